"""The names of `torch.cuda` that vLLM's runner, connectors and engine call whatever their platform is, in one place.

They lead to `torch.sim`. Nothing else of `torch.cuda` changes: what isn't listed fails as on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider_sim.meta import Metas
from outrider_sim.tensor import SimTensor, wrap
from outrider_sim.torch_module import SimTorchStream

NAMES = (
    "Event", "Stream", "current_stream", "default_stream", "set_stream", "stream", "synchronize", "current_device",
    "device_count", "mem_get_info", "memory_allocated", "memory_reserved", "empty_cache", "set_device",
    "max_memory_allocated",
)  # fmt: skip


def install_names(address: Callable[[SimTensor], int]) -> None:
    """Replace the names for this process. `address` is what `data_ptr` gives, where the bytes are: kernels follow it."""
    module: Any = torch.sim  # type: ignore[attr-defined]
    for name in NAMES:
        setattr(torch.cuda, name, getattr(module, name))
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # one of a kernel's tile sizes hangs on it
    cuda_stream: Any = property(lambda stream: stream.stream_id)
    SimTorchStream.cuda_stream = cuda_stream  # type: ignore[attr-defined]
    SimTorchStream.priority_range = staticmethod(lambda: (0, -1))  # type: ignore[attr-defined]
    accelerator: Any = torch.accelerator
    accelerator.memory_stats = stats
    accelerator.memory_allocated = module.memory_allocated
    accelerator.memory_reserved = module.memory_reserved
    accelerator.get_memory_info = module.mem_get_info
    accelerator.reset_peak_memory_stats = lambda device=None: None
    SimTensor.set_ = _over_storage  # type: ignore[assignment,method-assign]
    SimTensor.data_ptr = lambda self: address(self)  # type: ignore[method-assign]  # blocks never move


def stats(device: Any = None) -> dict[str, int]:
    """What `torch.accelerator.memory_stats` gives, as far as vLLM reads it."""
    del device
    module: Any = torch.sim  # type: ignore[attr-defined]
    return {
        "allocated_bytes.all.peak": module.max_memory_allocated(),
        "allocated_bytes.all.current": module.memory_allocated(),
    }


def _over_storage(tensor: SimTensor, storage: Any) -> SimTensor:
    """`torch.empty(0, ...).set_(other.untyped_storage())`: a new tensor over all of it, of the same dtype."""
    allocation = storage._allocation
    shape = (allocation.nbytes // tensor.element_size(),)
    meta = Metas().get(torch.Size(shape), (1,), tensor.dtype)
    return wrap(allocation.block.inner(meta), meta, allocation, tensor.device)
