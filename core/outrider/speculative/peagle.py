"""P-EAGLE (Hui et al. 2026): an EAGLE-3 head that drafts all its tokens in one pass, which is draft-extend's.

The pairs of an EAGLE head (:mod:`outrider.speculative.eagle`) are followed by places whose token and state aren't known: the
mask token, and the state that was learned for it. The place of the last accepted pair guesses the first draft token, each
place behind it the next one. So draft-extend runs the accepted pairs and K - 1 such places at once, and a draft is what the
output head makes of their states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import ForwardInput, PEagleHead
from outrider.speculative.eagle import HeadDrafts
from outrider.speculative.places import text_places
from outrider.speculative.proposer import MOST_REQUESTS, Draft, DraftInputs, ExtendInputs, RelaySpec, draw_rows
from outrider.speculative.slots import slots_of

_MOST_TOKENS = 63


class PEagleProposer(HeadDrafts):
    """A chain of K tokens from a P-EAGLE head. Relays, for each request, the K states that they're guessed from.

    Keys and values of places without a known token lie in the slots behind the accepted ones; the next pass writes the
    accepted pairs over all of them.
    """

    _head: PEagleHead
    name = "peagle"

    def __init__(self, head: PEagleHead, *, draft_tokens: int) -> None:
        if not 1 <= draft_tokens <= _MOST_TOKENS:
            raise ConfigError(f"draft_tokens is {draft_tokens}; expected 1 to {_MOST_TOKENS} from a P-EAGLE head")
        super().__init__(head.config, head.target.dtype)
        self._head = head
        self._draft_tokens = draft_tokens
        self._cold = torch.empty(0)

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """The cache, and temperatures of drafts that aren't sampled."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        self._cold = torch.zeros(MOST_REQUESTS * self._draft_tokens, device=backend.device)

    @property
    def depth(self) -> int:
        """K."""
        return self._draft_tokens

    @property
    def slots(self) -> int:
        """Those of verify's K + 1 tokens, all of which may be accepted, and K - 1 behind them."""
        return 2 * self._draft_tokens

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The states that the drafts are guessed from."""
        return (RelaySpec("hidden", (self._draft_tokens, self._head.config.hidden_size), self._head.target.dtype),)

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """The pass ends K - 1 places behind what it takes in."""
        return {"extend": self._draft_tokens - 1}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """One over the prompts, and one over the places behind each."""
        masks = self._draft_tokens - 1
        return (*super().prompt_passes(tokens, sequences, longest), *([sequences * masks] if masks else []))

    def draft(self, inputs: DraftInputs) -> Draft:
        """No pass of the layers: the output head over what draft-extend has made."""
        head, count = self._head, inputs.count or self._draft_tokens
        hidden = inputs.relay["hidden"][:, :count]
        lane = torch.arange(1, count + 1, device=hidden.device)
        positions = inputs.seq_lens.unsqueeze(1) + lane
        drawn, probs = draw_rows(head.kernels, head.logits(hidden.flatten(0, 1)), inputs, positions, self._cold)
        return Draft(self.tokens(drawn), self.over_target(probs) if inputs.sampling else None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """One pass; over a prompt, whose parts have different lengths, a second one for what follows."""
        return {"hidden": self._behind_prompts(inputs) if inputs.prompt is not None else self._behind_drafts(inputs)}

    def _behind_drafts(self, inputs: ExtendInputs) -> Tensor:
        """States [B, K, H] behind the accepted of W tokens each: whatever comes behind them is an unknown place."""
        head, masks, width = self._head, self._draft_tokens - 1, inputs.attention.max_query
        batch = inputs.last.shape[0]
        given = head.condition(inputs.hidden, inputs.aux_hidden_states).view(batch, width, -1)
        lane = torch.arange(width + masks, device=given.device)
        queries = inputs.attention.query_start[:-1].to(torch.int64)
        last = (inputs.last - queries).clamp(0, width - 1).unsqueeze(1)  # lane of the last pair [B, 1]
        known = lane <= last
        tokens = torch.where(known, F.pad(inputs.tokens.view(batch, width), (0, masks)), head.mask_token)
        hidden = torch.where(known.unsqueeze(-1), F.pad(given, (0, 0, 0, masks)), head.weights.mask_state)
        # As the host counts them: the given positions of a request that is over don't go beyond the context.
        start = (inputs.attention.seq_lens.to(torch.int64) - width).clamp(min=0)
        positions = start.unsqueeze(1) + lane
        states = self._pass(inputs, tokens, hidden, positions)
        wanted = (last + lane[: masks + 1]).unsqueeze(-1)
        return states.gather(1, wanted.expand(-1, -1, states.shape[-1]))

    def _behind_prompts(self, inputs: ExtendInputs) -> Tensor:
        """States [B, K, H] behind each prompt's part, and the keys and values of its pairs."""
        head, masks = self._head, self._draft_tokens - 1
        last = self.take_in(inputs).unsqueeze(1)
        if not masks:
            return last
        lane = torch.arange(-1, masks - 1, device=last.device)
        positions = inputs.next_positions.unsqueeze(1) + lane
        tokens = torch.full_like(positions, head.mask_token)
        hidden = head.weights.mask_state.expand(*positions.shape, -1)
        return torch.cat((last, self._pass(inputs, tokens, hidden, positions)), dim=1)

    def _pass(self, inputs: ExtendInputs, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """States [B, n, H] at consecutive ``positions`` [B, n], from ``tokens`` and ``hidden`` there."""
        batch, width = positions.shape
        tables, lens = inputs.attention.block_table, inputs.seq_lens_host
        room = tables.shape[1] * self._page_size
        attention = AttentionMetadata(
            query_start=torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=tokens.device),
            seq_lens=(positions[:, -1] + 1).clamp(max=room).to(torch.int32),
            block_table=tables,
            max_query=width,
            max_kv=min(inputs.attention.max_kv + self._draft_tokens - 1, room),
            uniform=True,
            seq_lens_host=None if lens is None else lens.param("extend", self._draft_tokens - 1),
        )
        flat = ForwardInput(
            tokens.flatten(),
            text_places(self._head.config.rope, positions.flatten(), inputs.mrope_position_deltas),
            slots_of(positions, tables, self._page_size).flatten(),
            attention,
        )
        return self._head.forward(flat, hidden.flatten(0, 1), self.cache).view(batch, width, -1)
