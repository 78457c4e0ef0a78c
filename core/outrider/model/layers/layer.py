"""One decoder layer: ``x += attention(norm(x)); x += mlp(norm(x))`` over a shared residual stream x.

Letters: T new tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.device import (
    AttentionShape,
    AttentionTokens,
    ConfigError,
    KernelSet,
    LayerRows,
    RecurrentBatch,
    RecurrentBlock,
    RecurrentTokens,
    ResidualStream,
    RotaryArgs,
)
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.cache import LayerState
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.layer_weights import (
    LayerWeights,
    attention_block,
    attention_scale,
    experts_block,
    mlp_block,
    recurrent_block,
)
from outrider.model.layers.ranks import ModelRanks, or_single_rank


def attention_shapes(config: ModelConfig, dtype: torch.dtype, *, page_size: int) -> tuple[AttentionShape, ...]:
    """Return the attention shapes of the layers of ``config``, without duplicates."""
    return tuple(
        AttentionShape(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            page_size=page_size,
            dtype=dtype,
            scale=attention_scale(config),
            window=window,
        )
        for window in dict.fromkeys(config.windows)
    )


class LayerBlock:
    """One half of a layer: its weights, and the method that computes it, chosen once for these weights."""

    def __init__(self, kernels: KernelSet, name: str, weights: Any) -> None:
        self.name, self.weights = name, weights
        self.implementation = kernels.implementation(name, weights)
        self._compute = kernels.resolve_block(name, weights)

    def __call__(self, x: ResidualStream, *tokens: Any) -> ResidualStream:
        """Return the residual stream with the block's contribution added. ``tokens`` are the further arguments of the block's
        kernel.
        """
        return self._compute(x, self.weights, *tokens)  # type: ignore[no-any-return]


class DecoderLayer:
    """A layer with attention and an MLP, or with routed experts instead of the MLP if its weights have a router.

    ``ranks`` hold the other slices of the layer; ``config`` has the number of heads of this rank. ``index`` is the layer's
    index, for error messages.
    """

    is_recurrent = False

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        kernels: KernelSet,
        *,
        window: int,
        ranks: ModelRanks | None = None,
        index: int = 0,
    ) -> None:
        boundary = or_single_rank(ranks)
        if weights.recurrent is None or config.recurrent is None:
            mixer: tuple[str, Any] = "attention_block", attention_block(config, weights, window, boundary)
        else:
            mixer = "recurrent_block", recurrent_block(config, config.recurrent, weights, weights.recurrent, boundary)
        if weights.router is None:
            mlp: tuple[str, Any] = "mlp_block", mlp_block(config, weights, boundary)
        else:
            mlp = "experts_block", experts_block(config, weights, weights.router, boundary, index)
        self.blocks = self._mixer, self._mlp = LayerBlock(kernels, *mixer), LayerBlock(kernels, *mlp)
        self._kernels = kernels

    def forward(
        self,
        x: ResidualStream,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        captured: tuple[Tensor, ...] = (),
    ) -> ResidualStream:
        """Return the residual stream after this layer, with all rows or only those that ``inputs`` keeps.

        Keys and values of all T tokens are written. Each tensor [T, H] of ``captured`` receives the layer's complete input.
        """
        tokens = self._tokens(inputs, cos_sin, cache, LayerRows(inputs.kept_index, captured))
        return self._mlp(self._mixer(x, tokens))

    def _tokens(
        self, inputs: ForwardInput, cos_sin: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], rows: LayerRows
    ) -> Any:
        attention = inputs.attention if inputs.kept is None else inputs.kept.attention
        return AttentionTokens(attention, RotaryArgs(*cos_sin, *cache, inputs.slots), rows, inputs.query_scales)


class RecurrentLayer(DecoderLayer):
    """A layer with a recurrent block in place of attention. Its ``cache`` is a :class:`LayerState` instead of keys and
    values.

    Speculation can't truncate a recurrent state. A pass over drafts therefore leaves the states unchanged and keeps
    tensors of each recurrent layer; :meth:`commit` computes the accepted tokens again and writes their states. Both passes
    compute the same bits.
    """

    is_recurrent = True

    def _tokens(
        self, inputs: ForwardInput, cos_sin: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], rows: LayerRows
    ) -> Any:
        del cos_sin
        return _recurrent_tokens(inputs, LayerState(*cache), rows)

    def commit(self, kept: tuple[Tensor, Tensor, Tensor], inputs: ForwardInput, state: LayerState, counts: Tensor) -> None:
        """Write to ``state`` the states after the first ``counts`` int64 [B] tokens of each sequence. ``kept`` are the
        layer's tensors that the pass over ``inputs`` kept.
        """
        block: RecurrentBlock = self._mixer.weights
        tokens = _recurrent_tokens(inputs, state)
        # The layers of the pass ran after the last write to the states.
        self._kernels.commit_recurrent(kept, block, tokens._replace(batch=tokens.batch._replace(settled=True)), counts)


def _recurrent_tokens(inputs: ForwardInput, state: LayerState, rows: LayerRows | None = None) -> RecurrentTokens:
    """Return the tokens and states that a recurrent block processes in the pass ``inputs``. Raises :class:`ConfigError` for a
    pass without states.
    """
    states, attention = inputs.states, inputs.attention
    if states is None:
        raise ConfigError("a model with recurrent layers was called without the rows of its states (ForwardInput.states)")
    operands = states.rows, attention.query_start, attention.seq_lens, attention.max_query
    batch = RecurrentBatch(*operands, settled=attention.settled, uniform=attention.uniform)
    return RecurrentTokens(batch, *state, rows or LayerRows(), states.decodes, states.counts, states.window)


def create_layer(
    config: ModelConfig,
    weights: LayerWeights,
    kernels: KernelSet,
    *,
    window: int,
    ranks: ModelRanks | None = None,
    index: int = 0,
) -> DecoderLayer:
    """Create the layer for ``weights``: a recurrent one if they have recurrent weights."""
    kind = DecoderLayer if weights.recurrent is None else RecurrentLayer
    return kind(config, weights, kernels, window=window, ranks=ranks, index=index)
