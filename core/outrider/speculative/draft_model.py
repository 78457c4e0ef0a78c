"""Drafting by a separate, smaller decoder (Leviathan et al. 2023, Chen et al. 2023), as a chain or as a tree.

Its KV cache holds every token up to the last one, so only its predictions of the next token are relayed. Draft-extend runs
the accepted tokens and computes these predictions: a draft of depth D costs D passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import ConfigError
from outrider.model import ForwardInput, KVCache, LanguageModel
from outrider.speculative.proposer import (
    CachedProposer,
    ChainProposer,
    Draft,
    DraftInputs,
    ExtendInputs,
    RelaySpec,
    TreeProposer,
    extend_rope_positions,
    sample_draft,
    slots_of,
    text_rope_positions,
)
from outrider.speculative.tree import DynamicTree, Level, most_likely


def _check_vocabulary(model: LanguageModel, target: LanguageModel) -> None:
    if model.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {model.config.vocab_size} tokens, the target one of "
            f"{target.config.vocab_size}: drafts must be tokens of the target"
        )


def _run_accepted(model: LanguageModel, cache: KVCache, page_size: int, inputs: ExtendInputs) -> Tensor:
    """Run the draft model over the accepted tokens, each at its own position. Return the hidden states [B, H] of each
    request's last token.
    """
    attention = inputs.attention
    batch = inputs.last.shape[0]
    if inputs.prompt is not None:
        # First the prompt's tokens, then the token after them, which no earlier call processed.
        # A vision-language draft model reads the target's image features if their size matches.
        reads_media = (
            model.config.vision is not None
            and inputs.embeddings is not None
            and inputs.embeddings.shape[1] == model.config.feature_size
        )
        flat = ForwardInput(
            inputs.prompt,
            extend_rope_positions(model.config.rope, inputs),
            inputs.slots,
            attention,
            inputs.embeddings if reads_media else None,
            inputs.embedded if reads_media else None,
            inputs.prompt_lens,
            inputs.kept,
        )
        model.forward(flat, cache)  # writes keys and values; the result is unused
        tokens, positions = inputs.tokens[inputs.last], inputs.positions[inputs.last] + 1
        query_start = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device)
        attention = replace(attention, query_start=query_start, max_query=1)
        last = torch.arange(batch, device=tokens.device)
    else:
        tokens, positions, last = inputs.tokens, inputs.positions + 1, inputs.last
    slots = slots_of(positions.view(batch, -1), attention.block_table, page_size).flatten()
    attention = replace(
        attention,
        seq_lens=attention.seq_lens + 1,
        tree_mask=None,
        max_kv=attention.max_kv + 1,
        uniform=True,
        seq_lens_host=inputs.seq_lens_host.host_param("extend", 1) if inputs.seq_lens_host is not None else None,
        plan=None,  # the existing plan is for one token less
        host_query_start=None,
        host_context=None,
        shapes=(),
    )
    rope_positions = text_rope_positions(model.config.rope, positions, inputs.mrope_position_deltas)
    return model.forward(ForwardInput(tokens, rope_positions, slots, attention), cache)[last]


class _DraftModelBase(CachedProposer):
    """Base class of the chain and the tree proposer of a draft model."""

    _model: LanguageModel
    _context: int | None = None
    name = "draft-model"
    lookahead = 0  # the cache entry of a position depends on no later token
    reads_hidden = False

    @property
    def max_context(self) -> int:
        """The context that the draft model was made for, in tokens."""
        return self._context or self._model.config.max_context

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return two passes: one over the prompts, and one over the token after each prompt."""
        del longest
        return tokens, sequences


class DraftModelProposer(_DraftModelBase, ChainProposer):
    """A proposer of chains of K tokens from a draft model. It relays the first token and, for requests that sample, the
    distribution of that token.
    """

    _tokens_ahead = 1

    def __init__(self, model: LanguageModel, *, target: LanguageModel, draft_tokens: int, context: int | None = None) -> None:
        """Create a proposer of chains of the draft ``model``.

        ``context`` is the context of the model's checkpoint, if the loaded ``model`` has positions for a longer one.
        """
        if draft_tokens < 1:
            raise ConfigError(f"draft_tokens is {draft_tokens}; a chain has at least 1 token")
        _check_vocabulary(model, target)
        super().__init__(model.config, model.cache_dtype)
        self._model, self._context = model, context
        self._draft_tokens = draft_tokens

    @property
    def slots(self) -> int:
        """Number of slots that an iteration writes, K + 2: draft-extend also writes the token after verify's last one."""
        return self._draft_tokens + 2

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The first draft token int64 and the distribution float32 [V] that it was sampled from, per request."""
        return (
            RelaySpec("token", (), torch.int64),
            RelaySpec("probs", (self._model.config.vocab_size,), torch.float32),
        )

    def draft(self, inputs: DraftInputs) -> Draft:
        """Run K - 1 passes of one token per request. The first token is relayed, and each pass gives the next one."""
        model, token = self._model, inputs.relay["token"]
        tokens, probs = [token], [inputs.relay["probs"]]
        count = inputs.count or self._draft_tokens
        following = self.next_positions(model.kernels, inputs, count=count + 1)
        for step in range(1, count):
            rope_positions = text_rope_positions(model.config.rope, following.positions[step], inputs.mrope_position_deltas)
            flat = ForwardInput(token, rope_positions, following.slots[step], following.attention(step, f"draft.{step}"))
            logits = model.logits(model.forward(flat, self.cache))
            token, distribution = sample_draft(model.kernels, logits, inputs, following.positions[step + 1])
            tokens.append(token)
            probs.append(distribution)
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if inputs.sampling else None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run one pass over the accepted tokens, or two for a prompt. Return the first draft token and its distribution, [B,
        ...] by name.
        """
        hidden = _run_accepted(self._model, self.cache, self._page_size, inputs)
        token, probs = sample_draft(self._model.kernels, self._model.logits(hidden), inputs, inputs.next_positions)
        return {"token": token, "probs": probs} if inputs.sampling else {"token": token}


class DraftModelTreeProposer(_DraftModelBase, TreeProposer):
    """A proposer of trees of K nodes from a draft model. It relays the T most likely first tokens and their
    log-probabilities.
    """

    def __init__(self, model: LanguageModel, *, target: LanguageModel, shape: DynamicTree) -> None:
        _check_vocabulary(model, target)
        if any(model.config.windows):
            raise ConfigError("a draft model with a sliding window can't draft trees; draft a chain (draft_topk=1)")
        TreeProposer.__init__(self, model.config, model.cache_dtype, shape)
        self._model = model

    @property
    def slots(self) -> int:
        """Number of slots that verify, draft-extend, or the last token with the expanded nodes write, the largest of the
        three.
        """
        shape = self._shape
        return max(shape.nodes + 1, shape.depth + 2, shape.expanded + 1)

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The T most likely first tokens and their log-probabilities, per request."""
        branches = self._shape.branches
        return (RelaySpec("tokens", (branches,), torch.int64), RelaySpec("scores", (branches,), torch.float32))

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """Host parameters of the passes: draft-extend adds one token, each level's draft pass its nodes and
        the last token.
        """
        return {"extend": 1, **{f"draft.{nodes}": nodes + 1 for nodes in self._shape.levels}}

    def draft(self, inputs: DraftInputs) -> Draft:
        """Grow the tree from the relayed first tokens with D - 1 passes, each over all nodes expanded so far."""
        model = self._model

        def expand(level: Level) -> Tensor:
            # The last token's keys and values follow the cached ones; the nodes follow the last token.
            positions = inputs.seq_lens.unsqueeze(1) + level.depths
            flat = self.level_input(inputs, level, model.config.rope, positions, ahead=1)
            hidden = model.forward(flat, self.cache).view(*level.tokens.shape, -1)
            return model.logits(hidden[:, -level.fresh :])

        tokens, tree = self._shape.grow(inputs.relay["tokens"], inputs.relay["scores"], expand)
        return Draft(tokens, None, tree)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run one pass over the accepted tokens, or two for a prompt. Return the T first tokens and their log-probabilities,
        [B, T] by name.
        """
        hidden = _run_accepted(self._model, self.cache, self._page_size, inputs)
        first, scores = most_likely(self._model.logits(hidden), self._shape.branches)
        return {"tokens": first, "scores": scores}
