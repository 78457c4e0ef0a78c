"""Block drafting (DFlash): one pass of a head proposes all tokens of a draft.

Draft-extend writes keys and values of the accepted tokens, which follow from the target's states; nothing is relayed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import DFlashHead, ForwardInput
from outrider.speculative.cached import UNBOUNDED, CachedProposer
from outrider.speculative.places import given_places, text_places
from outrider.speculative.proposer import MOST_REQUESTS, Draft, DraftInputs, ExtendInputs, RelaySpec, draw_rows
from outrider.speculative.vocabulary import over_target, target_tokens


class BlockProposer(CachedProposer):
    """A chain of K tokens from a DFlash head: the places 1 to K of a block that begins with the last token.

    K is one less than the head's ``block_size``, or less: then the block is shorter. The block's keys and values lie in the
    slots behind the cached ones, which verify's tokens take afterwards. A shorter draft is the beginning of a whole one.
    """

    name = "dflash"
    takes_padding = True

    def __init__(self, head: DFlashHead, *, draft_tokens: int | None = None) -> None:
        most = head.block_size - 1
        if draft_tokens is None:
            draft_tokens = most
        if not 1 <= draft_tokens <= most:
            raise ConfigError(
                f"draft_tokens is {draft_tokens}; this head was trained on blocks of {head.block_size} places: expected 1 to "
                f"{most}"
            )
        super().__init__(head.config, head.target.dtype)
        self._head = head
        self._draft_tokens = draft_tokens
        self._seen = torch.empty(0, 0, dtype=torch.bool)
        self._masks = torch.empty(1, 0, dtype=torch.int64)
        self._starts = torch.empty(0, dtype=torch.int32)
        self._cold = torch.empty(0)

    @property
    def head(self) -> DFlashHead:
        """The head that drafts."""
        return self._head

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Those that the head reads."""
        return self._head.aux_hidden_state_layers

    @property
    def reads_hidden(self) -> bool:
        """Inner states alone."""
        return False

    @property
    def depth(self) -> int:
        """K."""
        return self._draft_tokens

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """Nothing: a draft begins with the last token, which the engine relays."""
        return ()

    @property
    def extends(self) -> bool:
        """It takes the accepted tokens' states in."""
        return True

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """The block's places; draft-extend has no attention."""
        return {"draft.block": self._draft_tokens + 1}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """No layer is run over a prompt."""
        del tokens, sequences, longest
        return ()

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """The cache, and what of a block never changes."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        width, device = self._draft_tokens + 1, backend.device
        seen = torch.ones(width, width, dtype=torch.bool)
        self._seen = (seen.tril() if self._head.causal else seen).repeat(MOST_REQUESTS, 1).to(device)
        self._cold = torch.zeros(MOST_REQUESTS * self._draft_tokens, device=device)
        self._masks = torch.full((1, self._draft_tokens), self._head.mask_token, device=device)
        self._starts = torch.arange(0, (MOST_REQUESTS + 1) * width, width, dtype=torch.int32, device=device)

    def draft(self, inputs: DraftInputs) -> Draft:
        """One pass over the blocks."""
        head, batch, width = self._head, inputs.seq_lens.shape[0], self._draft_tokens + 1
        tokens = torch.cat((inputs.last_tokens.unsqueeze(1), self._masks.expand(batch, -1)), dim=1)
        positions = torch.empty_like(tokens)
        slots = torch.empty_like(tokens)
        behind = torch.empty_like(inputs.seq_lens, dtype=torch.int32)
        written = positions, slots, behind.unsqueeze(1)
        head.kernels.place_tokens(inputs.seq_lens, inputs.tables, self._page_size, UNBOUNDED, *written)
        attention = AttentionMetadata(
            query_start=self._starts[: batch + 1],
            seq_lens=behind,
            block_table=inputs.tables,
            max_query=width,
            max_kv=inputs.max_kv,
            tree_mask=self._seen[: batch * width],
            uniform=True,
            seq_lens_host=None if inputs.seq_lens_host is None else inputs.seq_lens_host.param("draft.block", width),
        )
        flat = ForwardInput(
            tokens.flatten(),
            text_places(head.config.rope, positions.flatten(), inputs.mrope_position_deltas),
            slots.flatten(),
            attention,
        )
        hidden = head.forward(flat, self.cache).view(batch, width, -1)[:, 1:]
        drawn, probs = draw_rows(head.kernels, head.logits(hidden.flatten(0, 1)), inputs, positions[:, 1:], self._cold)
        target = head.target
        tokens = target_tokens(head.kernels, drawn, target.output_ids)
        if not inputs.sampling:
            return Draft(tokens, None)
        return Draft(tokens, over_target(probs, target.output_ids, target.config.vocab_size))

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Write the keys and values of the tokens; padding goes where a later token will overwrite it, or to page 0."""
        places = given_places(self._head.config.rope, inputs)
        self._head.take_in(inputs.aux_hidden_states, places, inputs.slots, self.cache, inputs.prompt_lens)
        return {}
