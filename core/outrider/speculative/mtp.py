"""Multi-token prediction: a head for each token ahead drafts (DeepSeek-V3, section 2.2), all of it in draft-extend.

Head k (from 1) at position i reads the token at i+k and the hidden state that head k-1 returned at i (the target's for
k = 1), and guesses the token at i+k+1. So when the tokens up to t are known, head k is right up to position t-k, and its
last k-1 entries before the new tokens rest on drafts that may have been rejected: each draft-extend runs them again. All
heads read one sequence, the new tokens and then the drafts; only their first positions differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import ForwardInput, KVCache, MtpHead
from outrider.speculative.cached import CachedProposer
from outrider.speculative.places import given_places
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, RelaySpec, draw
from outrider.speculative.slots import slots_of
from outrider.speculative.tree import Tree
from outrider.speculative.vocabulary import over_target, target_tokens, too_many_branches


class MtpProposer(CachedProposer):
    """A token from each of K heads; with ``branches`` T > 1, T tokens from each, a tree whose likeliest path branches.

    Relays the drafts themselves (for a chain that samples, their distributions too), for each head but the last its hidden
    state at the first position that must run again, how many such positions there are, and where they lie on three axes, if
    they do.
    """

    name = "mtp"

    def __init__(self, heads: Sequence[MtpHead], *, draft_tokens: int | None = None, branches: int = 1) -> None:
        count = len(heads) if draft_tokens is None else min(draft_tokens, len(heads))
        if count < 1 or branches < 1:
            raise ConfigError(
                f"multi-token prediction by {count} heads with {branches} tokens each is impossible; both must be at least 1"
            )
        if branches > heads[0].target.output_size:
            raise too_many_branches(branches, heads[0].target.output_size)
        self._heads = tuple(heads[:count])
        self._branches = branches
        self._parents = torch.empty(0, dtype=torch.int64)
        config = heads[0].config
        super().__init__(replace(config, num_layers=count, windows=config.windows * count), dtype=heads[0].target.dtype)

    @property
    def depth(self) -> int:
        """K."""
        return len(self._heads)

    @property
    def nodes(self) -> int:
        """T for each head."""
        return len(self._heads) * self._branches

    @property
    def is_tree(self) -> bool:
        """With several tokens from each head."""
        return self._branches > 1

    @property
    def lookahead(self) -> int:
        """The last head reads the token K places ahead."""
        return len(self._heads)

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """See the class."""
        heads, target = len(self._heads), self._heads[0].target
        specs = [
            RelaySpec("tokens", (heads, self._branches), torch.int64),
            RelaySpec("hidden", (heads, target.config.hidden_size), target.dtype),
            RelaySpec("room", (), torch.int64, bounds=(0, heads)),
        ]
        if self._heads[0].config.rope.sections and heads > 1:
            specs.append(RelaySpec("places", (heads - 1, 3), torch.int64, bounds=(0, 1 << 62)))
        if not self.is_tree:
            specs.append(RelaySpec("probs", (heads, target.output_size), torch.float32))
        return tuple(specs)

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """Each head's pass ends where the tokens do."""
        return {_pass_name(extra): 0 for extra in range(len(self._heads))}

    @property
    def host_widths(self) -> Mapping[str, int]:
        """A token more with each head."""
        return {_pass_name(extra): extra for extra in range(len(self._heads))}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """One of each head, over as many lanes of each sequence."""
        del tokens
        return tuple(sequences * (longest + extra) for extra in range(len(self._heads)))

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """The heads' caches, and the tree's shape: the children of each head's likeliest token are the next head's."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        parents = [-1]
        for head in range(len(self._heads)):
            parents += [0 if head == 0 else 1 + (head - 1) * self._branches] * self._branches
        self._parents = torch.tensor(parents, device=backend.device)

    def draft(self, inputs: DraftInputs) -> Draft:
        """No pass at all: draft-extend has drafted."""
        tokens, target = inputs.relay["tokens"].flatten(1), self._heads[0].target
        if not self.is_tree:
            probs = inputs.relay["probs"]
            return Draft(tokens, over_target(probs, target.output_ids, target.config.vocab_size) if inputs.sampling else None)
        parents = self._parents.expand(tokens.shape[0], -1)
        return Draft(tokens, None, Tree.from_parents(parents, depth=len(self._heads)))

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """One pass of each head.

        Its lanes are positions in a row that end where ``attention.seq_lens`` does, or begin at 0 where these would begin
        before: so its length is known without knowing how many of its positions run again. Those that don't, and those
        behind the last new token, are padding.
        """
        queries = inputs.attention.query_start[:-1].to(torch.int64)
        width, heads, device = inputs.attention.max_query, len(self._heads), queries.device
        count = inputs.last - queries + 1  # new pairs of each request
        lane = torch.arange(width + heads, device=device)
        rows = (queries.unsqueeze(1) + lane[:width]).clamp(max=inputs.tokens.shape[0] - 1)  # [B, W]
        start = inputs.positions[queries]
        room = torch.where(inputs.continues, inputs.relay["room"], 0)
        text = torch.nn.functional.pad(inputs.tokens[rows], (0, heads))
        assert inputs.hidden is not None  # it's read, as ``reads_hidden`` says
        given = inputs.hidden[rows]
        places = self._places(inputs, rows)
        hidden, begin = given, start  # of the head before, and the position of its first lane
        drafts, probs, states = [], [], [given[:, 0]]
        for extra, head in enumerate(self._heads):
            lanes = _Lanes.of(inputs.attention.seq_lens, width + extra, start, count, room.clamp(max=extra), lane)
            states_in = _rows(hidden, lanes.positions - begin.unsqueeze(1))
            if extra:
                # What the head before returned further back came with the relay.
                first = (lanes.positions == (start - extra).unsqueeze(1)).unsqueeze(-1)
                states_in = torch.where(first, inputs.relay["hidden"][:, extra].unsqueeze(1), states_in)
            index = (lanes.positions - start.unsqueeze(1) + extra).clamp(0, text.shape[1] - 1)
            flat = self._flat(inputs, text.gather(1, index), lanes, start, places, extra)
            cache = KVCache((self.cache.layers[extra],))
            begin = lanes.positions[:, 0]
            end = start + count - begin  # of the lanes that aren't padding
            if inputs.kept is not None and extra + 1 == heads:  # no head behind it reads its states
                ends = torch.arange(0, index.numel(), index.shape[1], device=device) + end - 1
                flat = replace(flat, kept=replace(inputs.kept, index=ends))
                behind = head.forward(flat, states_in.flatten(0, 1), cache)
            else:
                hidden = head.forward(flat, states_in.flatten(0, 1), cache).view(*index.shape, -1)
                behind = _rows(hidden, (end - 1).unsqueeze(1)).squeeze(1)
            logits = head.logits(behind)
            if self.is_tree:
                drawn = logits.topk(self._branches, dim=-1).indices
            else:
                token, drawn_from = draw(head.kernels, logits, inputs, inputs.next_positions + extra)
                drawn = token.unsqueeze(1)
                probs.append(drawn_from)
            drafts.append(target_tokens(head.kernels, drawn, head.target.output_ids))
            text = text.scatter(1, (count + extra).unsqueeze(1), drafts[-1][:, :1])
            if extra + 1 < heads:  # for the next call, at its start - (extra + 1)
                states.append(_rows(hidden, (end - extra - 1).unsqueeze(1)).squeeze(1))
        relay = {
            "tokens": torch.stack(drafts, dim=1),
            "hidden": torch.stack(states, dim=1),
            "room": (room + count).clamp(max=heads - 1),
        }
        if places is not None and heads > 1:
            relay["places"] = _rows(places, count.unsqueeze(1) + lane[: heads - 1])
        if inputs.sampling and not self.is_tree:
            relay["probs"] = torch.stack(probs, dim=1)
        return relay

    def _places(self, inputs: ExtendInputs, rows: Tensor) -> Tensor | None:
        """On three axes: positions int64 [B, K - 1 + W, 3] from K - 1 before the first new token on; None on one."""
        rope = self._heads[0].config.rope
        if not rope.sections:
            return None
        new = given_places(rope, inputs).t()[rows]
        return torch.cat((inputs.relay["places"], new), dim=1) if len(self._heads) > 1 else new

    def _flat(
        self, inputs: ExtendInputs, tokens: Tensor, lanes: _Lanes, start: Tensor, places: Tensor | None, extra: int
    ) -> ForwardInput:
        """The pass over ``tokens`` [B, W], one a lane."""
        batch, width = tokens.shape
        real, positions = lanes.real, lanes.positions
        slots = slots_of(positions, inputs.attention.block_table, self._page_size)
        lens = inputs.seq_lens_host
        attention = AttentionMetadata(
            query_start=torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=tokens.device),
            seq_lens=(positions[:, -1] + 1).to(torch.int32),
            block_table=inputs.attention.block_table,
            max_query=width,
            max_kv=max(inputs.attention.max_kv, width),
            uniform=True,
            seq_lens_host=None if lens is None else lens.param(_pass_name(extra), 0, least=width),
        )
        # Padding behind the new tokens writes where they'd be next, so that attention finds numbers there; before them is
        # what earlier calls wrote.
        slots = torch.where(positions >= lanes.first.unsqueeze(1), slots, 0)
        if places is None:
            return ForwardInput(tokens.flatten(), torch.where(real, positions, 0).flatten(), slots.flatten(), attention)
        at = _rows(places, positions - start.unsqueeze(1) + len(self._heads) - 1)
        return ForwardInput(
            tokens.flatten(), torch.where(real.unsqueeze(-1), at, 0).flatten(0, 1).t(), slots.flatten(), attention
        )


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Which positions int64 [B, W] a pass computes. ``real`` bool [B, W]: no padding; they begin at ``first`` int64 [B]."""

    positions: Tensor
    real: Tensor
    first: Tensor

    @classmethod
    def of(cls, seq_lens: Tensor, width: int, start: Tensor, count: Tensor, back: Tensor, lane: Tensor) -> _Lanes:
        """``back`` positions before ``start`` run again, and ``count`` new ones follow."""
        begin = (seq_lens.to(torch.int64) - width).clamp(min=0)
        positions = begin.unsqueeze(1) + lane[:width]
        first = start - back
        real = (positions >= first.unsqueeze(1)) & (positions < (start + count).unsqueeze(1))
        return cls(positions, real, first)


def _pass_name(extra: int) -> str:
    """What the host lengths of a head's pass are called."""
    return f"extend.{extra}" if extra else "extend"


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[b, index[b, j]]`` of [B, W, H], for an index [B, J] that is clamped to both ends."""
    index = index.clamp(0, values.shape[1] - 1).unsqueeze(-1)
    return values.gather(1, index.expand(-1, -1, values.shape[-1]))
