"""Multi-token prediction: a head for each token ahead drafts (DeepSeek-V3, section 2.2), all of it in draft-extend.

Head k (from 1) at position i reads the token at i+k and the hidden state that head k-1 returned at i (the target's for
k = 1), and guesses the token at i+k+1. So when the tokens up to t are known, head k is right up to position t-k, and its
last k-1 entries before the new tokens rest on drafts that may have been rejected: each draft-extend runs them again. All
heads read one sequence, the new tokens and then the drafts; only their first positions differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError
from outrider.model import ForwardInput, KVCache, MtpHead
from outrider.speculative.cached import CachedProposer
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, RelaySpec, draw
from outrider.speculative.slots import slots_of
from outrider.speculative.tree import Tree


class MtpProposer(CachedProposer):
    """A token from each of K heads; with ``branches`` T > 1, T tokens from each, a tree whose likeliest path branches.

    Relays the drafts themselves (for a chain that samples, their distributions too), for each head but the last its hidden
    state at the first position that must run again, and how many such positions there are.
    """

    name = "mtp"

    def __init__(self, heads: Sequence[MtpHead], *, draft_tokens: int | None = None, branches: int = 1) -> None:
        count = len(heads) if draft_tokens is None else min(draft_tokens, len(heads))
        if count < 1 or branches < 1:
            raise ConfigError(
                f"multi-token prediction by {count} heads with {branches} tokens each is impossible; both must be at least 1"
            )
        if heads[0].config.rope.sections:
            raise ConfigError("multi-token prediction over positions on three axes (mrope) isn't supported")
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
        if not self.is_tree:
            specs.append(RelaySpec("probs", (heads, target.config.vocab_size), torch.float32))
        return tuple(specs)

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """The heads' caches, and the tree's shape: the children of each head's likeliest token are the next head's."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        parents = [-1]
        for head in range(len(self._heads)):
            parents += [0 if head == 0 else 1 + (head - 1) * self._branches] * self._branches
        self._parents = torch.tensor(parents, device=backend.device)

    def draft(self, inputs: DraftInputs) -> Draft:
        """No pass at all: draft-extend has drafted."""
        tokens = inputs.relay["tokens"].flatten(1)
        if not self.is_tree:
            return Draft(tokens, inputs.relay["probs"] if inputs.sampling else None)
        parents = self._parents.expand(tokens.shape[0], -1)
        return Draft(tokens, None, Tree.from_parents(parents, depth=len(self._heads)))

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """One pass of each head."""
        queries = inputs.attention.query_start[:-1].to(torch.int64)
        width, device = inputs.attention.max_query, queries.device
        count = inputs.last - queries + 1  # new pairs of each request
        lane = torch.arange(width + len(self._heads), device=device)
        rows = (queries.unsqueeze(1) + lane[:width]).clamp(max=inputs.tokens.shape[0] - 1)  # [B, W]
        start = inputs.positions[queries]
        room = torch.where(inputs.continues, inputs.relay["room"], 0)
        text = torch.nn.functional.pad(inputs.tokens[rows], (0, len(self._heads)))
        hidden = inputs.hidden[rows]
        back = torch.zeros_like(start)
        drafts, probs, states = [], [], [hidden[:, 0]]
        for extra, head in enumerate(self._heads):
            if extra:
                # The head before ran from ``back`` positions before the start; this one runs from one more, if it can.
                further = room.clamp(max=extra) - back
                earlier = inputs.relay["hidden"][:, extra].unsqueeze(1)
                hidden = _rows(torch.cat((earlier, hidden), dim=1), lane[: width + extra] + (1 - further).unsqueeze(1))
                back = back + further
            tokens = text.gather(1, (lane[: width + extra] + (extra - back).unsqueeze(1)).clamp(max=text.shape[1] - 1))
            flat = self._flat(inputs, tokens, start - back, count + back)
            cache = KVCache((self.cache.layers[extra],))
            hidden = head.forward(flat, hidden.flatten(0, 1), cache).view(*tokens.shape, -1)
            logits = head.logits(_rows(hidden, (count + back - 1).unsqueeze(1)).squeeze(1))
            if self.is_tree:
                drafts.append(logits.topk(self._branches, dim=-1).indices)
            else:
                token, drawn_from = draw(head.kernels, logits, inputs, inputs.next_positions + extra)
                drafts.append(token.unsqueeze(1))
                probs.append(drawn_from)
            text = text.scatter(1, (count + extra).unsqueeze(1), drafts[-1][:, :1])
            if extra + 1 < len(self._heads):  # for the next call, at its start - (extra + 1)
                states.append(_rows(hidden, (count + back - extra - 1).clamp(min=0).unsqueeze(1)).squeeze(1))
        relay = {
            "tokens": torch.stack(drafts, dim=1),
            "hidden": torch.stack(states, dim=1),
            "room": (room + count).clamp(max=len(self._heads) - 1),
        }
        if inputs.sampling and not self.is_tree:
            relay["probs"] = torch.stack(probs, dim=1)
        return relay

    def _flat(self, inputs: ExtendInputs, tokens: Tensor, begin: Tensor, valid: Tensor) -> ForwardInput:
        """A pass over ``tokens`` [B, W] at positions from ``begin`` [B] on, of which ``valid`` [B] are no padding."""
        batch, width = tokens.shape
        lane = torch.arange(width, device=tokens.device)
        real = lane < valid.unsqueeze(1)
        positions = torch.where(real, begin.unsqueeze(1) + lane, 0)
        slots = torch.where(real, slots_of(positions, inputs.attention.block_table, self._page_size), 0)
        attention = AttentionMetadata(
            query_start=torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=tokens.device),
            seq_lens=(begin + width).to(torch.int32),
            block_table=inputs.attention.block_table,
            max_query=width,
            max_kv=inputs.attention.max_kv,
        )
        return ForwardInput(tokens.flatten(), positions.flatten(), slots.flatten(), attention)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[b, index[b, j]]`` of [B, W, H], for an index [B, J] that is clamped to the end."""
    index = index.clamp(max=values.shape[1] - 1).unsqueeze(-1)
    return values.gather(1, index.expand(-1, -1, values.shape[-1]))
