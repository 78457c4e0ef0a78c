"""Multi-token prediction: one head for each position ahead drafts (DeepSeek-V3, section 2.2), entirely in draft-extend.

Head k (from 1) at position i reads the token at i+k and the hidden state that head k-1 returned at i (the target's for k =
1), and predicts the token at i+k+1. If the tokens up to t are known, head k's cache is valid up to position t-k. Its last k-1
entries before the new tokens were computed from drafts that may have been rejected, so each draft-extend recomputes them. All
heads read one sequence, the new tokens followed by the drafts; only their first positions differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import ForwardInput, KVCache, MtpHead
from outrider.speculative.proposer import (
    CachedProposer,
    Draft,
    DraftInputs,
    ExtendInputs,
    RelaySpec,
    extend_rope_positions,
    sample_draft,
    slots_of,
    too_many_branches,
)
from outrider.speculative.tree import Tree


class MtpProposer(CachedProposer):
    """A proposer with K heads: a chain with one token from each head, or with ``branches`` T > 1 a tree with T tokens from
    each head.

    The children of each head's most likely token are the next head's tokens. It relays the draft tokens and, for a chain that
    samples, their distributions. For each head except the last it relays the hidden state at the first position to recompute.
    It also relays the number of such positions (``num_recomputed``) and, with mrope, their positions (``rope_positions``).
    """

    name = "mtp"

    def __init__(self, heads: Sequence[MtpHead], *, draft_tokens: int | None = None, branches: int = 1) -> None:
        count = len(heads) if draft_tokens is None else min(draft_tokens, len(heads))
        if count < 1 or branches < 1:
            raise ConfigError(
                f"multi-token prediction by {count} heads with {branches} tokens each is impossible; both must be at least 1"
            )
        if branches > heads[0].draft_vocab_size:
            raise too_many_branches(branches, heads[0].draft_vocab_size)
        self._heads, self._draft_tokens = tuple(heads[:count]), count
        self._branches = branches
        self._parents = torch.empty(0, dtype=torch.int64)
        config = heads[0].config
        super().__init__(replace(config, num_layers=count, windows=config.windows * count), dtype=heads[0].target.dtype)

    @property
    def nodes(self) -> int:
        """K * T, the drafted tokens of all heads."""
        return len(self._heads) * self._branches

    @property
    def is_tree(self) -> bool:
        """True if each head drafts several tokens."""
        return self._branches > 1

    @property
    def lookahead(self) -> int:
        """K, since the last head reads the token K positions after its own."""
        return len(self._heads)

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The relayed tensors, as the class docstring lists them: drafts, distributions, hidden states and positions to
        recompute.
        """
        heads, first = len(self._heads), self._heads[0]
        target = first.target
        specs = [
            RelaySpec("tokens", (heads, self._branches), torch.int64),
            RelaySpec("hidden", (heads, target.config.hidden_size), target.dtype),
            RelaySpec("num_recomputed", (), torch.int64, bounds=(0, heads)),
        ]
        if self._heads[0].config.rope.sections and heads > 1:
            specs.append(RelaySpec("rope_positions", (heads - 1, 3), torch.int64, bounds=(0, 1 << 62)))
        if not self.is_tree:
            specs.append(RelaySpec("probs", (heads, first.draft_vocab_size), torch.float32))
        return tuple(specs)

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """An offset of 0 for each head, since its pass ends at the last new token."""
        return {_pass_name(extra): 0 for extra in range(len(self._heads))}

    @property
    def host_widths(self) -> Mapping[str, int]:
        """The widths of the heads' passes: each pass has one token per request more than the previous one."""
        return {_pass_name(extra): extra for extra in range(len(self._heads))}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return one pass for each head, over the same number of lanes for each sequence."""
        del tokens
        return tuple(sequences * (longest + extra) for extra in range(len(self._heads)))

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the heads' KV caches on the device, and the constant parents of the tree."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        parents = [-1]
        for head in range(len(self._heads)):
            parents += [0 if head == 0 else 1 + (head - 1) * self._branches] * self._branches
        self._parents = torch.tensor(parents, device=backend.device)

    def draft(self, inputs: DraftInputs) -> Draft:
        """Return the drafts that draft-extend has computed and relayed, without a pass."""
        tokens, head = inputs.relay["tokens"].flatten(1), self._heads[0]
        if not self.is_tree:
            return Draft(tokens, head.expand_to_target(inputs.relay["probs"]) if inputs.sampling else None)
        parents = self._parents.expand(tokens.shape[0], -1)
        return Draft(tokens, None, Tree.from_parents(parents, depth=len(self._heads)))

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run one pass of each head and return the relay of its drafts.

        The lanes of a pass are consecutive positions that end at ``attention.seq_lens``; they begin at 0 if a sequence is
        shorter than the number of lanes. The length of a pass is therefore known without the number of positions to
        recompute. Lanes before those positions and after the last new token are padding.
        """
        queries = inputs.attention.query_start[:-1].to(torch.int64)
        width, heads, device = inputs.attention.max_query, len(self._heads), queries.device
        count = inputs.last - queries + 1  # new pairs of each request
        lane = torch.arange(width + heads, device=device)
        rows = (queries.unsqueeze(1) + lane[:width]).clamp(max=inputs.tokens.shape[0] - 1)  # [B, W]
        start = inputs.positions[queries]
        num_recomputed = torch.where(inputs.continues, inputs.relay["num_recomputed"], 0)
        text = torch.nn.functional.pad(inputs.tokens[rows], (0, heads))
        assert inputs.hidden is not None  # required by reads_hidden
        target_states = inputs.hidden[rows]
        rope_positions = self._rope_positions(inputs, rows)
        hidden, begin = target_states, start  # states of the preceding head, and the position of its first lane
        drafts, probs, states = [], [], [target_states[:, 0]]
        for extra, head in enumerate(self._heads):
            lanes = _Lanes.from_positions(
                inputs.attention.seq_lens, width + extra, start, count, num_recomputed.clamp(max=extra), lane
            )
            states_in = _gather_rows(hidden, lanes.positions - begin.unsqueeze(1))
            if extra:
                # The preceding head's state at the first recomputed position comes from the relay.
                first = (lanes.positions == (start - extra).unsqueeze(1)).unsqueeze(-1)
                states_in = torch.where(first, inputs.relay["hidden"][:, extra].unsqueeze(1), states_in)
            index = (lanes.positions - start.unsqueeze(1) + extra).clamp(0, text.shape[1] - 1)
            flat = self._pass_input(inputs, text.gather(1, index), lanes, start, rope_positions, extra)
            cache = KVCache((self.cache.layers[extra],))
            begin = lanes.positions[:, 0]
            end = start + count - begin  # end of the lanes that aren't padding
            if inputs.kept is not None and extra + 1 == heads:  # no further head reads the states of all lanes
                ends = torch.arange(0, index.numel(), index.shape[1], device=device) + end - 1
                flat = replace(flat, kept=replace(inputs.kept, index=ends))
                last_states = head.forward(flat, states_in.flatten(0, 1), cache)
            else:
                hidden = head.forward(flat, states_in.flatten(0, 1), cache).view(*index.shape, -1)
                last_states = _gather_rows(hidden, (end - 1).unsqueeze(1)).squeeze(1)
            logits = head.logits(last_states)
            if self.is_tree:
                sampled = logits.topk(self._branches, dim=-1).indices
            else:
                token, distribution = sample_draft(head.kernels, logits, inputs, inputs.next_positions + extra)
                sampled = token.unsqueeze(1)
                probs.append(distribution)
            drafts.append(head.to_target_tokens(sampled))
            text = text.scatter(1, (count + extra).unsqueeze(1), drafts[-1][:, :1])
            if extra + 1 < heads:  # relayed to the next call, at its start - (extra + 1)
                states.append(_gather_rows(hidden, (end - extra - 1).unsqueeze(1)).squeeze(1))
        relay = {
            "tokens": torch.stack(drafts, dim=1),
            "hidden": torch.stack(states, dim=1),
            "num_recomputed": (num_recomputed + count).clamp(max=heads - 1),
        }
        if rope_positions is not None and heads > 1:
            relay["rope_positions"] = _gather_rows(rope_positions, count.unsqueeze(1) + lane[: heads - 1])
        if inputs.sampling and not self.is_tree:
            relay["probs"] = torch.stack(probs, dim=1)
        return relay

    def _rope_positions(self, inputs: ExtendInputs, rows: Tensor) -> Tensor | None:
        """Return mrope positions int64 [B, K - 1 + W, 3], from K - 1 before the first new token on, or None without mrope."""
        rope = self._heads[0].config.rope
        if not rope.sections:
            return None
        new = extend_rope_positions(rope, inputs).t()[rows]
        return torch.cat((inputs.relay["rope_positions"], new), dim=1) if len(self._heads) > 1 else new

    def _pass_input(
        self, inputs: ExtendInputs, tokens: Tensor, lanes: _Lanes, start: Tensor, rope_positions: Tensor | None, extra: int
    ) -> ForwardInput:
        """Return the pass of head ``extra`` over ``tokens`` [B, W], one token per lane."""
        batch, width = tokens.shape
        is_valid, positions = lanes.is_valid, lanes.positions
        slots = slots_of(positions, inputs.attention.block_table, self._page_size)
        lens = inputs.seq_lens_host
        attention = AttentionMetadata(
            query_start=torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=tokens.device),
            seq_lens=(positions[:, -1] + 1).to(torch.int32),
            block_table=inputs.attention.block_table,
            max_query=width,
            max_kv=max(inputs.attention.max_kv, width),
            uniform=True,
            seq_lens_host=None if lens is None else lens.host_param(_pass_name(extra), 0, least=width),
        )
        # Padding after the new tokens writes to the following slots, so that attention reads finite numbers there. Padding
        # before them writes to page 0 and keeps the entries of earlier calls.
        slots = torch.where(positions >= lanes.first.unsqueeze(1), slots, 0)
        if rope_positions is None:
            return ForwardInput(tokens.flatten(), torch.where(is_valid, positions, 0).flatten(), slots.flatten(), attention)
        lane_positions = _gather_rows(rope_positions, positions - start.unsqueeze(1) + len(self._heads) - 1)
        return ForwardInput(
            tokens.flatten(),
            torch.where(is_valid.unsqueeze(-1), lane_positions, 0).flatten(0, 1).t(),
            slots.flatten(),
            attention,
        )


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The token positions int64 [B, W] that one pass of a head computes, W per request."""

    positions: Tensor
    is_valid: Tensor
    """False for lanes that are padding, bool [B, W]."""
    first: Tensor
    """The first position of each request that is not padding, int64 [B]."""

    @classmethod
    def from_positions(cls, seq_lens: Tensor, width: int, start: Tensor, count: Tensor, back: Tensor, lane: Tensor) -> _Lanes:
        """Return ``width`` lanes per request: ``back`` positions before ``start`` are recomputed, and ``count`` new ones
        follow.
        """
        begin = (seq_lens.to(torch.int64) - width).clamp(min=0)
        positions = begin.unsqueeze(1) + lane[:width]
        first = start - back
        is_valid = (positions >= first.unsqueeze(1)) & (positions < (start + count).unsqueeze(1))
        return cls(positions, is_valid, first)


def _pass_name(extra: int) -> str:
    """Return the name of the host parameter with the KV lengths of the pass of head ``extra``."""
    return f"extend.{extra}" if extra else "extend"


def _gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``values[b, index[b, j]]`` [B, J, H] of ``values`` [B, W, H]. ``index`` int64 [B, J] is clamped to both
    ends.
    """
    index = index.clamp(0, values.shape[1] - 1).unsqueeze(-1)
    return values.gather(1, index.expand(-1, -1, values.shape[-1]))
