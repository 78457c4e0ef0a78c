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
    layout: int
    """Index of the GGUF type in the order in which :func:`_recover` tries them."""
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
    blocks = _recover(weight[:_PROBED_ROWS])
    parts: list[Tensor] = []
    for rows in weight.split(_ROWS_AT_A_TIME):
        bits = 0 if blocks is None else blocks.bits
        blocks = None if blocks is None else _recover(rows, blocks.layout)
        if blocks is None or bits != blocks.bits:
            return None
        parts.append(_to_records(blocks))
    return BlockWeight(torch.cat(parts), bits, weight.shape[0] // TILE, weight.shape[1] // GROUP)


def _recover(rows: Tensor, likely: int = 0) -> _Blocks | None:
    """Return the integers, scales and minima that give exactly the values of ``rows`` [N, K], or None. The layout
    ``likely`` is tried first.
    """
    grouped = rows.unflatten(1, (-1, GROUP))
    lowest, highest = grouped.amin(dim=2), grouped.amax(dim=2)  # faster than aminmax
    magnitude = torch.maximum(highest, -lowest)
    signed = torch.where(-lowest < magnitude, -magnitude, magnitude)
    layouts = (
        ((highest - lowest) / 15, lowest),  # Q4_1
        (signed / 8, -signed),  # Q4_0
        (magnitude / 127, None),  # Q8_0
        ((magnitude / 127).log2().ceil().exp2(), None),  # 8 bits with a power of two, which bfloat16 holds
    )
    for layout in sorted(range(len(layouts)), key=likely.__ne__):
        step, minimum = layouts[layout]
        scale = step.half()
        wide = scale.float().unsqueeze(2)
        offsets = grouped if minimum is None else grouped - minimum.unsqueeze(2)
        values = (offsets * torch.where(wide == 0, 0, wide.reciprocal())).round_()
        made = values * wide if minimum is None else values * wide + minimum.unsqueeze(2)
        if not torch.equal(made, grouped):
            continue
        if minimum is None:
            return _Blocks(layout, 8, values.to(torch.int8), (scale,))
        if torch.equal(minimum.half().float(), minimum) and int(values.max()) < 1 << 4:
            return _Blocks(layout, 4, values.to(torch.uint8), (scale, minimum.half()))
    return None


def _to_records(blocks: _Blocks) -> Tensor:
    """Return the records uint8 [tiles, G, bytes] of whole tiles."""
    fours = blocks.values.view(torch.int32)  # of columns; a word has even columns in its lower half, odd ones in its upper
    if blocks.bits == 8:
        words = fours & ~0x00FFFF00 | fours >> 8 & 0xFF00 | (fours & 0xFF00) << 8
    else:
        pairs = fours & 0x0F0F | fours >> 12 & 0xF0F0
        pairs = pairs & 0x00FF | (pairs & 0xFF00) << 8
        words = pairs[..., 0::2] | pairs[..., 1::2] << 8
    tiles, groups = words.shape[0] // TILE, words.shape[1]
    ordered = words.view(tiles, TILE, -1).mT.contiguous().view(tiles, groups, -1).view(torch.uint8)
    scales = [each.view(tiles, TILE, groups).transpose(1, 2).contiguous().view(torch.uint8) for each in blocks.scales]
    return torch.cat((ordered, *scales), dim=2)
