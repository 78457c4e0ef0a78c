"""The backend interface on the simulated machine. `SimBackend.control` is an additional handle for tools."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import (
    QUANTIZED_FORMATS,
    Access,
    Backend,
    Capabilities,
    CaptureContext,
    DeviceFault,
    Event,
    Flag,
    Graph,
    GraphCallable,
    GraphPool,
    Group,
    InterfaceError,
    KernelSet,
    MemoryInfo,
    Observer,
    Operation,
    Recompute,
    SpeculativeSync,
    StepMode,
    Stream,
    Waiter,
)
from outrider_sim.exploration import SimControl
from outrider_sim.kernels import HostLengthKernels
from outrider_sim.machine.device_state import HostAllocation, PinnedTensor, SimDeviceState, host_extent
from outrider_sim.machine.graphs import GraphProgram, OpenCapture
from outrider_sim.machine.host_scheduler import AttributeView
from outrider_sim.machine.memory import Pool
from outrider_sim.machine.queue import Op, OperationKind, StreamQueue
from outrider_sim.options import SimOptions
from outrider_sim.ranks.collectives import create_group
from outrider_sim.strategies import Strategy
from outrider_sim.streams import SimEvent, SimFlag, SimGraph, SimStream
from outrider_sim.torch_device.opinfo import extent
from outrider_sim.torch_device.tensor import SimTensor
from outrider_sim.torch_device.torch_registration import register
from outrider_sim.torch_device.torch_slot import TorchRegistration, host_of

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it


class ObserverTap:
    """The callbacks of the machine. Each runs on the host thread that caused it, in the order of that thread's calls.

    Reports operations and memory to an observer. The interface reports streams, events, flags and captures.
    """

    def __init__(self, backend: SimBackend, observer: Observer) -> None:
        self._backend = backend
        self.observer = observer
        self.timeline = getattr(observer, "ran", None)

    def launched(self, op: Op, stream: StreamQueue, index: int) -> None:
        """Report kernels and copies as operations; records, waits and launches have reports of their own."""
        if op.kind > OperationKind.COPY:
            return
        op.report = Operation(op.name, stream.name or stream.label, index, op.accesses, op.line)
        self.observer.launched(op.report)

    def ran(self, op: Op, stream: StreamQueue, index: int, start: float, end: float) -> None:
        """Report the virtual start and end of an operation, for observers that draw timelines."""
        if self.timeline is not None:
            self.timeline(op.report, op.name, stream.name or stream.label, index, start, end)

    def synchronized(self, stream: StreamQueue) -> None:
        """Report that the host waited for a stream inside a torch call."""
        for candidate in self._backend.streams:
            if candidate.native is stream:
                self.observer.stream_synchronized(candidate)

    def allocated(self, allocation: Any, previous: int | None) -> None:
        """Report a new allocation, and the previous allocation of its address."""
        if isinstance(allocation, HostAllocation):
            self.observer.allocated(allocation.id, allocation.nbytes, "host", allocation.line)
            return
        stream = allocation.stream
        self.observer.allocated(allocation.id, allocation.nbytes, stream.name or stream.label, allocation.line)
        if previous is not None:
            self.observer.address_reused(allocation.id, previous)

    def shared(self, allocation: Any, stream: StreamQueue) -> None:
        """Report that an allocation's reuse also waits for another stream."""
        self.observer.memory_shared(allocation.id, stream.name or stream.label)

    def freed(self, allocation: Any) -> None:
        """Report a freed allocation with the stream that allocated it."""
        host = isinstance(allocation, HostAllocation)
        self.observer.freed(allocation.id, "host" if host else allocation.stream.name or allocation.stream.label)

    def rows(self, op: Op, stream: StreamQueue, index: int) -> None:
        """Report the rows that an operation accesses."""
        del stream, index
        if op.report is not None:
            self.observer.rows_touched(op.report, op.rows())


_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class SimSync(SpeculativeSync):
    """The rules by which streams wait for each other on the imitated device family."""

    def __init__(self, backend: SimBackend) -> None:
        super().__init__(backend)
        like = backend.sim.options.like
        self.step_modes = frozenset({StepMode.STAGED} if like.exact_host_lengths else StepMode)
        self.published_waiter = Waiter.HOST if like.host_wait_for_published else Waiter.STREAM
        self.exact_host_lengths = like.exact_host_lengths
        self.results_on_forward = like.results_on_forward
        self.rebind_params = like.updates_graph_params
        if like.recompute_mrope:
            self.recompute_after_join = frozenset({Recompute.MROPE_POSITIONS})
            self.refresh_before_replay = frozenset({"rope_positions"})


def _capabilities(options: SimOptions) -> Capabilities:
    """Return the capabilities of a simulated device with these options."""
    like = options.like
    return Capabilities(
        asynchronous=True,
        concurrent_streams=True,
        stream_priorities=True,
        event_timing=True,
        flags=like.flags,
        captures_graphs=True,
        collectives=True,
        captures_collectives=True,
        captures_in_part=bool(options.native),
        updates_graph_params=like.updates_graph_params,
        forks_in_capture=like.forks_in_capture,
        perturbs_timing=True,
        reports_accesses=True,
        row_exact_accesses=True,
        memory_limit=True,
        dtypes=_DTYPES,
        quantized_formats=frozenset(QUANTIZED_FORMATS),
    )


class SimBackend(Backend):
    """A simulated accelerator.

    Each backend object is a separate device with its own streams, memory and schedule. torch calls outside any `on` scope
    go to the newest backend.
    """

    def __init__(self, options: SimOptions | None = None, ordinal: int = 0) -> None:
        options = options or SimOptions()
        registered = register_device(options.name, options)
        first = host_of(registered, options, ordinal) if ordinal else None
        if first is not None:
            options = options.for_further_device(first.options)
        like = options.like
        super().__init__(
            "sim",
            torch.device(options.name, ordinal),
            capabilities=_capabilities(options),
            kernels=HostLengthKernels if like.exact_host_lengths else KernelSet(),
            speculative_sync=SimSync,
        )
        self.sim = SimDeviceState(options, first, ordinal)
        self.sim.backend = weakref.ref(self)
        self.epoch = 0  # resets so far
        self._dispatcher = registered.dispatcher
        if first is None:
            self._dispatcher.current = self.sim
            self.sim.machine.scheduler.ambient.append(AttributeView(self._dispatcher, "current"))
            registered.backend = self
        else:
            self._dispatcher.has_several_devices = True
        self._control = SimControl(self)
        # Work outside any stream scope runs on the default stream, an ordinary stream of the backend.
        self.default_stream = SimStream(self, "default", 0, self.sim.machine.default)
        self._streams.append(self.default_stream)

    @property
    def control(self) -> SimControl:
        """The handle for strategies, schedules, virtual time, faults and host threads of this device."""
        return self._control

    def versions(self) -> Mapping[str, str]:
        """Return torch's version and the imitated device family."""
        return {**super().versions(), "device": f"simulated, like {self.sim.options.like.name}"}

    # -- ranks of a program --------------------------------------------------------------------------------------------

    def as_current(self) -> AbstractContextManager[None]:
        """Return a scope in which calls without a device use this backend."""
        return self._dispatcher.using(self.sim)

    def become_current(self) -> None:
        """Make this backend the device of the calling thread: for its torch calls that name no device, and as its rank."""
        self._dispatcher.has_several_devices = True
        self._dispatcher.current = self.sim
        self._dispatcher.thread_device.sim = self.sim

    # -- tools --------------------------------------------------------------------------------------------------------

    def attach(self, observer: Observer) -> None:
        """Report this device's operations, events and memory accesses to `observer`."""
        super().attach(observer)
        self.sim.machine.tap = ObserverTap(self, observer)
        self.sim.machine.scheduler.update_mode()

    def detach(self) -> None:
        """Detach the observer and stop reporting operations."""
        super().detach()
        self.sim.machine.tap = None
        self.sim.machine.scheduler.update_mode()

    def locate(self, tensor: Tensor) -> Access:
        """Return the allocation and the byte range that a device tensor or a pinned tensor occupies.

        Raises `InterfaceError` for a tensor that is neither.
        """
        if isinstance(tensor, PinnedTensor):
            return host_extent(tensor, False)
        if not isinstance(tensor, SimTensor):
            raise InterfaceError(f"a tensor on {tensor.device} that isn't pinned has no place on {self.label}")
        return extent(tensor, False, "")

    def start_over(self, strategy: Strategy | None) -> None:
        """Reset every device of this host; `SimControl.reset` lists the state that is reset."""
        self.sim.machine.reset(strategy)
        for machine in self.sim.machine.scheduler.machines:
            backend = machine.sim.backend()
            if backend is not None:
                backend.restart(strategy)

    def restart(self, strategy: Strategy | None) -> None:
        """Restore this device's option faults, memory, seed and stream names after a reset of its host."""
        machine = self.sim.machine
        machine.faults = self.sim.options.operation_faults()  # those that were injected since are over
        self.sim.memory.faults = self.sim.options.allocation_faults()
        self.sim.divergences = frozenset()
        self.epoch += 1
        floors: dict[int, int] = getattr(strategy, "floors", {})
        floors[machine.rank] = self.sim.memory.start_over(floors.get(machine.rank))
        self.sim.manual_seed(self.sim.options.seed)
        # A stream that only these lists hold was made by a run that is over; its name is free again.
        held = [s for s in self._streams if s is self.default_stream or sys.getrefcount(s) > _ONLY_LISTED]
        gone = [s for s in self._streams if s not in held]
        self._streams[:] = held
        for stream in gone:
            assert isinstance(stream, SimStream)
            machine.drop_stream(stream.queue_state)

    def create_stream(self, name: str, *, priority: int = 0) -> Stream:
        """Create a stream. An earlier run's stream of the same name (from before the last reset) is renamed.

        A program's streams therefore have the same names in each of its runs, so that schedules stay valid.
        """
        for stream in self._streams:
            if stream.name == name and isinstance(stream, SimStream) and stream.epoch < self.epoch:
                stream.name = f"{name}~{stream.epoch}"
                self.sim.machine.rename_stream(stream.queue_state, stream.name)
        return super().create_stream(name, priority=priority)

    # -- verbs --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _on(self, stream: Stream) -> Generator[None]:
        assert isinstance(stream, SimStream)
        dispatcher, machine = self._dispatcher, self.sim.machine
        other, dispatcher.current = dispatcher.current, self.sim
        before = machine.set_stream(stream.queue_state)
        try:
            yield
        finally:
            machine.set_stream(before)
            dispatcher.current = other

    def _create_stream(self, name: str, priority: int) -> Stream:
        return SimStream(self, name, priority, self.sim.machine.create_stream(name, priority))

    def _create_event(self, name: str, timing: bool) -> Event:
        return SimEvent(self, name, timing, self.sim.machine.create_event(name))

    def _create_flag(self, name: str) -> Flag:
        if not self.sim.options.like.flags:
            return super()._create_flag(name)
        return SimFlag(self, name, self.sim.machine.create_flag(name))

    def _synchronize(self) -> None:
        self.sim.machine.synchronize_device()

    def _delay(self, stream: Stream, cycles: int) -> None:
        assert isinstance(stream, SimStream)
        # A virtual clock of 1 GHz; where the order matters, strategies hold streams back better than time does.
        self.sim.machine.enqueue(Op(OperationKind.LAUNCH, "delay", cost=cycles / 1000.0), stream.queue_state)

    def _provoke_fault(self, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        self.sim.machine.enqueue(Op(OperationKind.KERNEL, "provoked fault", _fail_on_request), stream.queue_state)

    def _empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.sim.pinned(shape, dtype)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return isinstance(tensor, PinnedTensor)

    def memory_info(self) -> MemoryInfo:
        """Return the simulated device's memory in bytes; cached blocks count as free."""
        memory = self.sim.memory
        return MemoryInfo(total=memory.limit, free=memory.limit - memory.allocated, allocated=memory.allocated)

    def _create_group(self, name: str, ranks: tuple[int, ...], rank: int, store: Store, timeout_s: float) -> Group:
        return create_group(self, name, ranks, rank, store, timeout_s)

    def create_graph_pool(self, name: str) -> GraphPool:
        """Create private memory for graphs that never run concurrently."""
        return GraphPool(self, name, Pool(name))

    def _capture(
        self, name: str, fn: GraphCallable, context: CaptureContext, stream: Stream, pool: GraphPool | None
    ) -> Graph:
        assert isinstance(stream, SimStream)
        graph = SimGraph(self, name, context, fn)
        graph.pool = pool.native if pool is not None else Pool(name)
        graph.origin = stream
        graph.program = self.record_program(graph, fn, stream, graph.pool, seen=True)
        return graph

    def record_program(
        self, graph: SimGraph, fn: GraphCallable, stream: SimStream, pool: Pool, *, seen: bool
    ) -> GraphProgram:
        """Capture `fn` on `stream` into a program. `seen` is False if the observer must get no reports of the capture.

        The captured streams execute normally again afterwards, also if `fn` raises.
        """
        capture = OpenCapture(self.sim, graph.name, pool, stream.queue_state)
        machine = self.sim.machine
        tap, observer = machine.tap, self.observer
        if not seen:
            machine.tap = self.observer = None
        try:
            with self._on(stream):
                capture.begin()
                with self.capturing(graph, stream):
                    fn(graph.context)
                    return capture.finish()
        finally:
            capture.close()
            machine.tap, self.observer = tap, observer


# The list of streams, the loop variable and getrefcount's own argument.
_ONLY_LISTED = 3


def register_device(name: str = "sim", options: SimOptions | None = None) -> TorchRegistration:
    """Register `torch.device(name)` as the simulated device, or return the existing registration of that name.

    torch calls without a backend create one. Raises `BackendLoadError` if another name occupies torch's slot (an installed
    torch_npu does so when torch is imported).
    """
    return register(name, options or SimOptions(name=name), lambda: SimBackend(SimOptions(name=name)))


def _fail_on_request() -> None:
    """Raise the device fault that a test requested with `provoke_fault`, as the enqueued operation runs."""
    raise DeviceFault("failed on request (provoke_fault); its results are undefined, the device lives on")
