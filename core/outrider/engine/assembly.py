"""The components that launch iterations, created from the parts of an engine, and their warm-up.

The warm-up serves internal requests before the first user request, so that all kernels are compiled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from outrider.device import Group, StepMode
from outrider.engine.config import MAX_LOGPROBS
from outrider.engine.fused_step import FusedStep
from outrider.engine.graphs import CaptureProgress, GraphRunner, Runner, captured_features
from outrider.engine.guided import GuidedDecoding
from outrider.engine.guides.grammars import Guidance, UnrestrictedMatcher
from outrider.engine.loop import IterationLauncher, Loop
from outrider.engine.prefill import Prefill, build_prefill_graphs, stage_prompt_padding
from outrider.engine.ranked import DeciderGuidedDecoding, FollowerGuidedDecoding, RankedPrefill, RankedStep, ranked_stages
from outrider.engine.ranks.decision_log import DecisionLog
from outrider.engine.recovery import Watchdog
from outrider.engine.requests.batch import BatchFeatures
from outrider.engine.requests.draft_length import DraftLengthPolicy, LengthSchedule
from outrider.engine.requests.groups import GroupScheduler
from outrider.engine.requests.pages import FreeList, PagePool, StateCheckpoints
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.requests.scheduler import Scheduler, SchedulerLimits
from outrider.engine.stages import DecodeBatch, Iteration, Stages, build_frame
from outrider.engine.state.buffers import EXTEND, INPUTS, VERIFY
from outrider.engine.state.parts import EngineParts
from outrider.engine.step import Step

_MIN_DECODING_TO_GATHER, _MAX_GATHERED_TOKENS, _MAX_GATHER_ITERATIONS = 8, 1024, 4
"""While at least this many requests (and half the rows) decode, new prompts wait for others to share a launch: up to this
many tokens together, for at most this many iterations. They don't wait if they can share a pass with the decoding requests.
"""


class Assembly:
    """The factory of an engine's launchers: it holds the stages, the prefill and the guided decoding, and creates step and
    loop from them. Those of one of several ranks broadcast the decider's values; with data-parallel groups the scheduler
    schedules all groups.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._ranks = ranks = parts.model.ranks
        if ranks.is_single:
            self._stages, self._guided = Stages(parts), GuidedDecoding(parts)
            self.prefill = Prefill(parts, self._guided)
        else:
            ranks.use_stream(parts.streams.forward)
            self._stages = ranked_stages(parts, ranks)
            self._guided = DeciderGuidedDecoding(parts) if ranks.is_decider else FollowerGuidedDecoding(parts)
            self.prefill = RankedPrefill(parts, self._guided, ranks)
        self._iteration = Iteration(parts, self._stages)

    def warm_up(self, watchdog: Watchdog) -> WarmUp | None:
        """Compile every kernel variant before any graph is captured, by serving internal requests with a step that calls each
        stage. Returns None if the kernels have no variants to compile.
        """
        parts = self._parts
        variants = parts.model.kernels.every_variant()
        if variants is None:
            return None
        step = Step(parts, self._stages, Runner(parts), self.prefill, self._guided)
        loop = self.loop(self._on_all_ranks(step), watchdog, LengthSchedule(parts.lengths, parts.widths), DecisionLog())
        # On the engine's device, which may differ from the thread's current one: leaving the scope loads compiled kernels.
        with parts.backend.on(parts.streams.forward), variants:
            report = serve_internal_requests(loop, parts, self._compile_ahead)
        parts.staging.clear(parts.streams.forward)  # else capture would continue with requests of the warm-up
        return report

    def _compile_ahead(self) -> None:
        """Compile kernels of decode iterations and of short prompts on padding, without their results, if the kernels can.

        Only fused iterations are compiled, which need nothing of the host. The caller has opened the scope of variants.
        """
        parts, padding = self._parts, (INPUTS, VERIFY, EXTEND)
        scope = parts.model.kernels.compile_ahead()
        if scope is None or parts.config.step_mode is not StepMode.FUSED or not parts.model.ranks.is_single:
            return
        drafted, forward = max(parts.lengths), parts.streams.forward
        with parts.backend.guard("compiling kernels ahead"), parts.backend.on(forward):
            for group in padding:
                parts.buffers.pad(group, count=0, bucket=1, drafted=drafted)
            prompts = stage_prompt_padding(parts)
            with scope:
                for features in captured_features(parts):
                    batch = DecodeBatch(1, 1, drafted, features, parts.capacity, captured=True)
                    self._iteration.run(batch, build_frame(parts.buffers, batch))
                    if prompts is not None and features == BatchFeatures(sampling=True):  # as prompts are captured
                        self.prefill.enqueue_chunks(prompts, features)

    def capture(self, progress: CaptureProgress | None) -> Runner:
        """Capture the graphs of the config: those of prefill, and those of the returned runner."""
        parts, stages = self._parts, self._stages
        is_fused = parts.config.step_mode is StepMode.FUSED
        if is_fused:
            runner: Runner = GraphRunner(parts, stages, [self._iteration], progress)
        elif parts.config.graphs:
            captured = (stages.draft, stages.verify, stages.extend)
            runner = GraphRunner(parts, stages, [each for each in captured if each.has_work(parts.proposer.nodes)], progress)
        else:
            runner = Runner(parts)
        self.prefill.graphs = build_prefill_graphs(parts, self.prefill, self._iteration if is_fused else None)
        return runner

    def step(self, runner: Runner) -> IterationLauncher:
        """Create the step that runs stages with ``runner``. No iteration may be in flight, since the step signals its initial
        fences.
        """
        if self._parts.config.step_mode is StepMode.FUSED:
            return self._on_all_ranks(FusedStep(self._parts, self._iteration, runner, self.prefill, self._guided))
        return self._on_all_ranks(Step(self._parts, self._stages, runner, self.prefill, self._guided))

    def _on_all_ranks(self, step: Step) -> IterationLauncher:
        return step if self._ranks.is_single else RankedStep(step, self._parts, self._ranks)

    def loop(
        self, step: IterationLauncher, watchdog: Watchdog, draft_length: DraftLengthPolicy, decision_log: DecisionLog
    ) -> Loop:
        """Create the loop over ``step`` and a scheduler whose rows and pages are all free."""
        parts, data = self._parts, self._ranks.data
        waits = parts.config.step_mode is StepMode.FUSED and parts.backend.speculative_sync.fused_host_wait
        runs_ahead = parts.config.overlap and not waits
        graphs = self.prefill.graphs
        scheduler: Scheduler | GroupScheduler
        if data is None:
            scheduler = _build_scheduler(parts, draft_length, 0 if graphs is None else graphs.max_mixed_requests)
        else:
            scheduler = _build_groups(parts, data, draft_length)
        return Loop(parts, step, scheduler, watchdog, decision_log, runs_ahead=runs_ahead)


def _build_checkpoints(parts: EngineParts) -> StateCheckpoints | None:
    """Create the host's record of state checkpoints, whose rows follow those of requests; None without recurrent layers."""
    config = parts.config
    if not parts.states:
        return None
    return StateCheckpoints(
        first_row=config.max_requests + 1,
        count=config.state_checkpoints,
        interval=math.lcm(config.page_size, parts.model.kernels.state_interval),
    )


def _build_scheduler(parts: EngineParts, draft_length: DraftLengthPolicy, mixed_requests: int = 0) -> Scheduler:
    """Create a scheduler whose rows and pages are all free. At most ``mixed_requests`` share a pass with prompts."""
    config, proposer = parts.config, parts.proposer
    return Scheduler(
        rows=FreeList("request row", config.max_requests + 1),
        pages=PagePool(
            count=parts.cache.pages,
            page_size=config.page_size,
            ahead=proposer.lookahead,
            share=config.prefix_cache,
            checkpoints=_build_checkpoints(parts),
        ),
        limits=SchedulerLimits(
            growth=proposer.depth + 1,
            slots=proposer.slots,
            spare=parts.spare,
            prefill_chunk=config.prefill_chunk,
            token_budget=config.token_budget or config.max_requests * (proposer.nodes + 1) + config.prefill_chunk,
            crowd=max(_MIN_DECODING_TO_GATHER, config.max_requests // 2),
            gather_tokens=min(config.prefill_chunk, _MAX_GATHERED_TOKENS),
            gather_iterations=_MAX_GATHER_ITERATIONS,
            mixed_requests=mixed_requests,
        ),
        draft_length=draft_length,
    )


def _build_groups(parts: EngineParts, data: Group, draft_length: DraftLengthPolicy) -> GroupScheduler:
    """Create one scheduler for each data-parallel group."""
    proposer = parts.proposer

    def passes(tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        return tokens, *(proposer.prompt_passes(tokens, sequences, longest) if proposer.extends else ())

    return GroupScheduler(
        [_build_scheduler(parts, draft_length) for _ in range(data.size)],
        own=data.rank,
        draft_length=draft_length,
        passes=passes,
    )


_CHUNKS = 2
"""Number of chunks of a warm-up prompt; its second chunk continues the first one's cache."""
_ITERATIONS = 3
"""Minimum number of decode iterations after a prompt: the first one, the next one, and one whose inputs come from an
iteration in flight.
"""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The result of a warm-up. ``compiled`` counts the variants of each kernel that were compiled or loaded from a cache;
    empty if the kernels do not report it. ``chosen`` has the implementations that were chosen by measurement, by purpose.
    """

    seconds: float
    compiled: Mapping[str, int]
    chosen: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        named = ", ".join(f"{name} {count}" for name, count in sorted(self.compiled.items()))
        said = f"{sum(self.compiled.values())} kernels compiled or loaded in {self.seconds:.1f} s"
        return said + (f" ({named})" if named else "") + "".join(f"; {what}: {which}" for what, which in self.chosen.items())


def serve_internal_requests(loop: Loop, parts: EngineParts, compile_ahead: Callable[[], None]) -> WarmUp:
    """Serve internal requests that use every feature: a prompt, of two chunks for the first request, then iterations that
    draft, verify and extend with each draft length. ``loop`` is created for this and dropped afterwards.
    ``compile_ahead`` starts the compilation of kernels.
    """
    backend, model, proposer, config = parts.backend, parts.model, parts.proposer, parts.config
    kernels = model.kernels
    before, began = kernels.compiled(), time.perf_counter()
    compile_ahead()
    room = min(config.max_context, loop.scheduler.pages.available * config.page_size - parts.spare)
    most = max(1, min(2 * proposer.depth + 3, room - 1))
    length = max(1, min(config.prefill_chunk + 2, room - most))
    vision = model.config.vision
    pictures = () if vision is None else (vision.image_token, vision.video_token)
    word = next(token for token in range(model.config.vocab_size) if token not in pictures)
    greedy = SamplingParams(max_tokens=most, ignore_eos=True)
    everything = replace(
        greedy,
        temperature=1.0,
        top_k=2,
        top_p=0.9,
        min_p=0.1,
        logit_bias={word: 1.0},
        presence_penalty=1.0,
        logprobs=min(MAX_LOGPROBS, model.config.vocab_size),
    )
    rope_key = model.config.rope.sharing_key(length)
    rounds = max(_ITERATIONS, len(parts.lengths) + 1)
    for number, params in enumerate((greedy, replace(greedy, temperature=1.0), everything)):
        chunks = _CHUNKS if params is greedy else 1  # only the last row of a prompt depends on the features
        tokens = (word,) * (length if chunks > 1 else 1)
        request = Request(number, tokens, params.sample(0), frozenset(), rope_key=rope_key)
        if params is everything:
            request.guidance = Guidance(UnrestrictedMatcher(), vocabulary=model.config.vocab_size)
        loop.add(request)
        for _ in range(chunks + rounds):
            if not request.finished:
                loop.iterate()
        loop.drop_requests([request])
        loop.drain()
    backend.synchronize()
    after = kernels.compiled()
    new = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    return WarmUp(time.perf_counter() - began, new, kernels.chosen())
