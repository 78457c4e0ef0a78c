"""Accesses derived from torch's dispatcher, for backends that don't report their accesses.

The sanitizer reads the schema of every operator that passes the dispatcher on a watched thread. Tensor arguments are reads,
arguments with a writing alias annotation are writes, and returns without an alias are new memory. A storage is identified by
its object, not its address. The sanitizer holds only a weak reference, so that a new storage at the address of a freed one is
recognised.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.device import ROW_ACCESS, Access, Operation
from outrider.device.arrays import watched
from outrider.device.kernels.operators import exclude_from_dynamo, operands_by_index, reads_no_elements
from outrider_sanitizer.detector.ranks import RankClocks
from outrider_sanitizer.detector.synchronization import HOST
from outrider_sanitizer.observation.host_arrays import converted_names
from outrider_sanitizer.observation.hostsync import replaced
from outrider_sanitizer.observation.sanitizer import Sanitizer
from outrider_sanitizer.observation.storages import KnownStorage, Storages, extent
from outrider_sanitizer.report import caller_location

if TYPE_CHECKING:
    from outrider.device import Backend, Event, Graph, Stream

_AMBIENT = "default"
_FROM_NUMPY = torch.from_numpy
_BORN = "_outrider_born"
_WAITING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_WAITING = ("aten.is_nonzero.default", "aten.where.default")
"""Names of operators that give the host a value or a shape, although no tag of torch says so."""
_PICKING = "aten::index"
"""Name of the operator that has such a tag only because boolean indices decide its shape; other indices don't."""
_COPIES = frozenset(("aten::copy_", "aten::to", "aten::_to_copy"))
_APART = "which rows an operator takes by data: two such accesses to one memory are taken to be disjoint"
_BLIND = (
    "kernels launched outside torch's dispatcher, and what an operator does beyond its schema",
    "pinned memory touched below Python through an array that numpy() gave away",
    "threads that were started before the run was watched",
)


class _Operands(NamedTuple):
    """The accesses of an operator: (name, writes) of each argument by position and by keyword, and whether
    results are views.
    """

    names: tuple[str, ...]
    writes: frozenset[str]
    fresh: bool  # some return is memory of its own
    empty: bool  # it allocates and writes nothing
    like: bool  # it looks at its operand's shape, not at its bytes
    waits: bool  # it gives a value to the host
    rows: frozenset[str]
    at_once: int  # where `non_blocking` is among the arguments, -1 where it isn't
    views: bool  # results that share an operand's memory, unless it has to copy
    copies: bool  # torch's allocator of pinned memory is told of the stream that it uses


def _operands(func: Any) -> _Operands:
    schema = func._schema
    name: str = schema.name
    writes = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    fresh = any(r.alias_info is None and "Tensor" in str(r.type) for r in schema.returns)
    names = tuple(a.name for a in schema.arguments)
    return _Operands(
        names=names,
        writes=writes,
        fresh=fresh,
        empty=fresh and name.split("::")[-1].startswith(("empty", "new_empty")),
        like=reads_no_elements(func),
        waits=str(func) in _WAITING or (name != _PICKING and any(tag in func.tags for tag in _WAITING_TAGS)),
        rows=frozenset(ROW_ACCESS.get(name) or operands_by_index(func)),
        at_once=names.index("non_blocking") if "non_blocking" in names else -1,
        views=bool(schema.returns)
        and not writes
        and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        copies=name in _COPIES,
    )


class _Pinned:
    """The pinned memory of a numpy array; reports each read and write of the array to the sanitizer."""

    def __init__(self, sanitizer: DerivedSanitizer, number: int, tensor: Tensor) -> None:
        self._sanitizer = sanitizer
        self._number = number
        storage = self._storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self.nbytes = storage.nbytes()

    def range_accessed(self, low: int, high: int, write: bool) -> None:
        """Check the host's read or write of the bytes from ``low`` to ``high`` of the array."""
        if self._sanitizer.watches_arrays:
            self._sanitizer.host_accessed(Access(self._number, low, high, write, argument="array"), caller_location())

    def tensor_over(self, array: Any) -> Tensor:
        """Return a tensor over the bytes of ``array`` that has the storage of the watched tensor."""
        plain = _FROM_NUMPY(array)
        low = plain.data_ptr() - self.address
        made = torch.empty(0, dtype=plain.dtype)
        return made.set_(self._storage, low // plain.element_size(), plain.shape, plain.stride())


class _ThreadScopes(threading.local):
    """The sanitizer's state of each thread."""

    def __init__(self) -> None:
        self.streams: list[str] = []
        """Names of the streams of the open scopes, the innermost last."""
        self.modes: list[_SanitizerMode] = []
        """The sanitizer's dispatch modes, the innermost last."""
        self.is_inside_operator = False
        """True inside an operator, whose schema names its accesses."""
        self.native_graph: Any = None
        """The graph of torch that the thread captures, or None."""


class DerivedSanitizer(Sanitizer):
    """The sanitizer of a backend that reports no accesses. ``rows_apart``: see :func:`~outrider_sanitizer.watch`."""

    def __init__(self, backend: Backend, ranks: RankClocks | None = None, *, rows_apart: bool = True) -> None:
        super().__init__(backend, ranks)
        self.report.blind_spots.extend((_APART, *_BLIND) if rows_apart else _BLIND)
        self._rows_apart = rows_apart
        self._storages = Storages(backend)
        self._schemas: dict[Any, _Operands] = {}
        self._scopes = _ThreadScopes()
        self._index: dict[str, int] = {}
        """Number of steps of each stream so far: operations, records, waits, replays, and the steps of replays."""
        self._outside: dict[str, int] = {}
        self._captured: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()
        self._host_only = backend.device.type == "cpu"
        self.watches_arrays = False

    # -- placement -------------------------------------------------------------------------------------------------

    def scope_entered(self, stream: Stream) -> None:
        self._scopes.streams.append(stream.name)
        # The scope may have brought a dispatch mode of the plugin's own, which would take the operations before an
        # outer mode sees them: ours must be the innermost.
        mode = _SanitizerMode(self)
        self._scopes.modes.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def scope_left(self, stream: Stream) -> None:
        del stream
        self._scopes.streams.pop()
        self._scopes.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def innermost(self, mode: _SanitizerMode) -> bool:
        """Return True if ``mode`` is the innermost mode of this sanitizer on the calling thread."""
        modes = self._scopes.modes
        return not modes or modes[-1] is mode

    def capture_began(self, graph: Graph, stream: Stream) -> None:
        self._scopes.streams.append(stream.name)  # a capture places its callable without a scope of the backend interface
        with self._lock:
            self._outside, self._index = self._index, {}  # what is captured counts from the graph's beginning
        super().capture_began(graph, stream)

    def capture_ended(self, graph: Graph, failed: bool) -> None:
        super().capture_ended(graph, failed)
        with self._lock:
            self._captured[graph] = self._index.get(self._scopes.streams.pop(), 0)
            self._index = self._outside

    def replayed(self, graph: Graph, stream: Stream, generation: int) -> None:
        super().replayed(graph, stream, generation)
        with self._lock:
            if graph in self._captured:
                self._index[stream.name] = self._index.get(stream.name, 0) + 1 + self._captured[graph]

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        super().recorded(stream, event, generation)
        self._step(stream.name)

    def waited(self, stream: Stream, event: Event, generation: int) -> None:
        super().waited(stream, event, generation)
        self._step(stream.name)

    def _step(self, stream: str) -> int:
        """Count a step of a stream or thread and return its number."""
        with self._lock:
            index = self._index.get(stream, 0)
            self._index[stream] = index + 1
        return index

    def _steps(self, stream: str) -> tuple[str, int] | None:
        return None if stream == HOST else (stream, self._index.get(stream, 0))

    def locate(self, tensor: Tensor) -> Access | None:
        found = self._storages.known(tensor)
        return extent(tensor, found[0], False, "", -1) if found is not None else None

    def _placed(self) -> str:
        """Return the name of the calling thread's current stream."""
        streams = self._scopes.streams
        return streams[-1] if streams else _AMBIENT

    # -- operators -------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Generator[None]:
        """Extend the scope to reads of host memory that bypass the dispatcher."""

        def tolist(original: Any) -> Any:
            def read(tensor: Tensor) -> Any:
                self._host_read(tensor)
                return original(tensor)

            return read

        def numpy(original: Any) -> Any:
            return lambda tensor, *args, **kwargs: self._watched_array(tensor, original(tensor, *args, **kwargs))

        self.watches_arrays = True
        try:
            with replaced([(Tensor, "tolist", tolist), (Tensor, "numpy", numpy)]), converted_names():
                yield
        finally:
            self.watches_arrays = False

    def _watched_array(self, tensor: Tensor, array: Any) -> Any:
        """Return ``array``, which shares the memory of ``tensor``, so that reads and writes through the array are checked."""
        if self._host_only:
            self._host_read(tensor)
            return array
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return array
        with self._lock:
            found = self._storages.known(tensor)
        return array if found is None else watched(array, _Pinned(self, found[0].number, tensor))

    def _host_read(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return  # device memory comes to the host through an operator
        if self._host_only and self._scopes.is_inside_operator:
            return  # the device is the host: this is the operator, in its place on its stream
        with self._lock:
            found = self._storages.known(tensor)
            if found is not None:
                self.host_accessed(extent(tensor, found[0], False, "", getattr(tensor, _BORN, -1)), caller_location())

    def thread_scope(self) -> AbstractContextManager[Any]:
        """Return the dispatch mode in which a watched thread runs."""
        return _SanitizerMode(self)

    def dispatched(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Derive the accesses of an operator that has returned."""
        operands = self._schemas.get(func)
        if operands is None:
            operands = self._schemas[func] = _operands(func)
        inputs: list[tuple[str, Tensor]] = []
        for name, value in zip(operands.names, args, strict=False):
            _tensors(name, value, inputs)
        for name, value in kwargs.items():
            _tensors(name, value, inputs)
        outputs: list[tuple[str, Tensor]] = []
        _tensors("out", result, outputs)
        blocking = False
        if operands.at_once >= 0:
            non_blocking = args[operands.at_once] if len(args) > operands.at_once else kwargs.get("non_blocking")
            blocking = not non_blocking
        with self._lock:
            self._freed()
            self._note(func, operands, inputs, outputs, blocking)

    def _freed(self) -> None:
        for known in self._storages.gone():
            self.freed(known.number, known.home or _AMBIENT)

    def _note(
        self,
        func: Any,
        operands: _Operands,
        inputs: list[tuple[str, Tensor]],
        outputs: list[tuple[str, Tensor]],
        blocking: bool,
    ) -> None:
        if operands.views and self._viewed(inputs, outputs):
            return
        on_device = (
            bool(self._scopes.streams) if self._host_only else any(_on(t, self.backend) for _, t in (*inputs, *outputs))
        )
        stream = self._placed() if on_device else HOST
        location = caller_location()
        seen, accesses = self._input_accesses(operands, inputs)
        fresh = False
        for name, tensor in outputs:
            found = self._storages.known(tensor)
            if found is None:
                fresh = True  # memory that isn't watched was filled from what is: it's none of the operands
                continue
            storage, is_new = found
            if storage.number in seen:
                if not any(tensor is t for _, t in inputs):  # a view: it keeps the storage, and has an age
                    setattr(tensor, _BORN, self.backend.replays)
                    self._storages.note(tensor)
                continue
            self._storages.note(tensor)
            fresh = True
            if is_new:
                storage.home = HOST if storage.pinned or stream == HOST else stream
                self.allocated(storage.number, tensor.untyped_storage().nbytes(), storage.home, location)
                self.found(tensor, storage)
            if not operands.empty:
                accesses.append(extent(tensor, storage, True, name, -1))
        if not accesses or not (fresh or operands.writes or operands.waits):
            return  # questions move no bytes
        if stream == HOST:
            for access in accesses:
                self.host_accessed(access, location)
            return
        self.launched(Operation(func._schema.name, stream, self._step(stream), tuple(accesses), location))
        if operands.copies and not blocking and not self._host_only:
            self._copied((*inputs, *outputs), stream)
        if operands.waits or self._is_complete(inputs, outputs, blocking):
            self._ordering.stream_synchronized(stream)

    def _input_accesses(self, operands: _Operands, inputs: list[tuple[str, Tensor]]) -> tuple[set[int], list[Access]]:
        """Return the numbers of the operands' storages, and the accesses to them."""
        seen: set[int] = set()
        accesses: list[Access] = []
        for name, tensor in inputs:
            found = self._storages.known(tensor)
            if found is None:
                continue
            storage, is_new = found
            seen.add(storage.number)
            if is_new:
                self._storages.note(tensor)
            write = name in operands.writes
            if operands.like and not write:
                continue
            born = getattr(tensor, _BORN, -1)
            by_rows = self._rows_apart and name in operands.rows
            accesses.append(extent(tensor, storage, write, name, born, by_rows))
        return seen, accesses

    def _viewed(self, inputs: list[tuple[str, Tensor]], outputs: list[tuple[str, Tensor]]) -> bool:
        """Record the results of a view operator with the number of graph replays so far.

        Returns False, and records nothing, if a result is not a view of an operand.
        """
        sources = [self._storages.key(t) for _, t in inputs]
        if any(self._storages.key(t) not in sources for _, t in outputs):
            return False
        for _, tensor in outputs:
            found = self._storages.known(tensor)
            if found is None or any(tensor is t for _, t in inputs):
                continue
            setattr(tensor, _BORN, self.backend.replays)
            self._storages.note(tensor)
            if found[1]:
                for _, source in inputs:
                    self._storages.note(source)
        return True

    def _copied(self, tensors: Sequence[tuple[str, Tensor]], stream: str) -> None:
        """Report that the allocator waits for ``stream`` before it reuses the pinned tensors among ``tensors``."""
        for _, tensor in tensors:
            found = self._storages.known(tensor) if tensor.device.type == "cpu" else None
            if found is not None and found[0].pinned:
                self.memory_shared(found[0].number, stream)

    def found(self, tensor: Tensor, known: KnownStorage) -> None:
        """Handle a result of an operator whose storage is new to the sanitizer. This method does nothing; a subclass
        overrides it.
        """

    def _is_complete(self, inputs: list[tuple[str, Tensor]], outputs: list[tuple[str, Tensor]], blocking: bool) -> bool:
        """Return True for a copy that is complete on return: a blocking host copy, or a copy with pageable memory."""
        if self._host_only:
            return False
        host = [t for _, t in (*inputs, *outputs) if t.device.type == "cpu" and t.dim() > 0]
        return bool(host) and (blocking or any(self._storages.known(t) is None for t in host))


class _SanitizerMode(TorchDispatchMode):
    def __init__(self, sanitizer: DerivedSanitizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sanitizer = sanitizer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's own wrapper imports its compiler with the first operator, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if _of_a_library():
            return func(*args, **kwargs)
        scopes = self._sanitizer._scopes
        before = scopes.is_inside_operator
        scopes.is_inside_operator = True  # what it reads is its own access, which its schema names
        try:
            result = func(*args, **kwargs)
        finally:
            scopes.is_inside_operator = before
        if self._sanitizer.innermost(self):
            self._sanitizer.dispatched(func, args, kwargs, result)
        return result


exclude_from_dynamo(_SanitizerMode.__torch_dispatch__)


def is_python_thread() -> bool:
    """Return True if Python's ``threading`` created the calling thread."""
    known: dict[int, threading.Thread] = getattr(threading, "_active", {})
    thread = known.get(threading.get_ident())
    return thread is not None and not isinstance(thread, threading._DummyThread)


def _of_a_library() -> bool:
    """Return True on a library's own thread (for example gloo's), which works for a call that is reported as a whole.

    Torch passes the mode on to C++ threads, which Python's ``threading`` does not know. C++ threads that run a backward pass
    execute operations of the program, so they return False.
    """
    return not is_python_thread() and torch._C._current_graph_task_id() < 0


def _tensors(name: str, value: Any, into: list[tuple[str, Tensor]]) -> None:
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type != "meta":
            into.append((name, value))
    elif isinstance(value, list | tuple):
        for item in value:
            _tensors(name, item, into)


def _on(tensor: Tensor, backend: Backend) -> bool:
    return tensor.device.type == backend.device.type
