"""EAGLE drafting (Li et al. 2024, 2025): a draft head of one layer reads the target's hidden states, as a chain or as a tree.

The pair at position i is the target's hidden state at i (for EAGLE-3, three fused intermediate states) and the token at i+1.
The head's output predicts the hidden state at i+1, from which an output head predicts the token at i+2. Draft-extend runs the
accepted pairs with the target's true states and computes the first draft tokens of the next iteration, so a draft of depth D
costs D passes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import AttentionShape, ConfigError
from outrider.model import Eagle3Head, EagleHead, ForwardInput, MtpHead
from outrider.speculative.proposer import (
    ChainProposer,
    Draft,
    DraftInputs,
    ExtendInputs,
    HeadProposer,
    RelaySpec,
    TreeProposer,
    extend_rope_positions,
    sample_draft,
    too_many_branches,
)
from outrider.speculative.tree import DynamicTree, Level, most_likely

DraftHead = EagleHead | Eagle3Head | MtpHead
"""A head that drafts from its own results. A head of multi-token prediction does so if it is the model's only one."""


def _name_of(head: DraftHead) -> str:
    return "mtp" if isinstance(head, MtpHead) else "eagle3" if isinstance(head, Eagle3Head) else "eagle"


class EagleHeadProposer(HeadProposer):
    """Base class of proposers with an EAGLE or EAGLE-3 head. Its draft-extend runs the head over the accepted pairs."""

    head: DraftHead

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return one pass over all tokens of the prompts."""
        del sequences, longest
        return (tokens,)

    def attention_shapes(self, page_size: int) -> tuple[AttentionShape, ...]:
        """Return the attention shapes of the head's layers."""
        return self.head.config.attention_shapes(self._dtype, page_size=page_size)

    def run_accepted_pairs(self, inputs: ExtendInputs) -> Tensor:
        """Run one pass of the head over the accepted pairs. Return the head's states [B, H] at each request's last pair."""
        flat = ForwardInput(
            inputs.tokens,
            extend_rope_positions(self.head.config.rope, inputs),
            inputs.slots,
            inputs.attention,
            *self._following_features(inputs),
            prompt_lens=inputs.prompt_lens,
            kept=inputs.kept,
        )
        hidden = self.head.condition(inputs.hidden, inputs.aux_hidden_states)
        states = self.head.forward(flat, hidden, self.cache)
        return states if inputs.kept is not None else self.head.kernels.gather_rows(states, inputs.last)

    def _following_features(self, inputs: ExtendInputs) -> tuple[Tensor | None, Tensor | None]:
        """Return the media features [T, H] of the tokens after each token of a prompt, with the bool mask [T] of their rows;
        both None without media, and for a head that reads tokens only. The token after a chunk counts as text.
        """
        if inputs.embeddings is None or inputs.embedded is None or not isinstance(self.head, MtpHead):
            return None, None
        features = inputs.embeddings[:, : self.head.config.hidden_size].roll(-1, 0)
        return features, inputs.embedded.roll(-1, 0).index_fill(0, inputs.last, False)


class EagleProposer(EagleHeadProposer, ChainProposer):
    """A proposer of chains of K tokens from an EAGLE head.

    It relays for each request the first draft token, the head's hidden state for it and, if the request samples, the
    distribution that the token was sampled from.
    """

    def __init__(self, head: DraftHead, *, draft_tokens: int) -> None:
        if draft_tokens < 1:
            raise ConfigError(f"draft_tokens is {draft_tokens}; an EAGLE chain has at least 1 token")
        super().__init__(head.config, head.target.dtype)
        self.head = head
        self.name = _name_of(head)
        self._draft_tokens = draft_tokens

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The first draft token, the head's hidden state [H] for it, and the distribution [V] that it was sampled from, per
        request.
        """
        target = self.head.target
        return (
            RelaySpec("token", (), torch.int64),
            RelaySpec("hidden", (self.head.config.hidden_size,), target.dtype),
            RelaySpec("probs", (self.head.draft_vocab_size,), torch.float32),
        )

    def draft(self, inputs: DraftInputs) -> Draft:
        """Run K - 1 passes of one token per request. The first token is relayed, and each pass gives the next one."""
        token, hidden = inputs.relay["token"], inputs.relay["hidden"]
        tokens, probs = [token], [inputs.relay["probs"]]
        count = inputs.count or self._draft_tokens
        following = self.next_positions(self.head.kernels, inputs, count=count + 1)
        for step in range(1, count):
            flat = following.pass_input(step - 1, token, self.head.config.rope, f"draft.{step}")
            hidden = self.head.forward(flat, hidden, self.cache)
            token, distribution = self._sample_draft(hidden, inputs, following.positions[step + 1])
            tokens.append(token)
            probs.append(distribution)
        return Draft(
            torch.stack(tokens, dim=1), self.head.expand_to_target(torch.stack(probs, dim=1)) if inputs.sampling else None
        )

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run one pass over the accepted pairs. Return the first draft token, its state and its distribution, [B, ...] by
        name.
        """
        hidden = self.run_accepted_pairs(inputs)
        token, probs = self._sample_draft(hidden, inputs, inputs.next_positions)
        relay = {"token": token, "hidden": hidden}
        if inputs.sampling:
            relay["probs"] = probs
        return relay

    def _sample_draft(self, hidden: Tensor, inputs: DraftInputs | ExtendInputs, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a draft token for each row of ``hidden`` [B, H]. Return it as the target's token int64 [B], and the
        distribution [B, Vd] that it was sampled from.
        """
        sampled, distribution = sample_draft(self.head.kernels, self.head.logits(hidden), inputs, positions)
        return self.head.to_target_tokens(sampled), distribution


class EagleTreeProposer(EagleHeadProposer, TreeProposer):
    """A proposer of trees of K nodes from an EAGLE head, of fixed or dynamic shape.

    It relays the T most likely first tokens, their log-probabilities, and the head's hidden state for them.
    """

    def __init__(self, head: DraftHead, shape: DynamicTree) -> None:
        if shape.branches > head.draft_vocab_size:
            raise too_many_branches(shape.branches, head.draft_vocab_size)
        TreeProposer.__init__(self, head.config, head.target.dtype, shape)
        self.head = head
        self.name = _name_of(head)

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The T first draft tokens, their log-probabilities, and the head's hidden state [H] for them, per request."""
        hidden = RelaySpec("hidden", (self.head.config.hidden_size,), self.head.target.dtype)
        return (*super().relay, hidden)

    def draft(self, inputs: DraftInputs) -> Draft:
        """Grow the tree from the relayed first tokens with D - 1 passes, each over all nodes expanded so far."""
        root, rope = inputs.relay["hidden"], self.head.config.rope
        outputs: Tensor | None = None  # [B, M, H] of the last pass
        features: Tensor | None = None  # [B, M, H]: hidden state for each node's parent

        def expand(level: Level) -> Tensor:
            nonlocal outputs, features
            batch, nodes = level.tokens.shape
            if outputs is None or features is None:
                features = root.unsqueeze(1).expand(batch, nodes, -1)
            else:
                parents = level.parents[:, -level.fresh :].unsqueeze(-1).expand(-1, -1, root.shape[-1])
                features = torch.cat((features, outputs.gather(1, parents)), dim=1)
            positions = inputs.seq_lens.unsqueeze(1) + level.depths - 1  # an EAGLE pair has the position of its hidden state
            flat = self.level_input(inputs, level, rope, positions)
            hidden = self.head.forward(flat, features.flatten(0, 1), self.cache)
            outputs = hidden.view(batch, nodes, -1)
            return self.head.logits(outputs[:, -level.fresh :])

        first, scores = inputs.relay["tokens"], inputs.relay["scores"]
        tokens, tree = self._shape.grow(first, scores, expand, ids=self.head.target_ids)
        return Draft(tokens, None, tree)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run one pass over the accepted pairs. Return the T first draft tokens, their log-probabilities and the head's
        state, [B, ...] by name.
        """
        hidden = self.run_accepted_pairs(inputs)
        first, scores = most_likely(self.head.logits(hidden), self._shape.branches)
        return {"tokens": self.head.to_target_tokens(first), "scores": scores, "hidden": hidden}
