"""EAGLE (Li et al. 2024, 2025): a head of one layer drafts on the target's features; as a chain or as a tree.

The pair at position i is the target's hidden state at i (for EAGLE-3, three of its inner states, fused) and the token at
i+1; its output stands for the hidden state at i+1, which an output head turns into a guess of the token at i+2.
Draft-extend runs the accepted pairs with the target's true features and yields the first draft tokens of the next
iteration, so a draft of depth D costs D passes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, AttentionShape, ConfigError
from outrider.model import Eagle3Head, EagleHead, ForwardInput, attention_shapes
from outrider.speculative.cached import CachedProposer, TreeProposer, chain_lengths
from outrider.speculative.places import given_places, text_places
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, RelaySpec, draw
from outrider.speculative.slots import slots_of
from outrider.speculative.tree import Level, TreeShape, likeliest
from outrider.speculative.vocabulary import over_target, target_tokens, too_many_branches

DraftHead = EagleHead | Eagle3Head


def _name(head: DraftHead) -> str:
    return "eagle3" if isinstance(head, Eagle3Head) else "eagle"


class HeadDrafts(CachedProposer):
    """What drafts of one head have in common: what it sees of the target, and draft-extend up to its state."""

    _head: DraftHead
    takes_padding = True

    @property
    def head(self) -> DraftHead:
        """The head that drafts."""
        return self._head

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Those that the head reads."""
        return self._head.aux_hidden_state_layers

    @property
    def reads_hidden(self) -> bool:
        """Whether the head does."""
        return self._head.reads_hidden

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """One over all tokens."""
        del sequences, longest
        return (tokens,)

    def attention_shapes(self, page_size: int) -> tuple[AttentionShape, ...]:
        """Those of the head's layers."""
        return attention_shapes(self._head.config, self._dtype, page_size=page_size)

    def take_in(self, inputs: ExtendInputs) -> Tensor:
        """One pass over the accepted pairs; hidden states [B, H] behind the last ones."""
        places = given_places(self._head.config.rope, inputs)
        flat = ForwardInput(
            inputs.tokens, places, inputs.slots, inputs.attention, prompt_lens=inputs.prompt_lens, kept=inputs.kept
        )
        hidden = self._head.condition(inputs.hidden, inputs.aux_hidden_states)
        states = self._head.forward(flat, hidden, self.cache)
        return states if inputs.kept is not None else self._head.kernels.gather_rows(states, inputs.last)

    def tokens(self, drafted: Tensor) -> Tensor:
        """The target's tokens of drafted ones, any shape."""
        return target_tokens(self._head.kernels, drafted, self._head.target_ids)

    def over_target(self, probs: Tensor) -> Tensor:
        """Distributions [B, K, Vd] over the draft vocabulary, as ones over the target's [B, K, V]."""
        return over_target(probs, self._head.target_ids, self._head.target.config.vocab_size)


class EagleProposer(HeadDrafts):
    """A chain of K tokens from an EAGLE head.

    Relays, for each request, the first draft token, the head's hidden state behind it and, when the request samples, the
    distribution that the token was drawn from.
    """

    def __init__(self, head: DraftHead, *, draft_tokens: int) -> None:
        if draft_tokens < 1:
            raise ConfigError(f"draft_tokens is {draft_tokens}; an EAGLE chain has at least 1 token")
        super().__init__(head.config, head.target.dtype)
        self._head = head
        self.name = _name(head)
        self._draft_tokens = draft_tokens

    @property
    def depth(self) -> int:
        """K."""
        return self._draft_tokens

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """First draft token, hidden state behind it, distribution that it was drawn from."""
        target = self._head.target
        return (
            RelaySpec("token", (), torch.int64),
            RelaySpec("hidden", (self._head.config.hidden_size,), target.dtype),
            RelaySpec("probs", (self._head.draft_vocab_size,), torch.float32),
        )

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """A token more with each pass."""
        return chain_lengths(self._draft_tokens, 0)

    def host_lengths_of(self, count: int) -> Mapping[str, int]:
        """Draft-extend's, and those of a pass less than tokens."""
        return chain_lengths(min(count, self._draft_tokens), 0)

    def draft(self, inputs: DraftInputs) -> Draft:
        """A pass less than tokens: the first token comes with the relay."""
        token, hidden = inputs.relay["token"], inputs.relay["hidden"]
        tokens, probs = [token], [inputs.relay["probs"]]
        count = inputs.count or self._draft_tokens
        places = self.places(self._head.kernels, inputs, count=count + 1)
        for step in range(1, count):
            index = step - 1
            rope_positions = text_places(self._head.config.rope, places.positions[index], inputs.mrope_position_deltas)
            flat = ForwardInput(token, rope_positions, places.slots[index], places.attention(index, f"draft.{step}"))
            hidden = self._head.forward(flat, hidden, self.cache)
            token, drawn_from = self._draw(hidden, inputs, places.positions[step + 1])
            tokens.append(token)
            probs.append(drawn_from)
        return Draft(torch.stack(tokens, dim=1), self.over_target(torch.stack(probs, dim=1)) if inputs.sampling else None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """One pass over the accepted pairs."""
        hidden = self.take_in(inputs)
        token, probs = self._draw(hidden, inputs, inputs.next_positions)
        relay = {"token": token, "hidden": hidden}
        if inputs.sampling:
            relay["probs"] = probs
        return relay

    def _draw(self, hidden: Tensor, inputs: DraftInputs | ExtendInputs, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The target's token behind each row of ``hidden`` [B, H], and the distribution [B, Vd] that it was drawn from."""
        drawn, drawn_from = draw(self._head.kernels, self._head.logits(hidden), inputs, positions)
        return self.tokens(drawn), drawn_from


class EagleTreeProposer(HeadDrafts, TreeProposer):
    """A tree of K nodes from an EAGLE head, fixed or dynamic.

    Relays the T likeliest first tokens, their log-probabilities, and the head's hidden state behind them.
    """

    def __init__(self, head: DraftHead, shape: TreeShape) -> None:
        if shape.branches > head.draft_vocab_size:
            raise too_many_branches(shape.branches, head.draft_vocab_size)
        TreeProposer.__init__(self, head.config, head.target.dtype, shape)
        self._head = head
        self.name = _name(head)

    @property
    def slots(self) -> int:
        """Those of verify or of the expanded nodes, whichever are more."""
        return max(self._shape.nodes + 1, self._shape.expanded)

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """First draft tokens, their log-probabilities, the hidden state behind them."""
        branches = self._shape.branches
        return (
            RelaySpec("tokens", (branches,), torch.int64),
            RelaySpec("scores", (branches,), torch.float32),
            RelaySpec("hidden", (self._head.config.hidden_size,), self._head.target.dtype),
        )

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """The nodes of each level."""
        return {"extend": 0, **{f"draft.{nodes}": nodes for nodes in self._shape.levels}}

    def draft(self, inputs: DraftInputs) -> Draft:
        """D - 1 passes, each over all nodes expanded so far."""
        root, rope = inputs.relay["hidden"], self._head.config.rope
        outputs: Tensor | None = None  # [B, M, H] of the last pass
        features: Tensor | None = None  # [B, M, H]: hidden state of each node's parent

        def expand(level: Level) -> Tensor:
            nonlocal outputs, features
            batch, nodes = level.tokens.shape
            if outputs is None or features is None:
                features = root.unsqueeze(1).expand(batch, nodes, -1)
            else:
                parents = level.parents[:, -level.fresh :].unsqueeze(-1).expand(-1, -1, root.shape[-1])
                features = torch.cat((features, outputs.gather(1, parents)), dim=1)
            places = inputs.seq_lens.unsqueeze(1) + torch.arange(nodes, device=root.device)
            attention = AttentionMetadata(
                query_start=torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32, device=root.device),
                seq_lens=(inputs.seq_lens + nodes).to(torch.int32),
                block_table=inputs.tables,
                max_query=nodes,
                max_kv=inputs.max_kv,
                tree_mask=level.mask.flatten(0, 1),
                uniform=True,
                seq_lens_host=inputs.seq_lens_host.param(f"draft.{nodes}", nodes)
                if inputs.seq_lens_host is not None
                else None,
            )
            flat = ForwardInput(
                level.tokens.flatten(),
                text_places(rope, (inputs.seq_lens.unsqueeze(1) + level.depths - 1).flatten(), inputs.mrope_position_deltas),
                slots_of(places, inputs.tables, self._page_size).flatten(),
                attention,
            )
            hidden = self._head.forward(flat, features.flatten(0, 1), self.cache)
            outputs = hidden.view(batch, nodes, -1)
            return self._head.logits(outputs[:, -level.fresh :])

        first, scores = inputs.relay["tokens"], inputs.relay["scores"]
        tokens, tree = self._shape.grow(first, scores, expand, ids=self._head.target_ids)
        return Draft(tokens, None, tree)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """One pass over the accepted pairs."""
        hidden = self.take_in(inputs)
        first, scores = likeliest(self._head.logits(hidden), self._shape.branches)
        return {"tokens": self.tokens(first), "scores": scores, "hidden": hidden}
