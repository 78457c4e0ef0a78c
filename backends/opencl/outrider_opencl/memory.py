"""Shared virtual memory of an OpenCL context as torch tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.device import OutOfDeviceMemory
from outrider_opencl.driver import OpenCLDevice

_READ_WRITE_FINE_GRAIN = (1 << 0) | (1 << 10)
_ALIGNMENT = 64
"""Alignment in bytes of an allocation, that of torch's own host memory."""


class _Block:
    """One allocation of shared memory, freed with the last tensor over it."""

    def __init__(self, memory: SharedMemory, nbytes: int) -> None:
        library, context = memory.device.library, memory.device.context
        address = library.svm_alloc(context.int_ptr, _READ_WRITE_FINE_GRAIN, nbytes, _ALIGNMENT)
        if not address:
            raise OutOfDeviceMemory(
                f"OpenCL: {nbytes} bytes of shared memory don't fit; {memory.allocated} bytes are allocated; use a smaller "
                "model, cache or batch"
            )
        self.address = int(address)
        self._memory = memory
        self._nbytes = nbytes
        memory.blocks[self.address] = nbytes
        self.__array_interface__: dict[str, Any] = {
            "data": (self.address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "_memory") and self._memory.blocks.pop(self.address, None) is not None:
            device = self._memory.device
            device.library.svm_free(device.context.int_ptr, self.address)


class SharedMemory:
    """The allocations of one context that device and host address alike."""

    def __init__(self, device: OpenCLDevice) -> None:
        self.device = device
        self.blocks: dict[int, int] = {}
        """Bytes of each allocation by address."""

    @property
    def allocated(self) -> int:
        """Number of bytes that are allocated now."""
        return sum(list(self.blocks.values()))

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor with undefined contents in shared memory. Raises :class:`OutOfDeviceMemory`."""
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        block = _Block(self, extent * dtype.itemsize)
        return torch.from_numpy(np.asarray(block)).view(dtype).as_strided(shape, strides)

    def allocate_contiguous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new contiguous tensor with undefined contents in shared memory. Raises :class:`OutOfDeviceMemory`."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return self.allocate(shape, strides, dtype)

    def owns(self, tensor: Tensor) -> bool:
        """Return True if the memory of ``tensor`` was allocated here."""
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self.blocks
