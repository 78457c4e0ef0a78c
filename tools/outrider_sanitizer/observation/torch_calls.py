"""Programs that use torch alone: torch itself reports streams, events, synchronisation and released memory.

Such a program creates its streams and events outside the backend interface, in Python and in C++ (autograd's engine,
collectives). torch's device modules trace these calls for torch's own sanitizer; this module passes the trace to the
detectors. Calls that the trace lacks are caught at their Python names: queries, captures and replays of graphs, Triton's
launches. `record_stream` passes the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.device import Access, Operation
from outrider_sanitizer.detector.ranks import RankClocks
from outrider_sanitizer.observation.compiled_launches import compiled_launches
from outrider_sanitizer.observation.dispatch import DerivedSanitizer, is_python_thread
from outrider_sanitizer.observation.hostsync import Replacement, replaced
from outrider_sanitizer.observation.storages import KnownStorage, extent
from outrider_sanitizer.report import caller_location

if TYPE_CHECKING:
    from outrider.device import Backend, Graph, Stream

_DEFAULT = "default"
_ELSEWHERE = "devices of the program beside {}: their default streams count as its own"
_COMPILED = "kernels that torch.compile launches, and torch.Event's query()"
_NO_TRITON = "Triton isn't installed, so no launch of it was looked for"


def torch_trace_module(backend: Backend) -> Any:
    """Return torch's trace module of the device, or None if its device module has none."""
    if backend.capabilities.reports_accesses or backend.device.type == "cpu":
        return None
    try:
        return import_module(f"{torch.get_device_module(backend.device).__name__}._gpu_trace")
    except ImportError:
        return None


class RawTorchEvent:
    """An event that torch created. ``edge_of`` is the capture that recorded it last."""

    __slots__ = ("__weakref__", "edge_of", "generation", "name")

    def __init__(self) -> None:
        self.name = f"of {caller_location() or 'torch'}"
        self.generation = 0
        self.edge_of: object | None = None


class RawTorchGraph:
    """A graph that torch captured. Its inputs and outputs are known only from its operations."""

    def __init__(self) -> None:
        self.name = f"of {caller_location() or 'torch'}"
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.context = SimpleNamespace(params={})
        self.generation = 0


class TorchSanitizer(DerivedSanitizer):
    """The sanitizer of a program that uses torch alone, or torch next to the backend interface.

    Torch reports every stream and event, including those of the backend interface. The sanitizer therefore ignores the
    reports of the interface, except the names of its streams, its graphs (with their inputs and outputs) and its marks.
    """

    def __init__(self, backend: Backend, trace: Any, ranks: RankClocks | None = None, *, rows_apart: bool = True) -> None:
        super().__init__(backend, ranks, rows_apart=rows_apart)
        self.report.blind_spots.extend((_ELSEWHERE.format(backend.device), _COMPILED))
        self._trace = trace
        self._module: Any = torch.get_device_module(backend.device)
        self._names: dict[int, str] = {0: _DEFAULT}
        self._torch_events: dict[int, RawTorchEvent] = {}
        self._graphs: WeakKeyDictionary[Any, RawTorchGraph] = WeakKeyDictionary()
        self._addresses: dict[int, KnownStorage] = {}
        self._released: list[KnownStorage] = []
        self._in_graphs: dict[int, int] = {}
        self._pooled: set[int] = set()
        self._backward: list[tuple[Any, Any]] = []
        self._failure: BaseException | None = None

    # -- what torch tells ----------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Generator[None]:
        """Listen to torch's trace in this scope. Raises the first error of a callback, which torch only logs."""
        trace = self._trace
        torch._C._activate_gpu_trace()
        listeners: list[tuple[Any, Callable[..., None]]] = [
            (trace.EventRecordCallbacks, self._event_recorded),
            (trace.EventWaitCallbacks, self._event_waited),
            (trace.EventDeletionCallbacks, self._event_deleted),
            (trace.EventSynchronizationCallbacks, self._event_over),
            (trace.StreamSynchronizationCallbacks, self._stream_synchronized),
            (trace.DeviceSynchronizationCallbacks, self._device_synchronized),
            (trace.MemoryDeallocationCallbacks, self._deallocated),
        ]
        with super().scope(), ExitStack() as stack:
            for registry, listener in listeners:
                guarded = partial(self._guarded, listener)
                registry.callback_list.append(guarded)
                stack.callback(registry.callback_list.remove, guarded)
            stack.enter_context(replaced(self._names_to_replace()))
            if not stack.enter_context(compiled_launches(self._triton_launched)):
                self.report.blind_spots.append(_NO_TRITON)
            yield
        if self._failure is not None:
            raise self._failure

    def _guarded(self, listener: Callable[..., None], *args: Any) -> None:
        try:
            listener(*args)
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _stream(self, handle: int) -> str:
        name = self._names.get(handle)
        if name is None:
            with self._lock:
                name = self._names.setdefault(handle, f"s{len(self._names)}")
        return name

    def _event_of(self, handle: int) -> RawTorchEvent:
        event = self._torch_events.get(handle)
        if event is None:
            event = self._torch_events[handle] = RawTorchEvent()
        return event

    @property
    def _capture(self) -> object | None:
        return self._ordering.local.capture

    def _event_recorded(self, handle: int, stream: int) -> None:
        with self._lock:
            self._begin()
            event: Any = self._event_of(handle)
            event.edge_of = self._capture
            if event.edge_of is None:
                event.generation += 1
            name = self._stream(stream)
            self._ordering.recorded(name, event, 0 if event.edge_of is not None else event.generation)
            self._step(name)

    def _event_waited(self, handle: int, stream: int) -> None:
        with self._lock:
            self._begin()
            event: Any = self._event_of(handle)
            if event.generation == 0 and event.edge_of is None:
                return  # a wait for an event that was never recorded orders nothing
            name = self._stream(stream)
            inside = self._capture is not None and event.edge_of is self._capture
            self._ordering.waited(name, event, 0 if inside else event.generation)
            self._step(name)

    def _event_deleted(self, handle: int) -> None:
        self._torch_events.pop(handle, None)  # without the lock: a collection may run anywhere

    def _event_over(self, handle: int) -> None:
        with self._lock:
            self._begin()
            event: Any = self._event_of(handle)
            self._ordering.event_synchronized(event, event.generation)

    def _stream_synchronized(self, stream: int) -> None:
        with self._lock:
            self._begin()
            self._ordering.stream_synchronized(self._stream(stream))

    def _device_synchronized(self) -> None:
        with self._lock:
            self._begin()
            self._ordering.device_synchronized()

    def _deallocated(self, address: int) -> None:
        known = self._addresses.pop(address, None)
        if known is not None:
            self._released.append(known)  # told at the next step: this may run inside of one

    # -- what Python's names tell --------------------------------------------------------------------------------------

    def _names_to_replace(self) -> list[Replacement]:
        graph = self._module.CUDAGraph
        found: list[Replacement] = [
            (graph, "capture_begin", self._wrap_capture_begin),
            (graph, "capture_end", self._wrap_capture_end),
            (graph, "replay", self._wrap_replay),
            (self._module.Event, "query", partial(self._wrap_query, self._event_asked)),
            (self._module.Stream, "query", partial(self._wrap_query, self._stream_asked)),
        ]
        # torch.autograd took the name before.
        engines = [(module, "_engine_run_backward") for module in (torch.autograd, torch.autograd.graph)]
        return found + [(*engine, self._wrap_backward) for engine in engines if hasattr(*engine)]

    def _event_asked(self, event: Any) -> None:
        self._event_over(event.cuda_event)

    def _stream_asked(self, stream: Any) -> None:
        self._stream_synchronized(stream.cuda_stream)

    def _wrap_query(self, over: Callable[[Any], None], original: Any) -> Any:
        def query(asked: Any) -> bool:
            done: bool = original(asked)
            if done:
                over(asked)
            return done

        return query

    def _wrap_capture_begin(self, original: Any) -> Any:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            original(graph, *args, **kwargs)
            made: Any = RawTorchGraph()
            self._graphs[graph] = made
            self._scopes.native_graph = graph
            with self._lock:
                self._begin()
                self._captures(made, self._placed())

        return capture_begin

    def _captures(self, graph: Graph, stream: str) -> None:
        self._outside, self._index = self._index, {}
        self._ordering.capture_began(graph, stream)

    def _captured_all(self, graph: Graph, failed: bool) -> None:
        self._ordering.capture_ended(graph, failed)
        self._captured[graph] = sum(self._index.values())
        self._index = self._outside

    def _wrap_capture_end(self, original: Any) -> Any:
        def capture_end(graph: Any) -> None:
            failed = True
            try:
                original(graph)
                failed = False
            finally:
                self._scopes.native_graph = None
                made: Any = self._graphs.get(graph)
                if made is not None:  # else it's one of the backend interface's, which tells its end itself
                    with self._lock:
                        self._captured_all(made, failed)

        return capture_end

    def _wrap_replay(self, original: Any) -> Any:
        def replay(graph: Any) -> None:
            made: Any = self._graphs.get(graph)
            if made is not None:
                made.generation += 1
                self.backend.replays += 1
                with self._lock:
                    self._begin()
                    self._replays(made, self._placed(), made.generation)
            original(graph)

        return replay

    def _replays(self, graph: Graph, stream: str, generation: int) -> None:
        self.report.replays += 1
        self._uses(stream)
        self._ordering.replayed(graph, stream, generation)
        self._index[stream] = self._index.get(stream, 0) + 1 + self._captured.get(graph, 0)

    def _triton_launched(self, name: str, tensors: Sequence[tuple[str, Any, bool, bool]]) -> None:
        if self._scopes.is_inside_operator:
            return  # inside an operator, whose schema says what it does
        location = caller_location()
        with self._lock:
            self._begin()
            accesses: list[Access] = []
            for argument, tensor, read, write in tensors:
                found = self._storages.known(tensor) if isinstance(tensor, Tensor) else None
                if found is not None and (read or write):
                    accesses.append(extent(tensor, found[0], write, argument, -1))
            stream = self._placed()
            self.launched(Operation(name, stream, self._step(stream), tuple(accesses), location))

    # -- host threads --------------------------------------------------------------------------------------------------

    def _wrap_backward(self, original: Any) -> Any:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._backward.append((self._ordering.thread(), self._capture))
            try:
                return original(*args, **kwargs)
            finally:
                with self._lock:
                    self._backward.pop()

        return run_backward

    def _begin(self) -> None:
        """Begin the handling of one torch report: set the calling thread and handle releases since the last report."""
        if self._backward and not is_python_thread():
            # A thread of autograd's engine: it does what the thread that waits for it asked for.
            local = self._ordering.local
            local.actor, local.capture = self._backward[-1]
        self._freed()

    def _freed(self) -> None:
        while self._released:
            known = self._released.pop()
            self.freed(known.number, known.home or _DEFAULT)
        super()._freed()

    # -- operators -----------------------------------------------------------------------------------------------------

    def _placed(self) -> str:
        return self._stream(self._current(self.backend.device.index or 0))

    def _handle(self, stream: Stream) -> int:
        """Return the torch handle of a stream of the backend interface."""
        handle: int = stream.native.cuda_stream
        return handle

    def _current(self, index: int) -> int:
        """Return the handle of the calling thread's current stream of a device."""
        handle: int = torch._C._cuda_getCurrentRawStream(index)
        return handle

    def dispatched(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        with self._lock:
            self._begin()
        if func is torch.ops.aten.record_stream.default:
            self._shared(args[0], args[1])
            return
        super().dispatched(func, args, kwargs, result)

    def _shared(self, tensor: Tensor, stream: Any) -> None:
        known = self._storages.known(tensor)
        if known is not None:
            made = self._module.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
            self.memory_shared(known[0].number, self._stream(made.cuda_stream))

    def found(self, tensor: Tensor, known: KnownStorage) -> None:
        """Register the address of a new storage, because torch reports a release by address."""
        if not known.device:
            return
        address = tensor.untyped_storage().data_ptr()
        if self._capture is None:
            self._addresses[address] = known
            return
        # The addresses stay with the graph. Graphs that share a pool lie over each other: their replays need an order.
        before = self._in_graphs.get(address)
        self._in_graphs[address] = known.number
        self._pooled.add(known.number)
        if before is not None:
            self.address_reused(known.number, before)

    def freed(self, storage: int, stream: str) -> None:
        if storage not in self._pooled:
            super().freed(storage, stream)

    # -- what the interface tells: streams' names, graphs, marks ------------------------------------------------------------

    def stream_created(self, stream: Stream) -> None:
        with self._lock:
            self._names[self._handle(stream)] = stream.name
        super().stream_created(stream)

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Ignore a report of the interface: torch knows the current stream, and reports the same call."""

    scope_entered = scope_left = recorded = waited = _ignore
    event_synchronized = event_queried = stream_synchronized = stream_queried = device_synchronized = _ignore

    def capture_began(self, graph: Graph, stream: Stream) -> None:
        """Assign the capture that torch has just begun to a graph of the backend interface, which knows its inputs."""
        native = self._scopes.native_graph
        with self._lock:
            if native is not None:
                made: Any = self._graphs.pop(native)
                self._ordering.capture_ended(made, True)
                self._index = self._outside
            self._captures(graph, stream.name)

    def capture_ended(self, graph: Graph, failed: bool) -> None:
        with self._lock:
            self._captured_all(graph, failed)
