"""From the tensors of one module, on the host, to a QuantizedWeight; and parts, stacks and padding of these.

All of it is exact: values are repacked and scales repeated, nothing is computed with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import ConfigError, QuantizedWeight
from outrider.model.cuts import Cut
from outrider.model.quantization.scheme import Scheme

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the columns of a word lie among its nibbles."""


class ActOrderError(ConfigError):
    """Columns of a weight are assigned to groups in another order than they lie in."""


def weight_of(scheme: Scheme, shape: tuple[int, int], held: Mapping[str, Tensor], *, ordered: bool) -> QuantizedWeight:
    """The weight that a module's tensors ``held`` (by the ends of their names) store.

    ``ordered``: raise :class:`ActOrderError` where columns of a group don't lie together; else each column gets its own
    scale then, which is right and takes more memory than the weight. Raises :class:`ConfigError` for contents that
    contradict each other.
    """
    if scheme.storage == "awq":
        return _awq(scheme, shape, held)
    if scheme.storage == "gptq":
        return _gptq(scheme, shape, held, ordered)
    grid, block = scheme.grid(shape), scheme.block_of(shape)
    if scheme.storage == "packed":
        if tuple(held["weight_shape"].tolist()) != shape:
            raise ConfigError(f"weight_shape is {held['weight_shape'].tolist()}, expected {list(shape)}")
        values = _unpacked(held["weight_packed"], scheme.bits, dim=1, count=shape[1])
        data = packed_halves(values) if scheme.bits == 4 else (values ^ 128).view(torch.int8)
    else:
        data = held["weight"]
    scales = _plain_scales(held[scheme.scale]).reshape(grid)
    zeros = held.get("weight_zero_point")
    if zeros is not None and scheme.storage == "packed" and scheme.packed_zeros:
        zeros = (_unpacked(zeros, scheme.bits, dim=0, count=grid[0]).to(torch.int16) - (1 << scheme.bits - 1)).to(torch.int8)
    if zeros is not None:
        zeros = zeros.reshape(grid)
    if scheme.block[0] == 0:  # one scale for all: what it's stacked with has others
        scales, block = _by_row(scales, shape[0], shape[0]), (1, block[1])
        zeros = None if zeros is None else _by_row(zeros, shape[0], shape[0])
    return _made(scheme, shape, data, scales, zeros, block, held.get("input_scale"))


def _made(
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


def _plain_scales(scales: Tensor) -> Tensor:
    """Powers of two in eight bits as float32; other scales as they are."""
    return scales.to(torch.float32) if scales.dtype == torch.float8_e8m0fnu else scales


def _unpacked(words: Tensor, bits: int, *, dim: int, count: int) -> Tensor:
    """The values of int32 ``words`` along ``dim``, lowest bits first, as uint8; the first ``count`` of them."""
    moved = words.movedim(dim, -1).contiguous().view(torch.uint8)  # bytes of a word: the lowest first
    if bits == 4:
        moved = torch.stack((moved & 15, moved >> 4), dim=-1).flatten(-2)
    return moved[..., :count].movedim(-1, dim).contiguous()


def packed_halves(values: Tensor) -> Tensor:
    """Values of four bits [out, in], in uint8, as two in a byte: [out, ceil(in / 2)]."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1), value=8)
    return values[:, 0::2] | values[:, 1::2] << 4


def unpacked_halves(data: Tensor, width: int) -> Tensor:
    """The reverse of :func:`packed_halves`."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)[:, :width]


def _awq(scheme: Scheme, shape: tuple[int, int], held: Mapping[str, Tensor]) -> QuantizedWeight:
    out = shape[0]

    def columns(words: Tensor) -> Tensor:
        values = _unpacked(words, 4, dim=1, count=words.shape[1] * 8).view(words.shape[0], -1, 8)
        return values[..., list(_AWQ_ORDER)].flatten(-2)[:, :out]

    zeros = None
    if "qzeros" in held:
        zeros = columns(held["qzeros"]).T.to(torch.int8) - 8
        if scheme.symmetric:
            if bool(zeros.any()):
                raise ConfigError("qzeros aren't 8 everywhere, but the config says that zero_point is false")
            zeros = None
    data = packed_halves(columns(held["qweight"]).T)
    return _made(scheme, shape, data, held["scales"].T, zeros, (1, scheme.block_of(shape)[1]), None)


def _gptq(scheme: Scheme, shape: tuple[int, int], held: Mapping[str, Tensor], ordered: bool) -> QuantizedWeight:
    (out, into), half, bits = shape, 1 << scheme.bits - 1, scheme.bits
    columns = scheme.block_of(shape)[1]
    values = _unpacked(held["qweight"], bits, dim=0, count=into).T
    scales, zeros = held["scales"].T, None
    if "qzeros" in held:
        stored = _unpacked(held["qzeros"], bits, dim=1, count=out).T.to(torch.int16)
        if scheme.symmetric:
            # Two generations of the format store another number, and the config's label of them can't be relied on.
            if not (bool((stored == half).all()) or bool((stored == half - 1).all())):
                raise ConfigError(f"qzeros aren't {half} or {half - 1} everywhere, but the config says sym")
        else:
            zeros = stored + scheme.zero_offset - half
            if int(zeros.max()) > 127:
                raise ConfigError(
                    f"qzeros stand for a zero point of {int(zeros.max()) + half}, expected at most {127 + half}"
                )
            zeros = zeros.to(torch.int8)
    groups = held.get("g_idx")
    if groups is not None:
        groups = groups.to(torch.int64)
        if into and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
            raise ConfigError(f"g_idx names groups {int(groups.min())} to {int(groups.max())}, there are {scales.shape[1]}")
        if not torch.equal(groups, torch.arange(into) // columns):
            if ordered:
                raise ActOrderError("g_idx assigns columns to groups in another order than they lie in (act-order, desc_act)")
            scales, columns = scales.index_select(1, groups), 1
            zeros = None if zeros is None else zeros.index_select(1, groups)
    data = packed_halves(values) if bits == 4 else (values.contiguous() ^ 128).view(torch.int8)
    return _made(scheme, shape, data, scales, zeros, (1, columns), None)


def _by_row(grid: Tensor, rows: int, total: int) -> Tensor:
    """A value for each ``rows`` rows → one for each of ``total``."""
    return grid.repeat_interleave(rows, dim=0)[:total].contiguous()


def by_row(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with scales for each row."""
    rows, total = weight.block[0], weight.shape[0]
    if rows == 1:
        return weight
    scales, zeros = _by_row(weight.scales, rows, total), weight.zero_points
    zeros = None if zeros is None else _by_row(zeros, rows, total)
    return replace(weight, scales=scales, zero_points=zeros, block=(1, weight.block[1]))


def narrowed(weight: QuantizedWeight, cut: Cut | None) -> QuantizedWeight:
    """Rows or columns of the weight."""
    if cut is None:
        return weight
    length = cut.stop - cut.start
    rows, columns = weight.block
    if cut.dim == 0:
        if cut.start % rows:
            weight, rows = by_row(weight), 1
        grid = slice(cut.start // rows, -(-cut.stop // rows))
        return replace(
            weight,
            data=weight.data[cut.start : cut.stop].contiguous(),
            scales=weight.scales[grid].contiguous(),
            zero_points=None if weight.zero_points is None else weight.zero_points[grid].contiguous(),
            shape=(length, weight.shape[1]),
        )
    scales, zeros = weight.scales, weight.zero_points
    if scales.shape[1] == 1:
        columns = length
    else:
        shared = math.gcd(columns, cut.start)
        across = slice(cut.start // shared, -(-cut.stop // shared))
        scales = scales.repeat_interleave(columns // shared, dim=1)[:, across].contiguous()
        zeros = None if zeros is None else zeros.repeat_interleave(columns // shared, dim=1)[:, across].contiguous()
        columns = shared
    if weight.format == "int4":
        data = packed_halves(unpacked_halves(weight.data, weight.shape[1])[:, cut.start : cut.stop])
    else:
        data = weight.data[:, cut.start : cut.stop]
    return replace(
        weight,
        data=data.contiguous(),
        scales=scales,
        zero_points=zeros,
        block=(rows, columns),
        shape=(weight.shape[0], length),
    )


def padded(weight: QuantizedWeight, rows: int) -> QuantizedWeight:
    """``rows`` rows of zeros behind the weight."""
    if not rows:
        return weight
    weight = by_row(weight)
    zero = 0x88 if weight.format == "int4" else 0
    more = torch.full((rows, weight.data.shape[1]), zero, dtype=torch.uint8).view(weight.data.dtype)
    grid = (rows, weight.scales.shape[1])
    zeros = weight.zero_points
    return replace(
        weight,
        data=torch.cat((weight.data.view(torch.uint8), more.view(torch.uint8))).view(weight.data.dtype),
        scales=torch.cat((weight.scales, weight.scales.new_ones(grid))),
        zero_points=None if zeros is None else torch.cat((zeros, zeros.new_zeros(grid))),
        shape=(weight.shape[0] + rows, weight.shape[1]),
    )


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The weights under one another as one; None where they are quantised in ways that one record can't say."""
    first = weights[0]
    if len(weights) == 1:
        return first
    alike = all(
        weight.format == first.format
        and weight.shape[1] == first.shape[1]
        and weight.block[1] == first.block[1]
        and weight.activations == first.activations
        and weight.activation_group == first.activation_group
        and _same(weight.input_scale, first.input_scale)
        for weight in weights
    )
    if not alike:
        return None
    rows = first.block[0]
    if any(weight.block[0] != rows for weight in weights) or any(weight.shape[0] % rows for weight in weights[:-1]):
        weights, rows = [by_row(weight) for weight in weights], 1
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
    """``scales`` as products take them: in float32 or wider where each row has one, else as they're stored.

    Libraries take scales of rows in float32 alone, and would have them converted for every product; there are few. Groups of
    columns have a share of the weight's bytes, and are read as they are.
    """
    by_row = block[1] == shape[1]
    return scales.to(torch.promote_types(scales.dtype, torch.float32)) if by_row else scales


def moved(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """The weight on a device, once the current stream has run."""

    def there(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return made.copy_(tensor)

    return replace(
        weight,
        data=there(weight.data),
        scales=there(wide_scales(weight.scales, weight.block, weight.shape)),
        zero_points=None if weight.zero_points is None else there(weight.zero_points),
        input_scale=None if weight.input_scale is None else there(weight.input_scale),
    )
