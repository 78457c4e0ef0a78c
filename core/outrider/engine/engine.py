"""The engine: accepts requests, runs iterations of the model and its draft, and returns tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from outrider.device import Backend, ConfigError, DeviceError, Fence
from outrider.engine.assembly import Assembly
from outrider.engine.config import Choice, EngineConfig
from outrider.engine.draft_costs import captured_widths, select_draft_length_policy, usable_draft_lengths
from outrider.engine.fences import Streams
from outrider.engine.graphs import CaptureProgress
from outrider.engine.guides.grammars import Grammars
from outrider.engine.guides.guides import Guide
from outrider.engine.lending import PageLending
from outrider.engine.loop import EngineLoad, EngineStats
from outrider.engine.ranks.decision_log import DecisionLog, RankedDecisionLog
from outrider.engine.ranks.processes import start_ranks
from outrider.engine.ranks.ranks import ParallelConfig, Ranks, join_engine
from outrider.engine.recovery import Watchdog
from outrider.engine.requests.admission import Admission
from outrider.engine.requests.draft_length import DraftLengthPolicy
from outrider.engine.requests.hand_over import HandOver, RequestState, check_fit
from outrider.engine.requests.pages import CacheEvent, CacheEvents
from outrider.engine.requests.request import Completion, FinishReason, Request, RequestStream, StepOutput
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.session import Session, VoteAnswer, follow, vote_handler
from outrider.engine.setup.checks import check_invariance, check_policy, check_tree, check_type
from outrider.engine.setup.facts import collect_facts
from outrider.engine.setup.loading import LoadingArguments, absolute, load_checkpoint
from outrider.engine.setup.resolve import resolve
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.transfer import StateTransfer
from outrider.errors import RequestError
from outrider.model import DraftFormat, LanguageModel, Media, QuantizedMode, Tokenizer, VisionTower
from outrider.registry import get_backend
from outrider.speculative.build import Builder
from outrider.speculative.proposer import NonSpeculativeProposer, Proposer

Progress = Callable[[str, int, int], None]

_MAX_CONSECUTIVE_FAILURES = 8


class Engine:
    """The engine that runs requests in continuous batches on one backend.

    The engine belongs to the thread that created it, or that called :meth:`adopt` last. A call from another thread or a
    forked process raises :class:`~outrider.engine.session.WrongThread`. The constructor allocates all device memory
    before the first step.

    Any call may raise a :class:`DeviceError`. If the device still works, the engine repeats the iterations in flight, and
    requests keep their tokens. Once the device is lost or stuck, every call raises :class:`EngineStopped`.
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
        draft_length: DraftLengthPolicy | None = None,
        ranks: Ranks | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """Create an engine. ``draft_length`` replaces the draft-length policy of the config. ``ranks`` run the engine
        together: each creates its own engine over its part of the model, in the same order, and all but the first then
        call :meth:`follow`. ``parallel`` is refused for several ranks; :meth:`from_checkpoint` starts them.
        """
        if parallel is not None and parallel.world > 1:
            raise ConfigError(
                f"parallel is {parallel}, and the model is loaded here already, whole; other ranks read their own parts: use "
                "Engine.from_checkpoint(..., parallel=...), or make an engine on each rank and give it ranks="
            )
        check_type("model", model, LanguageModel)
        check_type("config", config, EngineConfig, type(None))
        self.backend, self.model = backend, model
        self.proposer = proposer = proposer or NonSpeculativeProposer()
        decided = resolve(config or EngineConfig(), collect_facts(backend, model, proposer))
        self.config = config = join_engine(ranks, backend, model, proposer, decided)
        self._decision_log = decision_log = DecisionLog() if ranks is None else RankedDecisionLog(ranks)
        self._tokenizer, self._vision = tokenizer, vision
        check_policy(backend, config, proposer, model.kernels)
        check_invariance(config, model)
        check_tree(model, proposer)
        self.max_context = config.max_context
        watchdog = Watchdog(config.device_timeout_s)
        self._parts = parts = EngineParts(
            model,
            backend,
            proposer=proposer,
            config=config,
            lengths=usable_draft_lengths(config, backend, proposer, draft_length),
            widths=captured_widths(config, backend, model, proposer, draft_length),
            vision=vision,
            wrap_fence=watchdog.wrapping(wrap_fence),
        )
        self._transfer = StateTransfer(parts)
        assembly = Assembly(parts)
        self.warm_up = assembly.warm_up(watchdog)
        with backend.guard("capturing the engine's graphs"):
            runner = assembly.capture(capture_progress)
        self.captured = runner.report
        self.captured_prefill = None if assembly.prefill.graphs is None else assembly.prefill.graphs.report
        self._step = assembly.step(runner)
        sizes = None if runner.report is None else runner.report.buckets
        policy, self.draft_length = select_draft_length_policy(parts, self._step, draft_length, sizes=sizes)
        self._loop = loop = assembly.loop(self._step, watchdog, decision_log.replicate(policy), decision_log)
        watchdog.limit_s = decision_log.wait_limit(watchdog.limit_s)
        self._failure_recovery, self._scheduler, self._requests = loop.failure_recovery, loop.scheduler, loop.requests
        self._grammars = Grammars(
            tokenizer,
            vocabulary=model.config.vocab_size,
            ends=model.config.eos_token_ids,
            seconds=decision_log.compile_limit_s,
        )
        self._admission = Admission(
            config=config,
            model=model.config,
            pages=loop.scheduler.pages.count - 1,
            pages_of=loop.scheduler.groups[0].max_pages,
            tokenizer=tokenizer,
            grammars=self._grammars,
            vision=vision,
        )
        self._session = Session(loop)
        self._failures = 0  # consecutive recoverable ones
        self._lending: PageLending | None = None
        self._processes = ExitStack()  # of the other ranks

    @classmethod
    def from_checkpoint(
        cls,
        model_dir: Path | str,
        backend: Backend | str,
        *,
        draft_dir: Path | str | None = None,
        speculate: str = "none",
        builders: Mapping[str, Builder] | None = None,
        config: EngineConfig | None = None,
        through_transformers: bool = False,
        trust_remote_code: bool = False,
        quantized: QuantizedMode = "kernels",
        draft_weights: DraftFormat | Literal["stored"] | None = None,
        draft_vocabulary: Path | str | int | None = None,
        progress: Progress | None = None,
        capture_progress: CaptureProgress | None = None,
        ranks: Ranks | None = None,
        parallel: ParallelConfig | None = None,
    ) -> Engine:
        """Load a checkpoint (and its draft) and build an engine for it.

        ``backend`` is a backend, or its name for :func:`~outrider.registry.get_backend`. The engine chooses each setting that
        ``config`` leaves open, see :attr:`chosen`. ``speculate`` names a proposer: one
        of :data:`outrider.speculative.plugin.BUILTIN_PROPOSERS`, one of ``builders``, or a plugin. ``draft_dir`` has its
        checkpoint.

        ``through_transformers`` runs any decoder with a replaceable attention by transformers' code on the paged cache,
        slower than a native one. ``trust_remote_code`` lets it run the checkpoint's Python code with all rights of this
        process.

        ``quantized`` is a :class:`~outrider.model.QuantizedMode`. ``draft_weights`` is the format of a draft head's
        products and of the copy of the target's output head with which the draft samples, or ``stored``; by default the
        engine chooses. Verification uses the target's own weights. ``draft_vocabulary`` limits that copy to the first tokens
        or to those of a file (:class:`~outrider.model.DraftVocabulary`).

        ``progress(tensor, bytes done, total)`` is called for each loaded tensor, ``capture_progress(done, total)`` for each
        captured batch size. ``ranks`` run the engine together, each with its part of the checkpoint. ``parallel`` instead
        starts the other ranks as processes of this host; they end with :meth:`close`.
        Raises :class:`~outrider.device.CheckpointError` and :class:`~outrider.device.ConfigError`, the latter also for values
        of a wrong type.
        """
        loading = LoadingArguments(
            draft_dir=absolute(draft_dir),
            speculate=speculate,
            config=config,
            through_transformers=through_transformers,
            trust_remote_code=trust_remote_code,
            quantized=quantized,
            draft_weights=draft_weights,
            draft_vocabulary=draft_vocabulary if isinstance(draft_vocabulary, int) else absolute(draft_vocabulary),
        )
        check_type("model_dir", model_dir, str, Path)
        check_type("backend", backend, str, Backend)
        model_dir, backend = Path(model_dir), get_backend(backend) if isinstance(backend, str) else backend
        if parallel is not None and parallel.world > 1:
            if ranks is not None:
                raise ConfigError("ranks and parallel are both given; parallel starts ranks, and these are there already")
            if builders:
                raise ConfigError(
                    "builders are objects of this process, which other ranks don't have; install the proposer as a plugin"
                )
            load_engine = partial(cls._of_rank, model_dir.resolve(), loading)
            with ExitStack() as stack:
                first = start_ranks(stack, backend, parallel, load_engine)
                engine = load_engine(first, progress=progress, capture_progress=capture_progress)
                engine._processes = stack.pop_all()
            return engine
        with nullcontext() if ranks is None else ranks.starting():
            loaded = load_checkpoint(model_dir, backend, loading, builders=builders, progress=progress, ranks=ranks)
        return cls(
            loaded.model,
            backend,
            proposer=loaded.proposer,
            config=loaded.config,
            tokenizer=loaded.tokenizer,
            vision=loaded.vision,
            capture_progress=capture_progress,
            ranks=ranks,
        )

    @classmethod
    def _of_rank(cls, model_dir: Path, loading: LoadingArguments, ranks: Ranks, **callbacks: Any) -> Engine:
        return cls.from_checkpoint(model_dir, ranks.backend, ranks=ranks, **loading.arguments(), **callbacks)

    def compile_guide(self, guide: Guide) -> None:
        """Compile a guide now, so that a later request need not wait. Any thread may call this; it blocks.

        Raises :class:`ConfigError` if this engine compiles no guides, and :class:`RequestError` for an invalid guide.
        """
        self._grammars.compile(guide)

    # -- requests --------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        media: Sequence[Media] = (),
    ) -> int:
        """Queue a request and return its id. A higher ``priority`` runs first and is preempted last.

        With ``n`` samples, each sample is a request. Their ids are consecutive, and the first id is returned. The other
        samples start once the prompt of the first was launched, and share its pages.

        ``prompt`` is a text, which the checkpoint's tokenizer encodes, or token ids. ``media`` are images and videos from
        :class:`~outrider.model.MediaProcessor`, in the order of their placeholders in ``prompt``. Each has one placeholder
        token, or one for each of its features.

        Raises :class:`RequestError` for a request that the engine cannot serve.
        """
        tokens = self._encoded(prompt)
        with self._session.use():
            samples = self._admission.requests(self._session.next_id, tokens, params, priority=priority, media=media)
            self._decision_log.append_call("add_request", tuple(tokens), params, priority, tuple(media))
            return self._session.submit(samples)

    def abort(self, request_id: int) -> None:
        """End a request now. Its output so far stays valid; the results of an iteration in flight are discarded. Raises
        :class:`RequestError` for an id that neither waits nor runs.
        """
        with self._session.use():
            request = self._requests.get(request_id)
            if request is None:
                raise RequestError(f"request {request_id} isn't waiting or running; it may have finished already")
            self._decision_log.append_call("abort", request_id)
            self._loop.end_request(request, FinishReason.ABORT)
            self._scheduler.retire()

    def step(self) -> list[StepOutput]:
        """Run one iteration and return a record for each request with new tokens.

        With ``overlap``, it launches an iteration and returns the results of the previous one.
        """
        with self._session.use():
            self._loop.iterate()
        return self._loop.output_queue.pop_outputs()

    def step_or_retry(self) -> list[StepOutput]:
        """Return the outputs of :meth:`step`, for a loop that serves requests; none after a recoverable device failure, since
        requests keep their tokens. Raises the :class:`DeviceError` of a lost device, and the last of 8 consecutive failures.
        """
        try:
            outputs = self.step()
        except DeviceError as error:
            self._failures += 1
            if error.device_lost or self._failures >= _MAX_CONSECUTIVE_FAILURES:
                raise
            return []
        self._failures = 0
        return outputs

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        media: Sequence[Sequence[Media]] | None = None,
    ) -> list[Completion]:
        """Run requests until they finish and return completions in the order of ``prompts``, with the samples of a prompt
        together.

        ``prompts`` is a text, or a sequence of texts or of token ids; the checkpoint's tokenizer encodes texts.
        ``media`` has one sequence for each prompt. Requests that were added before run too; the next :meth:`step` returns
        their outputs. Raises :class:`RequestError` before any request starts if one cannot be served.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(prompts, Sequence):
            prompts = [self._encoded(prompt) for prompt in prompts]
        with self._session.use():
            batch = self._admission.batch(self._session.next_id, prompts, params, media)
            self._decision_log.append_call(
                "generate", tuple(map(tuple, prompts)), params, None if media is None else tuple(map(tuple, media))
            )
            return self._generate(batch)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, media: Sequence[Media] = ()
    ) -> RequestStream:
        """Queue one request, of a text or of token ids, and yield its outputs as they arrive. Closing the stream early, or
        dropping it, aborts the request.

        Any number of streams may be open and read in any order. Each has a queue of its own, and reading one runs iterations
        for all. The next :meth:`step` returns the outputs of requests without a stream.

        Raises :class:`RequestError` for a request that the engine cannot serve.
        """
        if isinstance(params, SamplingParams) and params.n > 1:
            raise RequestError(f"n is {params.n}; a stream is one sample: use add_request and step, or generate")
        tokens = self._encoded(prompt)
        with self._session.use():
            (request,) = self._admission.requests(self._session.next_id, tokens, params, media=media)
            self._decision_log.append_call("add_request", tuple(tokens), params, 0, tuple(media))
            outputs = self._loop.output_queue.open(request.id)
            self._session.submit([request])
        return RequestStream(request, outputs, advance=self._iterate, close=self._session.close_stream)

    def drain(self) -> None:
        """Wait for every iteration in flight without launching another; the next step returns their outputs."""
        with self._session.use():
            self._loop.drain()

    def follow(self, answer: VoteAnswer | None = None) -> None:
        """Repeat the calls of the first rank's engine until that engine is closed. Engines of other ranks take no calls of
        their own.

        ``answer`` returns the vote of this rank when the first rank calls :meth:`ask_ranks`, between two iterations.

        Raises :class:`DeviceError` if a rank failed, and :class:`~outrider.engine.ranks.records.RanksDiffer` if this rank
        decides differently from the first.
        """
        decision_log = self._decision_log
        if not isinstance(decision_log, RankedDecisionLog) or decision_log.leads:
            raise ConfigError("this engine leads its ranks, or is alone: it has nothing to follow")
        self._session.check_owner()
        handed_over = decision_log.ranks.handed_over
        calls: dict[str, Callable[..., object]] = {
            "add_request": lambda tokens, params, priority, media: self.add_request(
                tokens, params, priority=priority, media=media
            ),
            "generate": self._queue,
            "abort": self.abort,
            "drop": self._forget_ids,
            "hand_over": self.hand_over,
            "take_over": lambda key: self.take_over(handed_over[key]),
            "resume": self.resume,
            "expect_pages": lambda state, group: self.lending.follow_expect(state, group),
            "pages_arrived": lambda request, relay: self.lending.follow_arrived(request, relay),
            "release_pages": lambda request: self.lending.abandon(self.lending.expected[request]),
            "vote": vote_handler(decision_log, answer),
        }
        follow(decision_log, calls, self._loop)

    @property
    def follows(self) -> bool:
        """True if another rank leads, so that this engine only accepts :meth:`follow`."""
        return not self._decision_log.leads

    def close(self) -> None:
        """End the engines of the other ranks. With one rank it does nothing. May be called twice."""
        if self._decision_log.leads and self._failure_recovery.stopped is None:
            self._decision_log.end_followers()
        self._processes.close()

    def adopt(self) -> None:
        """Make the calling thread the owner. The previous owner must no longer use the engine.

        Raises :class:`~outrider.engine.session.WrongThread` in a forked process: devices don't survive a fork.
        """
        self._session.adopt()

    def watch_prefix_cache(self, handle: Callable[[CacheEvent], None] | None) -> None:
        """Call ``handle`` for each page that the prefix cache stores or drops, in order. Pages already cached are reported at
        once. None ends the reports.

        ``handle`` runs in the engine's thread, inside an iteration: it must be quick, and neither raise nor call the engine.
        Raises :class:`ConfigError` for an engine without a prefix cache.
        """
        with self._session.use():
            if not self._scheduler.pages.shares_prefixes:
                raise ConfigError("this engine has no prefix cache to watch; make it with prefix_cache=True")
            self._scheduler.pages.watch(None if handle is None else CacheEvents(handle))

    # -- moving requests between engines -----------------------------------------------------------------------------------

    def hand_over(self, request_id: int) -> HandOver:
        """Take a decoding request out of this engine, with its caches and draft state, for another engine's
        :meth:`take_over`.

        The host waits for the iterations in flight of this request; other requests continue. The next :meth:`step` returns
        the tokens of these iterations, and the hand-over's output includes them. Raises :class:`RequestError` for a request
        that has finished or has no output yet.
        """
        with self._session.use():
            self._decision_log.append_call("hand_over", request_id)
            self._decision_log.publish_or_check("go on")
            request = self._loop.request_to_hand_over(request_id)
            with self._failure_recovery.guard_device_work("handing a request over"):
                handed = self._decision_log.keep_handed_over(self._transfer.copy_request_state(request))
            self._loop.hand_over_request(request)
            self._scheduler.retire()
            return handed

    def take_over(self, handed: HandOver) -> int:
        """Continue a request from another engine of the same model and kind of proposer, and return its id here.

        The request decodes once it is scheduled, without a prefill. Its completion has the whole output; :meth:`step`
        yields only new tokens. State from another backend is copied at once, and the host waits for the copy.

        Raises :class:`ConfigError` if the engines do not match, and :class:`RequestError` for a request that the engine
        cannot serve.
        """
        check_fit(self._transfer.fit, handed.fit)
        self._decision_log.check_handed_over(handed)
        with self._session.use():
            request = self._admission.arrival(self._session.next_id, handed)
            self._decision_log.append_call("take_over", handed.key)
            self._decision_log.drop_handed_over(handed)
            request.group = handed.group
            with self._failure_recovery.guard_device_work("taking a request over"):
                request.arrival = self._transfer.copy_to_this_backend(handed)
            return self._session.add(request)

    def resume(self, state: RequestState, *, lend: bool = False) -> int:
        """Queue a request that another engine knows, with its output so far, and return its id here. Prompt and output are
        prefilled.

        With ``lend``, the request does not decode here: it rests after its next token until :meth:`PageLending.lend` takes it
        out.

        Raises :class:`RequestError` for a request that the engine cannot serve.
        """
        with self._session.use():
            if lend:
                self.lending.check_lends()
            self._decision_log.append_call("resume", state)
            request = self._admission.resumed(self._session.next_id, state)
            request.is_prefill_only = lend
            self._session.choose_group([request])
            return self._session.add(request)

    @property
    def lending(self) -> PageLending:
        """The requests whose pages a network card reads or writes, created at the first use. Raises :class:`ConfigError` for
        an engine that cannot lend requests.
        """
        if self._lending is None:
            self._lending = PageLending(self._parts, self._loop, self._admission, self._session)
        return self._lending

    @property
    def page_memory(self) -> tuple[Tensor, ...]:
        """All tensors that have pages, [pages, ...] each, for the life of the engine. A link registers them."""
        return self._transfer.paged_caches

    @property
    def state_memory(self) -> tuple[Tensor, ...]:
        """All states of recurrent layers, [rows, ...] each, for the life of the engine; empty for a model without recurrent
        layers. A link registers them.
        """
        return self._transfer.states

    def ask_ranks(self, said: str) -> tuple[str, ...]:
        """Request a vote from every other rank and return the answers in the order of ranks. Each rank answers with the
        ``answer`` that its :meth:`Engine.follow` received, after all earlier calls of this engine. The call waits for the
        answers.
        """
        with self._session.use(), self._failure_recovery.guard_device_work("asking the other ranks"):
            return self._decision_log.request_votes(said)

    # -- state -------------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises :class:`ConfigError` when the engine was built without one."""
        if self._tokenizer is None:
            raise ConfigError("this engine was built without a tokenizer; use Engine.from_checkpoint, or pass token ids")
        return self._tokenizer

    @property
    def chosen(self) -> tuple[Choice, ...]:
        """The settings of :attr:`config` that the engine chose when it was created, with the reasons."""
        return self.config.chosen

    @property
    def has_tokenizer(self) -> bool:
        """True if the engine was built with a tokenizer."""
        return self._tokenizer is not None

    @property
    def stats(self) -> EngineStats:
        """Counts of requests, iterations and tokens since the engine was created."""
        groups = self._scheduler.groups
        return EngineStats(
            **self._loop.counts,
            blocked_s=self._failure_recovery.blocked_s,
            preemptions=sum(group.preemptions for group in groups),
            prefix_looked_up=sum(group.prefix_looked_up for group in groups),
            prefix_hits=sum(group.prefix_hits for group in groups),
        )

    @property
    def load(self) -> EngineLoad:
        """The number of requests and pages that the engine holds now."""
        running = sum(not request.finished for request in self._scheduler.running)
        pools = [group.pages for group in self._scheduler.groups]
        return EngineLoad(
            running=running,
            waiting=len(self._requests) - running,
            pages=sum(pool.count - 1 for pool in pools),
            free_pages=self.free_pages,
            cached_pages=sum(pool.cached for pool in pools),
            state_checkpoints=sum(pool.state_checkpoints for pool in pools),
        )

    @property
    def longest_request(self) -> int:
        """Maximum number of tokens of prompt and output of one request, limited by the context and by the cache."""
        return self._admission.longest

    @property
    def has_unfinished(self) -> bool:
        """True if :meth:`step` has work to do."""
        return self._session.has_abandoned or self._loop.has_work

    @property
    def groups(self) -> int:
        """Number of data-parallel groups of ranks, each with requests, rows and pages of its own; 1 without data
        parallelism.
        """
        return self._decision_log.groups

    @property
    def free_pages(self) -> int:
        """Number of KV pages that no request holds. Some of them may hold cached prefixes."""
        return sum(group.pages.available for group in self._scheduler.groups)

    @property
    def streams(self) -> Streams:
        """The device streams of the engine, for tools."""
        return self._parts.streams

    @property
    def free_rows(self) -> int:
        """Number of rows that no request holds."""
        return sum(group.rows.available for group in self._scheduler.groups)

    @property
    def open_requests(self) -> dict[int, tuple[int, ...]]:
        """The requests that wait or run, by id, with the output that the host knows. An engine that stopped still has
        them.
        """
        return self._loop.open_requests

    # -- inside ----------------------------------------------------------------------------------------------------

    def _encoded(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Return token ids of a prompt that may be a text. Raises :class:`ConfigError` for a text without a tokenizer."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _queue(self, prompts: Sequence[Sequence[int]], params: object, media: object) -> None:
        """Queue the requests of :meth:`generate`, which the first rank has admitted, on a follower rank."""
        for samples in self._admission.batch(self._session.next_id, prompts, params, media):
            self._session.submit(samples)

    def _forget_ids(self, ids: Sequence[int]) -> None:
        self._loop.drop_requests([self._requests[number] for number in ids if number in self._requests])

    def _iterate(self) -> None:
        with self._session.use():
            self._loop.iterate()

    def _generate(self, batch: Sequence[Sequence[Request]]) -> list[Completion]:
        loop, requests = self._loop, [request for samples in batch for request in samples]
        for request in requests:
            loop.output_queue.open(request.id)
        try:
            for samples in batch:
                self._session.submit(samples)
            while not all(request.finished for request in requests):
                loop.iterate()
            loop.drain()
        except DeviceError:  # they go on where the device does, and come out of the next steps
            for request in requests:
                loop.output_queue.release(request.id)
            raise
        except BaseException:
            self._session.drop(requests)
            raise
        for request in requests:
            loop.output_queue.close(request.id)
        return [request.completion() for request in requests]
