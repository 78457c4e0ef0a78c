"""Backend: one device, as the core sees it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from outrider.device.capabilities import Capabilities
from outrider.device.errors import (
    CapabilityError,
    CaptureError,
    ConfigError,
    DeviceError,
    InterfaceError,
    StreamOrderError,
    SynchronousCopyError,
)
from outrider.device.graph import (
    ActiveCapture,
    CaptureContext,
    EagerGraph,
    Graph,
    GraphCallable,
    GraphPool,
    HostParam,
    Scalar,
)
from outrider.device.memory import KeepAlive, MemoryInfo, PinnedBuffer
from outrider.device.stream import Event, Flag, Guard, Stream, StreamScope, uncollected
from outrider.device.sync import SpeculativeSync
from outrider.device.tools import Access, ControllableDevice, Observer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from outrider.device.collectives import Group
    from outrider.device.kernels.kernelset import KernelSet

_IGNORES_REPORTS = Observer()
_DECLARED = "implement it, or don't declare the ability"


class Backend(ABC):
    """One device. A vendor subclasses it (or ``TorchDeviceBackend``) and implements the underscored verbs.

    The public methods check the rules and report to an attached observer, then call the vendor's verb. Two backend
    objects for one device share nothing: streams, events and graphs belong to the object that made them.

    *Declarations.* A subclass passes ``capabilities``, ``kernels`` and ``speculative_sync`` to the constructor, or overrides
    the properties. As constructor arguments, ``kernels`` is a kernel set or a factory that takes the backend, and
    ``speculative_sync`` is a factory that takes the backend, such as the class ``SpeculativeSync`` or a subclass. Each
    factory is called once, on first access. The constructor raises :class:`TypeError` if one of the three is neither passed
    nor overridden.

    *Threads.* Every method may be called from any thread. ``on`` scopes and captures belong to the thread that opened
    them. *Names* are for reports: two objects with one name share nothing. *Process.* No method changes torch's global state
    (default dtype, gradient mode, threads, seed), not even inside its scope.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        capabilities: Capabilities | None = None,
        kernels: KernelSet | Callable[[Any], KernelSet] | None = None,
        speculative_sync: Callable[[Any], SpeculativeSync] | None = None,
    ) -> None:
        self.name = name
        self.spec = name
        """The name that creates this backend in another process. The registry adds the device number and the options."""
        self.device = device
        self._declarations: dict[str, Any] = {
            "capabilities": capabilities,
            "kernels": kernels,
            "speculative_sync": speculative_sync,
        }
        for declaration, value in self._declarations.items():
            if value is None and getattr(type(self), declaration) is getattr(Backend, declaration):
                raise TypeError(
                    f"{type(self).__name__} declares no {declaration}: pass {declaration}=… to Backend.__init__, or override "
                    "the property"
                )
        self._creation_lock = threading.RLock()
        self.observer: Observer | None = None
        self.replays = 0  # graph replays enqueued so far, for the age of tensor objects in reports
        self._local = threading.local()
        self._keep_alive = KeepAlive()
        self._streams: list[Stream] = []
        self._chosen_kernels: KernelSet | None = None

    # -- declarations ----------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities of the device. Constant over the backend's life."""
        declared: Capabilities = self._declarations["capabilities"]
        return declared

    @property
    def kernels(self) -> KernelSet:
        """Return the kernels of this device. Constant over the backend's life."""
        kernels: KernelSet = self._created_once("kernels")
        return kernels

    @property
    def speculative_sync(self) -> SpeculativeSync:
        """Return the policy of this device. Constant over the backend's life."""
        policy: SpeculativeSync = self._created_once("speculative_sync")
        return policy

    def _created_once(self, name: str) -> Any:
        """Return the declaration ``name``. The first access calls its factory."""
        if callable(self._declarations[name]):
            with self._creation_lock:
                factory = self._declarations[name]
                if callable(factory):
                    self._declarations[name] = factory(self)
        return self._declarations[name]

    def with_capabilities(self, **abilities: Any) -> Self:
        """Return a view of this backend that also declares ``abilities``, for tools that test undeclared abilities.

        The view is another object that shares the device and all state with this backend. Streams, events and graphs
        belong to the object whose method created them. The declarations of this backend do not change.
        """
        declared = replace(self.capabilities, **abilities)
        kind = type(type(self).__name__, (type(self),), {"capabilities": property(lambda _: declared)})
        view: Any = object.__new__(kind)
        view.__dict__ = self.__dict__
        return view  # type: ignore[no-any-return]

    # -- identity and kernels ------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Return name and device for messages: ``backend 'sim' (sim:0)``."""
        return f"backend {self.name!r} ({self.device})"

    @property
    def kernels_in_use(self) -> KernelSet:
        """Return the kernels that the engine computes with: those of :meth:`use_kernels`, else :attr:`kernels`."""
        return self._chosen_kernels if self._chosen_kernels is not None else self.kernels

    def use_kernels(self, kernels: KernelSet) -> None:
        """Compute with ``kernels`` instead of the device's own. Call it once, before a model is loaded.

        Raises :class:`InterfaceError` if other kernels were chosen before.
        """
        if self._chosen_kernels is not None:
            raise InterfaceError(f"{self.label} computes with {self._chosen_kernels.name!r} already; make another backend")
        self._chosen_kernels = kernels

    @property
    def control(self) -> ControllableDevice | None:
        """Return the handle by which a tool decides the schedule; None if the device decides itself."""
        return None

    def versions(self) -> Mapping[str, str]:
        """Return the versions that a report of a run should carry: driver, runtime, device name."""
        return {"torch": torch.__version__}

    # -- placement -------------------------------------------------------------------------------------------------

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Place the calling thread's torch work on ``stream``, and make this the current device.

        The only way to place work. Scopes nest; leaving one restores the one around it, also after an exception. A
        tensor made, cast or filled inside a scope belongs to that scope's stream. Entering orders nothing.

        In a capture, a scope of another stream than the captured one needs ``forks_in_capture``.
        """
        return StreamScope(self, stream)

    def create_stream(self, name: str, *, priority: int = 0) -> Stream:
        """Create a stream. ``name`` is for reports and schedules, unique among the backend's streams.

        A lower ``priority`` is more urgent; other values than 0 need ``stream_priorities``. Raises :class:`CapabilityError`
        for a priority that the backend doesn't declare.
        """
        if priority != 0 and not self.capabilities.stream_priorities:
            raise CapabilityError(f"{self.label} doesn't declare stream_priorities; create {name!r} with priority=0")
        with self._creation_lock:
            taken = {stream.name for stream in self._streams}
            unique, number = name, 1
            while unique in taken:
                number += 1
                unique = f"{name}.{number}"
            stream = self._create_stream(unique, priority)
            self._streams.append(stream)
        self.listener.stream_created(stream)
        return stream

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Return every stream created so far, in order of creation."""
        return tuple(self._streams)

    def create_event(self, name: str, *, timing: bool = False) -> Event:
        """Create an event, at generation 0. ``timing=True`` needs ``event_timing``.

        Raises :class:`CapabilityError` without it.
        """
        if timing and not self.capabilities.event_timing:
            raise CapabilityError(f"{self.label} doesn't declare event_timing; create {name!r} without timing")
        return self._create_event(name, timing)

    def create_flag(self, name: str) -> Flag:
        """Create a flag, in the lowered state. Needs ``flags``. Raises :class:`CapabilityError` without them."""
        if not self.capabilities.flags:
            raise CapabilityError(f"{self.label} doesn't declare flags; {name!r} can't be made: use an event")
        return self._create_flag(name)

    def synchronize(self) -> None:
        """Block the calling thread until every stream is empty. Errors of queued work surface here, typed."""
        self.check_not_capturing("synchronize the device")
        with self.guard("synchronizing the device"):
            self._synchronize()
        self.listener.device_synchronized()

    def delay(self, stream: Stream, cycles: int) -> None:
        """Keep ``stream`` busy for about ``cycles`` device clocks. Captured, it does so at each replay of the graph.

        Needs ``perturbs_timing``; for tests. Raises :class:`CapabilityError` without it.
        """
        if not self.capabilities.perturbs_timing:
            raise CapabilityError(f"{self.label} doesn't declare perturbs_timing")
        self._delay(stream, cycles)

    def provoke_fault(self, stream: Stream) -> None:
        """Enqueue on ``stream`` an operation that fails when it runs, like a kernel that receives invalid data.

        Optional: for tests, implemented by plugins whose device survives the failure.

        The failure is a :class:`DeviceFault`. The first wait of the host that covers the operation raises it once, also if
        the wait covers the operation through other streams. Waits are ``synchronize`` of a stream, an event or the backend,
        ``synchronize_within``, a query that would return True, and a value that is read back. Afterwards the device works
        normally. *Capture.* A captured operation fails at each replay of the graph.

        Raises :class:`CapabilityError` if the plugin doesn't implement the method, or in a capture if the device's graphs
        can't hold the failing operation.
        """
        self._provoke_fault(stream)

    # -- memory ----------------------------------------------------------------------------------------------------

    def empty_pinned(self, owner: str, shape: Sequence[int], dtype: torch.dtype) -> PinnedBuffer:
        """Allocate page-locked host memory with undefined contents. ``owner`` names the memory in reports.

        No two live buffers share memory; a tensor that is a view of a buffer keeps the memory.
        """
        return PinnedBuffer(self, owner, self._empty_pinned(tuple(shape), dtype))

    def copy_async(self, destination: Tensor, source: Tensor, *, stream: Stream) -> None:
        """Copy on ``stream`` without blocking the host: device to device, pinned host to device, or back.

        *Ordering.* The bytes of the source are read, and those of the destination written, in stream order: the host
        must not touch its side until a fence says so.

        Raises :class:`InterfaceError` unless shape and dtype agree (a cast is a kernel: write it where it belongs), and
        :class:`SynchronousCopyError` where the device would silently make the copy synchronous: a host side that isn't
        pinned by this backend, or not contiguous.
        """
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise InterfaceError(
                f"copy_async on {stream.name!r}: destination {tuple(destination.shape)} {destination.dtype} and source "
                f"{tuple(source.shape)} {source.dtype} differ; cast or reshape in the scope of the stream that owns it"
            )
        for side, tensor, other in (("destination", destination, source), ("source", source, destination)):
            if not self.is_host(tensor):
                continue
            if not self.is_pinned(tensor):
                raise SynchronousCopyError(
                    f"copy_async on {stream.name!r}: the {side} is pageable host memory, so the copy would block the "
                    "host; use memory from empty_pinned"
                )
            if not tensor.is_contiguous() or not other.is_contiguous():
                raise SynchronousCopyError(
                    f"copy_async on {stream.name!r}: a side isn't contiguous (strides {tuple(tensor.stride())} and "
                    f"{tuple(other.stride())}), so the copy would go through pageable memory and block the host; copy "
                    "a contiguous slice"
                )
        with self.on(stream), self.guard(f"copying on {stream.name!r}"):
            self._copy_async(destination, source)

    def is_host(self, tensor: Tensor) -> bool:
        """Return True if the tensor is host memory from the view of this device."""
        return tensor.device.type == "cpu" and self.device.type != "cpu"

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True if a host tensor (or a slice of one) is page-locked for this device."""
        return self._is_pinned(tensor)

    def keep_alive(self, objects: Sequence[object], *, until: Event) -> None:
        """Hold references until the generation of ``until`` that is visible now has completed.

        Use it to pass memory to another stream: the allocator can't reuse memory that is held. ``until`` must have been
        recorded, and always on the same stream. :meth:`release_finished` drops the holds.
        """
        until._check_recorded("nothing can be kept alive until then")
        self._keep_alive.hold(objects, until)

    def release_finished(self) -> int:
        """Drop every hold whose event has completed; return how many remain. Never blocks; call it once an iteration."""
        return self._keep_alive.release_finished()

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return how many bytes of device memory exist, are free and are allocated now."""

    # -- graphs ----------------------------------------------------------------------------------------------------

    def create_graph_pool(self, name: str) -> GraphPool:
        """Create a memory pool for graphs that never run at the same time."""
        return GraphPool(self, name)

    def capture(
        self,
        name: str,
        fn: GraphCallable,
        *,
        stream: Stream,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        scalars: Mapping[str, Scalar] | None = None,
        params: Mapping[str, Sequence[int]] | None = None,
        pool: GraphPool | None = None,
    ) -> Graph:
        """Capture the device work of ``fn(context)`` on ``stream`` as a graph.

        ``inputs`` and ``outputs`` are static device tensors, allocated by the caller before the capture and written in
        place; ``scalars`` are frozen; ``params`` name host integers that ``Graph.update_params`` can rebind. A device may
        run ``fn`` before the capture, to warm up, so ``fn`` must be harmless with the present contents of the inputs. A
        device may also capture ``fn`` again, on ``stream``, when ``params`` are rebound. ``fn`` must not synchronise,
        allocate pinned memory or replay another graph; a library that synchronises (``Tensor.item``) fails the capture.
        If the backend doesn't declare ``captures_graphs``, the result runs ``fn`` eagerly at each replay, in a scope of
        the replay's stream: work that ``fn`` places on a stream by name goes to that stream.

        *Ordering.* The caller has ordered ``stream`` after the allocation of inputs and outputs. Other streams of the
        device may be busy: capture is thread-local, and a query by another thread doesn't break it. Garbage
        collection is off until the capture is over.

        Raises :class:`CaptureError`, with the cause, when ``fn`` or the device fails; streams, pools and the ambient
        stream are then as they were. A :class:`DeviceError` passes through unchanged.
        """
        if self.active_capture is not None:
            raise CaptureError(f"graph {name!r} can't be captured while another capture is open on this thread")
        context = CaptureContext(
            inputs=MappingProxyType(dict(inputs)),
            outputs=MappingProxyType(dict(outputs)),
            scalars=MappingProxyType(dict(scalars or {})),
            params=MappingProxyType({key: HostParam(key, value) for key, value in (params or {}).items()}),
        )
        for kind, tensors in (("input", context.inputs), ("output", context.outputs)):
            for key, tensor in tensors.items():
                if tensor.device != self.device:
                    raise CaptureError(
                        f"{kind} {key!r} of graph {name!r} is on {tensor.device}, expected {self.device}: static buffers "
                        "live on the device"
                    )
        if not self.capabilities.captures_graphs:
            return EagerGraph(self, name, context, fn)
        try:
            with self.guard(f"capturing graph {name!r}"), uncollected():
                return self._capture(name, fn, context, stream, pool)
        except (DeviceError, CaptureError):
            raise
        except Exception as error:
            raise CaptureError(
                f"capturing graph {name!r} on stream {stream.name!r} of {self.label} failed: {error}; the streams are "
                "as they were, run the callable eagerly to find the operation that can't be captured"
            ) from error

    @property
    def active_capture(self) -> ActiveCapture | None:
        """Return the open capture of the calling thread, or None."""
        return getattr(self._local, "capture", None)

    @property
    def is_rehearsing(self) -> bool:
        """True if the calling thread runs the warm-up that precedes a capture."""
        capture = self.active_capture
        return capture is not None and capture.rehearsal

    @contextmanager
    def capturing(self, graph: Graph, stream: Stream) -> Generator[ActiveCapture]:
        """Mark the calling thread as capturing; a plugin's ``_capture`` opens this around the vendor's capture."""
        capture = self._local.capture = ActiveCapture(self, graph.context, stream, graph=graph)
        self.listener.capture_began(graph, stream)
        failed = True
        try:
            yield capture
            failed = False
        finally:
            self._local.capture = None
            self.listener.capture_ended(graph, failed)

    @contextmanager
    def rehearsing(self, context: CaptureContext, stream: Stream) -> Generator[None]:
        """Run a callable before its capture, under the rules of a capture; a plugin's ``_capture`` warms up in this scope.

        The device runs the work. Recorded events are edges, as in the capture: they get no generation, and the capture can
        use them afterwards.
        """
        rehearsal = self._local.capture = ActiveCapture(self, context, stream, rehearsal=True)
        try:
            yield
        finally:
            self._local.capture = None
            for event in rehearsal.edges:
                event._captured_by = None

    def reissue(self, param: HostParam, issue: Callable[[tuple[int, ...]], None]) -> None:
        """Enqueue one operation that reads the host parameter ``param``: ``issue(values)``.

        Within the capture that ``param`` belongs to, the operation is registered: a device that rebinds captured
        operations one by one calls ``issue`` again, with the new values, when ``param`` is rebound. So ``issue`` must
        enqueue exactly one operation, the same each time but for the values, with operands that exist already and that
        it keeps alive. Anywhere else the operation is just enqueued.
        """
        capture = self.active_capture
        if capture is None or capture.rehearsal or capture.context.params.get(param.name) is not param:
            issue(param.value)
        else:
            self._reissue(capture.context, param, issue)

    def check_not_capturing(self, action: str) -> None:
        """Raise :class:`StreamOrderError` when the calling thread has a capture open."""
        if self.active_capture is not None:
            raise StreamOrderError(f"can't {action} while capturing on {self.label}: nothing runs during a capture")

    # -- ranks -----------------------------------------------------------------------------------------------------

    def create_group(self, name: str, *, ranks: Sequence[int], rank: int, store: Store, timeout_s: float = 30.0) -> Group:
        """Join the ranks of a new group. Needs ``collectives``.

        ``ranks`` are ranks of the world, in the group's order; ``rank`` is the calling rank. Each rank makes the call with
        the same ``name``, ``ranks`` and ``timeout_s``, and blocks until all ranks have made the call, for at most
        ``timeout_s`` seconds. The ranks find each other through ``store``: a ``TCPStore`` between processes, a ``HashStore``
        between threads of one process. Ranks that share several groups create them in the same order. A name may be used
        again after its group was closed.

        Raises :class:`CapabilityError` if the backend has no collectives, :class:`ConfigError` if the ranks aren't
        distinct or don't include ``rank``, and :class:`CollectiveError` if a rank doesn't make the call.
        """
        if not self.capabilities.collectives:
            raise CapabilityError(f"{self.label} doesn't declare collectives, so it runs on one rank; {name!r} can't be made")
        if rank not in ranks or len(set(ranks)) != len(ranks):
            raise ConfigError(f"group {name!r}: ranks {list(ranks)} must be distinct and hold this one, {rank}")
        if timeout_s <= 0:
            raise ConfigError(f"group {name!r}: timeout_s is {timeout_s}, expected more than 0")
        self.check_not_capturing(f"create group {name!r}")
        with self.guard(f"creating group {name!r}"):
            return self._create_group(name, tuple(ranks), rank, store, timeout_s)

    # -- errors and tools ------------------------------------------------------------------------------------------

    def guard(self, doing: str) -> AbstractContextManager[None]:
        """Return a scope that turns the device's own exceptions into typed errors that name the action ``doing``."""
        return Guard(self, doing)

    def translate_error(self, error: Exception, doing: str) -> DeviceError | None:
        """Return the typed error for a device exception, or None if the exception isn't the device's."""
        del error, doing
        return None

    @property
    def listener(self) -> Observer:
        """Return the attached observer, or one that ignores every report."""
        observer = self.observer  # read once: another thread may detach it
        return _IGNORES_REPORTS if observer is None else observer

    def attach(self, observer: Observer) -> None:
        """Report to ``observer`` from now on, on every thread. One observer at a time.

        The existing streams are reported at once. Raises :class:`InterfaceError` if an observer is attached.
        """
        if self.observer is not None:
            raise InterfaceError(f"{self.label} already reports to {self.observer!r}; detach it first")
        self.observer = observer
        for stream in self._streams:
            observer.stream_created(stream)

    def detach(self) -> None:
        """Stop reporting to the attached observer."""
        self.observer = None

    def locate(self, tensor: Tensor) -> Access:
        """Return the storage number and byte range of a tensor, as this backend reports accesses.

        For tools. A backend that declares ``reports_accesses`` implements it, for pinned memory too. Raises
        :class:`CapabilityError` on a backend that doesn't report accesses.
        """
        raise CapabilityError(f"{self.label} doesn't report accesses, so it has no number for {tuple(tensor.shape)}")

    def mark_stale(self, tensor: Tensor, reason: str) -> None:
        """Tell an attached tool that the contents of ``tensor`` are stale, such as a padded input before the next batch.

        A later read of bytes that weren't written since then is a stale read, ordered or not. Changes nothing itself.
        """
        self.listener.marked_stale(tensor, reason)

    def mark_mirror(self, mirror: Tensor | tuple[Graph, str], source: Tensor) -> None:
        """Tell an attached tool that ``mirror`` is read as the present value of ``source``.

        ``mirror`` is a tensor (host or device) or a host parameter of a graph, given as ``(graph, name)``. Reading it
        after ``source`` was written again, and before it was itself refreshed, is stale. Changes nothing itself.
        """
        self.listener.marked_mirror(mirror, source)

    # -- verbs that a vendor implements ----------------------------------------------------------------------------------

    @abstractmethod
    def _on(self, stream: Stream) -> AbstractContextManager[None]:
        """Carry out :meth:`on` on the vendor's device: device and stream, restored on exit also after an exception."""

    @abstractmethod
    def _create_stream(self, name: str, priority: int) -> Stream:
        """Carry out :meth:`create_stream` on the vendor's device: a stream of its own, never one out of a recycled pool."""

    @abstractmethod
    def _create_event(self, name: str, timing: bool) -> Event:
        """Carry out :meth:`create_event` on the vendor's device."""

    def _create_flag(self, name: str) -> Flag:
        raise CapabilityError(f"{self.label} declares flags but its plugin has no _create_flag ({name!r}); {_DECLARED}")

    @abstractmethod
    def _synchronize(self) -> None:
        """Carry out :meth:`synchronize` on the vendor's device."""

    def _delay(self, stream: Stream, cycles: int) -> None:
        del cycles
        raise CapabilityError(
            f"{self.label} declares perturbs_timing but its plugin has no _delay ({stream.name!r}); {_DECLARED}"
        )

    def _provoke_fault(self, stream: Stream) -> None:
        """Carry out :meth:`provoke_fault` on the vendor's device; optional."""
        raise CapabilityError(f"{self.label} offers no provoke_fault, so nothing can fail on purpose on {stream.name!r}")

    @abstractmethod
    def _empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Carry out :meth:`empty_pinned` on the vendor's device."""

    @abstractmethod
    def _is_pinned(self, tensor: Tensor) -> bool:
        """Carry out :meth:`is_pinned` on the vendor's device."""

    def _copy_async(self, destination: Tensor, source: Tensor) -> None:
        """Carry out :meth:`copy_async` on the vendor's device; runs inside the stream's scope."""
        destination.copy_(source, non_blocking=True)

    def _reissue(self, context: CaptureContext, param: HostParam, issue: Callable[[tuple[int, ...]], None]) -> None:
        """Carry out :meth:`reissue` on the vendor's device in a capture.

        A device that captures the whole callable again needs no implementation.
        """
        del context
        issue(param.value)

    def _capture(
        self, name: str, fn: GraphCallable, context: CaptureContext, stream: Stream, pool: GraphPool | None
    ) -> Graph:
        del fn, context, stream, pool
        raise CapabilityError(f"{self.label} declares captures_graphs but its plugin has no _capture ({name!r}); {_DECLARED}")

    def _create_group(self, name: str, ranks: tuple[int, ...], rank: int, store: Store, timeout_s: float) -> Group:
        """Carry out :meth:`create_group` on the vendor's device."""
        del ranks, rank, store, timeout_s
        raise CapabilityError(
            f"{self.label} declares collectives but its plugin has no _create_group ({name!r}); {_DECLARED}"
        )
