"""ForwardInput: the new tokens of a ragged batch. Letters: T new tokens, H hidden size, S kept rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import (
    AttentionMetadata,
    AttentionTokens,
    ConfigError,
    KernelSet,
    LayerRows,
    RecurrentBatch,
    RecurrentTokens,
    RecurrentWindow,
    RotaryArgs,
)
from outrider.model.layers.cache import LayerState


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of a batch whose states are needed after the last layer. The other rows only write their keys and values there.

    Both tensors live as long as the batch's other tensors.
    """

    index: Tensor
    """Indices of the kept rows among the T tokens, int64 [S]."""
    attention: AttentionMetadata
    """Metadata of the kept tokens alone: each is the one new token of a sequence whose cached tokens end with it."""

    @classmethod
    def last_of_each(cls, attention: AttentionMetadata, last: Tensor) -> KeptRows:
        """Keep the last token of each sequence, at ``last`` int64 [S]. The sequence's cached tokens end with it.

        A sequence without tokens keeps another sequence's row, which attends only to the first slot of its own page. The
        result of such a row is never read.
        """
        starts = torch.arange(last.shape[0] + 1, dtype=torch.int32, device=last.device)
        return cls.one_per_sequence(attention, last, starts, attention.seq_lens.clamp(min=1))

    @classmethod
    def one_per_sequence(cls, attention: AttentionMetadata, index: Tensor, starts: Tensor, seq_lens: Tensor) -> KeptRows:
        """Keep the token at ``index`` int64 [S] of each sequence.

        ``seq_lens`` int32 [S], at least 1, are the cached tokens up to and including that token. ``starts`` int32 [S + 1] is
        0, 1, and so on.
        """
        return cls(
            index,
            replace(
                attention,
                query_start=starts,
                seq_lens=seq_lens,
                block_table=attention.block_table[: index.shape[0]],
                max_query=1,
                tree_mask=None,
                uniform=True,
                plan=None,  # the existing plan is for all tokens
                host_query_start=None,
                host_context=None,
                shapes=(),
                parts=(),
                settled=False,  # the current layer has just written some of the cached tokens
            ),
        )


@dataclass(frozen=True, slots=True)
class StateInput:
    """The states of recurrent layers that a pass reads, and how it writes them."""

    rows: Tensor
    """Row of each sequence's states, int64 [B]; row 0 for padding sequences."""
    decodes: bool = False
    """True if each sequence has few tokens, which a recurrence computes token by token. With a cache that has windows, they
    keep the tokens. Otherwise the pass writes the states after all tokens.
    """
    pending: Tensor | None = None
    """:attr:`KVCache.pending`, which the decoder sets for a pass with windows."""


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """A ragged batch of T new tokens, padding included. Every tensor is on the model's device."""

    tokens: Tensor
    """Token ids, int64 [T]."""
    positions: Tensor
    """Positions for the rope, int64 [T], or [3, T] for a model with mrope."""
    slots: Tensor
    """Cache slot of each token's key and value, int64 [T] (page * page size + offset). Padding is written to page 0."""
    attention: AttentionMetadata
    """Metadata of attention: the number of tokens and the pages of each sequence."""
    embeddings: Tensor | None = None
    """Features of images and videos, [T, ``ModelConfig.feature_size``] in the model's dtype, and 0 for text. Given together
    with ``embedded``. The first H columns replace embeddings. H more columns are added to the output of each deepstack layer.
    """
    embedded: Tensor | None = None
    """True for the tokens whose embedding is replaced by their row of ``embeddings``, bool [T]."""
    prompt_lens: Tensor | None = None
    """Length of each token's prompt, int64 [T], needed for prefill with a dynamic rope. None when decoding."""
    kept: KeptRows | None = None
    """Rows whose results are needed; None means all. Every layer writes keys and values of all tokens. Only the kept rows
    continue after the attention of the last layer.
    """

    query_scales: Tensor | None = None
    """Factors of the queries of each token, [T, 1, 1] in the model's dtype; None means 1. The decoder sets them."""
    per_layer: Tensor | None = None
    """Input of each of L layers for each token, [T, L, P] in the model's dtype, of a model with per-layer embeddings. The
    decoder sets it.
    """
    states: StateInput | None = None
    """State rows of each sequence; required by models with recurrent layers, None for others."""

    @classmethod
    def concatenated(cls, *batches: ForwardInput) -> ForwardInput:
        """Return a batch with the tokens of ``batches`` in this order. They have only tokens, positions, slots and attention,
        and only the last one may have padding tokens.
        """
        others = ("embeddings", "embedded", "prompt_lens", "kept", "query_scales", "per_layer", "states")
        assert all(getattr(each, name) is None for each in batches for name in others)
        return cls(
            torch.cat([each.tokens for each in batches]),
            torch.cat([each.positions for each in batches], dim=-1),
            torch.cat([each.slots for each in batches]),
            AttentionMetadata.concatenated(*((each.tokens.shape[0], each.attention) for each in batches)),
        )

    @property
    def whole(self) -> ForwardInput:
        """The batch without a selection of rows, as all layers but the last process it."""
        return self if self.kept is None else replace(self, kept=None)

    def select_rows(self, state: Tensor, kernels: KernelSet) -> Tensor:
        """Return the kept rows [S, ...] of ``state`` [T, ...], or ``state`` itself if all rows are kept."""
        return state if self.kept is None else kernels.gather_rows(state, self.kept.index)

    def kept_batch(self, kernels: KernelSet) -> ForwardInput:
        """Return the kept rows as a batch of their own, for layers that only read keys and values. The batch itself if all
        rows are kept.
        """
        kept = self.kept
        if kept is None:
            return self
        tokens, positions, slots = (each.index_select(-1, kept.index) for each in (self.tokens, self.positions, self.slots))
        per_layer = None if self.per_layer is None else kernels.gather_rows(self.per_layer, kept.index)
        return ForwardInput(tokens, positions, slots, kept.attention, per_layer=per_layer)

    def after_first_layer(self) -> ForwardInput:
        """Return the batch for all layers after the first one: its attention metadata is ``settled``."""
        return replace(self, attention=self.attention.after_layer())

    def attention_tokens(
        self, cos_sin: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], captured: tuple[Tensor, ...] = ()
    ) -> AttentionTokens:
        """Return the tokens of an attention block, for the rotation ``cos_sin`` and the keys and values ``cache``.

        Each tensor [T, H] of ``captured`` receives the block's complete input.
        """
        attention = self.attention if self.kept is None else self.kept.attention
        rotary = RotaryArgs(*cos_sin, *cache, self.slots)
        return AttentionTokens(attention, rotary, self._layer_rows(captured), self.query_scales)

    def recurrent_tokens(
        self, state: LayerState, window: RecurrentWindow | None, captured: tuple[Tensor, ...] = ()
    ) -> RecurrentTokens:
        """Return the tokens, states and window of a recurrent block; ``captured`` as in :meth:`attention_tokens`.

        Raises :class:`ConfigError` for a pass without states.
        """
        states, attention = self.states, self.attention
        if states is None:
            raise ConfigError("a model with recurrent layers was called without the rows of its states (ForwardInput.states)")
        operands = states.rows, attention.query_start, attention.seq_lens, attention.max_query
        batch = RecurrentBatch(*operands, attention.settled, attention.uniform, states.pending)
        return RecurrentTokens(batch, *state, self._layer_rows(captured), decodes=states.decodes, window=window)

    def _layer_rows(self, captured: tuple[Tensor, ...]) -> LayerRows:
        return LayerRows(None if self.kept is None else self.kept.index, captured)
