"""Conversion of token positions to cache slots."""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(positions: Tensor, tables: Tensor, page_size: int) -> Tensor:
    """Return the cache slots int64 [B, Q] of ``positions`` int64 [B, Q] under block tables [B, pages].

    A slot is page * page size + offset. Positions beyond the table map to the reserved page 0; they belong to finished
    requests, whose tokens the host discards.
    """
    index = positions // page_size
    inside = index < tables.shape[1]
    page = tables.gather(1, index.clamp(max=tables.shape[1] - 1)).to(torch.int64)
    return torch.where(inside, page, 0) * page_size + positions % page_size
