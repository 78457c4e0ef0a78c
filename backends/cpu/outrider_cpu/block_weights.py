"""BlockWeight: a weight of 4- or 8-bit integers with a scale per 32 columns, recovered from its float32 values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Columns of a weight that share a scale."""
TILE = 32
"""Rows of a weight in a tile."""
_PROBED_ROWS = 4
"""Rows that are checked before the whole weight is."""
_ROWS_AT_A_TIME = 4 * TILE
"""Rows that are converted at a time; they fit into the cache of a core."""


class BlockWeight(NamedTuple):
    """A weight in the layout of :mod:`outrider_cpu.block_functions`."""

    data: Tensor
    """uint8 [tiles, groups, bytes of a record]."""
    bits: int
    tiles: int
    groups: int


class _Blocks(NamedTuple):
    bits: int
    values: Tensor
    """uint8 or int8 [N, G, 32]."""
    scales: tuple[Tensor, ...]
    """float16 [N, G] each: the scales, then the minima if there are some."""


def pack_blocks(weight: Tensor) -> BlockWeight | None:
    """Return the float32 ``weight`` [N, K] in blocks, or None if some value isn't exactly one of 4- or 8-bit blocks.

    ``Q4_0``, ``Q4_1`` and ``Q8_0`` of GGUF have such values.
    """
    if weight.dtype is not torch.float32 or weight.dim() != 2 or weight.shape[0] % TILE or weight.shape[1] % GROUP:
        return None
    weight = weight.detach()
    if _recover(weight[:_PROBED_ROWS]) is None:
        return None
    parts: list[Tensor] = []
    bits = 0
    for rows in weight.split(_ROWS_AT_A_TIME):
        blocks = _recover(rows)
        if blocks is None or bits not in (0, blocks.bits):
            return None
        bits = blocks.bits
        parts.append(_to_records(blocks))
    return BlockWeight(torch.cat(parts), bits, weight.shape[0] // TILE, weight.shape[1] // GROUP)


def _recover(rows: Tensor) -> _Blocks | None:
    """Return the integers, scales and minima that give exactly the values of ``rows`` [N, K], or None."""
    grouped = rows.unflatten(1, (-1, GROUP))
    lowest, highest = grouped.aminmax(dim=2)
    magnitude = torch.maximum(highest, -lowest)
    signed = torch.where(-lowest < magnitude, -magnitude, magnitude)
    for step, minimum in (
        ((highest - lowest) / 15, lowest),  # Q4_1
        (signed / 8, -signed),  # Q4_0
        (magnitude / 127, None),  # Q8_0
        ((magnitude / 127).log2().ceil().exp2(), None),  # 8 bits with a power of two, which bfloat16 holds
    ):
        scale = step.half()
        wide = scale.float().unsqueeze(2)
        offsets = grouped if minimum is None else grouped - minimum.unsqueeze(2)
        values = (offsets * torch.where(wide == 0, 0, wide.reciprocal())).round_()
        made = values * wide if minimum is None else values * wide + minimum.unsqueeze(2)
        if not torch.equal(made, grouped):
            continue
        if minimum is None:
            return _Blocks(8, values.to(torch.int8), (scale,))
        if torch.equal(minimum.half().float(), minimum) and int(values.max()) < 1 << 4:
            return _Blocks(4, values.to(torch.uint8), (scale, minimum.half()))
    return None


def _to_records(blocks: _Blocks) -> Tensor:
    """Return the records uint8 [tiles, G, bytes] of whole tiles."""
    values = blocks.values
    halves = values.unflatten(2, (blocks.bits, -1, 2)).mT  # a word has even columns in its lower half, odd ones in its upper
    values = halves if blocks.bits == 8 else halves[..., 0::2] | halves[..., 1::2] << 4
    tiles, groups = values.shape[0] // TILE, values.shape[1]
    words = values.reshape(*blocks.values.shape[:2], -1).view(torch.int32).view(tiles, TILE, groups, blocks.bits)
    ordered = words.permute(0, 2, 3, 1).reshape(tiles, groups, -1).view(torch.uint8)
    scales = [each.view(tiles, TILE, groups).transpose(1, 2).contiguous().view(torch.uint8) for each in blocks.scales]
    return torch.cat((ordered, *scales), dim=2)
