"""Pinned host memory: host tensors that queued copies may read and write while the host continues.

A pinned tensor is a host tensor with a class of its own. Each host read or write of it therefore runs code of this module and
becomes a point of the schedule. Queued copies reference a plain tensor over the same bytes, because Python code may exchange
the contents of the caller's object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from outrider.device.arrays import watched

if TYPE_CHECKING:
    from outrider_sim.machine.device_state import SimDeviceState

_FROM_NUMPY = torch.from_numpy  # a watched run replaces the name


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
