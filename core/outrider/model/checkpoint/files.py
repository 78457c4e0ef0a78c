"""The tensor files of a checkpoint, whatever their format.

Tensors are read one at a time, or in bulk from their extents (:mod:`outrider.model.checkpoint.bulk`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.bulk import Extent
from outrider.model.checkpoint.pieces import TensorSlice

GGUF_LIST = "gguf.json"
"""File of an unpacked GGUF checkpoint that lists the GGUF files."""


class TensorFile(ABC):
    """An open file of tensors: their names, shapes, dtypes and values."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        self.shapes = shapes

    @abstractmethod
    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        """Return tensor ``name``, or the part ``tensor_slice`` of it, on the host in the dtype of the file."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype | None:
        """Return the tensor's dtype without reading its values, or None if the dtype is not supported."""

    def extent(self, name: str) -> Extent | None:
        """Return the tensor's extent in the file if its values are contiguous there. None means: use :meth:`read_tensor`."""
        del name
        return None


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The tensors of a checkpoint by name, each with the file that holds it."""

    origin: Path
    """Index or single tensor file, for error messages."""
    tensors: Mapping[str, TensorFile]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the checkpoint contains."""
        return self.tensors[name].shapes[name]

    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        """Return a floating-point tensor, or its slice ``tensor_slice``, on the host.

        Raises :class:`CheckpointError` for another dtype.
        """
        tensor = self.tensors[name].read_tensor(name, tensor_slice)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self.tensors[name].path}: tensor {shown(name)} is {tensor.dtype}, expected float16, bfloat16, float32 or "
                "float64; the config says nothing of quantised weights here"
            )
        return tensor

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of an existing tensor, or None if the dtype is not supported."""
        return self.tensors[name].dtype(name)

    def dtype_name(self, name: str) -> str:
        """Return the dtype of an existing tensor in words, for error messages."""
        dtype = self.dtype(name)
        return "of a dtype that isn't known" if dtype is None else str(dtype).removeprefix("torch.")

    def read_stored(self, name: str) -> Tensor:
        """Return tensor ``name`` as the file stores it, in any dtype, on the host."""
        return self.tensors[name].read_tensor(name)

    def extent(self, name: str) -> Extent | None:
        """Return a tensor's extent in its file, or None if it cannot be read in bulk."""
        return self.tensors[name].extent(name)

    def read_ids(self, name: str) -> Tensor:
        """Return a tensor of integers as int64, on the host. Raises :class:`CheckpointError` for another dtype."""
        tensor = self.tensors[name].read_tensor(name)
        if tensor.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(f"{self.tensors[name].path}: tensor {name!r} is {tensor.dtype}, expected int64")
        return tensor.to(torch.int64)
