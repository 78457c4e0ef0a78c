"""BlockProposer: block drafting (DFlash). One pass of a head proposes all tokens of a draft.

Draft-extend writes keys and values of the accepted tokens, computed from the target's states. The only relayed state is the
engine's last token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import DFlashHead, ForwardInput
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
    def depth(self) -> int:
        """K, the number of drafted tokens."""
        return self._draft_tokens

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
        return Draft(self.to_target_tokens(sampled), self.expand_to_target(probs) if inputs.sampling else None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Write keys and values of the accepted tokens, computed from the target's hidden states, to their slots.

        Padding goes to slots that later tokens overwrite, or to page 0.
        """
        rope_positions = extend_rope_positions(self.head.config.rope, inputs)
        self.head.write_text_cache(inputs.aux_hidden_states, rope_positions, inputs.slots, self.cache, inputs.prompt_lens)
        return {}
