"""Agreed values: integers that the first tensor-parallel rank broadcasts, so that all ranks decide alike."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.model import ModelRanks


def agree_values(ranks: ModelRanks, *values: Tensor) -> list[Tensor]:
    """Return ``values`` [B, ...], int64 or bool, of the first tensor-parallel rank, with one broadcast on the device.

    Ranks can differ in the last bits of floating-point results. They must not derive different tokens from them.
    """
    if ranks.tensor is None:
        return list(values)
    batch = values[0].shape[0]
    record = torch.cat([value.reshape(batch, -1).to(torch.int64) for value in values], dim=1)
    ranks.agree(record)
    parts = record.split([value[0].numel() if batch else 0 for value in values], dim=1)
    return [part.reshape(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]
