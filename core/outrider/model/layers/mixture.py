"""MixtureLayer: a decoder layer with a mixture of experts instead of an MLP.

Routing is computed and applied on the device. Letters: T new tokens, H hidden size, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import ConfigError, KernelSet, QuantizedWeight
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.layer import DecoderLayer, LayerWeights
from outrider.model.layers.pending import Attended, Made, Partial, Pending, add_rms_norm
from outrider.model.layers.products import Attending, SplitWeight, label, linear, linear_silu_mul, plain
from outrider.model.layers.ranks import ModelRanks


class MixtureLayer(DecoderLayer):
    """Attention as in :class:`DecoderLayer`, then each token's routed experts and the shared expert, if there is one.

    Each rank holds a slice of every expert's intermediate size. All ranks compute the same routing from identical inputs.
    ``index`` is the layer's index, for error messages.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        kernels: KernelSet,
        *,
        window: int,
        ranks: ModelRanks | None = None,
        index: int,
    ) -> None:
        super().__init__(config, weights, kernels, window=window, ranks=ranks)
        if config.experts is None or weights.router is None:
            raise ConfigError(f"layer {index} has a router, and the config has no experts; expected both or none")
        self._experts = config.experts
        self._router = weights.router
        self._gate_up, self._down = weights.gate_up, weights.down
        kinds = {isinstance(each, QuantizedWeight) for each in (self._gate_up, self._down)}
        if len(kinds) > 1 or any(isinstance(each, SplitWeight) for each in (self._gate_up, self._down)):
            raise ConfigError(
                f"layer {index}: its experts are stored as {label(self._gate_up)} (gate and up) and {label(self._down)} "
                "(down); expected all of them in one way, with one scale for all activations where these are static: load "
                "them as plain weights (--quantized dequantize)"
            )

    def mlp(self, attended: Attended, residual: Tensor) -> Pending:
        """Add ``attended`` to ``residual`` [T, H] in place. Return the experts' pending contribution."""
        assert not isinstance(attended, Attending)  # a layer with a router doesn't defer its attention
        normed = add_rms_norm(attended, residual, self._weights.mlp_norm, self._config.rms_eps, self._kernels)
        if not isinstance(attended, Partial):
            return Made(self._run_experts(normed))
        ranks = attended.ranks
        partial = self._run_experts(ranks.gather_tokens(normed))
        return Partial(ranks.scatter_tokens(partial, normed.shape[0]), ranks)

    def _run_experts(self, x: Tensor) -> Tensor:
        """Return the output of the experts [T, H] for normed ``x`` [T, H]."""
        kernels, weights, experts = self._kernels, self._weights, self._experts
        logits = linear(kernels, x, self._router)
        shares, chosen = kernels.route(logits, experts.per_token, renormalize=experts.renormalize)
        gate_up, down = self._gate_up, self._down
        if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
            mixed = kernels.experts_quantized(x, shares, chosen, gate_up, down)
        else:
            mixed = kernels.experts(x, shares, chosen, plain(gate_up), plain(down))
        if weights.shared_gate_up is None or weights.shared_down is None or weights.shared_gate is None:
            return mixed
        shared = linear(kernels, linear_silu_mul(kernels, x, weights.shared_gate_up, None), weights.shared_down)
        return mixed.add_(torch.sigmoid(linear(kernels, x, weights.shared_gate)) * shared)


def create_layer(
    config: ModelConfig,
    weights: LayerWeights,
    kernels: KernelSet,
    *,
    window: int,
    ranks: ModelRanks | None = None,
    index: int = 0,
) -> DecoderLayer:
    """Create the decoder layer for ``weights``: a mixture of experts if they have a router. ``index`` is its index in the
    stack.
    """
    if weights.router is None:
        return DecoderLayer(config, weights, kernels, window=window, ranks=ranks)
    return MixtureLayer(config, weights, kernels, window=window, ranks=ranks, index=index)
