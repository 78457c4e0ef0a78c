"""P-EAGLE (Hui et al. 2026): an EAGLE-3 head that drafts all tokens in one pass, which is the pass of draft-extend.

The pairs of an EAGLE head (:mod:`outrider.speculative.eagle`) are followed by mask positions, whose token and state are
unknown: they have the mask token and a learned state. The last accepted pair predicts the first draft token, and each mask
position predicts the next one. Draft-extend runs the accepted pairs and K - 1 mask positions at once; the output head then
computes the draft from their states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import ForwardInput, PEagleHead
from outrider.speculative.eagle import HeadDrafts
from outrider.speculative.proposer import (
    MAX_BATCH_REQUESTS,
    Draft,
    DraftInputs,
    ExtendInputs,
    RelaySpec,
    sample_draft_rows,
    slots_of,
    text_rope_positions,
)

_MAX_TOKENS = 63


class PEagleProposer(HeadDrafts):
    """A proposer of chains of K tokens from a P-EAGLE head. It relays for each request the K head states that predict them.

    Keys and values of mask positions use the slots after the accepted tokens. The next pass overwrites all of them with the
    accepted pairs.
    """

    head: PEagleHead
    name = "peagle"

    def __init__(self, head: PEagleHead, *, draft_tokens: int) -> None:
        if not 1 <= draft_tokens <= _MAX_TOKENS:
            raise ConfigError(f"draft_tokens is {draft_tokens}; expected 1 to {_MAX_TOKENS} from a P-EAGLE head")
        super().__init__(head.config, head.target.dtype)
        self.head = head
        self._draft_tokens = draft_tokens
        self._zeros = torch.empty(0)

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the head's KV cache, and a constant tensor of zero temperatures for greedy drafts."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        self._zeros = torch.zeros(MAX_BATCH_REQUESTS * self._draft_tokens, device=backend.device)

    @property
    def depth(self) -> int:
        """K, the number of drafted tokens."""
        return self._draft_tokens

    @property
    def slots(self) -> int:
        """Number of slots that an iteration writes, 2 K: verify's K + 1 tokens, all of which may be accepted, and K - 1 mask
        positions.
        """
        return 2 * self._draft_tokens

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The head's states [K, H] that predict the draft tokens, per request."""
        return (RelaySpec("hidden", (self._draft_tokens, self.head.config.hidden_size), self.head.target.dtype),)

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """Host parameter of draft-extend, whose pass ends K - 1 mask positions after the accepted tokens."""
        return {"extend": self._draft_tokens - 1}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return one pass over the prompts, and one over the mask positions after each prompt."""
        masks = self._draft_tokens - 1
        return (*super().prompt_passes(tokens, sequences, longest), *([sequences * masks] if masks else []))

    def draft(self, inputs: DraftInputs) -> Draft:
        """Sample all K tokens from the relayed states, without a pass."""
        head, count = self.head, inputs.count or self._draft_tokens
        hidden = inputs.relay["hidden"][:, :count]
        lane = torch.arange(1, count + 1, device=hidden.device)
        positions = inputs.seq_lens.unsqueeze(1) + lane
        sampled, probs = sample_draft_rows(head.kernels, head.logits(hidden.flatten(0, 1)), inputs, positions, self._zeros)
        return Draft(self.to_target_tokens(sampled), self.expand_to_target(probs) if inputs.sampling else None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run one pass over accepted pairs and mask positions, and return the states that predict the next draft. Prompts,
        whose chunks differ in length, need a second pass.
        """
        return {
            "hidden": self._states_after_prompts(inputs) if inputs.prompt is not None else self._states_after_drafts(inputs)
        }

    def _states_after_drafts(self, inputs: ExtendInputs) -> Tensor:
        """Return the head's states [B, K, H] at the last accepted pair and the K - 1 positions after it. Those positions are
        mask positions.
        """
        head, masks, width = self.head, self._draft_tokens - 1, inputs.attention.max_query
        batch = inputs.last.shape[0]
        target_states = head.condition(inputs.hidden, inputs.aux_hidden_states).view(batch, width, -1)
        lane = torch.arange(width + masks, device=target_states.device)
        queries = inputs.attention.query_start[:-1].to(torch.int64)
        last = (inputs.last - queries).clamp(0, width - 1).unsqueeze(1)  # lane of the last pair [B, 1]
        known = lane <= last
        tokens = torch.where(known, F.pad(inputs.tokens.view(batch, width), (0, masks)), head.mask_token)
        hidden = torch.where(known.unsqueeze(-1), F.pad(target_states, (0, 0, 0, masks)), head.weights.mask_state)
        # Positions must agree with the host's lengths. Those in the inputs stop at the context limit of a finished request.
        start = (inputs.attention.seq_lens.to(torch.int64) - width).clamp(min=0)
        positions = start.unsqueeze(1) + lane
        states = self._run_pass(inputs, tokens, hidden, positions)
        wanted = (last + lane[: masks + 1]).unsqueeze(-1)
        return states.gather(1, wanted.expand(-1, -1, states.shape[-1]))

    def _states_after_prompts(self, inputs: ExtendInputs) -> Tensor:
        """Return states [B, K, H] from the last pair of each prompt chunk on, and write the chunk's keys and values."""
        head, masks = self.head, self._draft_tokens - 1
        last = self.run_accepted_pairs(inputs).unsqueeze(1)
        if not masks:
            return last
        lane = torch.arange(-1, masks - 1, device=last.device)
        positions = inputs.next_positions.unsqueeze(1) + lane
        tokens = torch.full_like(positions, head.mask_token)
        hidden = head.weights.mask_state.expand(*positions.shape, -1)
        return torch.cat((last, self._run_pass(inputs, tokens, hidden, positions)), dim=1)

    def _run_pass(self, inputs: ExtendInputs, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return states [B, n, H] at consecutive ``positions`` [B, n], from ``tokens`` [B, n] and ``hidden`` [B, n, H]."""
        batch, width = positions.shape
        tables, lens = inputs.attention.block_table, inputs.seq_lens_host
        capacity = tables.shape[1] * self._page_size
        attention = AttentionMetadata(
            query_start=torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=tokens.device),
            seq_lens=(positions[:, -1] + 1).clamp(max=capacity).to(torch.int32),
            block_table=tables,
            max_query=width,
            max_kv=min(inputs.attention.max_kv + self._draft_tokens - 1, capacity),
            uniform=True,
            seq_lens_host=None if lens is None else lens.host_param("extend", self._draft_tokens - 1),
        )
        flat = ForwardInput(
            tokens.flatten(),
            text_rope_positions(self.head.config.rope, positions.flatten(), inputs.mrope_position_deltas),
            slots_of(positions, tables, self._page_size).flatten(),
            attention,
        )
        return self.head.forward(flat, hidden.flatten(0, 1), self.cache).view(batch, width, -1)
