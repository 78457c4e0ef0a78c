"""Philox4x32-10 on torch tensors: random numbers that depend only on a key and a counter.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; constants and known-answer vectors as in Random123.
Integers live in int64 tensors and are kept below 2**32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUND_0, _ROUND_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def _multiply(constant: int, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of ``constant * value``. The signed product modulo 2**64 has the unsigned bits."""
    product = value * constant
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit words per counter. All arguments are int64 tensors below 2**32 that broadcast together."""
    c0, c1, c2, c3 = counter
    rounds = torch.arange(_ROUNDS, dtype=torch.int64, device=c0.device).view(-1, *[1] * key[0].dim())
    for k0, k1 in zip((key[0] + rounds * _WEYL_0) & _MASK, (key[1] + rounds * _WEYL_1) & _MASK, strict=True):
        high_0, low_0 = _multiply(_ROUND_0, c0)
        high_1, low_1 = _multiply(_ROUND_1, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
    return c0, c1, c2, c3


def uniforms(seeds: Tensor, positions: Tensor, lane: int, count: int) -> Tensor:
    """Return uniform float32 values in (0, 1), of shape ``seeds.shape + (count,)``.

    ``seeds`` (any int64) and ``positions`` (non-negative) have one shape; ``lane`` separates values for different purposes at
    one position. The value at index i depends on the seed, the position, the lane and i, and on nothing else.
    """
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=seeds.device)
    seed = seeds.to(torch.int64).unsqueeze(-1)
    position = positions.to(torch.int64).unsqueeze(-1)
    words = philox(
        (blocks, position & _MASK, (position >> 32) & _MASK, torch.full_like(blocks, lane)),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    flat = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :count]
    # 23 bits and the half after them fill a float32's mantissa. With one bit more, the largest would round up to 1, whose
    # Gumbel noise is infinite: one sample in 131 over a vocabulary of 128256 would then be an arbitrary token.
    return ((flat >> 9).to(torch.float32) + 0.5) * (1.0 / (1 << 23))
