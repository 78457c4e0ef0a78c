"""One decoder layer: ``x += attention(norm(x)); x += mlp(norm(x))`` over a shared residual stream x.

Letters: T new tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from outrider.device import KernelSet, RecurrentBatch, RecurrentWindow, ResidualStream
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.cache import LayerState
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.latent import LatentAttention
from outrider.model.layers.layer_weights import LayerWeights, layer_blocks
from outrider.model.layers.ranks import ModelRanks, or_single_rank
from outrider.model.layers.sandwich import SandwichLayer


class LayerBlock:
    """One half of a layer: its weights, and the method that computes it, chosen once for these weights.

    ``composed`` computes the block in place of a method of ``kernels``.
    """

    def __init__(
        self, kernels: KernelSet, name: str, weights: Any, composed: Callable[..., ResidualStream] | None = None
    ) -> None:
        self.name, self.weights = name, weights
        self.implementation = kernels.implementation(name, weights) if composed is None else "composed"
        self._compute = composed or kernels.resolve_block(name, weights)

    def __call__(self, x: ResidualStream, *tokens: Any) -> ResidualStream:
        """Return the stream with the block's contribution added. ``tokens`` are the further arguments of its kernel."""
        return self._compute(x, self.weights, *tokens)


class DecoderLayer:
    """A layer with attention and an MLP, or with routed experts instead of the MLP if its weights have a router.

    ``ranks`` hold the other slices of the layer; ``config`` has the number of heads of this rank. Errors name ``index``.
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
        mixer, mlp = layer_blocks(config, weights, window, or_single_rank(ranks), index)
        latent = None if config.latent is None else LatentAttention(kernels, weights, config.latent, config.num_heads)
        self.blocks = self._mixer, self._mlp = LayerBlock(kernels, *mixer, latent), LayerBlock(kernels, *mlp)
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
        return self._mlp(self._mixer(x, inputs.attention_tokens(cos_sin, cache, captured)))


class RecurrentLayer(DecoderLayer):
    """A layer with a recurrent block in place of attention. Its ``cache`` is a :class:`LayerState`, and the window of a pass
    over drafts or None, instead of keys and values.

    Speculation can't truncate a recurrent state. A pass over drafts therefore keeps their tokens in a window. The next pass
    over drafts, or :meth:`settle`, changes the state by the accepted ones.
    """

    is_recurrent = True

    def forward(
        self,
        x: ResidualStream,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Any, Any],
        captured: tuple[Tensor, ...] = (),
    ) -> ResidualStream:
        """Return the residual stream after this layer, which does not rotate queries and keys."""
        del cos_sin
        return self._mlp(self._mixer(x, inputs.recurrent_tokens(*cache, captured)))

    def settle(
        self, state: LayerState, window: RecurrentWindow, batch: RecurrentBatch, padding: tuple[Tensor, Tensor]
    ) -> None:
        """Write the pending tokens of ``batch``, which has no new tokens, to the states.

        ``padding`` has a row of the kernels' operands: channels [1, C] and gates [1, 2 Hv].
        """
        rule, (mixed, gates) = self._mixer.weights.rule, padding
        self._kernels.short_convolution(mixed, rule.convolution, state.convolution, batch, window.inputs)
        operands = mixed, gates, rule.a_log, rule.dt_bias, state.delta, batch
        self._kernels.gated_delta_rule(*operands, window.updates)


def create_layers(
    config: ModelConfig, layers: Sequence[LayerWeights], kernels: KernelSet, ranks: ModelRanks | None
) -> tuple[DecoderLayer | SandwichLayer, ...]:
    """Create a layer for each of ``layers``: a recurrent one if it has recurrent weights, or one that norms its results.

    Raises :class:`ConfigError` if ``kernels`` don't take an operand of the layers.
    """
    config.check_kernels(kernels)
    numbered = enumerate(zip(layers, config.windows, strict=True))
    if config.sandwich is not None:
        return tuple(SandwichLayer(config, each, kernels, window=window, index=index) for index, (each, window) in numbered)
    return tuple(
        (DecoderLayer if each.recurrent is None else RecurrentLayer)(
            config, each, kernels, window=window, ranks=ranks, index=index
        )
        for index, (each, window) in numbered
    )
