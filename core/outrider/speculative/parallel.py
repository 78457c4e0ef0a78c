"""Proposers that draft all tokens in one pass of a head: BlockProposer (DFlash) and PEagleProposer (P-EAGLE).

*DFlash.* A pass over a block of masks proposes the tokens. Draft-extend writes keys and values of the accepted tokens,
computed from the target's states. The only relayed state is the engine's last token.

*P-EAGLE* (Hui et al. 2026). An EAGLE-3 head whose draft pass is the pass of draft-extend. The pairs of an EAGLE head
(:mod:`outrider.speculative.eagle`) are followed by mask positions, whose token and state are unknown: they have the mask
token and a learned state. The last accepted pair predicts the first draft token, and each mask position predicts the next
one. Draft-extend runs the accepted pairs and K - 1 mask positions at once; the output head then computes the draft from
their states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import DFlashHead, Eagle3Head, ForwardInput
from outrider.speculative.eagle import EagleHeadProposer
from outrider.speculative.proposer import (
    MAX_BATCH_REQUESTS,
    UNBOUNDED,
    Draft,
    DraftInputs,
    ExtendInputs,
    HeadProposer,
    RelaySpec,
    extend_rope_positions,
    sample_draft_rows,
    slots_of,
    text_rope_positions,
)


class BlockProposer(HeadProposer):
    """A chain of K tokens from a DFlash head: positions 1 to K of a block that begins with the last known token.

    K is at most the head's ``block_size`` minus one; a smaller K shortens the block. The block's keys and values use the
    slots after the cached tokens, which verify overwrites. A shorter draft is a prefix of a full one.
    """

    name = "dflash"
    head: DFlashHead
    extends = True
    relay: tuple[RelaySpec, ...] = ()

    def __init__(self, head: DFlashHead, *, draft_tokens: int | None = None) -> None:
        max_tokens = head.block_size - 1
        if draft_tokens is None:
            draft_tokens = max_tokens
        if not 1 <= draft_tokens <= max_tokens:
            raise ConfigError(
                f"draft_tokens is {draft_tokens}; this head was trained on blocks of {head.block_size} places: expected 1 to "
                f"{max_tokens}"
            )
        super().__init__(head.config, head.target.dtype)
        self.head = head
        self._draft_tokens = draft_tokens
        self._block_mask = torch.empty(0, 0, dtype=torch.bool)
        self._mask_tokens = torch.empty(1, 0, dtype=torch.int64)
        self._query_starts = torch.empty(0, dtype=torch.int32)
        self._zeros = torch.empty(0)

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """Host parameter of the draft pass: the block adds K + 1 tokens. Draft-extend has no attention."""
        return {"draft.block": self._draft_tokens + 1}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return no passes, because draft-extend runs no layer."""
        del tokens, sequences, longest
        return ()

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the KV cache of the head and the constant inputs of a block on the device."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        width, device = self._draft_tokens + 1, backend.device
        self._block_mask = torch.ones(MAX_BATCH_REQUESTS * width, width, dtype=torch.bool, device=device)
        self._zeros = torch.zeros(MAX_BATCH_REQUESTS * self._draft_tokens, device=device)
        self._mask_tokens = torch.full((1, self._draft_tokens), self.head.mask_token, device=device)
        self._query_starts = torch.arange(0, (MAX_BATCH_REQUESTS + 1) * width, width, dtype=torch.int32, device=device)

    def draft(self, inputs: DraftInputs) -> Draft:
        """Draft K tokens for each request with one pass of the head over a block of K + 1 positions per request."""
        head, batch, width = self.head, inputs.seq_lens.shape[0], self._draft_tokens + 1
        tokens = torch.cat((inputs.last_tokens.unsqueeze(1), self._mask_tokens.expand(batch, -1)), dim=1)
        positions = torch.empty_like(tokens)
        slots = torch.empty_like(tokens)
        kv_lens = torch.empty_like(inputs.seq_lens, dtype=torch.int32)
        written = positions, slots, kv_lens.unsqueeze(1)
        head.kernels.place_tokens(inputs.seq_lens, inputs.tables, self._page_size, UNBOUNDED, *written)
        attention = AttentionMetadata(
            query_start=self._query_starts[: batch + 1],
            seq_lens=kv_lens,
            block_table=inputs.tables,
            max_query=width,
            max_kv=inputs.max_kv,
            tree_mask=self._block_mask[: batch * width],
            uniform=True,
            seq_lens_host=None if inputs.seq_lens_host is None else inputs.seq_lens_host.host_param("draft.block", width),
        )
        flat = ForwardInput(
            tokens.flatten(),
            text_rope_positions(head.config.rope, positions.flatten(), inputs.mrope_position_deltas),
            slots.flatten(),
            attention,
        )
        hidden = head.forward(flat, self.cache).view(batch, width, -1)[:, 1:]
        sampled, probs = sample_draft_rows(
            head.kernels, head.logits(hidden.flatten(0, 1)), inputs, positions[:, 1:], self._zeros
        )
        return Draft(self.head.to_target_tokens(sampled), self.head.expand_to_target(probs) if inputs.sampling else None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Write keys and values of the accepted tokens, computed from the target's hidden states, to their slots.

        Padding goes to slots that later tokens overwrite, or to page 0.
        """
        rope_positions = extend_rope_positions(self.head.config.rope, inputs)
        self.head.write_text_cache(inputs.aux_hidden_states, rope_positions, inputs.slots, self.cache, inputs.prompt_lens)
        return {}


_MAX_TOKENS = 63


class PEagleProposer(EagleHeadProposer):
    """A proposer of chains of K tokens from a P-EAGLE head. It relays for each request the K head states that predict them.

    Keys and values of mask positions use the slots after the accepted tokens. The next pass overwrites all of them with the
    accepted pairs.
    """

    head: Eagle3Head
    name = "peagle"

    def __init__(self, head: Eagle3Head, *, draft_tokens: int) -> None:
        if not 1 <= draft_tokens <= _MAX_TOKENS:
            raise ConfigError(f"draft_tokens is {draft_tokens}; expected 1 to {_MAX_TOKENS} from a P-EAGLE head")
        super().__init__(head.config, head.target.dtype)
        self.head = head
        if head.mask_token is None or head.weights.mask_state is None:
            raise ConfigError("the head has no mask token and state; expected a P-EAGLE head, as load_peagle returns it")
        self._mask_token, self._mask_state = head.mask_token, head.weights.mask_state
        self._draft_tokens = draft_tokens
        self._zeros = torch.empty(0)

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the head's KV cache, and a constant tensor of zero temperatures for greedy drafts."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        self._zeros = torch.zeros(MAX_BATCH_REQUESTS * self._draft_tokens, device=backend.device)

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
        return Draft(self.head.to_target_tokens(sampled), self.head.expand_to_target(probs) if inputs.sampling else None)

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
        tokens = torch.where(known, F.pad(inputs.tokens.view(batch, width), (0, masks)), self._mask_token)
        hidden = torch.where(known.unsqueeze(-1), F.pad(target_states, (0, 0, 0, masks)), self._mask_state)
        # Positions must agree with the host's lengths. Those in the inputs stop at the context limit of a finished request.
        start = (inputs.attention.seq_lens.to(torch.int64) - width).clamp(min=0)
        positions = start.unsqueeze(1) + lane
        states = self._run_pass(inputs, tokens, hidden, positions)
        wanted = (last + lane[: masks + 1]).unsqueeze(-1)
        return states.gather(1, wanted.expand(-1, -1, states.shape[-1]))

    def _states_after_prompts(self, inputs: ExtendInputs) -> Tensor:
        """Return states [B, K, H] from the last pair of each prompt chunk on, and write the chunk's keys and values."""
        masks = self._draft_tokens - 1
        last = self.run_accepted_pairs(inputs).unsqueeze(1)
        if not masks:
            return last
        lane = torch.arange(-1, masks - 1, device=last.device)
        positions = inputs.next_positions.unsqueeze(1) + lane
        tokens = torch.full_like(positions, self._mask_token)
        hidden = self._mask_state.expand(*positions.shape, -1)
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
