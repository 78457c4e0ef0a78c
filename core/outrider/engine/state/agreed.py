"""Whole numbers that tensor-parallel ranks must have alike: those of the first one, in one record, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.model import ModelRanks


def agreed(ranks: ModelRanks, *values: Tensor) -> list[Tensor]:
    """``values`` [B, ...], int64 or bool, as the first tensor-parallel rank has them; one broadcast for all of them.

    Ranks compute the same from the same bits, but one that differs in the last of them must not decide otherwise.
    """
    if ranks.tensor is None:
        return list(values)
    batch = values[0].shape[0]
    record = torch.cat([value.reshape(batch, -1).to(torch.int64) for value in values], dim=1)
    ranks.agree(record)
    parts = record.split([value[0].numel() if batch else 0 for value in values], dim=1)
    return [part.reshape(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]
