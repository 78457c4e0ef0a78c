"""The names of `torch.cuda` that vLLM uses on every platform, redirected to `torch.sim`.

Other names of `torch.cuda` are unchanged, and fail as on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider_sim.machine.memory import intern_meta
from outrider_sim.torch_device.tensor import SimTensor, wrap
from outrider_sim.torch_device.torch_module import SimTorchStream

REDIRECTED_NAMES = (
    "Event", "Stream", "current_stream", "default_stream", "set_stream", "stream", "synchronize", "current_device",
    "device_count", "mem_get_info", "memory_allocated", "memory_reserved", "empty_cache", "set_device",
    "max_memory_allocated",
)  # fmt: skip


def install_names(address: Callable[[SimTensor], int]) -> None:
    """Redirect the names in this process. `address` replaces `SimTensor.data_ptr`: it returns the host address of the bytes.

    Kernels load such addresses from tables of pointers and follow them.
    """
    module: Any = torch.sim  # type: ignore[attr-defined]
    for name in REDIRECTED_NAMES:
        setattr(torch.cuda, name, getattr(module, name))
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # a kernel chooses a tile size by it
    cuda_stream: Any = property(lambda stream: stream.stream_id)
    SimTorchStream.cuda_stream = cuda_stream  # type: ignore[method-assign]
    SimTorchStream.priority_range = staticmethod(lambda: (0, -1))  # type: ignore[attr-defined]
    accelerator: Any = torch.accelerator
    accelerator.memory_stats = memory_stats
    accelerator.memory_allocated = module.memory_allocated
    accelerator.memory_reserved = module.memory_reserved
    accelerator.get_memory_info = module.mem_get_info
    accelerator.reset_peak_memory_stats = lambda device=None: None
    SimTensor.set_ = _tensor_over_storage  # type: ignore[assignment,method-assign]
    SimTensor.data_ptr = lambda self: address(self)  # type: ignore[method-assign]  # the bytes never move


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the two entries of `torch.accelerator.memory_stats` that vLLM reads, in bytes."""
    del device
    module: Any = torch.sim  # type: ignore[attr-defined]
    return {
        "allocated_bytes.all.peak": module.max_memory_allocated(),
        "allocated_bytes.all.current": module.memory_allocated(),
    }


def _tensor_over_storage(tensor: SimTensor, storage: Any) -> SimTensor:
    """Implement `tensor.set_(storage)`: return a new tensor over the whole storage, of the same dtype as `tensor`."""
    allocation = storage._allocation
    shape = (allocation.nbytes // tensor.element_size(),)
    meta = intern_meta(torch.Size(shape), (1,), tensor.dtype)
    return wrap(allocation.block.inner(meta), meta, allocation, tensor.device)
