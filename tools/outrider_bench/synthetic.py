"""Synthetic acceptance, for measurements: the number of accepted draft tokens is decided in advance, the text has no meaning.

Only benchmarks make a model with these kernels. The name of the kernels says so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import KernelSet, WrappedKernels
from outrider_bench.acceptance import acceptance_rates

_LAST_HASH = 0xFFFF
_REQUEST_STRIDE = 257
"""Distance between the table rows of neighbouring requests; odd, so that 65,536 requests start at different rows."""
_MIN_REQUESTS = 1024
_HASH_ROUNDS = ((7, 0x2993), (5, 0xE877), (9, 0x0235))
"""Shifts and factors of a bijective hash of 16 bits without a pattern among neighbours."""


class _AcceptanceTable(NamedTuple):
    """Random acceptance results, decided in advance, so that an iteration only launches two more operations."""

    by_position: Tensor
    """Results by request and position, int64 [requests, positions, 2 K + 2]. A row has the number of accepted draft tokens, K
    + 1 tokens (0 at an accepted draft token, then the token of the target, then -1), and K factors of the draft tokens (1 if
    accepted). All requests share one table, and each starts at a row of its own.
    """
    requests: Tensor
    """The numbers 0, 1, 2 and so on, int64 [requests]."""


class _SyntheticKernels(WrappedKernels):
    def __init__(self, inner: KernelSet, rates: tuple[float, ...], described: str, context: int) -> None:
        super().__init__(inner)
        self.name = f"{inner.name}, synthetic acceptance of {described}"
        self.rates, self.context = rates, context
        self.tables: dict[tuple[int, int, int, torch.device], _AcceptanceTable] = {}

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the real verification, so that its cost is measured, then replace its result with two more launches."""
        super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
        return self._replaced(target_logits, draft_tokens, positions)

    def verify_checked(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        found: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Replace the result of verification as :meth:`verify_chain` does, but only if there are draft tokens."""
        made = self.inner.verify_checked(target_logits, draft_tokens, temperature, seeds, positions, found)
        return self._replaced(target_logits, draft_tokens, positions) if draft_tokens.shape[1] else made

    def _replaced(self, logits: Tensor, draft_tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, drafted = draft_tokens.shape
        most = max(_MIN_REQUESTS, 1 << (batch - 1).bit_length())
        key = (most, drafted, logits.shape[-1], draft_tokens.device)
        if key not in self.tables:
            self.tables[key] = _make_table(self.rates, self.context + drafted + 1, *key)
        table = self.tables[key]
        made = table.by_position[table.requests[:batch], positions]
        tokens = made[:, 1 : drafted + 2]
        tokens[:, :drafted].addcmul_(made[:, drafted + 2 :], draft_tokens)
        return tokens, made[:, 0]


def _make_table(
    rates: tuple[float, ...], length: int, most: int, drafted: int, vocabulary: int, device: torch.device
) -> _AcceptanceTable:
    """Return the table of acceptance results for ``most`` requests and ``length`` positions, on ``device``.

    A hash of request and position is the random number. Draft token i is accepted if the number is below ``rates[i]``, the
    chance that it and all before it are accepted. The hash also determines the token after the accepted ones.
    """
    hashed = torch.arange(_LAST_HASH + 1, device=device)
    for shift, factor in _HASH_ROUNDS:
        hashed = (hashed ^ hashed >> shift) * factor & _LAST_HASH
    hashed ^= hashed >> 10
    accepted = sum((hashed < round(rate * 65536)).to(torch.int64) for rate in rates[:drafted]) + torch.zeros_like(hashed)
    following = hashed.flip(0) * 40503 % vocabulary
    index, count = torch.arange(drafted + 1, device=device), accepted.unsqueeze(1)
    others = torch.where(index < count, 0, torch.where(index == count, following.unsqueeze(1), -1))
    drafts = (index[:drafted] < count).to(torch.int64)
    rows = torch.cat((count, others, drafts), dim=1)
    count_rows, width = length + most * _REQUEST_STRIDE, rows.shape[1]
    table = rows.repeat(-(-count_rows // (_LAST_HASH + 1)), 1)
    by_position = table.as_strided((most, length, width), (_REQUEST_STRIDE * width, width, 1))
    return _AcceptanceTable(by_position, torch.arange(most, device=device))


def with_synthetic_acceptance(
    kernels: KernelSet, accept_length: str | float, draft_tokens: int, *, context: int
) -> KernelSet:
    """Return ``kernels`` with synthetic verification of chains, by the chances of :func:`acceptance_rates`.

    The random number is a hash of request and position. ``context``: maximum length of a text in tokens. A shorter chain is
    accepted as far as the whole one would be, so it yields fewer tokens. Trees get the real verification. Raises the errors
    of :func:`acceptance_rates`.
    """
    rates = acceptance_rates(accept_length, draft_tokens)
    return _SyntheticKernels(kernels, rates, f"{accept_length} ({'/'.join(f'{rate:.3g}' for rate in rates)})", context)
