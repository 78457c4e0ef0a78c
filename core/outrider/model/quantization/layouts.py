"""Conversion of a module's stored tensors, on the host, to a QuantizedWeight, and slicing, stacking and padding of these.

Every conversion is exact: values are repacked and scales are repeated, without arithmetic on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import ConfigError, QuantizedWeight
from outrider.device.kernels.formats import pack_nibbles
from outrider.model.pieces import TensorSlice
from outrider.model.quantization.scheme import Scheme

_AWQ_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each column among the nibbles of an AWQ word."""


class ActOrderError(ConfigError):
    """The columns of a weight are assigned to groups in another order than they are stored."""


def weight_of(scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, Tensor], *, grouped: bool) -> QuantizedWeight:
    """Return the weight that a module's ``tensors``, by the suffix of their names, store.

    ``grouped`` requires that the columns of each group are contiguous, and raises :class:`ActOrderError` otherwise. Without
    it, such a weight gets one scale per column, which is exact but needs more memory than the weight. Raises
    :class:`ConfigError` for contradictory contents.
    """
    if scheme.storage == "awq":
        return _awq(scheme, shape, tensors)
    if scheme.storage == "gptq":
        return _gptq(scheme, shape, tensors, grouped)
    grid, block = scheme.grid(shape), scheme.block_of(shape)
    if scheme.storage == "packed":
        if tuple(tensors["weight_shape"].tolist()) != shape:
            raise ConfigError(f"weight_shape is {tensors['weight_shape'].tolist()}, expected {list(shape)}")
        values = _unpack(tensors["weight_packed"], scheme.bits, dim=1, count=shape[1])
        data = pack_nibbles(values) if scheme.bits == 4 else (values ^ 128).view(torch.int8)
    else:
        data = tensors["weight"]
    scales = _float_scales(tensors[scheme.scale]).reshape(grid)
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and scheme.storage == "packed" and scheme.packed_zeros:
        zeros = (_unpack(zeros, scheme.bits, dim=0, count=grid[0]).to(torch.int16) - (1 << scheme.bits - 1)).to(torch.int8)
    if zeros is not None:
        zeros = zeros.reshape(grid)
    if scheme.block[0] == 0:  # repeat a single scale per row, because the weight may be stacked with others
        scales, block = _repeat_rows(scales, shape[0], shape[0]), (1, block[1])
        zeros = None if zeros is None else _repeat_rows(zeros, shape[0], shape[0])
    return _quantized_weight(scheme, shape, data, scales, zeros, block, tensors.get("input_scale"))


def _quantized_weight(
    scheme: Scheme,
    shape: tuple[int, int],
    data: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    block: tuple[int, int],
    input_scale: Tensor | None,
) -> QuantizedWeight:
    activations = scheme.activations
    if input_scale is not None:
        input_scale = input_scale.reshape(1).to(torch.float32)
        if not (math.isfinite(float(input_scale)) and float(input_scale) > 0):
            raise ConfigError(f"input_scale is {float(input_scale)}, expected a number above 0")
    return QuantizedWeight(
        format=scheme.format,
        data=data.contiguous(),
        scales=scales.contiguous(),
        block=block,
        shape=shape,
        zero_points=None if zeros is None else zeros.contiguous(),
        activations=None if activations is None else activations.format,
        activation_group=0 if activations is None else activations.group,
        input_scale=input_scale,
    )


def _float_scales(scales: Tensor) -> Tensor:
    """Return scales stored as 8-bit powers of two as float32, and other scales unchanged."""
    return scales.to(torch.float32) if scales.dtype == torch.float8_e8m0fnu else scales


def _unpack(words: Tensor, bits: int, *, dim: int, count: int) -> Tensor:
    """Unpack int32 ``words`` along ``dim``, lowest bits first, into ``count`` uint8 values."""
    values = words.movedim(dim, -1).contiguous().view(torch.uint8)  # little-endian bytes of each word
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    return values[..., :count].movedim(-1, dim).contiguous()


def _awq(scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    out_features = shape[0]

    def unpack_columns(words: Tensor) -> Tensor:
        values = _unpack(words, 4, dim=1, count=words.shape[1] * 8).view(words.shape[0], -1, 8)
        return values[..., list(_AWQ_NIBBLE_ORDER)].flatten(-2)[:, :out_features]

    zeros = None
    if "qzeros" in tensors:
        zeros = unpack_columns(tensors["qzeros"]).T.to(torch.int8) - 8
        if scheme.symmetric:
            if bool(zeros.any()):
                raise ConfigError("qzeros aren't 8 everywhere, but the config says that zero_point is false")
            zeros = None
    data = pack_nibbles(unpack_columns(tensors["qweight"]).T)
    return _quantized_weight(scheme, shape, data, tensors["scales"].T, zeros, (1, scheme.block_of(shape)[1]), None)


def _gptq(scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, Tensor], grouped: bool) -> QuantizedWeight:
    (out_features, in_features), zero_value, bits = shape, 1 << scheme.bits - 1, scheme.bits
    group_columns = scheme.block_of(shape)[1]
    values = _unpack(tensors["qweight"], bits, dim=0, count=in_features).T
    scales, zeros = tensors["scales"].T, None
    if "qzeros" in tensors:
        stored = _unpack(tensors["qzeros"], bits, dim=1, count=out_features).T.to(torch.int16)
        if scheme.symmetric:
            # The two versions of the format store different numbers, and configs often name the wrong version.
            if not (bool((stored == zero_value).all()) or bool((stored == zero_value - 1).all())):
                raise ConfigError(f"qzeros aren't {zero_value} or {zero_value - 1} everywhere, but the config says sym")
        else:
            zeros = stored + scheme.zero_offset - zero_value
            if int(zeros.max()) > 127:
                raise ConfigError(
                    f"qzeros stand for a zero point of {int(zeros.max()) + zero_value}, expected at most {127 + zero_value}"
                )
            zeros = zeros.to(torch.int8)
    groups = tensors.get("g_idx")
    if groups is not None:
        groups = groups.to(torch.int64)
        if in_features and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
            raise ConfigError(f"g_idx names groups {int(groups.min())} to {int(groups.max())}, there are {scales.shape[1]}")
        if not torch.equal(groups, torch.arange(in_features) // group_columns):
            if grouped:
                raise ActOrderError("g_idx assigns columns to groups in another order than they lie in (act-order, desc_act)")
            scales, group_columns = scales.index_select(1, groups), 1
            zeros = None if zeros is None else zeros.index_select(1, groups)
    data = pack_nibbles(values) if bits == 4 else (values.contiguous() ^ 128).view(torch.int8)
    return _quantized_weight(scheme, shape, data, scales, zeros, (1, group_columns), None)


def _repeat_rows(grid: Tensor, rows: int, total: int) -> Tensor:
    """Repeat each row of a grid of scales ``rows`` times and cut the result to ``total`` rows."""
    return grid.repeat_interleave(rows, dim=0)[:total].contiguous()


def with_row_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Return an equal weight in which each row of the weight has its own row of scales."""
    rows, total_rows = weight.block[0], weight.shape[0]
    if rows == 1:
        return weight
    scales, zeros = _repeat_rows(weight.scales, rows, total_rows), weight.zero_points
    zeros = None if zeros is None else _repeat_rows(zeros, rows, total_rows)
    return replace(weight, scales=scales, zero_points=zeros, block=(1, weight.block[1]))


def slice_weight(weight: QuantizedWeight, tensor_slice: TensorSlice | None) -> QuantizedWeight:
    """Return the rows or columns of the weight that ``tensor_slice`` selects."""
    if tensor_slice is None:
        return weight
    length = tensor_slice.stop - tensor_slice.start
    rows, columns = weight.block
    if tensor_slice.dim == 0:
        if tensor_slice.start % rows:
            weight, rows = with_row_scales(weight), 1
        grid = slice(tensor_slice.start // rows, -(-tensor_slice.stop // rows))
        return replace(
            weight,
            data=weight.data[tensor_slice.start : tensor_slice.stop].contiguous(),
            scales=weight.scales[grid].contiguous(),
            zero_points=None if weight.zero_points is None else weight.zero_points[grid].contiguous(),
            shape=(length, weight.shape[1]),
        )
    scales, zeros = weight.scales, weight.zero_points
    if scales.shape[1] == 1:
        columns = length
    else:
        shared = math.gcd(columns, tensor_slice.start)
        grid_columns = slice(tensor_slice.start // shared, -(-tensor_slice.stop // shared))
        scales = scales.repeat_interleave(columns // shared, dim=1)[:, grid_columns].contiguous()
        zeros = None if zeros is None else zeros.repeat_interleave(columns // shared, dim=1)[:, grid_columns].contiguous()
        columns = shared
    data = weight.elements.slice_columns(weight.data, weight.shape[1], tensor_slice.start, tensor_slice.stop)
    return replace(
        weight,
        data=data.contiguous(),
        scales=scales,
        zero_points=zeros,
        block=(rows, columns),
        shape=(weight.shape[0], length),
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


def wide_scales(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Return ``scales`` in the dtype that product kernels expect.

    Libraries take per-row scales in float32 only, and would convert others for every product, so these few scales are
    converted once. Scales of column groups stay in their stored dtype, because they are a large share of the weight's bytes.
    """
    per_row = block[1] == shape[1]
    return scales.to(torch.promote_types(scales.dtype, torch.float32)) if per_row else scales


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return the weight on ``device``, valid after the current stream's work."""

    def copied(tensor: Tensor) -> Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return result.copy_(tensor)

    return replace(
        weight,
        data=copied(weight.data),
        scales=copied(wide_scales(weight.scales, weight.block, weight.shape)),
        zero_points=None if weight.zero_points is None else copied(weight.zero_points),
        input_scale=None if weight.input_scale is None else copied(weight.input_scale),
    )
