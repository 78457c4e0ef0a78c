"""EAGLE (Li et al. 2024): a one-layer head drafts on the target's features.

The pair at position i is the target's hidden state at i and the token at i+1; its output predicts the hidden state at
i+1, which the target's own output head turns into a guess of the token at i+2. Draft-extend runs the accepted pairs with
the target's true features and yields the first draft token of the next iteration, so K draft tokens cost K passes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import EagleHead, ForwardInput, KVCache
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer, RelaySpec
from outrider.speculative.slots import slots_of


class EagleProposer(Proposer):
    """A chain of K tokens from an EAGLE head.

    Relays, for each request, the first draft token, the head's hidden state behind it and, when the request samples, the
    distribution that the token was drawn from.
    """

    name = "eagle"

    def __init__(self, head: EagleHead, *, draft_tokens: int) -> None:
        if draft_tokens < 1:
            raise ConfigError(f"draft_tokens is {draft_tokens}; an EAGLE chain has at least 1 token")
        self._head = head
        self._draft_tokens = draft_tokens
        self._cache: KVCache | None = None
        self._page_size = 0

    @property
    def draft_tokens(self) -> int:
        """K."""
        return self._draft_tokens

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """First draft token, hidden state behind it, distribution that it was drawn from."""
        config = self._head.config
        return (
            RelaySpec("token", (), torch.int64),
            RelaySpec("hidden", (config.hidden_size,), self._head.target.dtype),
            RelaySpec("probs", (self._head.target.config.vocab_size,), torch.float32),
        )

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """One layer of keys and values."""
        config = self._head.config
        self._page_size = page_size
        self._cache = KVCache.allocate(
            1,
            config.num_kv_heads,
            config.head_size,
            pages=pages,
            page_size=page_size,
            dtype=self._head.target.dtype,
            device=backend.device,
        )

    @property
    def head(self) -> EagleHead:
        """The head that drafts."""
        return self._head

    @property
    def cache(self) -> KVCache:
        """The head's cache; exists from :meth:`allocate` on."""
        if self._cache is None:
            raise ConfigError("the EAGLE proposer has no cache yet; the engine allocates it")
        return self._cache

    def draft(self, inputs: DraftInputs) -> Draft:
        """K - 1 passes: the first token comes with the relay."""
        token, hidden = inputs.relay["token"], inputs.relay["hidden"]
        tokens, probs = [token], [inputs.relay["probs"]]
        batch = token.shape[0]
        query_start = torch.arange(batch + 1, dtype=torch.int32, device=token.device)
        for step in range(1, self._draft_tokens):
            positions = inputs.lens + (step - 1)
            attention = AttentionMetadata(
                query_start=query_start,
                kv_lens=(inputs.lens + step).to(torch.int32),
                block_table=inputs.tables,
                max_query=1,
                max_kv=inputs.max_kv,
            )
            slots = slots_of(positions.unsqueeze(1), inputs.tables, self._page_size).flatten()
            hidden = self._head.forward(ForwardInput(token, positions, slots, attention), hidden, self.cache)
            token, drawn_from = self._draw(hidden, inputs.temperature, inputs.seeds, inputs.lens + 1 + step, inputs.sampling)
            tokens.append(token)
            probs.append(drawn_from)
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if inputs.sampling else None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """One pass over the accepted pairs."""
        flat = ForwardInput(inputs.tokens, inputs.positions, inputs.slots, inputs.attention)
        hidden = self._head.forward(flat, inputs.hidden, self.cache)[inputs.last]
        token, probs = self._draw(hidden, inputs.temperature, inputs.seeds, inputs.next_positions, inputs.sampling)
        relay = {"token": token, "hidden": hidden}
        if inputs.sampling:
            relay["probs"] = probs
        return relay

    def _draw(
        self, hidden: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, sampling: bool
    ) -> tuple[Tensor, Tensor]:
        logits = self._head.logits(hidden)
        token = self._head.kernels.sample(logits, temperature, seeds, positions, draft=True)
        if not sampling:
            return token, logits
        # Rows at temperature 0 don't read their distribution; 1 keeps the division finite for them.
        scale = torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
        return token, torch.softmax(logits.float() / scale, dim=-1)
