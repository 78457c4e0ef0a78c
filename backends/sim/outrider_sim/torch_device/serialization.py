"""Saving and loading of device tensors with `torch.save` and `torch.load`.

A file names storages and the device of each. A device storage is pickled as a host storage with the device's name. When torch
loads a tensor for the device, `set_` copies the host storage there, once for all tensors that share it. Tied weights and
views therefore stay tied, and with `map_location="cpu"` a file loads in a process without the device.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from outrider_sim.machine.tensor_meta import Meta

if TYPE_CHECKING:
    from outrider_sim.machine.memory import Allocation
    from outrider_sim.torch_device.tensor import SimTensor

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


def bytes_of(allocation: Allocation, device: torch.device) -> Tensor:
    """Return all bytes of a device storage as a uint8 tensor on the device."""
    from outrider_sim.torch_device.tensor import wrap

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
