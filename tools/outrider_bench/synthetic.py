"""Synthetic acceptance, for measurements: the number of accepted draft tokens is decided in advance, the text has no meaning.

Only benchmarks make a model with these kernels. The name of the kernels says so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import KernelSet, WrappedKernels
from outrider_bench.acceptance import rates_of_requests

_LAST_HASH = 0xFFFF
_REQUEST_STRIDE = 257
"""Distance between the table rows of neighbouring requests; odd, so that 65,536 requests start at different rows."""
_MIN_REQUESTS = 1024
_HASH_ROUNDS = ((7, 0x2993), (5, 0xE877), (9, 0x0235))
"""Shifts and factors of a bijective hash of 16 bits without a pattern among neighbours."""


class _AcceptanceTable(NamedTuple):
    """Random acceptance results, decided in advance, so that an iteration only launches two more operations."""

    by_position: Tensor
    """Results by kind, request and position, int64 [kinds, requests, positions, 2 K + 2]. A row has the number of accepted
    draft tokens, K + 1 tokens (0 at an accepted draft token, then the token of the target, then -1), and K factors of the
    draft tokens (1 if accepted). All requests of a kind share one table, and each starts at a row of its own.
    """
    requests: Tensor
    """The numbers 0, 1, 2 and so on, int64 [requests]."""
    kinds: Tensor
    """The number of each request's chances, 0, 1 and so on in turn, int64 [requests]."""


class _SyntheticKernels(WrappedKernels):
    def __init__(
        self, inner: KernelSet, rates: tuple[tuple[float, ...], ...], described: str, context: int, by_request: bool
    ) -> None:
        super().__init__(inner)
        self._by_request = by_request
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
        made = table.by_position[table.kinds[:batch], table.requests[:batch], positions]
        tokens, accepted = made[:, 1 : drafted + 2], made[:, 0]
        tokens[:, :drafted].addcmul_(made[:, drafted + 2 :], draft_tokens)
        if not self._by_request:
            return tokens, accepted
        following = tokens.gather(1, accepted.unsqueeze(1))
        accepted = torch.minimum(accepted, (draft_tokens >= 0).sum(1))  # draft tokens after the verified ones are -1
        last = accepted.unsqueeze(1)
        lane = table.requests[: drafted + 1]
        return torch.where(lane < last, tokens, torch.where(lane == last, following, -1)), accepted


def _make_table(
    rates: tuple[tuple[float, ...], ...], length: int, most: int, drafted: int, vocabulary: int, device: torch.device
) -> _AcceptanceTable:
    """Return the table of acceptance results for ``most`` requests and ``length`` positions, on ``device``.

    A hash of request and position is the random number. Draft token i is accepted if the number is below ``rates[kind][i]``,
    the chance that it and all before it are accepted. The hash also determines the token after the accepted ones.
    """
    hashed = torch.arange(_LAST_HASH + 1, device=device)
    for shift, factor in _HASH_ROUNDS:
        hashed = (hashed ^ hashed >> shift) * factor & _LAST_HASH
    hashed ^= hashed >> 10
    # Chances are scalars: a tensor of them would be a copy from the host, which a graph can't capture.
    accepted = [[hashed < round(rate * 65536) for rate in kind[:drafted]] for kind in rates]
    count = torch.stack([sum(drafts, start=torch.zeros_like(hashed)) for drafts in accepted]).unsqueeze(-1)
    following = hashed.flip(0) * 40503 % vocabulary
    index = torch.arange(drafted + 1, device=device)
    others = torch.where(index < count, 0, torch.where(index == count, following.unsqueeze(1), -1))
    drafts = (index[:drafted] < count).to(torch.int64)
    rows = torch.cat((count, others, drafts), dim=-1)
    count_rows, width = length + most * _REQUEST_STRIDE, rows.shape[-1]
    table = rows.repeat(1, -(-count_rows // (_LAST_HASH + 1)), 1)
    sizes, strides = (len(rates), most, length, width), (table.stride(0), _REQUEST_STRIDE * width, width, 1)
    requests = torch.arange(most, device=device)
    return _AcceptanceTable(table.as_strided(sizes, strides), requests, requests % len(rates))


def with_synthetic_acceptance(
    kernels: KernelSet, accept_length: str | float, draft_tokens: int, *, context: int, by_request: bool = False
) -> KernelSet:
    """Return ``kernels`` with synthetic verification of chains, by the chances of :func:`rates_of_requests`, which the
    requests of a batch have in turn.

    The random number is a hash of request and position. ``context``: maximum length of a text in tokens. A shorter chain is
    accepted as far as the whole one would be, so it yields fewer tokens. Trees get the real verification. ``by_request``:
    each request may have a draft length of its own. Raises the errors of :func:`rates_of_requests`.
    """
    rates = rates_of_requests(accept_length, draft_tokens)
    listed = ", ".join("/".join(f"{rate:.3g}" for rate in kind) for kind in rates)
    return _SyntheticKernels(kernels, rates, f"{accept_length} ({listed})", context, by_request)
