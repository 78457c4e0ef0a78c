"""The engine: requests in, tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from outrider.device import Backend, ConfigError, DeviceFault, Fence, RequestError, StepMode
from outrider.engine.assembly import assemble, build_runner, ring_slots
from outrider.engine.checks import (
    check_invariance,
    check_options,
    check_pages,
    check_policy,
    check_prompt,
    check_tree,
    context_limit,
)
from outrider.engine.config import EngineConfig
from outrider.engine.graphs import Caller, CaptureProgress
from outrider.engine.loading import load_checkpoint
from outrider.engine.recovery.lifeline import Lifeline
from outrider.engine.recovery.watchdog import Watchdog
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.hand_over import HandOver
from outrider.engine.requests.media import expanded, request_media
from outrider.engine.requests.pages import FreeList, PagePool
from outrider.engine.requests.request import Completion, FinishReason, Request, StepOutput
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.requests.scheduler import OutOfPages, Scheduler, SchedulerLimits
from outrider.engine.requests.text import watch
from outrider.engine.stages import Stages
from outrider.engine.state.results import Outcome, Ticket
from outrider.engine.state.transfer import bring_here, collect
from outrider.engine.stats import EngineStats as EngineStats
from outrider.engine.step import Step
from outrider.engine.streams import Streams
from outrider.engine.warm_up import warm_up
from outrider.model import LanguageModel, Media, Tokenizer, VisionTower
from outrider.speculative.build import Builder
from outrider.speculative.proposer import PlainProposer, Proposer

Progress = Callable[[str, int, int], None]


class Engine:
    """Runs requests in continuous batches on one backend.

    Not thread-safe: one thread calls it. Everything that it allocates on the device is made here, before the first step.

    Any call may raise a :class:`DeviceError`. Where the device lives on, so does the engine: what was in flight is done
    again, and requests keep the tokens that they have. Once it's lost or stuck, every call raises :class:`EngineStopped`.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: Backend,
        *,
        proposer: Proposer | None = None,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        wrap_fence: Callable[[Fence], Fence] | None = None,
        vision: VisionTower | None = None,
        capture_progress: CaptureProgress | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.backend = backend
        self.model = model
        self.proposer = proposer = proposer or PlainProposer()
        self._tokenizer = tokenizer
        self._vision = vision
        check_policy(backend, config, proposer, model.kernels)
        check_invariance(config, model)
        check_tree(model, proposer)
        self.max_context = context_limit(config, model, proposer)
        watchdog = Watchdog(config.device_timeout_s)
        self._lifeline = Lifeline(backend, watchdog, open_requests=lambda: self.open_requests, undo=self._undo)
        self._parts = parts = assemble(
            model,
            backend,
            proposer=proposer,
            config=config,
            max_context=self.max_context,
            vision=vision,
            wrap_fence=watchdog.around(wrap_fence),
        )
        # A tree's nodes are scattered over slots behind the cached tokens, and all of them count until they're moved.
        spare = max(proposer.slots - 2, 0) if proposer.is_tree else 0
        self._fences, self._results = parts.fences, parts.results
        self._scheduler = Scheduler(
            rows=FreeList("request row", config.max_requests + 1),
            pages=PagePool(
                count=parts.cache.pages, page_size=config.page_size, ahead=proposer.lookahead, share=config.prefix_cache
            ),
            limits=SchedulerLimits(
                growth=proposer.depth + 1, slots=proposer.slots, spare=spare, prefill_chunk=config.prefill_chunk
            ),
        )
        self._begin()
        stages, slots = Stages(parts), ring_slots(config)
        fused_waits = config.step_mode is StepMode.FUSED and backend.speculative_sync.fused_host_wait
        self._runs_ahead = config.overlap and not fused_waits
        variants, self.warm_up = model.kernels.every_variant(), None
        if variants is not None:
            self._step = Step(parts, stages, Caller(parts, stages), mode=StepMode.STAGED, slots=slots)
            with variants:
                self.warm_up = warm_up(self, room=min(self.max_context, self.free_pages * config.page_size - spare))
            self._scheduler.pages.forget_all()
            self._begin()
        with backend.guard("capturing the engine's graphs"):
            runner = build_runner(parts, stages, config, capture_progress)
        self.captured = runner.report
        self._step = Step(parts, stages, runner, mode=config.step_mode, slots=slots)

    def _begin(self) -> None:
        """No request was ever served."""
        self._in_flight: deque[Ticket] = deque()
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._pending: list[StepOutput] = []
        self._counts = {"iterations": 0, "request_iterations": 0, "verified_tokens": 0, "emitted_tokens": 0}

    @classmethod
    def from_checkpoint(
        cls,
        model_dir: Path,
        backend: Backend,
        *,
        draft_dir: Path | None = None,
        speculate: str = "none",
        builders: Mapping[str, Builder] | None = None,
        config: EngineConfig | None = None,
        through_transformers: bool = False,
        progress: Progress | None = None,
        capture_progress: CaptureProgress | None = None,
    ) -> Engine:
        """Load a checkpoint (and its draft) and build an engine for it.

        ``speculate`` names a proposer: one of Outrider's (:data:`outrider.speculative.plugin.OWN_PROPOSERS`), one of
        ``builders``, or an installed plugin. ``draft_dir`` holds the checkpoint of those that have one.

        ``through_transformers`` runs the model by transformers' own code on the paged cache: any decoder with a
        replaceable attention, slower than a native one. ``progress(file, done, total)`` is told of each tensor loaded,
        ``capture_progress(done, total)`` of each batch size captured.

        Raises :class:`~outrider.device.CheckpointError` and :class:`~outrider.device.ConfigError`.
        """
        config = config or EngineConfig()
        loaded = load_checkpoint(
            model_dir,
            backend,
            config,
            draft_dir=draft_dir,
            speculate=speculate,
            builders=builders,
            through_transformers=through_transformers,
            progress=progress,
        )
        return cls(
            loaded.model,
            backend,
            proposer=loaded.proposer,
            config=config,
            tokenizer=loaded.tokenizer,
            vision=loaded.vision,
            capture_progress=capture_progress,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises :class:`ConfigError` when the engine was built without one."""
        if self._tokenizer is None:
            raise ConfigError("this engine was built without a tokenizer; use Engine.from_checkpoint, or pass token ids")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the engine was built with a tokenizer."""
        return self._tokenizer is not None

    @property
    def stats(self) -> EngineStats:
        """Counts so far."""
        return EngineStats(**self._counts, blocked_s=self._lifeline.blocked_s)

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._pending or self._in_flight or self._scheduler.has_work)

    @property
    def free_pages(self) -> int:
        """KV pages that no request holds; some of them may be cached prefixes."""
        return self._scheduler.pages.available

    @property
    def streams(self) -> Streams:
        """The engine's streams, for tools."""
        return self._parts.streams

    @property
    def free_rows(self) -> int:
        """Rows that no request holds."""
        return self._scheduler.rows.available

    @property
    def open_requests(self) -> dict[int, tuple[int, ...]]:
        """The requests that wait or run, by id, with the output that the host knows of; also of an engine that stopped."""
        return {request.id: tuple(request.output) for request in self._requests.values()}

    # -- requests --------------------------------------------------------------------------------------------------

    def add_request(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        media: Sequence[Media] = (),
    ) -> int:
        """Queue a request; returns its id. A higher ``priority`` goes first and is preempted last.

        With ``n`` samples, each is a request of its own; their ids follow each other and the first is returned. The others
        start once the first one's prompt is on its way, and share its pages.

        ``media``: images and videos (:class:`~outrider.model.MediaProcessor` makes them), in the order of their places in
        ``tokens``, which have one placeholder token for each, or already one for each of its features.

        Raises :class:`RequestError` for a request that can't be served.
        """
        self._lifeline.check()
        params = params or SamplingParams()
        model = self.model.config
        prompt = expanded([int(token) for token in tokens], media, model.vision)
        stops = self._check(prompt, params)
        pictures = request_media(media, prompt, model.vision, self._vision)
        rope_key = model.rope.sharing_key(len(prompt))
        samples = []
        for index in range(params.n):
            request = Request(self._next_id, prompt, params.sample(index), stops, priority, pictures, rope_key)
            if params.stop:
                request.stop_text = watch(self.tokenizer, params)
            self._next_id += 1
            self._requests[request.id] = request
            samples.append(request)
        first = samples[0]
        first.followers = samples[1:]
        self._scheduler.add(first)
        if not self.config.prefix_cache:
            self._start_followers(first)
        return first.id

    def abort(self, request_id: int) -> None:
        """End a request now. What it has produced so far stays valid; its last iteration, if one is in flight, is
        discarded when it comes back. Raises :class:`RequestError` for an id that isn't running or waiting.
        """
        self._lifeline.check()
        request = self._requests.pop(request_id, None)
        if request is None:
            raise RequestError(f"request {request_id} isn't waiting or running; it may have finished already")
        self._pending.append(request.end(FinishReason.ABORT))
        self._scheduler.drop_waiting(request)
        self._start_followers(request)
        self._scheduler.retire()

    def hand_over(self, request_id: int) -> HandOver:
        """Take a decoding request out, with its caches and its draft state, for another engine's :meth:`take_over`.

        The host waits for the request's own iterations in flight; other requests go on. Tokens that this finds come out of
        the next :meth:`step`, and are in the hand-over's output too. Raises :class:`RequestError` for a request that has
        finished, or has no output yet.
        """
        request = self._requests.get(request_id)
        with self._lifeline.working("waiting for a request's iterations"):
            while request is not None and request.in_flight:
                self._handle_oldest()
        if request is None or request.finished:
            raise RequestError(f"request {request_id} isn't running; it may have finished already")
        if not request.row or request.needs_prefill or not request.output:
            raise RequestError(f"request {request_id} waits or is at its prompt; hand it over once it has put out a token")
        with self._lifeline.working("handing a request over"):
            handed = collect(self._parts, request)
        del self._requests[request_id]
        request.finish_reason = FinishReason.HAND_OVER
        self._pending.append(StepOutput(request_id, (), FinishReason.HAND_OVER))
        self._scheduler.retire()
        return handed

    def take_over(self, handed: HandOver) -> int:
        """Go on with a request from another engine of the same model and kind of proposer; returns its id here.

        It decodes as soon as it's scheduled, without a prefill. Its completion has the whole output; :meth:`step` yields
        what is new. From another backend its state is copied at once, and the host waits for that.

        Raises :class:`ConfigError` when the engines don't fit, and :class:`RequestError` for a request that can't be served.
        """
        handed.check_fits(self.model.config, self.model.dtype, self.proposer)
        stops = self._check(handed.prompt, handed.params)
        request = Request(self._next_id, handed.prompt, handed.params, stops, handed.priority)
        request.media = request_media(handed.media, handed.prompt, self.model.config.vision, self._vision)
        request.rope_key = self.model.config.rope.sharing_key(len(handed.prompt))
        request.output, request.logprobs = list(handed.output), list(handed.logprobs)
        request.iterations, request.verified_tokens = handed.iterations, handed.verified_tokens
        request.context = (*handed.prompt, *handed.output[:-1])
        if handed.params.stop:
            request.stop_text = watch(self.tokenizer, handed.params, handed.output)
            request.text.append(request.stop_text.take())
        with self._lifeline.working("taking a request over"):
            request.arrival = bring_here(self._parts, handed)
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.add(request)
        return request.id

    def step(self) -> list[StepOutput]:
        """Run one iteration; returns the new tokens that the host learnt of, a record for each request that has some.

        With ``overlap`` the iteration is launched, and the results are those of the one before.
        """
        with self._lifeline.working("running an iteration"):
            batch = self._next_batch()
            if batch is not None:
                self._in_flight.append(self._launch(batch))
                self._counts["iterations"] += 1
                for chunk in batch.prefill:
                    if chunk.final:
                        self._start_followers(chunk.request)
            keep = 1 if self._runs_ahead and batch is not None else 0
            while len(self._in_flight) > keep:
                self._handle_oldest()
            self._scheduler.retire()
            self.backend.release_finished()
        outputs, self._pending = self._pending, []
        return outputs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        media: Sequence[Sequence[Media]] | None = None,
    ) -> list[Completion]:
        """Run requests to their ends; completions in the order of ``prompts``, the samples of one side by side.

        ``media``: those of each prompt, in the order of ``prompts``. Requests added before run along; what they produce
        meanwhile comes out of the next :meth:`step`.
        """
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams] = [params or SamplingParams()] * len(prompts)
        else:
            each = params
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one, or as many")
        pictures = media if media is not None else [()] * len(prompts)
        if len(pictures) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with media for {len(pictures)}; give one sequence for each")
        firsts = [
            (self.add_request(prompt, chosen, media=seen), chosen)
            for prompt, chosen, seen in zip(prompts, each, pictures, strict=True)
        ]
        requests = [self._requests[first + i] for first, chosen in firsts for i in range(chosen.n if chosen else 1)]
        ours = {request.id for request in requests}
        others: list[StepOutput] = []
        while not all(request.finished for request in requests):
            others += (output for output in self.step() if output.request_id not in ours)
        self.drain()
        self._pending[:0] = others
        return [request.completion() for request in requests]

    def stream(
        self, tokens: Sequence[int], params: SamplingParams | None = None, *, media: Sequence[Media] = ()
    ) -> Iterator[StepOutput]:
        """Run one request, yielding its tokens as they come. Closing the iterator early aborts the request.

        Requests added before run along; what they produce meanwhile comes out of the next :meth:`step`.
        """
        if params is not None and params.n > 1:
            raise RequestError(f"n is {params.n}; a stream is one sample: use add_request and step, or generate")
        request = self._requests[self.add_request(tokens, params, media=media)]
        others: list[StepOutput] = []
        try:
            while not request.finished:
                for output in self.step():
                    if output.request_id == request.id:
                        yield output
                    else:
                        others.append(output)
        finally:
            if self._lifeline.stopped is None:
                if not request.finished:
                    self.abort(request.id)
                    self._pending = [output for output in self._pending if output.request_id != request.id]
                self.drain()
            self._pending[:0] = others

    def drain(self) -> None:
        """Handle every iteration in flight without launching another; what it yields comes out of the next step."""
        with self._lifeline.working("waiting for the iterations in flight"):
            while self._in_flight:
                self._handle_oldest()
        self._scheduler.retire()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> frozenset[int]:
        """Raise for what can't be served; else the request's stop tokens."""
        config, vocabulary = self.config, self.model.config.vocab_size
        check_prompt(prompt, params, context=self.max_context, vocabulary=vocabulary)
        needed = self._scheduler.most_pages(len(prompt) + params.max_tokens)
        check_pages(needed, self._scheduler.pages.count - 1, config.page_size)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.model.config.eos_token_ids)
        check_options(params, stops, config=config, vocabulary=vocabulary)
        if params.stop:
            self.tokenizer  # noqa: B018  (raises when there is none)
        return frozenset(stops)

    def _launch(self, batch: Batch) -> Ticket:
        """Launch, or leave the engine as if the batch had never been: an interrupt may come anywhere in a launch."""
        try:
            return self._step.launch(batch)
        except BaseException as error:
            self._undo(batch, failed=isinstance(error, DeviceFault))
            raise

    def _undo(self, *unlaunched: Batch, failed: bool = True) -> None:
        """Take back what was being launched; and what is in flight too if an operation ``failed``, since nobody knows
        whose results that has spoilt.
        """
        well = self._lifeline.quiet(self._parts.streams) and not failed
        try:
            while well and self._in_flight:
                self._handle_oldest()
        finally:
            batches = [*(ticket.batch for ticket in self._in_flight), *unlaunched]
            self._in_flight.clear()
            self._scheduler.take_back(batches, spoilt=not well)

    def _next_batch(self) -> Batch | None:
        """The scheduler's next batch. Where it must preempt, what is in flight is handled first: that's rare."""
        try:
            return self._scheduler.next_batch()
        except OutOfPages:
            self.drain()
            return self._scheduler.next_batch()

    def _start_followers(self, request: Request) -> None:
        """Queue the samples that waited for the prompt of ``request``, to share its pages."""
        for follower in request.followers:
            if not follower.finished:
                self._scheduler.add(follower)
        request.followers = []

    def _handle_oldest(self) -> None:
        """Take in the results of the oldest iteration in flight; those of requests that are over are dropped."""
        ticket = self._in_flight[0]
        outcome = self._results.redeem(ticket, self._fences.results_copied[ticket.slot])
        self._in_flight.popleft()
        for request, tokens in zip(ticket.batch.decode, outcome.decoded, strict=True):
            request.in_flight -= 1
            request.decodes_in_flight -= 1
            if not request.finished:
                request.iterations += 1
                request.verified_tokens += len(tokens)
                self._counts["request_iterations"] += 1
                self._counts["verified_tokens"] += len(tokens)
                self._emit(request, tokens, outcome)
        for chunk, first in zip(ticket.batch.prefill, outcome.first_tokens, strict=True):
            chunk.request.in_flight -= 1
            if (first is not None or chunk.request.id in outcome.bad) and not chunk.request.finished:
                self._emit(chunk.request, () if first is None else (first,), outcome)
        for request, _ in ticket.batch.arrivals:
            request.in_flight -= 1

    def _emit(self, request: Request, tokens: Sequence[int], outcome: Outcome) -> None:
        """Hand new tokens on; none, and the request's end, where a probe found a bad value."""
        bad = outcome.bad.get(request.id, ())
        if bad:
            # Nobody may take over a page whose keys and values may be bad as well.
            self._scheduler.pages.forget_all()
            found = "; ".join(str(each) for each in bad)
            self._pending.append(request.end(FinishReason.ERROR, f"request {request.id}: {found}"))
        else:
            output = request.take(tokens, outcome.logprobs.get(request.id, ()))
            self._scheduler.register(request, len(request.prompt) + len(request.output) - 1)
            self._counts["emitted_tokens"] += len(output.tokens)
            self._pending.append(output)
        if request.finished:
            del self._requests[request.id]
            self._start_followers(request)
