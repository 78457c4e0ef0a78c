"""The random numbers of the interface, computed in numpy: Philox4x32-10 (Salmon et al., SC 2011) and Gumbel noise in
float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
SAMPLE, ACCEPT, DRAFT, RESIDUAL = range(4)
"""Lanes: what a draw is for."""


def uniforms(seeds: Tensor, positions: Tensor, lane: int, count: int) -> Tensor:
    """Return float64 in (0, 1) of shape ``seeds.shape + (count,)``. Value i is word i % 4 of block i // 4, its upper 23
    bits.
    """
    seed = seeds.numpy().astype(np.int64).view(np.uint64)[..., None]
    position = positions.numpy().astype(np.int64).view(np.uint64)[..., None]
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    words = list(np.broadcast_arrays(block, position & _MASK, position >> _HALF, np.uint64(lane)))
    key = [seed & _MASK, seed >> _HALF]
    for _ in range(_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _HALF) ^ words[1] ^ key[0],
            second & _MASK,
            (first >> _HALF) ^ words[3] ^ key[1],
            first & _MASK,
        ]
        key = [(part + step) & _MASK for part, step in zip(key, _WEYL, strict=True)]
    flat = np.stack(np.broadcast_arrays(*words), axis=-1).reshape(*seeds.shape, -1)[..., :count]
    return torch.from_numpy(((flat >> np.uint64(9)).astype(np.float64) + 0.5) / (1 << 23))


def gumbel(seeds: Tensor, positions: Tensor, lane: int, count: int) -> Tensor:
    """Return Gumbel noise of the shape that :func:`uniforms` returns."""
    return -torch.log(-torch.log(uniforms(seeds, positions, lane, count)))
