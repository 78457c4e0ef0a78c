"""Drafting by a separate, smaller decoder (Leviathan et al. 2023, Chen et al. 2023), as a chain or as a tree.

Its KV cache holds every token up to the last one, so only its predictions of the next token are relayed. Draft-extend runs
the accepted tokens and computes these predictions: a draft of depth D costs D passes. A draft model with recurrent layers
costs one pass more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import Backend, ConfigError
from outrider.model import ForwardInput, KVCache, LanguageModel, LayerState, RecurrentConfig, StateInput
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


def _prompt_input(model: LanguageModel, inputs: ExtendInputs) -> ForwardInput:
    """Return the draft model's pass over the tokens of prompts.

    A vision-language draft model reads the target's image features if their size matches.
    """
    assert inputs.prompt is not None  # the caller has prompts
    reads_media = (
        model.config.vision is not None
        and inputs.embeddings is not None
        and inputs.embeddings.shape[1] == model.config.feature_size
    )
    return ForwardInput(
        inputs.prompt,
        extend_rope_positions(model.config.rope, inputs),
        inputs.slots,
        inputs.attention,
        inputs.embeddings if reads_media else None,
        inputs.embedded if reads_media else None,
        inputs.prompt_lens,
        inputs.kept,
    )


def _run_accepted(model: LanguageModel, cache: KVCache, page_size: int, inputs: ExtendInputs) -> Tensor:
    """Run the draft model over the accepted tokens, each at its own position. Return the hidden states [B, H] of each
    request's last token.
    """
    attention = inputs.attention
    batch = inputs.last.shape[0]
    if inputs.prompt is not None:
        # First the prompt's tokens, then the token after them, which no earlier call processed.
        model.forward(_prompt_input(model, inputs), cache)  # writes keys and values; the result is unused
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
    _tokens_ahead = 1

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
        return self._draft_after([inputs.relay["token"]], [inputs.relay["probs"]], inputs, self.cache)

    def _draft_after(
        self,
        tokens: list[Tensor],
        probs: list[Tensor],
        inputs: DraftInputs,
        cache: KVCache,
        states: StateInput | None = None,
    ) -> Draft:
        """Extend the drafted ``tokens`` and their distributions to K, with a pass of one token per request for each."""
        model, count = self._model, inputs.count or self._draft_tokens
        following = self.next_positions(model.kernels, inputs, count=count + 1)
        for step in range(len(tokens), count):
            token = tokens[-1] if tokens else inputs.last_tokens
            flat = following.pass_input(step, token, model.config.rope, f"draft.{step}", states)
            logits = model.logits(model.forward(flat, cache))
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


class HybridDraftModelProposer(DraftModelProposer):
    """A proposer of chains of K tokens from a draft model with recurrent layers. It relays nothing.

    A recurrent state can't be cut back to the accepted tokens. A draft therefore advances a copy of each request's states,
    and draft-extend runs the verified tokens from the states themselves, and commits those of the accepted tokens, as verify
    does. Both cover the target's cached tokens, so that K + 1 passes draft K tokens.
    """

    _tokens_ahead = 0
    accepts_padding = extends = True
    relay: tuple[RelaySpec, ...] = ()
    _drafted: KVCache

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The recurrent layers of the draft model."""
        return self._model.config.recurrent

    @property
    def slots(self) -> int:
        """Number of slots that an iteration writes, K + 1: draft-extend writes those of verify."""
        return self._draft_tokens + 1

    @property
    def states(self) -> tuple[LayerState, ...]:
        """The states of each recurrent layer of the draft model."""
        return self.cache.states

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request."""
        return self._recurrent.state_bytes(self._model.dtype)

    @property
    def request_bytes(self) -> int:
        """Bytes of the copy of one request's states, and of what draft-extend keeps of its verified tokens."""
        return self.state_bytes + (self._draft_tokens + 1) * self._recurrent.window_bytes(self._model.dtype)

    @property
    def _recurrent(self) -> RecurrentConfig:
        assert self.recurrent is not None  # other draft models have another proposer
        return self.recurrent

    def allocate_states(self, *, backend: Backend, rows: int, requests: int) -> None:
        """Allocate the states, and a row of the copy for each request."""
        del backend
        recurrent, dtype, pages = self._recurrent, self._model.dtype, self.cache
        committed = pages.with_states(recurrent, rows, dtype)
        self._cache = committed.with_windows(recurrent, 1 + requests, self._draft_tokens + 1, dtype)
        self._drafted = pages.with_states(recurrent, 1 + requests, dtype)

    def host_lengths_of(self, count: int) -> Mapping[str, int]:
        """Return the lengths of draft-extend and of ``count`` draft passes, the first over the last token."""
        return {"extend": 0, **{f"draft.{step}": step + 1 for step in range(min(count, self._draft_tokens))}}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return the only pass, over the prompts."""
        del sequences, longest
        return (tokens,)

    def draft(self, inputs: DraftInputs) -> Draft:
        """Copy the states of the batch, and run K passes of one token per request, which advance the copy."""
        kernels, rows = self._model.kernels, inputs.rows
        for committed, drafted in zip(self.cache.states, self._drafted.states, strict=True):
            for state, copied in zip(committed, drafted, strict=True):
                kernels.scatter_rows(copied, rows, kernels.gather_rows(state, rows))
        return self._draft_after([], [], inputs, self._drafted, StateInput(rows, decodes=True))

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run one pass over the prompts, or over the verified tokens, and commit the states of the accepted ones."""
        model, first = self._model, inputs.first_tokens
        if first is None:
            model.forward(replace(_prompt_input(model, inputs), states=StateInput(inputs.rows)), self.cache)
            return {}
        after = inputs.tokens.view(first.shape[0], -1)
        tokens = torch.cat((first.unsqueeze(1), after[:, :-1]), dim=1).flatten()
        attention = replace(inputs.attention, plan=None, shapes=())  # the existing plan is for the target's shape
        rope_positions = extend_rope_positions(model.config.rope, inputs)
        states = StateInput(inputs.rows, decodes=True)
        flat = ForwardInput(tokens, rope_positions, inputs.slots, attention, kept=inputs.kept, states=states)
        model.forward(flat, self.cache)
        assert self.cache.pending is not None  # the states have windows
        counts = torch.where(inputs.rows > 0, inputs.last % after.shape[1] + 1, 0)  # accepted drafts and the token before
        self.cache.pending.index_copy_(0, inputs.rows, counts)
        model.settle(self.cache, inputs.rows)  # the next draft copies the states
        return {}


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

    def draft(self, inputs: DraftInputs) -> Draft:
        """Grow the tree from the relayed first tokens with D - 1 passes, each over all nodes expanded so far."""
        model = self._model

        def expand(level: Level) -> Tensor:
            # The last token's keys and values follow the cached ones; the nodes follow the last token.
            positions = inputs.seq_lens.unsqueeze(1) + level.depths
            flat = self.level_input(inputs, level, model.config.rope, positions)
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
