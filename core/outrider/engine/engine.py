"""The engine: requests in, tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.device import Backend, CapabilityError, ConfigError, RequestError, StepMode
from outrider.engine.buffers import StepBuffers
from outrider.engine.config import EngineConfig
from outrider.engine.fences import FenceSet
from outrider.engine.logprobs import TokenLogprobs
from outrider.engine.options import OptionTable
from outrider.engine.pages import FreeList, PagePool
from outrider.engine.request import Completion, FinishReason, Request, StepOutput
from outrider.engine.results import Results, Ticket
from outrider.engine.rows import FutureMap, RowTable
from outrider.engine.sampling import MAX_LOGIT_BIAS, SamplingParams
from outrider.engine.scheduler import OutOfPages, Scheduler, SchedulerLimits
from outrider.engine.staging import Batch, Staging, staging_capacity
from outrider.engine.step import Step, StepParts, Streams
from outrider.engine.text import StopText
from outrider.model import Decoder, KVCache, Tokenizer, load_decoder, load_eagle
from outrider.speculative.eagle import EagleProposer
from outrider.speculative.proposer import PlainProposer, Proposer

SPECULATE = ("eagle", "none")
DEFAULT_MAX_CONTEXT = 4096

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made. ``verified_tokens`` came out of ``request_iterations`` verifications of single
    requests; ``iterations`` counts launched batches, prefill-only ones included.
    """

    iterations: int
    request_iterations: int
    verified_tokens: int
    emitted_tokens: int

    @property
    def acceptance_length(self) -> float:
        """Tokens that one verification of a request yields on average; 0 before the first."""
        return self.verified_tokens / self.request_iterations if self.request_iterations else 0.0


class Engine:
    """Runs requests in continuous batches on one backend.

    Not thread-safe: one thread calls it. Everything that it allocates on the device is made here, before the first step.
    """

    def __init__(
        self,
        model: Decoder,
        backend: Backend,
        *,
        proposer: Proposer | None = None,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.backend = backend
        self.model = model
        self.proposer = proposer = proposer or PlainProposer()
        self._tokenizer = tokenizer
        _check_policy(backend)
        if config.batch_invariant and not (model.native and model.kernels.row_invariant):
            raise ConfigError(
                "batch_invariant is set, but the model doesn't run on kernels that are; use Engine.from_checkpoint with a "
                "model of a supported family, or make the Decoder with backend.kernels.batch_invariant()"
            )
        self.max_context = _max_context(config, model)
        _check_tree(model, proposer)
        # A tree's nodes are scattered over slots behind the cached tokens, and all of them count until they're moved.
        spare = max(proposer.slots - 2, 0) if proposer.is_tree else 0
        table_width = -(-(self.max_context + proposer.slots) // config.page_size)
        pages = config.num_pages or config.max_requests * table_width + 1
        slots = 2 if config.overlap else 1
        device = backend.device

        streams = Streams(*(backend.create_stream(name) for name in ("schedule", "forward", "plan", "copy")))
        # Everything that lives as long as the engine is made on forward, and finished before any stream starts.
        with backend.on(streams.forward), backend.guard("allocating the engine's caches and buffers"):
            cache = KVCache.allocate(
                model.config.num_layers,
                model.config.num_kv_heads,
                model.config.head_size,
                pages=pages,
                page_size=config.page_size,
                dtype=config.torch_dtype,
                device=device,
            )
            proposer.allocate(backend=backend, pages=pages, page_size=config.page_size)
            rows = RowTable(rows=config.max_requests + 1, pages=table_width, device=device)
            options = OptionTable(
                rows=config.max_requests + 1,
                vocabulary=model.config.vocab_size,
                penalties=config.penalties,
                device=device,
            )
            future = FutureMap(rows=config.max_requests + 1, relay=proposer.relay, device=device)
            buffers = StepBuffers(
                max_requests=config.max_requests,
                nodes=proposer.nodes,
                depth=proposer.depth,
                is_tree=proposer.is_tree,
                pages=table_width,
                device=device,
            )
            capacity = staging_capacity(requests=config.max_requests, pages=table_width, prefill_chunk=config.prefill_chunk)
            capacity += OptionTable.capacity(
                requests=config.max_requests,
                vocabulary=model.config.vocab_size,
                max_context=self.max_context,
                penalties=config.penalties,
            )
            staging = Staging(backend, slots=slots, capacity=capacity)
            results = Results(
                backend,
                slots=slots,
                max_requests=config.max_requests,
                depth=proposer.depth,
                max_logprobs=min(config.max_logprobs, model.config.vocab_size),
            )
        streams.forward.synchronize()

        self._fences = FenceSet(backend.speculative_sync, slots=slots)
        self._results = results
        self._scheduler = Scheduler(
            rows=FreeList("request row", config.max_requests + 1),
            pages=PagePool(count=pages, page_size=config.page_size, ahead=proposer.lookahead, share=config.prefix_cache),
            limits=SchedulerLimits(
                growth=proposer.depth + 1, slots=proposer.slots, spare=spare, prefill_chunk=config.prefill_chunk
            ),
        )
        self._step = Step(
            StepParts(
                backend=backend,
                streams=streams,
                fences=self._fences,
                model=model,
                cache=cache,
                proposer=proposer,
                rows=rows,
                options=options,
                future=future,
                buffers=buffers,
                staging=staging,
                results=results,
                page_size=config.page_size,
                max_context=self.max_context,
            ),
            slots=slots,
        )
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
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Load a checkpoint (and its draft) and build an engine for it.

        ``speculate`` is ``eagle``, which needs ``draft_dir``, or ``none``. ``progress(file, done, total)`` is told of
        each tensor loaded. Raises :class:`~outrider.device.CheckpointError` and :class:`~outrider.device.ConfigError`.
        """
        config = config or EngineConfig()
        if speculate not in SPECULATE:
            raise ConfigError(f"speculate is {speculate!r}; expected one of {', '.join(SPECULATE)}")
        model = load_decoder(model_dir, backend=backend, dtype=config.torch_dtype, progress=progress)
        if config.batch_invariant:
            model = Decoder(model.config, model.weights, backend.kernels.batch_invariant())
        proposer: Proposer = PlainProposer()
        if speculate == "eagle":
            if draft_dir is None:
                raise ConfigError("speculate='eagle' needs the directory of an EAGLE head; give draft_dir (--draft)")
            head = load_eagle(draft_dir, target=model, backend=backend, dtype=config.torch_dtype, progress=progress)
            proposer = EagleProposer(head, draft_tokens=config.draft_tokens)
        tokenizer = Tokenizer.from_checkpoint(model_dir)
        return cls(model, backend, proposer=proposer, config=config, tokenizer=tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises :class:`ConfigError` when the engine was built without one."""
        if self._tokenizer is None:
            raise ConfigError("this engine was built without a tokenizer; use Engine.from_checkpoint, or pass token ids")
        return self._tokenizer

    @property
    def stats(self) -> EngineStats:
        """Counts so far."""
        return EngineStats(**self._counts)

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._pending or self._in_flight or self._scheduler.has_work)

    @property
    def free_pages(self) -> int:
        """KV pages that no request holds; some of them may be cached prefixes."""
        return self._scheduler.pages.available

    @property
    def free_rows(self) -> int:
        """Rows that no request holds."""
        return self._scheduler.rows.available

    # -- requests --------------------------------------------------------------------------------------------------

    def add_request(self, tokens: Sequence[int], params: SamplingParams | None = None, *, priority: int = 0) -> int:
        """Queue a request; returns its id. A higher ``priority`` goes first and is preempted last.

        With ``n`` samples, each is a request of its own; their ids follow each other and the first is returned. The others
        start once the first one's prompt is on its way, and share its pages.

        Raises :class:`RequestError` for a request that can't be served.
        """
        params = params or SamplingParams()
        prompt = tuple(int(token) for token in tokens)
        self._check_prompt(prompt, params)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.model.config.eos_token_ids)
        self._check_options(params, stops)
        samples = []
        for index in range(params.n):
            request = Request(self._next_id, prompt, params.sample(index), frozenset(stops), priority)
            if params.stop:
                request.stop_text = StopText(self.tokenizer.stream(), params.stop, overlook=params.min_tokens)
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
        request = self._requests.pop(request_id, None)
        if request is None:
            raise RequestError(f"request {request_id} isn't waiting or running; it may have finished already")
        request.finish_reason = FinishReason.ABORT
        self._pending.append(StepOutput(request.id, (), FinishReason.ABORT, text=_text_of(request)))
        self._scheduler.drop_waiting(request)
        self._start_followers(request)
        self._scheduler.retire()

    def step(self) -> list[StepOutput]:
        """Run one iteration; returns the new tokens that the host learnt of, a record for each request that has some.

        With ``overlap`` the iteration is launched, and the results are those of the one before.
        """
        with self.backend.guard("running an iteration"):
            batch = self._next_batch()
            if batch is not None:
                self._in_flight.append(self._step.launch(batch))
                self._counts["iterations"] += 1
                for chunk in batch.prefill:
                    if chunk.final:
                        self._start_followers(chunk.request)
            keep = 1 if self.config.overlap and batch is not None else 0
            while len(self._in_flight) > keep:
                self._handle_oldest()
            self._scheduler.retire()
            self.backend.release_finished()
        outputs, self._pending = self._pending, []
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run requests to their ends; completions in the order of ``prompts``, the samples of one side by side.

        Requests added before run along; what they produce meanwhile comes out of the next :meth:`step`.
        """
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams] = [params or SamplingParams()] * len(prompts)
        else:
            each = params
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one, or as many")
        firsts = [(self.add_request(p, chosen), chosen) for p, chosen in zip(prompts, each, strict=True)]
        requests = [self._requests[first + i] for first, chosen in firsts for i in range(chosen.n if chosen else 1)]
        ours = {request.id for request in requests}
        others: list[StepOutput] = []
        while not all(request.finished for request in requests):
            others += (output for output in self.step() if output.request_id not in ours)
        self.drain()
        self._pending[:0] = others
        return [request.completion() for request in requests]

    def stream(self, tokens: Sequence[int], params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Run one request, yielding its tokens as they come. Closing the iterator early aborts the request.

        Requests added before run along; what they produce meanwhile comes out of the next :meth:`step`.
        """
        if params is not None and params.n > 1:
            raise RequestError(f"n is {params.n}; a stream is one sample: use add_request and step, or generate")
        request = self._requests[self.add_request(tokens, params)]
        others: list[StepOutput] = []
        try:
            while not request.finished:
                for output in self.step():
                    if output.request_id == request.id:
                        yield output
                    else:
                        others.append(output)
        finally:
            if not request.finished:
                self.abort(request.id)
                self._pending = [output for output in self._pending if output.request_id != request.id]
            self.drain()
            self._pending[:0] = others

    def drain(self) -> None:
        """Handle every iteration in flight without launching another; what it yields comes out of the next step."""
        while self._in_flight:
            self._handle_oldest()
        self._scheduler.retire()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_prompt(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        total = len(prompt) + params.max_tokens
        if total > self.max_context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and asks for {params.max_tokens} more: {total} don't fit in the "
                f"context of {self.max_context}; shorten the prompt or lower max_tokens"
            )
        needed, pages = self._scheduler.most_pages(total), self._scheduler.pages.count - 1
        if needed > pages:
            raise RequestError(
                f"the request needs {needed} KV pages of {self.config.page_size} tokens, the cache has {pages}; raise "
                "num_pages or lower max_tokens"
            )
        vocabulary = self.model.config.vocab_size
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} of the prompt is outside the model's vocabulary of {vocabulary}")

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

    def _check_options(self, params: SamplingParams, stops: set[int]) -> None:
        vocabulary, listed = self.model.config.vocab_size, dict(params.biases)
        wrong = next((token for token in listed if token >= vocabulary), None)
        if wrong is None:
            wrong = next((token for token in params.stop_token_ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} of the sampling options is outside the model's vocabulary of {vocabulary}")
        banned = {token for token, value in listed.items() if value == float("-inf")}
        if params.min_tokens:
            banned |= stops
        if len(banned) >= vocabulary:
            raise RequestError("logit_bias and min_tokens ban every token of the vocabulary; leave at least one")
        entries = len(listed) + (len(stops) if params.min_tokens else 0)
        if entries > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias and the stop tokens that min_tokens bans make {entries} entries, a request may have "
                f"{MAX_LOGIT_BIAS}; list fewer tokens"
            )
        if params.penalized and not self.config.penalties:
            raise RequestError("this engine was built without penalties; build it with EngineConfig(penalties=True)")
        most = min(self.config.max_logprobs, vocabulary)
        if params.logprobs is not None and params.logprobs > most:
            raise RequestError(f"logprobs is {params.logprobs}, this engine reports {most} at most; raise max_logprobs")
        if params.stop:
            self.tokenizer  # noqa: B018  (raises when there is none)

    def _handle_oldest(self) -> None:
        """Take in the results of the oldest iteration in flight; those of requests that are over are dropped."""
        ticket = self._in_flight.popleft()
        outcome = self._results.redeem(ticket, self._fences.results_copied[ticket.slot])
        for request, tokens in zip(ticket.batch.decode, outcome.decoded, strict=True):
            request.in_flight -= 1
            request.decodes_in_flight -= 1
            if not request.finished:
                request.iterations += 1
                request.verified_tokens += len(tokens)
                self._counts["request_iterations"] += 1
                self._counts["verified_tokens"] += len(tokens)
                self._emit(request, tokens, outcome.logprobs.get(request.id, ()))
        for chunk, first in zip(ticket.batch.prefill, outcome.first_tokens, strict=True):
            chunk.request.in_flight -= 1
            if first is not None and not chunk.request.finished:
                self._emit(chunk.request, (first,), outcome.logprobs.get(chunk.request.id, ()))

    def _emit(self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Append tokens up to the first stop token, the one that completes a stop string, or the limit."""
        taken: list[int] = []
        watch = request.stop_text
        for token in tokens:
            taken.append(token)
            if token in request.stop_tokens or (watch is not None and watch.push(token)):
                request.finish_reason = FinishReason.STOP
                break
            if len(request.output) + len(taken) == request.params.max_tokens:
                request.finish_reason = FinishReason.LENGTH
                break
        request.output.extend(taken)
        self._scheduler.register(request, len(request.prompt) + len(request.output) - 1)
        self._counts["emitted_tokens"] += len(taken)
        request.logprobs.extend(logprobs[: len(taken)])
        text = _text_of(request)
        self._pending.append(StepOutput(request.id, tuple(taken), request.finish_reason, tuple(logprobs[: len(taken)]), text))
        if request.finished:
            del self._requests[request.id]


def _text_of(request: Request) -> str | None:
    """The new text of a request with stop strings; all of it once it's over, which may show one more stop string."""
    watch = request.stop_text
    if watch is None:
        return None
    if request.finished and watch.finish() and request.finish_reason is FinishReason.LENGTH:
        request.finish_reason = FinishReason.STOP
    text = watch.take()
    request.text.append(text)
    return text


def _check_policy(backend: Backend) -> None:
    sync = backend.speculative_sync
    if StepMode.STAGED not in sync.step_modes or sync.exact_host_lengths or sync.rebind_params:
        raise CapabilityError(
            f"{backend.label} declares a policy that this version's step doesn't carry out (staged mode without host "
            "lengths or rebound parameters is what it does)"
        )


def _check_tree(model: Decoder, proposer: Proposer) -> None:
    if proposer.nodes < proposer.depth:
        raise ConfigError(
            f"the proposer {proposer.name!r} declares {proposer.nodes} nodes and paths of {proposer.depth}: a path has no "
            "more nodes than its tree"
        )
    if proposer.is_tree and any(model.config.windows):
        raise ConfigError(
            f"the proposer {proposer.name!r} drafts trees, and the model has layers with a sliding window, which count slots"
            " and not positions on a path; draft a chain (draft_topk=1)"
        )


def _max_context(config: EngineConfig, model: Decoder) -> int:
    limit = model.config.max_context
    if config.max_context is None:
        return min(limit, DEFAULT_MAX_CONTEXT)
    if config.max_context > limit:
        raise ConfigError(f"max_context is {config.max_context}, the model was made for {limit} at most")
    return config.max_context
