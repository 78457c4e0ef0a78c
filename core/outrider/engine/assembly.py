"""The device state of an engine: allocated before the first step, and passed to the engine's components."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from outrider.device import Backend, Fence, Group, StepMode
from outrider.engine import prefill_graphs
from outrider.engine.checks import check_cache
from outrider.engine.config import MAX_LOGPROBS, DecidedConfig, state_rows
from outrider.engine.fences import FenceSet
from outrider.engine.graphs import AnyStage, CaptureProgress, EagerRunner, GraphRunner, Runner
from outrider.engine.loop import Loop
from outrider.engine.plan_stages import ExtendAttention, PlanExtend, PlanPositions, PlanTokens, VerifyAttention
from outrider.engine.prefill import Prefill
from outrider.engine.prefill_graphs import PrefillGraphs
from outrider.engine.ranks.decision_log import DecisionLog
from outrider.engine.recovery.watchdog import Watchdog
from outrider.engine.requests.draft_length import DraftLengthPolicy
from outrider.engine.requests.features import Features
from outrider.engine.requests.groups import AgreedLength, GroupScheduler
from outrider.engine.requests.pages import FreeList, PagePool
from outrider.engine.requests.scheduler import Scheduler, SchedulerLimits
from outrider.engine.requests.state_checkpoints import StateCheckpoints
from outrider.engine.stages import DraftStage, Extend, Gather, Iteration, Stages, Verify
from outrider.engine.state.attention_plans import AttentionPlans
from outrider.engine.state.buffers import StaticBuffers, step_buffers
from outrider.engine.state.input_upload import InputUpload
from outrider.engine.state.masks import Masks
from outrider.engine.state.options import OptionTable
from outrider.engine.state.plans import Plans
from outrider.engine.state.probes import Probes
from outrider.engine.state.results import Results
from outrider.engine.state.rows import FutureMap, RowTable, SeqLensRing
from outrider.engine.state.staging import Staging, staging_capacity
from outrider.engine.state.state_copies import StateCopies
from outrider.engine.state.transfer import StateTransfer
from outrider.engine.step import Step
from outrider.engine.streams import Streams
from outrider.model import KVCache, LanguageModel, VisionTower
from outrider.speculative.proposer import Proposer

_MIN_DECODING_TO_GATHER, _MAX_GATHERED_TOKENS, _MAX_GATHER_ITERATIONS = 8, 1024, 4
"""While at least this many requests (and half the rows) decode, new prompts wait for others to share a launch: up to this
many tokens together, for at most this many iterations.
"""

_MAX_TRANSFERS = 64
"""Maximum number of requests on their way to other engines, and from other engines, at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts that live as long as the engine. This module passes to each component only the parts that it needs.

    ``lengths`` are the numbers of tokens that an iteration may draft; for a tree, its nodes.
    """

    backend: Backend
    streams: Streams
    fences: FenceSet
    model: LanguageModel
    cache: KVCache
    proposer: Proposer
    rows: RowTable
    options: OptionTable
    masks: Masks
    future: FutureMap
    buffers: StaticBuffers
    plans: Plans
    attention: AttentionPlans
    probes: Probes
    staging: Staging
    results: Results
    seq_lens_ring: SeqLensRing
    transfer: StateTransfer
    lengths: tuple[int, ...]
    config: DecidedConfig
    vision: VisionTower | None

    @property
    def capacity(self) -> int:
        """Number of tokens that a block table holds."""
        return self.rows.tables.shape[1] * self.config.page_size

    @property
    def spare(self) -> int:
        """Number of cache slots that a request needs in addition to one per token.

        The nodes of a tree lie in slots after the cached tokens, and each counts until the accepted path is moved.
        """
        return max(self.proposer.slots - 2, 0) if self.proposer.is_tree else 0


def ring_entries(config: DecidedConfig) -> int:
    """Return how many iterations use pinned buffers at the same time: two with overlap, else one."""
    return 2 if config.overlap else 1


def _create_streams(backend: Backend, config: DecidedConfig) -> Streams:
    sync = backend.speculative_sync
    schedule, forward = backend.create_stream("schedule"), backend.create_stream("forward")
    plan = backend.create_stream("plan") if config.plan_stream else forward
    copy = forward if sync.results_on_forward else backend.create_stream("copy")
    update = backend.create_stream("update") if sync.rebind_params and config.graphs else None
    return Streams(schedule, forward, plan, copy, update)


def _allocate_staging(model: LanguageModel, backend: Backend, config: DecidedConfig, *, pages: int) -> Staging:
    """Allocate the staging ring; a block table has ``pages`` entries."""
    capacity = staging_capacity(requests=config.max_requests, pages=pages, prefill_chunk=config.prefill_chunk)
    capacity += OptionTable.capacity(
        requests=config.max_requests, vocabulary=model.config.vocab_size, max_context=config.max_context
    )
    return Staging(backend, entries=ring_entries(config), capacity=capacity, max_requests=config.max_requests)


def _allocate_cache(model: LanguageModel, backend: Backend, config: DecidedConfig) -> KVCache:
    return KVCache.for_model(
        model.config,
        pages=config.num_pages,
        page_size=config.page_size,
        dtype=model.dtype,
        cache_dtype=model.cache_dtype,
        rows=state_rows(config.max_requests, config.state_checkpoints),
        device=backend.device,
    )


def _allocate_buffers(
    model: LanguageModel, backend: Backend, proposer: Proposer, config: DecidedConfig, lengths: tuple[int, ...], *, pages: int
) -> StaticBuffers:
    return StaticBuffers(
        backend,
        step_buffers(model, proposer, pages=pages),
        max_requests=config.max_requests,
        shorter={
            length: step_buffers(model, proposer, pages=pages, drafted=length)
            for length in lengths
            if length != proposer.nodes
        },
    )


def assemble(
    model: LanguageModel,
    backend: Backend,
    *,
    proposer: Proposer,
    config: DecidedConfig,
    lengths: tuple[int, ...],
    vision: VisionTower | None,
    wrap_fence: Callable[[Fence], Fence] | None = None,
) -> EngineParts:
    """Allocate streams, fences, caches and buffers of an engine. The allocations have completed when this returns."""
    table_width = -(-(config.max_context + proposer.slots) // config.page_size)
    pages, entries, device = config.num_pages, ring_entries(config), backend.device
    check_cache(backend, config, model, pages=pages)
    streams = _create_streams(backend, config)
    data = None if model.ranks is None else model.ranks.data
    # Allocations are enqueued on forward and completed before work starts on any other stream.
    with backend.on(streams.forward), backend.guard("allocating the engine's caches and buffers"):
        cache = _allocate_cache(model, backend, config)
        proposer.allocate(backend=backend, pages=pages, page_size=config.page_size)
        rows = RowTable(rows=config.max_requests + 1, pages=table_width, device=device)
        vocabulary = model.config.vocab_size
        options = OptionTable(rows=config.max_requests + 1, vocabulary=vocabulary, device=device)
        masks = Masks(backend, proposer, entries=entries, max_requests=config.max_requests, vocabulary=vocabulary)
        future = FutureMap(model.kernels, rows=config.max_requests + 1, relay=proposer.relay, device=device)
        buffers = _allocate_buffers(model, backend, proposer, config, lengths, pages=table_width)
        staging = _allocate_staging(model, backend, config, pages=table_width)
        probes = Probes(model.kernels, proposer, vocabulary=model.config.vocab_size, ranks=model.ranks is not None)
        results = Results(
            backend,
            entries=entries,
            max_requests=config.max_requests,
            depth=proposer.depth,
            probes=probes,
            max_logprobs=min(MAX_LOGPROBS, model.config.vocab_size),
            data=data,
        )
        seq_lens_ring = SeqLensRing(backend, future.seq_lens, entries=entries)
    streams.forward.synchronize()
    transfers = min(config.max_requests, _MAX_TRANSFERS)
    fences = FenceSet(backend.speculative_sync, entries=entries, transfers=transfers, wrap=wrap_fence)
    return EngineParts(
        backend=backend,
        streams=streams,
        fences=fences,
        model=model,
        cache=cache,
        proposer=proposer,
        rows=rows,
        options=options,
        masks=masks,
        future=future,
        buffers=buffers,
        plans=Plans(model.kernels, proposer, lane=buffers.lane, page_size=config.page_size, max_context=config.max_context),
        attention=AttentionPlans(model, proposer, page_size=config.page_size),
        probes=probes,
        staging=staging,
        results=results,
        seq_lens_ring=seq_lens_ring,
        lengths=lengths,
        transfer=StateTransfer(
            backend,
            streams.forward,
            model,
            proposer,
            cache=cache,
            rows=rows,
            future=future,
            fences=fences,
            group=0 if data is None else data.rank,
        ),
        config=config,
        vision=vision,
    )


def build_stages(parts: EngineParts) -> Stages:
    """Create the stages, each on its stream."""
    forward, plan = parts.streams.forward, parts.streams.plan
    kernels, proposer, buffers = parts.model.kernels, parts.proposer, parts.buffers
    probes, results, options, future = parts.probes, parts.results, parts.options, parts.future
    return Stages(
        gather=Gather(
            forward,
            kernels,
            rows=parts.rows,
            future=future,
            options=options,
            probes=probes,
            results=results,
            buffers=buffers,
        ),
        draft=DraftStage(forward, proposer, probes=probes, results=results, buffers=buffers, ranks=parts.model.ranks),
        place=PlanPositions(plan, parts.plans, buffers),
        fill=PlanTokens(plan, parts.plans),
        verify_attention=VerifyAttention(plan, parts.attention, buffers),
        verify=Verify(
            forward,
            parts.model,
            proposer,
            cache=parts.cache,
            options=options,
            probes=probes,
            results=results,
            future=future,
            buffers=buffers,
        ),
        plan_extend=PlanExtend(plan, parts.plans, buffers),
        extend_attention=ExtendAttention(plan, parts.attention, buffers, proposer),
        extend=Extend(forward, kernels, proposer, cache=parts.cache, future=future),
        extends=proposer.extends or proposer.is_tree,
    )


def build_runner(parts: EngineParts, stages: Stages, iteration: Iteration, progress: CaptureProgress | None = None) -> Runner:
    """Create the runner: one that captures graphs for every bucket now, or an eager one."""
    config, proposer = parts.config, parts.proposer
    fused = config.step_mode is StepMode.FUSED
    if not (fused or config.graphs):
        return EagerRunner(parts.backend, parts.buffers)
    which: list[AnyStage] = [iteration]
    if not fused:
        which = [
            *([stages.draft] if proposer.nodes else []),
            stages.verify,
            *([stages.extend] if stages.extends else []),
        ]
    everything = Features(
        sampling=True,
        biased=True,
        penalized=True,
        truncated=True,
        logprobs=min(MAX_LOGPROBS, parts.model.config.vocab_size),
    )
    return GraphRunner(
        parts.backend,
        parts.buffers,
        stages,
        which=which,
        buckets=config.buckets,
        most=config.max_requests,
        lengths=parts.lengths,
        everything=everything,
        capacity=parts.capacity,
        progress=progress,
    )


def build_prefill(parts: EngineParts) -> Prefill:
    """Create the prefill that calls each chunk of prompts."""
    return Prefill(
        parts.backend,
        parts.streams.forward,
        parts.model,
        parts.proposer,
        cache=parts.cache,
        rows=parts.rows,
        future=parts.future,
        options=parts.options,
        masks=parts.masks,
        attention=parts.attention,
        probes=parts.probes,
        staging=parts.staging,
        results=parts.results,
        vision=parts.vision,
        capacity=parts.capacity,
    )


def build_input_upload(parts: EngineParts) -> InputUpload:
    """Create the component that uploads and unpacks batches."""
    return InputUpload(
        staging=parts.staging,
        rows=parts.rows,
        options=parts.options,
        future=parts.future,
        page_size=parts.config.page_size,
        rope=parts.model.config.rope,
    )


def can_replay_prefill(parts: EngineParts) -> bool:
    """Return True if each part of the engine allows that chunks of prompts are replayed from graphs."""
    config, model, proposer = parts.config, parts.model, parts.proposer
    if model.ranks is not None and model.ranks.data is not None:
        return False  # data-parallel groups have different numbers of tokens in a prefill
    if config.step_mode is not StepMode.FUSED and not config.graphs:
        return False  # decoding isn't replayed either
    if parts.backend.speculative_sync.exact_host_lengths or parts.attention.plans_on_host:
        return False  # attention reads lengths on the host
    if model.config.rope.sections or model.config.rope.depends_on_length:
        return False  # rope depends on more than a position
    if model.config.recurrent is not None:
        return False  # the reference's launches grow with the tokens of a chunk
    if not model.native or model.kernels.row_invariant:
        return False  # kernels launch a call for each token, or belong to another model's code
    return proposer.accepts_padding or not proposer.extends


def build_prefill_graphs(parts: EngineParts, prefill: Prefill) -> PrefillGraphs | None:
    """Capture the graphs that replay short chunks of prompts. Returns None for an engine that calls every chunk."""
    most = min(parts.config.prefill_chunk, parts.config.max_requests * parts.capacity)
    tokens = min(prefill_graphs.max_graph_tokens(parts.backend), most)
    if not tokens or not can_replay_prefill(parts):
        return None
    return PrefillGraphs(
        parts.backend,
        parts.streams.forward,
        prefill=prefill,
        input_upload=build_input_upload(parts),
        staging=parts.staging,
        tokens=tokens,
        capacity=parts.capacity,
    )


def build_step(
    parts: EngineParts,
    stages: Stages,
    iteration: Iteration,
    runner: Runner,
    mode: StepMode,
    prefill: Prefill,
    prefill_graphs: PrefillGraphs | None = None,
) -> Step:
    """Create the step over ``runner``. No iteration may be in flight, since the step signals its initial fences."""
    return Step(
        parts.backend,
        parts.streams,
        parts.fences,
        input_upload=build_input_upload(parts),
        transfer=parts.transfer,
        prefill=prefill,
        prefill_graphs=prefill_graphs,
        state_copies=StateCopies(parts.model.kernels, parts.cache, parts.staging),
        stages=stages,
        iteration=iteration,
        runner=runner,
        called=EagerRunner(parts.backend, parts.buffers),
        masks=parts.masks,
        plans=parts.plans,
        proposer=parts.proposer,
        results=parts.results,
        seq_lens_ring=parts.seq_lens_ring,
        plans_on_host=parts.attention.plans_on_host,
        mode=mode,
        entries=ring_entries(parts.config),
        capacity=parts.capacity,
        ranks=parts.model.ranks,
    )


def build_checkpoints(parts: EngineParts) -> StateCheckpoints | None:
    """Create the host's record of state checkpoints, whose rows follow those of requests; None without recurrent layers."""
    config = parts.config
    if parts.model.config.recurrent is None:
        return None
    return StateCheckpoints(
        first_row=config.max_requests + 1,
        count=config.state_checkpoints,
        interval=math.lcm(config.page_size, parts.model.kernels.state_interval),
    )


def build_scheduler(parts: EngineParts, draft_length: DraftLengthPolicy) -> Scheduler:
    """Create a scheduler whose rows and pages are all free."""
    config, proposer = parts.config, parts.proposer
    return Scheduler(
        rows=FreeList("request row", config.max_requests + 1),
        pages=PagePool(
            count=parts.cache.pages,
            page_size=config.page_size,
            ahead=proposer.lookahead,
            share=config.prefix_cache,
            checkpoints=build_checkpoints(parts),
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
        ),
        draft_length=draft_length,
    )


def build_groups(parts: EngineParts, data: Group, draft_length: DraftLengthPolicy) -> GroupScheduler:
    """Create one scheduler for each data-parallel group."""
    agreed, proposer = AgreedLength(draft_length.lengths[-1]), parts.proposer

    def passes(tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        return tokens, *(proposer.prompt_passes(tokens, sequences, longest) if proposer.extends else ())

    return GroupScheduler(
        [build_scheduler(parts, agreed) for _ in range(data.size)],
        own=data.rank,
        agreed=agreed,
        draft_length=draft_length,
        passes=passes,
    )


def build_loop(
    parts: EngineParts,
    step: Step,
    watchdog: Watchdog,
    draft_length: DraftLengthPolicy,
    decision_log: DecisionLog | None = None,
) -> Loop:
    """Create the loop over ``step`` and its scheduler, whose rows and pages are all free."""
    config, ranks = parts.config, parts.model.ranks
    scheduler: Scheduler | GroupScheduler
    if ranks is None or ranks.data is None:
        scheduler = build_scheduler(parts, draft_length)
    else:
        scheduler = build_groups(parts, ranks.data, draft_length)
    fused_waits = config.step_mode is StepMode.FUSED and parts.backend.speculative_sync.fused_host_wait
    return Loop(
        parts.backend,
        parts.streams,
        parts.fences,
        scheduler=scheduler,
        step=step,
        results=parts.results,
        watchdog=watchdog,
        runs_ahead=config.overlap and not fused_waits,
        decision_log=decision_log,
    )
