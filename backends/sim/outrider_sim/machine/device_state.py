"""The state of one simulated device: machine, memory allocator, random number generator, and pinned host memory.

Queued copies may read and write pinned memory while the host continues. A pinned tensor is a host tensor with a class of its
own. Each host read or write of it therefore runs code of this module and becomes a point of the schedule. Queued copies
reference a plain tensor over the same bytes, because Python code may exchange the contents of the caller's object.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.device import Access, CaptureError
from outrider.device.arrays import watched
from outrider_sim.machine.memory import CachingAllocator
from outrider_sim.machine.queue import Action, StreamQueue, python_line
from outrider_sim.machine.stream_machine import StreamMachine
from outrider_sim.options import SimOptions

_FROM_NUMPY = torch.from_numpy  # a watched run replaces the name


def exclude_ambient_dispatch() -> AbstractContextManager[Any]:
    """Disable the calling thread's torch modes, autocast and autograd while host kernels run in the block."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_AMBIENT)
    return guard


_AMBIENT = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)
)


class SimDeviceState:
    """The machine, memory and random numbers of one backend object. Device tensors keep the memory alive."""

    def __init__(self, options: SimOptions, first: SimDeviceState | None = None, rank: int = 0) -> None:
        """Create the state of device `rank` of the host whose device 0 is `first`; None creates a new host."""
        self.options = options
        self.backend: Any = lambda: None  # a weak reference to the backend object
        self.device = torch.device(options.name, rank)
        self.machine: StreamMachine = StreamMachine(options, None if first is None else first.machine.scheduler, rank)
        self.machine.scheduler.operation_scope = exclude_ambient_dispatch
        self.machine.sim = self
        self.memory = CachingAllocator(self.machine)
        self.memory.sim = self
        self.seeds = random.Random(options.seed)
        self.divergences: frozenset[str] = frozenset()  # operators whose results differ from other devices', see `diverging`

    def next_seed(self) -> int:
        """Return the seed of one random operation. It is generated at enqueue, so values don't depend on the schedule."""
        return self.seeds.getrandbits(62)

    def manual_seed(self, seed: int) -> None:
        """Seed the device's random number generator."""
        self.seeds.seed(seed)

    def synchronize(self, stream: StreamQueue, why: str) -> None:
        """Block the host in a torch call until `stream` is empty. Raises `CaptureError` in a capture, where no operation
        runs.
        """
        if stream.capture is not None:
            raise CaptureError(f"{why} would wait for stream {stream.label!r}, which is capturing: nothing runs in a capture")
        self.machine.synchronize_stream(stream)
        if self.machine.tap is not None:
            self.machine.tap.synchronized(stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype, *, guarded: bool = False) -> PinnedTensor:
        """Return new pinned host memory.

        `guarded` memory imitates torch's caching host allocator, which reuses memory after the copies that use it have
        completed. The allocator doesn't wait for kernels that access the memory, unless such a copy follows them.
        """
        with torch._C._DisableTorchDispatch(), torch._C._InferenceMode(False):
            plain = torch.empty(0, dtype=dtype)
            nbytes = math.prod(shape) * dtype.itemsize
            reused = self.memory.take_pinned(nbytes) if guarded else None
            if reused is None:
                plain = torch.empty(shape, dtype=dtype)
            else:
                plain.set_(reused, 0, shape)  # type: ignore[call-overload]  # the stubs lack it
            if self.options.poison:
                plain.fill_(float("nan") if dtype.is_floating_point else 0x7F if dtype.itemsize == 1 else 0x7FFF)
        allocation = HostAllocation(plain, self, self.memory.next_id())
        if self.machine.scheduler.strategy.needs_accesses:
            self.machine.scheduler.bases[allocation.id] = self.memory.take_address(allocation.nbytes)
        tap = self.machine.tap
        if guarded:
            allocation.kept = plain.untyped_storage()
        if tap is not None:
            allocation.line = python_line()
            tap.allocated(allocation, None)
        return pin(plain, allocation)

    def release_host(self, allocation: HostAllocation) -> None:
        """Report that pinned memory was freed, and return `guarded` memory for reuse."""
        if self.machine.tap is not None:
            self.machine.tap.freed(allocation)
        if allocation.kept is not None:
            self.memory.release_pinned(allocation.kept, allocation.users)

    def used_by_copy(self, tensor: PinnedTensor, stream: StreamQueue) -> None:
        """Prevent reuse of pinned memory until `stream` has run its work queued at the release, as a copy does in torch."""
        allocation = tensor._alloc
        if allocation.kept is not None and stream not in allocation.users:
            allocation.users.append(stream)
            if self.machine.tap is not None:
                self.machine.tap.shared(allocation, stream)

    def host_access(self, tensor: PinnedTensor, write: bool) -> None:
        """Let the strategy run other steps, then report the host's read or write of a pinned tensor."""
        self._host_access(tensor, host_extent(tensor, write) if self.machine.tracks else None)

    def host_range(self, allocation: HostAllocation, low: int, high: int, write: bool) -> None:
        """Report the host's read or write of some bytes of pinned memory through a numpy array."""
        self._host_access(
            allocation, Access(allocation.id, low, high, write, None, None, "") if self.machine.tracks else None
        )

    def host_write(self, access: Access, write: Callable[[], object], *, remapped: Any = None) -> None:
        """Let the strategy run other steps, then write device memory from the host and report that.

        With `remapped`, the write is a change of the allocation's pages.
        """
        machine = self.machine
        machine.point(Action("host", self, (access,) if machine.tracks else ()))
        with exclude_ambient_dispatch():
            write()
        if machine.tap is None:
            return
        if remapped is None:
            machine.tap.observer.host_accessed(access, python_line())
        else:
            machine.tap.observer.memory_remapped(remapped.id)

    def _host_access(self, what: PinnedTensor | HostAllocation, access: Access | None) -> None:
        machine = self.machine
        machine.point(Action("host", what, () if access is None else (access,)))
        if machine.tap is not None and access is not None:
            machine.tap.observer.host_accessed(access, python_line())


def host_extent(tensor: PinnedTensor, write: bool, argument: str = "") -> Access:
    """Return the access to the bytes of a pinned tensor: a write if ``write``, else a read."""
    return Access.of_tensor(tensor, tensor._alloc.id, write, argument)


class HostAllocation:
    """Pinned memory from the call that made it to the last reference. `id` is never used twice.

    `sim` is the device that made the memory, whichever device is current. It learns of each host read and write.
    """

    __slots__ = ("address", "id", "kept", "line", "nbytes", "sim", "users")

    def __init__(self, tensor: Tensor, sim: SimDeviceState, ident: int) -> None:
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self.id = ident
        self.users: list[Any] = []  # streams that copy from or to it
        self.nbytes = storage.nbytes()
        self.line = ""
        self.kept: torch.UntypedStorage | None = None  # what a release gives back to the caching host allocator
        self.sim = sim

    def range_accessed(self, low: int, high: int, write: bool) -> None:
        """Report that the host reads or writes the bytes from `low` to `high` of this allocation."""
        self.sim.host_range(self, low, high, write)

    def tensor_over(self, array: Any) -> PinnedTensor:
        """Return a pinned tensor over the bytes of a plain array in this allocation."""
        return pin(_FROM_NUMPY(array), self)

    def __del__(self) -> None:
        self.sim.release_host(self)


class PinnedTensor(Tensor):
    """A host tensor in pinned memory. Its views are pinned too; results of computations are ordinary host tensors."""

    _alloc: HostAllocation

    # As for the device's own tensors: torch calls the class, set once by the registration.
    _dispatch: ClassVar[Callable[..., Any]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Report the operator's host reads and writes, then run the operator on plain host tensors."""
        return cls._dispatch(func, types, args, kwargs or {})

    def is_pinned(self, *_: Any) -> bool:
        """Return True: every tensor of this class is pinned."""
        return True

    def tolist(self) -> Any:
        """Return the values as Python numbers, and report a host read."""
        return self.plain(write=False).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a numpy array over the same memory; reads and writes through the array are reported like the tensor's."""
        del force
        return watched(self.plain(write=None).numpy(), self._alloc)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._alloc.sim.host_access(self, False)
        made = self.numpy()
        return made.astype(*args) if args and args[0] is not None else made

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__()

    def __dlpack_device__(self) -> Any:
        return (1, 0)

    def plain(self, *, write: bool | None) -> Tensor:
        """Return a plain host tensor over the same bytes, and report a host read or write (`write`; None: no access)."""
        made = alias(self)
        if write is not None:
            self._alloc.sim.host_access(self, write)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = self.plain(write=False).clone()
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain(write=False).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.plain(write=False))


def alias(tensor: Tensor) -> Tensor:
    """Return a plain host tensor over the bytes of a pinned tensor, for which torch runs neither dispatch nor autograd."""
    # The inference-mode guard keeps the alias usable outside; DisableTorchDispatch reaches the bytes below the class.
    with torch._C._DisableTorchDispatch(), torch._C._InferenceMode(False):
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return made


def pin(plain: Tensor, allocation: HostAllocation) -> PinnedTensor:
    """Return a pinned tensor over `plain`, whose memory is `allocation`."""
    with torch._C._InferenceMode(False):
        made = Tensor._make_subclass(PinnedTensor, plain)
    made._alloc = allocation
    return made
