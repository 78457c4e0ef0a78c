"""The simulated tensor: a torch wrapper tensor over a host tensor in a simulated block."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import ref

import torch
from torch import Tensor

from outrider.device import CapabilityError
from outrider_sim.machine.memory import Allocation, Meta

if TYPE_CHECKING:
    from outrider.device import Access


_BEFORE_TORCHS = 9


class HostStorage(torch.UntypedStorage):
    """The bytes of a device storage, on the host. `place` is the device of the original storage."""

    place: torch.device
    device_copy: Any = None  # the bytes on the device, once a tensor needs them

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is a plain attribute
        """The device on which torch creates tensors over this storage."""
        return self.place


def _host_storage(size: int, place: torch.device) -> HostStorage:
    made = HostStorage(size)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    made.place = place
    return made


def bytes_of(allocation: Allocation, device: torch.device) -> SimTensor:
    """Return all bytes of a device storage as a uint8 tensor on the device."""
    meta = Meta((allocation.nbytes,), (1,), torch.uint8)
    inner = torch.as_strided(allocation.block.typed[torch.uint8], meta.shape, meta.stride, 0)
    return wrap(inner, meta, allocation, device)


def pickle_reduction(tensor: SimTensor) -> Any:
    """Return the pickle reduction of a simulated tensor."""
    if getattr(tensor, "_is_param", False):
        with torch.no_grad():
            inner = tensor.detach()
        return torch._utils._rebuild_parameter, (inner, tensor.requires_grad, OrderedDict())
    if tensor.dtype not in torch.storage._dtype_to_storage_type_map():
        # These dtypes have no name in a file's list of storages.
        with torch.no_grad():
            values = tensor.detach().cpu()
        place = str(tensor.device)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, (values, tensor.dtype, place, tensor.requires_grad)
    allocation = tensor._alloc
    # Tensors that are pickled together find the same host storage; it lives as long as the pickler keeps it.
    storage: HostStorage | None = allocation.saved() if allocation.saved is not None else None
    if storage is None:
        with torch.no_grad():
            held = bytes_of(allocation, tensor.device).cpu()
        storage = _host_storage(allocation.nbytes, tensor.device)
        bytes_on_host(storage).copy_(held)
        allocation.saved = ref(storage)
    looks: tuple[Any, ...] = (
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        OrderedDict(),
    )
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    return torch._utils._rebuild_tensor_v2, (typed, *looks)


def bytes_on_host(storage: torch.UntypedStorage) -> Tensor:
    """Return the bytes of a host storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def to_device(storage: HostStorage) -> SimTensor:
    """Copy a host storage to its device and return the device tensor of its bytes; repeated calls return the same tensor."""
    if storage.device_copy is None:
        with torch.no_grad():
            storage.device_copy = bytes_on_host(storage).to(storage.place)
    found: SimTensor = storage.device_copy
    return found


def install(name: str) -> None:
    """Register the device called `name` with `torch.save` and `torch.load`."""

    def place(location: str) -> torch.device | None:
        kind, _, number = location.partition(":")
        return torch.device(name, int(number or 0)) if kind == name else None

    def tag(storage: Any) -> str | None:
        return str(storage.place) if isinstance(storage, HostStorage) else None

    def restore(storage: Any, location: str) -> HostStorage | None:
        found = place(location)
        if found is None:
            return None
        made = _host_storage(storage.nbytes(), found)
        bytes_on_host(made).copy_(bytes_on_host(storage))
        return made

    torch.serialization.register_package(_BEFORE_TORCHS, tag, restore)


_make = Tensor._make_wrapper_subclass


class SimStorage:
    """The storage that `untyped_storage()` returns. Its bytes can be copied but not accessed."""

    def __init__(self, allocation: Allocation, device: torch.device) -> None:
        self._allocation = allocation
        self.device = device

    def data_ptr(self) -> int:
        """Return the allocation's simulated address."""
        return self._allocation.address

    def nbytes(self) -> int:
        """Return the size of the storage in bytes, as requested."""
        return 0 if self._allocation.is_empty else self._allocation.nbytes

    size = nbytes
    __len__ = nbytes

    def resize_(self, nbytes: int) -> SimStorage:
        """Release the bytes (0), or allocate new ones on the current stream; views keep their shape, as FSDP relies on.

        Raises `RuntimeError` for any other change of size.
        """
        self._allocation.resize(nbytes)
        return self

    def cpu(self) -> torch.UntypedStorage:
        """Return a copy of the storage's bytes on the host. Waits for the current stream."""
        with torch.no_grad():
            return bytes_of(self._allocation, self.device).cpu().untyped_storage()

    def copy_(self, source: torch.UntypedStorage, non_blocking: bool | None = None) -> SimStorage:
        """Copy the bytes of a host storage of the same size to this storage, on the current stream."""
        with torch.no_grad():
            bytes_of(self._allocation, self.device).copy_(bytes_on_host(source), non_blocking=bool(non_blocking))
        return self

    def share_memory_(self) -> NoReturn:
        """Raise `CapabilityError`: no memory is shared with other processes."""
        raise CapabilityError("the simulated device shares no memory with other processes; use threads as ranks (--ranks N)")

    _share_cuda_ = share_memory_

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimStorage) and other._allocation is self._allocation

    def __hash__(self) -> int:
        return hash(self._allocation.id)


class SimTypedStorage:
    """The storage that `storage()` returns: as `SimStorage`, counted in elements."""

    def __init__(self, storage: SimStorage, itemsize: int) -> None:
        self._untyped = storage
        self._itemsize = itemsize

    def untyped(self) -> SimStorage:
        """Return the storage counted in bytes."""
        return self._untyped

    def data_ptr(self) -> int:
        """Return the allocation's simulated address."""
        return self._untyped.data_ptr()

    def size(self) -> int:
        """Return the number of elements."""
        return self._untyped.nbytes() // self._itemsize

    def resize_(self, size: int) -> SimTypedStorage:
        """Release the elements (0), or allocate them again on the current stream."""
        self._untyped.resize_(size * self._itemsize)
        return self

    _resize_, _size, __len__ = resize_, size, size


class SimTensor(Tensor):
    """A tensor on the simulated device.

    Queued operations work on the host tensor `_inner`. `_alloc` keeps the memory alive. `_meta` is the interned shape,
    strides and dtype. Reading a value waits for the device, as on any accelerator.
    """

    _inner: Tensor
    _alloc: Allocation
    _meta: Meta
    _seen: dict[tuple[bool, str], Access] | None = None  # accesses, as tools were told them
    _born = -1  # graph replays before this object was made

    # torch calls the class, so the class has to know the device: set once, by the registration.
    _dispatch: ClassVar[Callable[..., Any]]
    _failed: ClassVar[Callable[[BaseException], Any]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass an operator call to the dispatcher: it queues the operator, runs a view at once, or waits for a read."""
        del types
        try:
            return cls._dispatch(func, args, kwargs)
        except BaseException as error:
            return cls._failed(error)

    def data_ptr(self) -> int:
        """Return the simulated address of the first element."""
        return self._alloc.address + int(self._inner.storage_offset()) * self._meta.itemsize

    @property
    def data(self) -> Tensor:
        """Return a tensor over the same memory, outside autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, SimTensor):
            raise RuntimeError(f"data of a tensor on {self.device} can't become a tensor on {value.device}")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._inner, self._alloc, self._meta, self._seen = value._inner, value._alloc, value._meta, None

    def untyped_storage(self) -> Any:
        """Return the storage's identity and size. The host can't access its bytes."""
        return SimStorage(self._alloc, self.device)

    def storage(self) -> Any:
        """Return the storage's identity and size, counted in elements."""
        return SimTypedStorage(self.untyped_storage(), self._meta.itemsize)

    _typed_storage = storage

    def set_(self, source: Any = None, *place: Any, **named: Any) -> Tensor:
        """Take over the memory of a tensor or of a storage, at `storage_offset`, with `size` and `stride`."""
        place = (*place, *(named[name] for name in ("storage_offset", "size", "stride") if name in named))
        if isinstance(source, SimStorage):
            kind = torch.ops.aten.set_.source_Storage_storage_offset if place else torch.ops.aten.set_.source_Storage
            made: Tensor = self._dispatch(kind, (self, source, *place), {})
            return made
        return Tensor.set_(self, source, *place)

    def is_pinned(self, *_: Any) -> bool:
        """Return False: device memory isn't pinned host memory."""
        return False

    def tolist(self) -> Any:
        """Return the values as Python numbers. Waits for the current stream."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a host copy if `force` is set; otherwise raise, because the host can't access device memory."""
        if not force:
            raise TypeError(f"can't convert {self.device} tensor to numpy; use Tensor.cpu() to copy it to the host first")
        return self.detach().cpu().numpy()

    def __array__(self, *_: Any) -> NoReturn:
        raise TypeError(f"can't convert {self.device} tensor to numpy; use Tensor.cpu() to copy it to the host first")

    def record_stream(self, stream: Any) -> None:
        """Prevent reuse of the tensor's memory until `stream` has run its work queued at the release."""
        queue = getattr(stream, "queue_state", stream)
        self._alloc.used_by(queue)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError("only tensors that the user made support deepcopy")
        with torch.no_grad():
            made = self.detach().clone()
        made.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            made._is_param = True
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As torch pickles any device's tensor: storages by reference, so that tensors which share one still do afterwards.
        del protocol
        return pickle_reduction(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        host = self.detach().cpu()
        text = repr(host)
        tail = f", device='{self.device}'"
        if self.requires_grad:
            tail += ", requires_grad=True"
        return f"{text[:-1]}{tail})"


def wrap(inner: Tensor, meta: Meta, allocation: Allocation, device: torch.device) -> SimTensor:
    """Wrap `inner`, which lies in the memory of `allocation`, as a simulated tensor."""
    if torch.is_inference_mode_enabled():
        # Views of normal tensors must be normal tensors, and nothing needs ours to be inference tensors.
        with torch._C._InferenceMode(False):
            made = _make(
                SimTensor,
                meta.shape,
                strides=meta.stride,
                storage_offset=inner.storage_offset(),
                dtype=meta.dtype,
                device=device,
            )
    else:
        made = _make(
            SimTensor, meta.shape, strides=meta.stride, storage_offset=inner.storage_offset(), dtype=meta.dtype, device=device
        )
    made._inner = inner
    made._alloc = allocation
    made._meta = meta
    made._born = allocation.machine_memory.machine.replays
    return made
