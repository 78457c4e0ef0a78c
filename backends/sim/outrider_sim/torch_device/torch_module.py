"""The module `torch.sim`: the functions and classes that torch requires of a device module.

Calls go to the newest backend, and create one if none exists. An observer of that backend therefore sees programs that
use torch alone.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import CapabilityError, CaptureContext, CaptureError, ConfigError
from outrider_sim.machine.graphs import OpenCapture
from outrider_sim.machine.memory import Pool
from outrider_sim.machine.queue import Op, OperationKind, python_line
from outrider_sim.streams import SimGraph, SimStream
from outrider_sim.torch_device import launches
from outrider_sim.torch_device.torch_slot import registered

if TYPE_CHECKING:
    from outrider_sim.backend import SimBackend
    from outrider_sim.streams import SimEvent


def _backend() -> SimBackend:
    found = registered()
    assert found is not None
    if found.backend is None:
        found.backend = found.create_backend()
    if found.dispatcher.has_several_devices:
        current: SimBackend | None = found.dispatcher.current.backend()
        if current is not None:
            return current
    backend: SimBackend = found.backend
    return backend


def _dispatcher() -> Any:
    _backend()
    found = registered()
    assert found is not None
    return found.dispatcher


class SimTorchStream:
    """A simulated stream with the interface of `torch.cuda.Stream`; `torch.sim` exports it as `Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, *, wrapped: SimStream | None = None) -> None:
        del device
        backend = _backend()
        made: Any = wrapped or backend.create_stream(f"s{len(backend.streams)}", priority=priority)
        self.wrapped: SimStream = made
        self._scopes: list[Any] = []

    @property
    def queue_state(self) -> Any:
        """The stream's queue in the simulated machine."""
        return self.wrapped.queue_state

    def record_event(self, event: SimTorchEvent | None = None) -> SimTorchEvent:
        """Record `event`, or a new event, and return it."""
        event = event or SimTorchEvent()
        event.record(self)
        return event

    def wait_event(self, event: SimTorchEvent) -> None:
        """Make later work on this stream wait for the event's latest record."""
        made = event.wrapped
        if made.generation or made._captured_by is not None:  # torch: a wait for an event never recorded does nothing
            self.wrapped.wait(made)

    def wait_stream(self, other: SimTorchStream) -> None:
        """Make later work on this stream wait for the work now queued on `other`."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Block the host until all work enqueued on this stream so far has run."""
        self.wrapped.synchronize()

    def query(self) -> bool:
        """Return True if all work enqueued on this stream so far has run."""
        return self.wrapped.query()

    @property
    def device(self) -> torch.device:
        """The simulated device on which this stream runs."""
        return self.wrapped.backend.device

    @property
    def cuda_stream(self) -> int:
        """The stream's handle: a number that `ExternalStream` takes, nonzero except for the default stream."""
        backend: Any = self.wrapped.backend
        return 0 if self.wrapped is backend.default_stream else _FIRST_HANDLE + self.stream_id

    @property
    def device_index(self) -> int:
        """The index of the stream's device."""
        return self.device.index or 0

    @property
    def stream_id(self) -> int:
        """The stream's number on its device."""
        found: int = self.queue_state.id
        return found

    def __enter__(self) -> SimTorchStream:
        """Enqueue torch work on this stream inside the block."""
        self._scopes.append(self.wrapped.backend.on(self.wrapped))
        self._scopes[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Make the stream that was current before the block current again."""
        self._scopes.pop().__exit__(None, None, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimTorchStream) and other.wrapped is self.wrapped

    def __hash__(self) -> int:
        return hash(self.wrapped)


class SimTorchEvent:
    """A simulated event with the interface of `torch.cuda.Event`; `torch.sim` exports it as `Event`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        del blocking
        if interprocess:
            raise unsupported("Event(interprocess=True)", "use threads as ranks (--ranks N)")
        self.external = external
        made: Any = _backend().create_event("", timing=enable_timing)
        self.wrapped: SimEvent = made

    def record(self, stream: SimTorchStream | None = None) -> None:
        """Record the event on `stream`, or on the current stream."""
        if self.external and _backend().active_capture is not None:
            raise unsupported("Event(external=True) in a capture", "record the event after replay()")
        (stream or current_stream()).wrapped.record(self.wrapped)

    def wait(self, stream: SimTorchStream | None = None) -> None:
        """Make `stream`, or the current stream, wait for the event's latest record."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether the event's latest record is complete; True without a record, like torch."""
        return self.wrapped.generation == 0 or self.wrapped.query()

    def synchronize(self) -> None:
        """Block the host until the event's latest record is complete."""
        if self.wrapped.generation:
            self.wrapped.synchronize()

    def elapsed_time(self, end: SimTorchEvent) -> float:
        """Return the virtual milliseconds from this event's record to that of `end`."""
        return self.wrapped.elapsed_ms(end.wrapped)


def current_stream(device: Any = None) -> SimTorchStream:
    """Return the calling thread's current stream."""
    del device
    backend = _backend()
    queue = backend.sim.machine.stream
    for stream in backend.streams:
        if stream.native is queue:
            return SimTorchStream(wrapped=stream)  # type: ignore[arg-type]
    return default_stream()


def default_stream(device: Any = None) -> SimTorchStream:
    """Return the stream on which torch work outside any stream scope is enqueued."""
    del device
    return SimTorchStream(wrapped=_backend().default_stream)


def unsupported(name: str, instead: str) -> CapabilityError:
    """Return the error of a name of `torch.cuda` that the simulated device does not imitate."""
    return CapabilityError(f"the simulated device doesn't imitate {name}: {instead}")


_FIRST_HANDLE = 0x10_0000


def external_stream(handle: int, device: Any = None) -> SimTorchStream:
    """Return the stream whose `cuda_stream` is `handle`. Raises `ConfigError` for any other number."""
    del device
    for known in _backend().streams:
        found = SimTorchStream(wrapped=known)  # type: ignore[arg-type]
        if found.cuda_stream == handle:
            return found
    raise ConfigError(f"no stream has the handle {handle}: streams of another library don't run on the simulated device")


def _sleep(cycles: int) -> None:
    """Enqueue an operation on the current stream that takes `cycles` cycles of a clock of 1 GHz in virtual time."""
    machine = _backend().sim.machine
    op = Op(OperationKind.KERNEL, "sleep", lambda: None, cost=machine.like.kernel_us + cycles / 1000)
    if machine.tracks:
        op.line = python_line()
    machine.enqueue(op, machine.stream)


def _device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties that programs use to choose sizes; they name no vendor's architecture."""
    del device
    backend = _backend()
    return SimpleNamespace(
        name=f"simulated, like {backend.sim.options.like.name}",
        major=0,
        minor=0,
        total_memory=backend.sim.memory.limit,
        multi_processor_count=1,
        warp_size=32,
        max_threads_per_multi_processor=1024,
        shared_memory_per_block=48 << 10,
        L2_cache_size=1 << 20,
        is_integrated=False,
    )


class MemPool:
    """A pool of graph memory, as `torch.cuda.MemPool` names it; pass `id` to a capture."""

    def __init__(self, allocator: Any = None, **options: Any) -> None:
        del options
        if allocator is not None:
            raise unsupported("MemPool with an allocator", "the device has one allocator")
        self.id = Pool("pool")


def use_mem_pool(pool: MemPool, device: Any = None) -> Any:
    """Return a context in which device memory of the calling thread's current stream comes from `pool`."""
    del device
    return _backend().sim.memory.using(pool.id)


def _nvtx() -> ModuleType:
    """Create a module with the marks of `torch.cuda.nvtx`, which change nothing that the device does."""
    module = ModuleType("nvtx", "Marks for a profiler; the simulated device has none.")
    marks = dict.fromkeys(("mark", "range_push", "range_pop", "range_start", "range_end"), lambda *args, **kwargs: 0)
    for name, mark in {**marks, "range": lambda *args, **kwargs: nullcontext()}.items():
        setattr(module, name, mark)
    return module


def stream(chosen: SimTorchStream | None) -> AbstractContextManager[Any]:
    """Return a reusable context in which torch work is enqueued on the stream `chosen`; None changes nothing."""
    return nullcontext() if chosen is None else chosen


def set_stream(chosen: SimTorchStream) -> None:
    """Make the stream `chosen` the calling thread's current stream."""
    chosen.wrapped.backend.sim.machine.set_stream(chosen.queue_state)


def synchronize(device: Any = None) -> None:
    """Block the host until every stream of the device is empty."""
    del device
    _backend().synchronize()


def _device_count() -> int:
    found = registered()
    return 1 if found is None else len(found.dispatcher.current.machine.scheduler.machines)


def _set_device(device: Any) -> None:
    """Make another device of the host current for the calling thread."""
    found = registered()
    index = device if isinstance(device, int) else torch.device(device).index
    if found is None or index is None or not found.dispatcher.has_several_devices:
        return
    for machine in found.dispatcher.current.machine.scheduler.machines:
        if machine.rank == index:
            found.dispatcher.current = machine.sim
            return
    raise RuntimeError(f"there is no device {index}: this host has {_device_count()}")


def _manual_seed(seed: int) -> None:
    found = registered()
    if found is not None:  # torch also seeds this device while it is being registered
        found.dispatcher.current.manual_seed(seed)


def _get_rng_state(device: Any = None) -> Tensor:
    """Return the generator's state as bytes: version, Mersenne twister words, then the unused normal variate, if any."""
    del device
    version, words, left = _backend().sim.seeds.getstate()
    rest = () if left is None else struct.unpack("<2I", struct.pack("<d", left))
    return torch.frombuffer(
        bytearray(struct.pack(f"<{1 + len(words) + len(rest)}I", version, *words, *rest)), dtype=torch.uint8
    )


def _set_rng_state(state: Tensor, device: Any = None) -> None:
    del device
    seeds = _backend().sim.seeds
    count = len(seeds.getstate()[1])
    content = bytes(state.tolist())
    if len(content) not in (4 * (1 + count), 4 * (3 + count)):
        raise ConfigError(f"a random state of {len(content)} bytes can't be set; expected what get_rng_state gave")
    version, *words = struct.unpack(f"<{len(content) // 4}I", content)
    left = struct.unpack("<d", struct.pack("<2I", *words[count:]))[0] if words[count:] else None
    try:
        seeds.setstate((version, tuple(words[:count]), left))
    except ValueError as error:
        raise ConfigError(f"the random state can't be set ({error}); expected what get_rng_state gave") from error


def _empty_cache() -> None:
    _backend().sim.memory.empty_cache()


def _memory_info() -> tuple[int, int]:
    memory = _backend().sim.memory
    return memory.limit - memory.allocated, memory.limit


def _memory_stats() -> dict[str, Any]:
    memory = _backend().sim.memory

    def bytes_of(current: int, peak: int) -> dict[str, Any]:
        return {"all": {"current": current, "peak": peak}}

    return {
        "allocated_bytes": bytes_of(memory.allocated, memory.peak),
        "reserved_bytes": bytes_of(memory.reserved, memory.peak_reserved),
    }


def _reset_peaks() -> None:
    _backend().sim.memory.reset_peaks()


def make_module(name: str) -> ModuleType:
    """Create the module `torch.<name>` of the simulated device."""
    module = ModuleType(f"torch.{name}", "A simulated accelerator.")
    named = (
        *(CUDAGraph, MemPool, _sleep, current_stream, default_stream, graph, graph_pool_handle, is_current_stream_capturing),
        *(make_graphed_callables, set_stream, stream, synchronize, use_mem_pool),
        *(launches.copy_unordered, launches.peer_view, launches.remap),
    )
    members: dict[str, Any] = {
        **{each.__name__: each for each in named},
        "Event": SimTorchEvent,
        "Stream": SimTorchStream,
        "StreamContext": stream,
        "_initialized": True,  # without it, checkpointing doesn't restore random states
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: _backend().sim.machine.rank,
        "device": lambda device: nullcontext(),  # the scope has no effect
        "device_count": _device_count,
        "empty_cache": _empty_cache,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "ExternalStream": external_stream,
        "declare_rows": lambda operator, operands: _dispatcher().declare_rows(operator, operands),
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": _device_properties,
        "nvtx": _nvtx(),
        "get_device_name": lambda device=None: f"simulated, like {_backend().sim.options.like.name}",
        "get_rng_state": _get_rng_state,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "can_device_access_peer": lambda device, peer: False,
        "reset_max_memory_allocated": lambda device=None: _reset_peaks(),
        "is_initialized": lambda: True,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "max_memory_allocated": lambda device=None: _backend().sim.memory.peak,
        "mem_get_info": lambda device=None: _memory_info(),
        "memory_allocated": lambda device=None: _backend().sim.memory.allocated,
        "max_memory_reserved": lambda device=None: _backend().sim.memory.peak_reserved,
        "memory_reserved": lambda device=None: _backend().sim.memory.reserved,
        "reset_peak_memory_stats": lambda device=None: _reset_peaks(),
        "set_device": _set_device,
        "set_rng_state": _set_rng_state,
    }
    for key, value in members.items():
        setattr(module, key, value)
    return module


_NONE: Any = MappingProxyType({})


def graph_pool_handle() -> Pool:
    """Return a memory pool for graphs that never run concurrently."""
    return Pool("graphs")


def is_current_stream_capturing() -> bool:
    """Return whether the calling thread captures a graph."""
    return _backend().active_capture is not None


class CUDAGraph:
    """A graph that is captured once and replayed. The caller keeps memory outside the graph's pool alive."""

    def __init__(self, keep_graph: bool = False) -> None:
        del keep_graph
        self._graph: SimGraph | None = None
        self._capture: OpenCapture | None = None
        self._open = ExitStack()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global", **_: Any) -> None:
        """Start to capture the calling thread's work; the current stream is the graph's first stream.

        Raises `CaptureError` if this graph was already captured or the stream is in another capture.
        """
        del capture_error_mode
        if self._graph is not None:
            raise CaptureError("this graph has been captured; reset() it first, or make another")
        backend, stream = _backend(), current_stream().wrapped
        assert isinstance(stream, SimStream)
        graph = SimGraph(backend, "captured", CaptureContext(_NONE, _NONE, _NONE, _NONE), _not_again)
        graph.pool = (pool.id if isinstance(pool, MemPool) else pool) or Pool("captured")
        graph.origin = stream
        capture = OpenCapture(backend.sim, graph.name, graph.pool, stream.queue_state)
        capture.begin()
        try:
            self._open.enter_context(backend.capturing(graph, stream))
        except BaseException:
            capture.close()
            raise
        self._graph, self._capture = graph, capture

    def register_generator_state(self, state: Any) -> None:
        """Do nothing: each replay takes new seeds from the device, as torch's registered generators do."""

    def capture_end(self) -> None:
        """End this graph's capture. Raises `CaptureError` if a stream was forked into the capture and not joined."""
        graph, capture = self._graph, self._capture
        if graph is None or capture is None:
            raise CaptureError("capture_end() without capture_begin()")
        self._capture = None
        try:
            graph.program = capture.finish()
        except BaseException as error:
            self._graph = None
            self._open.__exit__(type(error), error, error.__traceback__)
            raise
        else:
            self._open.close()
        finally:
            capture.close()

    def replay(self) -> None:
        """Enqueue the graph's captured operations on the current stream. Raises `CaptureError` before a capture."""
        if self._graph is None or self._graph.program is None:
            raise CaptureError("replay() of a graph that wasn't captured")
        self._graph.replay(current_stream().wrapped)

    def reset(self) -> None:
        """Drop the graph's captured operations. Replays in flight still run."""
        self._graph = None

    def pool(self) -> Pool:
        """Return the graph's memory pool, for other graphs to share. Raises `CaptureError` before a capture."""
        if self._graph is None or self._graph.pool is None:
            raise CaptureError("pool() of a graph that wasn't captured")
        return self._graph.pool


def make_graphed_callables(
    callables: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False, pool: Pool | None = None
) -> Any:
    """Return functions that copy their arguments to a captured graph's inputs, replay it and return its outputs.

    Forward passes only: raises `CapabilityError` if an argument or a result needs a gradient.
    """
    del allow_unused_input
    if isinstance(callables, tuple):
        shared = pool or graph_pool_handle()
        pairs = zip(callables, sample_args, strict=True)
        return tuple(make_graphed_callables(body, args, num_warmup_iters, pool=shared) for body, args in pairs)
    if any(isinstance(arg, Tensor) and arg.requires_grad for arg in sample_args):
        raise unsupported("make_graphed_callables with gradients", "pass arguments without requires_grad")
    inputs = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in sample_args)
    with torch.no_grad():
        for _ in range(num_warmup_iters):
            callables(*inputs)
        made = CUDAGraph()
        with graph(made, pool):
            outputs = callables(*inputs)

    def replay(*args: Any) -> Any:
        with torch.no_grad():
            for own, given in zip(inputs, args, strict=True):
                if isinstance(own, Tensor) and own is not given:
                    own.copy_(given, non_blocking=True)
        made.replay()
        return outputs

    return replay


def _not_again(context: CaptureContext) -> None:
    raise CaptureError(f"a graph captured between two calls can't be captured again ({context})")


@contextmanager
def graph(
    cuda_graph: CUDAGraph,
    pool: Pool | None = None,
    stream: SimTorchStream | None = None,
    capture_error_mode: str = "global",
) -> Generator[None]:
    """Capture the block's work into `cuda_graph`, on `stream` or on a new stream."""
    synchronize()
    with stream or SimTorchStream():
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()
