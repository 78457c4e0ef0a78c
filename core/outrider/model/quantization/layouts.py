"""Slicing, stacking and padding of quantised weights, exactly: values are repacked and scales are repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider.device.kernels.weight_formats import widen_scales
from outrider.model.checkpoint.pieces import TensorSlice
from outrider.model.quantization.storages import repeat_rows


def map_scales(weight: QuantizedWeight, change: Callable[[Tensor], Tensor], **fields: Any) -> QuantizedWeight:
    """Return a copy of ``weight`` with ``change`` applied to its scales and its zero points, and with other ``fields``
    replaced.
    """
    zeros = weight.zero_points
    changed = None if zeros is None else change(zeros).contiguous()
    return replace(weight, scales=change(weight.scales).contiguous(), zero_points=changed, **fields)


def with_row_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Return an equal weight in which each row of the weight has its own row of scales."""
    rows, total_rows = weight.block[0], weight.shape[0]
    if rows == 1:
        return weight
    return map_scales(weight, lambda grid: repeat_rows(grid, rows, total_rows), block=(1, weight.block[1]))


def slice_weight(weight: QuantizedWeight, tensor_slice: TensorSlice | None) -> QuantizedWeight:
    """Return the rows or columns of ``weight`` that ``tensor_slice`` selects; the whole weight for None. A cut within a group
    of columns gives smaller groups.
    """
    if tensor_slice is None:
        return weight
    start, stop = tensor_slice.start, tensor_slice.stop
    if tensor_slice.dim == 0:
        weight = with_row_scales(weight) if start % weight.block[0] else weight
        rows = weight.block[0]
        data, shape = weight.data[start:stop].contiguous(), (stop - start, weight.shape[1])
        return map_scales(weight, lambda grid: grid[start // rows : -(-stop // rows)], data=data, shape=shape)
    data = weight.elements.slice_columns(weight.data, weight.shape[1], start, stop).contiguous()
    shape, columns = (weight.shape[0], stop - start), weight.block[1]
    if weight.scales.shape[1] == 1:
        return replace(weight, data=data, shape=shape, block=(weight.block[0], stop - start))
    shared = math.gcd(columns, start)  # columns of the largest groups that begin where the slice does
    return map_scales(
        weight,
        lambda grid: grid.repeat_interleave(columns // shared, dim=1)[:, start // shared : -(-stop // shared)],
        data=data,
        shape=shape,
        block=(weight.block[0], shared),
    )


def pad_rows(weight: QuantizedWeight, rows: int) -> QuantizedWeight:
    """Return the weight with ``rows`` zero rows appended."""
    if not rows:
        return weight
    weight = with_row_scales(weight)
    padding = weight.elements.encode(torch.zeros(rows, weight.shape[1]))
    grid = (rows, weight.scales.shape[1])
    zeros = weight.zero_points
    return replace(
        weight,
        data=torch.cat((weight.data.view(torch.uint8), padding.view(torch.uint8))).view(weight.data.dtype),
        scales=torch.cat((weight.scales, weight.scales.new_ones(grid))),
        zero_points=None if zeros is None else torch.cat((zeros, zeros.new_zeros(grid))),
        shape=(weight.shape[0] + rows, weight.shape[1]),
    )


def stack_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate the rows of ``weights``. Return None if their formats differ in a way that one record can't express."""
    first = weights[0]
    if len(weights) == 1:
        return first
    compatible = all(
        weight.format == first.format
        and weight.shape[1] == first.shape[1]
        and weight.block[1] == first.block[1]
        and weight.activations == first.activations
        and weight.activation_group == first.activation_group
        and _same(weight.input_scale, first.input_scale)
        for weight in weights
    )
    if not compatible:
        return None
    rows = first.block[0]
    if any(weight.block[0] != rows for weight in weights) or any(weight.shape[0] % rows for weight in weights[:-1]):
        weights, rows = [with_row_scales(weight) for weight in weights], 1
    dtype = weights[0].scales.dtype
    for weight in weights:
        dtype = torch.promote_types(dtype, weight.scales.dtype)
    zeros = None
    if any(weight.zero_points is not None for weight in weights):
        zeros = torch.cat(
            [torch.zeros_like(w.scales, dtype=torch.int8) if w.zero_points is None else w.zero_points for w in weights]
        )
    return replace(
        first,
        data=torch.cat([weight.data.view(torch.uint8) for weight in weights]).view(first.data.dtype),
        scales=torch.cat([weight.scales.to(dtype) for weight in weights]),
        zero_points=zeros,
        block=(rows, first.block[1]),
        shape=(sum(weight.shape[0] for weight in weights), first.shape[1]),
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return a copy of ``weight`` with all tensors on ``device``, valid after the current stream's work."""

    def copied(tensor: Tensor) -> Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return result.copy_(tensor)

    return replace(
        weight,
        data=copied(weight.data),
        scales=copied(widen_scales(weight.scales, weight.block, weight.shape)),
        zero_points=None if weight.zero_points is None else copied(weight.zero_points),
        input_scale=None if weight.input_scale is None else copied(weight.input_scale),
    )
