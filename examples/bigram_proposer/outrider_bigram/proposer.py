"""BigramProposer: drafts along a table of token successors on the device.

Letters as in `outrider.speculative.proposer`: B requests, M rows of a flat token batch, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Backend
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer, RelaySpec


class BigramProposer(Proposer):
    """Remembers the latest successor of each token. All requests share the table, so one may draft what another wrote."""

    name = "bigram"

    def __init__(self, *, vocab_size: int, draft_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._draft_tokens = draft_tokens
        self._successor = torch.empty(0, dtype=torch.int64)

    @property
    def depth(self) -> int:
        return self._draft_tokens

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The last token of a call, which precedes the first token of the next call."""
        return (RelaySpec("last", (), torch.int64),)

    @property
    def reads_hidden(self) -> bool:
        """False: the proposer learns from tokens only, so the target needn't compute every hidden state of a prompt."""
        return False

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate V + 1 entries. Entry V receives the writes of padding and is never read."""
        self._successor = torch.zeros(self._vocab_size + 1, dtype=torch.int64, device=backend.device)

    def draft(self, inputs: DraftInputs) -> Draft:
        token, drafted = inputs.last_tokens, []
        for _ in range(self._draft_tokens):
            token = self._successor[token]
            drafted.append(token)
        tokens = torch.stack(drafted, dim=1)
        # A deterministic draft is a one-point distribution.
        probs = F.one_hot(tokens, self._vocab_size).to(torch.float32) if inputs.sampling else None
        return Draft(tokens, probs)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Learn each pair of adjacent tokens, except for padding."""
        after = inputs.tokens
        if inputs.prompt is not None:
            before, known = inputs.prompt, torch.ones_like(after, dtype=torch.bool)
        else:
            before = after.roll(1)
            known = torch.ones_like(after, dtype=torch.bool)
            first = inputs.attention.query_start[:-1].to(torch.int64).clamp(max=after.shape[0] - 1)
            before = before.scatter(0, first, inputs.relay["last"])
            known = known.scatter(0, first, inputs.continues)
        row = torch.arange(after.shape[0], device=after.device)
        request = torch.searchsorted(inputs.attention.query_start[1:].to(torch.int64), row, right=True)
        is_valid = row <= inputs.last[request.clamp(max=inputs.last.shape[0] - 1)]
        self._successor[torch.where(is_valid & known, before, self._vocab_size)] = after
        return {"last": after[inputs.last]}
