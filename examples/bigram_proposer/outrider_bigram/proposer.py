"""Drafts along a table of successors that is kept on the device.

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
    """One successor a token, the latest seen. All requests share the table: what one wrote, another may draft."""

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
        """The last token of a call: the first one of the next call comes after it."""
        return (RelaySpec("last", (), torch.int64),)

    @property
    def reads_hidden(self) -> bool:
        """It learns from tokens alone, so the target needn't compute every state of a prompt."""
        return False

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Entry V is written where there is nothing to learn, and never read."""
        self._successor = torch.zeros(self._vocab_size + 1, dtype=torch.int64, device=backend.device)

    def draft(self, inputs: DraftInputs) -> Draft:
        token, drafted = inputs.last_tokens, []
        for _ in range(self._draft_tokens):
            token = self._successor[token]
            drafted.append(token)
        tokens = torch.stack(drafted, dim=1)
        # It is certain of its token: a distribution of one point.
        probs = F.one_hot(tokens, self._vocab_size).to(torch.float32) if inputs.sampling else None
        return Draft(tokens, probs)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Learn each pair of neighbours; rows of padding teach nothing."""
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
        real = row <= inputs.last[request.clamp(max=inputs.last.shape[0] - 1)]
        self._successor[torch.where(real & known, before, self._vocab_size)] = after
        return {"last": after[inputs.last]}
