"""Sampled tokens as distributions: many seeds over a small vocabulary, compared with float64 probabilities by a
chi-square test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LIMIT_SIGMAS = 5.0
"""Standard deviations of the limit: a right backend fails about once in three million tests."""
_MIN_EXPECTED_COUNT = 8.0
ROWS = 12_000


@dataclass(frozen=True, slots=True)
class Shaping:
    """Temperature, top-k, top-p and min-p of a request's samples."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the float64 probabilities of ``logits`` [..., V] after top-k, top-p and min-p, renormalised after each."""
        rows = [self._row(row) for row in logits.double().reshape(-1, logits.shape[-1])]
        return torch.stack(rows).view(logits.shape)

    def _row(self, logits: Tensor) -> Tensor:
        probs = torch.softmax(logits / self.temperature, dim=-1)
        ranked, order = torch.sort(probs, descending=True, stable=True)
        if self.top_k:
            ranked[self.top_k :] = 0
            ranked /= ranked.sum()
        if self.top_p < 1:
            ranked[ranked.cumsum(0) - ranked >= self.top_p] = 0
            ranked /= ranked.sum()
        ranked[ranked < self.min_p * ranked[0]] = 0
        ranked /= ranked.sum()
        return torch.zeros_like(ranked).scatter(0, order, ranked)

    def __str__(self) -> str:
        return f"t={self.temperature:g} k={self.top_k} p={self.top_p:g} min-p={self.min_p:g}"


SHAPINGS: Sequence[Shaping] = (
    Shaping(0.4),
    Shaping(1.0),
    Shaping(1.7),
    Shaping(0.8, top_k=4),
    Shaping(1.3, top_p=0.8),
    Shaping(1.0, min_p=0.12),
    Shaping(1.5, top_k=6, top_p=0.9, min_p=0.05),
)


def check_distribution(tokens: Tensor, law: Tensor, what: str) -> None:
    """Fail unless ``tokens`` [n] follow the probabilities ``law`` [V]. A token with probability 0 must never occur."""
    total = tokens.numel()
    assert total >= 400, f"{what}: {total} draws are too few to judge; there should be far more"
    assert ((tokens >= 0) & (tokens < law.numel())).all(), f"{what}: a token outside of the vocabulary"
    seen = torch.bincount(tokens, minlength=law.numel()).double()
    never = seen[law == 0]
    assert not never.any(), f"{what}: drew {int(never.sum())} times what has no probability: {seen.tolist()}"
    statistic, limit = _chi_square(seen, law * total)
    assert statistic <= limit, (
        f"{what}: {total} draws don't follow the law (chi-square {statistic:.1f}, at most {limit:.1f}): "
        f"found {[round(float(x), 4) for x in seen / total]}, expected {[round(float(x), 4) for x in law]}"
    )


def check_independence(one: Tensor, other: Tensor, law_one: Tensor, law_other: Tensor, what: str) -> None:
    """Fail unless the two tokens of each row look independent, each with its own probabilities."""
    joint = (law_one.unsqueeze(1) * law_other).flatten()
    statistic, limit = _chi_square(
        torch.bincount(one * law_other.numel() + other, minlength=joint.numel()).double(), joint * one.numel()
    )
    assert statistic <= limit, f"{what} aren't independent (chi-square {statistic:.1f}, at most {limit:.1f})"


def _chi_square(seen: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the statistic, with rare cells joined, and its limit (Wilson and Hilferty 1931)."""
    common = expected >= _MIN_EXPECTED_COUNT
    cells = torch.cat((seen[common], seen[~common].sum().view(1)))
    means = torch.cat((expected[common], expected[~common].sum().view(1)))
    kept = means > 0
    statistic = float(((cells - means).square()[kept] / means[kept]).sum())
    freedom = max(int(kept.sum()) - 1, 1)
    spread = 2 / (9 * freedom)
    return statistic, float(freedom * (1 - spread + _LIMIT_SIGMAS * spread**0.5) ** 3)
