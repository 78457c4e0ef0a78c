"""Monitors of an engine: each stage accesses only memory that it declares, batches are complete, launches run ahead, and no
launch blocks the host.

Tokens do not show these faults: an engine that omits a request from a batch, or waits for each iteration, is only slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from outrider.device import Fence, Observer, OutriderError, Waiter

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.device import Backend, Operation
    from outrider.engine.engine import Engine
    from outrider.engine.guided import GuidedDecoding
    from outrider.engine.loop import Loop
    from outrider.engine.requests.batch import Batch
    from outrider.engine.requests.request import Request
    from outrider.engine.stages import DecodeBatch, Frame, Stage
    from outrider.engine.state.parts import EngineParts
    from outrider.engine.state.results import PendingResult


class UndeclaredAccess(OutriderError):
    """Raised when a stage accessed memory that its ``reads`` and ``writes`` do not name."""


class StageMonitor:
    """A monitor of all stages of ``engine``. It needs a device that reports accesses, and an attached observer.

    ``note`` receives each fault. A stage may read what it wrote itself. Temporary memory and weights need no declaration.
    """

    def __init__(self, engine: Engine, note: Callable[[OutriderError], None]) -> None:
        self._backend = engine.backend
        self._note = note
        self.accessed: dict[str, set[tuple[str, str]]] = {}
        """The accesses of each stage, by the stage's name: ``reads`` or ``writes``, and the name of the memory."""
        step: Any = engine._step
        step = getattr(step, "step", step)
        self._names = {
            self._backend.locate(tensor).storage: name
            for name, tensors in declared_memory(engine._parts, step._guided)
            for tensor in tensors
            if tensor.numel()
        }
        for stage in vars(step._stages).values():
            if hasattr(stage, "reads"):
                self._watch(stage)

    def _watch(self, stage: Stage) -> None:
        run, accessed = stage.run, self.accessed.setdefault(stage.name, set())

        def watched(batch: DecodeBatch, frame: Frame) -> None:
            observer = self._backend.observer or Observer()
            launched, written = observer.launched, set[str]()

            def check(operation: Operation) -> None:
                launched(operation)
                for access in operation.accesses:
                    name = self._names.get(access.storage)
                    if name is None:
                        continue
                    kind = "writes" if access.write else "reads"
                    accessed.add((kind, name))
                    if access.write:
                        written.add(name)
                    elif name in written:
                        continue
                    if not any(is_part(name, declared) for declared in getattr(stage, kind)):
                        self._note(
                            UndeclaredAccess(
                                f"the stage {stage.name!r} {kind} {name!r} ({operation.name}, {operation.location}) and "
                                f"doesn't declare it; name it in {type(stage).__name__}.{kind}"
                            )
                        )

            setattr(observer, "launched", check)  # noqa: B010  # mypy takes it for an assignment to a method
            try:
                run(batch, frame)
            finally:
                delattr(observer, "launched")

        setattr(stage, "run", watched)  # noqa: B010


def is_part(name: str, declared: str) -> bool:
    """Return True if ``declared`` is the memory ``name`` or a group that contains it."""
    return f"{name}.".startswith(f"{declared}.")


def declared_memory(parts: EngineParts, guided: GuidedDecoding) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Yield the names that stages may declare, with the tensors of each."""
    yield from ((name, [memory]) for name, memory in parts.buffers._memory.items())
    yield "staged inputs", [parts.staging._device]
    yield "request rows", _tensors(parts.rows)
    yield "sampling options", _tensors(parts.options)
    yield "published lengths", [parts.future.seq_lens]
    yield "resolved lengths", [parts.future.batch_seq_lens]
    yield "stash", [parts.future.last_tokens, *parts.future.relay.values()]
    yield "results", [parts.results._device, parts.results._logprobs]
    yield "token masks", [guided._draft_masks]
    yield "target cache", [tensor for layer in parts.cache.layers for tensor in layer]
    cache, proposer = parts.cache, parts.proposer
    states = [tensor for layer in (*cache.states, *cache.windows) for tensor in layer]
    yield "recurrent states", states if cache.pending is None else [*states, cache.pending]
    yield "draft cache", [*proposer.caches, *(tensor for layer in proposer.states for tensor in layer)]


def _tensors(owner: object) -> list[Tensor]:
    from torch import Tensor  # the help of the explorer's commands does without

    return [value for value in vars(owner).values() if isinstance(value, Tensor)]


_BLOCKING_CALLS = ("event_synchronized", "stream_synchronized", "device_synchronized")
"""Names of the observer callbacks that report a blocked host."""


class LostBatching(OutriderError):
    """Raised when a batch omitted a request that was ready."""


class FreedInFlight(OutriderError):
    """Raised when an engine freed a request's row and pages while an iteration in flight may still use them."""


class LostOverlap(OutriderError):
    """Raised when the host waited for the device instead of launching the next iteration."""


class OverlapMonitor:
    """A monitor that collects ``faults`` while engines run; :meth:`raise_if_any` raises the first fault after the run.

    *Batching.* Each batch has every running request whose context was launched and whose output may be incomplete.
    *Overlap.* The engine launches an iteration before it handles the results of the previous one. Exceptions: the engine must
    wait for results before a preemption or a hand-over; the results may complete all requests; a guided request runs alone.
    *Rows.* The engine frees a row and its pages when no iteration of their request is in flight.
    *Launch.* No launch blocks the host, except at fences where the backend's policy is a host wait, and in image prefill.
    *Stages.* Each stage accesses the memory that it declares, see :class:`~outrider_proof.monitors.StageMonitor`.

    Pass :meth:`wrap` as the engines' ``wrap_fence``, call :meth:`watch` per engine and :meth:`observe` with the backend.
    """

    def __init__(self) -> None:
        self.faults: list[OutriderError] = []
        self.launches = 0
        self.ran_ahead = 0
        """Number of launches while the previous iteration was in flight."""
        self._launching = False
        self._passing: str | None = None
        self._may_block: frozenset[str] = frozenset()

    def wrap(self, fence: Fence) -> Fence:
        """Let ``fence`` report its name to the monitor during host waits from now on, and return the fence."""

        def reporting(wait: Callable[..., Any]) -> Callable[..., Any]:
            def wait_reported(*limit: float) -> Any:
                self._passing = fence.name.split("[")[0]
                try:
                    return wait(*limit)
                finally:
                    self._passing = None

            return wait_reported

        for name in ("wait_host", "wait_host_within"):
            setattr(fence, name, reporting(getattr(fence, name)))
        return fence

    def watch(self, engine: Engine, *, overlap: bool) -> None:
        """Watch ``engine`` from now on; ``overlap`` expects it to launch ahead."""
        loop = engine._loop
        sync = loop._backend.speculative_sync
        exact = sync.exact_host_lengths or engine._parts.attention.plans_on_host
        policy = {"lengths_on_host": exact, "published": sync.published_waiter is Waiter.HOST, "draft_on_host": True}
        self._may_block |= {name for name, may in policy.items() if may}
        _WatchedLoop(self, loop, overlap, engine.proposer.depth)
        if loop._backend.capabilities.reports_accesses:  # other devices don't tell which memory a stage accessed
            self.stages = StageMonitor(engine, self.note)

    def observe(self, backend: Backend) -> Callable[[], None]:
        """Receive reports of a blocked host from the attached or a new observer; return a function that stops this."""
        observer = backend.observer
        own = observer is None
        if observer is None:
            observer = Observer()
            backend.attach(observer)
        for name in _BLOCKING_CALLS:
            setattr(observer, name, self._blocking(getattr(observer, name), name))

        def stop() -> None:
            for name in _BLOCKING_CALLS:
                delattr(observer, name)
            if own:
                backend.detach()

        return stop

    def raise_if_any(self, error: Exception | None = None) -> None:
        """Raise the first fault, if any, with ``error`` as its cause."""
        if self.faults:
            raise self.faults[0] from error

    def note(self, fault: OutriderError) -> None:
        """Append a fault to ``faults``; the run continues, because later errors may explain the fault."""
        self.faults.append(fault)

    def _blocking(self, original: Callable[..., None], name: str) -> Callable[..., None]:
        def report_call(*arguments: Any) -> None:
            original(*arguments)
            if self._launching and self._passing not in self._may_block:
                at = f"at fence {self._passing!r}" if self._passing else f"({name.replace('_', ' ')})"
                self.note(LostOverlap(f"the host was blocked in a launch, {at}; expected: it enqueues and returns"))

        return report_call


class _WatchedLoop:
    """The monitor's record of one engine's batches, launches and freed rows."""

    def __init__(self, monitor: OverlapMonitor, loop: Loop, overlap: bool, depth: int) -> None:
        self._monitor, self._loop, self._overlap, self._depth = monitor, loop, overlap, depth
        self._followed = False  # the iteration before this one is to be in flight still
        self._wrap_method(loop.scheduler, "next_batch", self._next_batch)
        self._wrap_method(loop.scheduler, "_release", self._release)
        self._wrap_method(loop.step, "launch", self._launch)
        self._wrap_method(loop, "_handle_oldest", self._handle)
        for name in ("_drain", "handle_results_of", "_undo"):
            self._wrap_method(loop, name, self._settled)

    def _wrap_method(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *arguments, **named: wrapper(original, *arguments, **named))

    def _settled(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._followed = False
        return original(*arguments, **named)

    def _handle(self, original: Callable[..., None], **named: Any) -> None:
        if len(self._loop._in_flight) == 1 and self._may_be_the_last():
            self._followed = False
        original(**named)

    def _may_be_the_last(self) -> bool:
        """Return True if the iterations in flight complete every request when all draft tokens are accepted."""
        scheduler: Any = self._loop.scheduler
        groups = getattr(scheduler, "_schedulers", (scheduler,))
        return not any(group._waiting for group in groups) and all(
            request.prefilled >= len(request.context)
            and request.params.max_tokens - len(request.output) - request.tokens_in_flight
            <= request.decodes_in_flight * self._depth
            for request in scheduler.running
            if request.finish_reason is None
        )

    def _next_batch(self, original: Callable[[], Batch | None]) -> Batch | None:
        batch = original()
        if batch is None:
            self._followed = False
        left_out = [request.id for request in self._loop.scheduler.running if self._left_out(request, batch)]
        if left_out:
            self._monitor.note(
                LostBatching(
                    f"requests {left_out} run, have their context, and aren't in the batch; expected: all in one batch"
                )
            )
        return batch

    def _release(self, original: Callable[[Request], None], request: Request) -> None:
        if request.in_flight:
            self._monitor.note(
                FreedInFlight(
                    f"request {request.id} gave row {request.row} back with {request.in_flight} iterations in flight; "
                    "expected: none"
                )
            )
        original(request)

    @staticmethod
    def _left_out(request: Request, batch: Batch | None) -> bool:
        """Return True if a request that is ready to decode is not in the batch.

        The counts are those after the batch; for a request that is not in the batch they are unchanged.
        """
        if batch is not None and request in batch.requests:
            return False
        unsure = len(request.output) + request.tokens_in_flight < request.params.max_tokens
        return unsure and request.finish_reason is None and request.prefilled >= len(request.context)

    def _launch(self, original: Callable[[Batch], PendingResult], batch: Batch) -> PendingResult:
        monitor = self._monitor
        if self._overlap and self._followed and not batch.is_guided and not self._loop._in_flight:
            monitor.note(LostOverlap("the results of an iteration were handled before the next one was launched"))
        monitor.launches += 1
        monitor.ran_ahead += bool(self._loop._in_flight)
        # A vision tower of transformers reads the sizes of images on the host.
        monitor._launching = all(chunk.request.media is None for chunk in batch.prefill)
        try:
            ticket = original(batch)
        finally:
            monitor._launching = False
        self._followed = not batch.is_guided
        return ticket
