"""Shapes, strides and dtypes as interned objects, so that a plan for an operation is found by a dictionary look-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Meta:
    """Shape, strides and dtype of a tensor, without its offset. Equal metas are the same object."""

    __slots__ = ("byte_stride", "dense", "dtype", "extent", "itemsize", "nbytes", "numel", "shape", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.stride = stride
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self.numel = self.shape.numel()
        # Bytes from the start of the first element to the end of the last one.
        span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if self.numel else 0
        self.extent = span * self.itemsize
        self.byte_stride = tuple(s * self.itemsize for s in stride)
        self.nbytes = self.numel * self.itemsize
        self.dense = span == self.numel

    def __repr__(self) -> str:
        return f"Meta({tuple(self.shape)}, {self.stride}, {self.dtype})"


_LIMIT = 1 << 16


class Metas:
    """The table of interned metas. It is cleared when it exceeds its size limit, which costs only look-ups."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table: dict[tuple[Any, ...], Meta] = {}

    def get(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Meta:
        """Return the interned meta of a shape, strides and dtype."""
        key = (shape, stride, dtype)
        found = self._table.get(key)
        if found is None:
            if len(self._table) > _LIMIT:
                self._table.clear()
            found = self._table[key] = Meta(tuple(shape), tuple(stride), dtype)
        return found

    def meta_of(self, tensor: Tensor) -> Meta:
        """Return the interned meta of a host tensor."""
        return self.get(tensor.shape, tensor.stride(), tensor.dtype)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(1, shape[i + 1])
    return tuple(strides)
