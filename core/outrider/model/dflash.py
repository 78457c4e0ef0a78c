"""DFlash: a head that drafts a whole block in one pass, every place of which sees the block and the text before it.

Letters: T tokens of text, N new tokens, H hidden size, A of the target's layers that are read, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.device import HeadNorms, RotaryArgs
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput
from outrider.model.language_model import LanguageModel
from outrider.model.layer import DecoderLayer, LayerWeights
from outrider.model.pending import Pending, add_rms_norm
from outrider.model.products import Weight, linear
from outrider.model.rotary import rotary
from outrider.model.side_by_side import side_by_side


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashWeights:
    """Tensors of a head: ``fusion`` [H, A H], ``hidden_norm`` and ``norm`` [H], and its layers, whose q and k are normed.

    Embedding and output head are the target's.
    """

    fusion: Weight
    hidden_norm: Tensor
    norm: Tensor
    layers: tuple[LayerWeights, ...]


class DFlashHead:
    """Drafts a block on what the target's inner layers made of the text. Placement and capture as for :class:`LanguageModel`.

    Its keys and values of the text come from the target's states alone (:meth:`take_in`), without a pass through its layers.
    Those of a block are its own, and mean nothing later. ``block_size``: places of a block, the last known token's included;
    ``mask_token`` stands at the others. ``causal``: a place sees those before it alone. ``aux_hidden_state_layers``: the
    target's layers whose input is read.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DFlashWeights,
        target: LanguageModel,
        *,
        block_size: int,
        mask_token: int,
        aux_hidden_state_layers: tuple[int, ...],
        causal: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.target = target
        self.block_size = block_size
        self.mask_token = mask_token
        self.causal = causal
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self.kernels = target.kernels
        context = max(config.max_context, target.config.max_context)
        self._rotary = rotary(
            config.rope, config.head_size, context, kernels=target.kernels, dtype=target.dtype, device=target.device
        )
        self._layers = tuple(
            DecoderLayer(config, layer, self.kernels, window=0, ranks=target.ranks) for layer in weights.layers
        )

    def take_in(
        self,
        aux_hidden_states: tuple[Tensor, ...],
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        prompt_lens: Tensor | None = None,
    ) -> None:
        """Write keys and values of T tokens of text: the target's states [T, H] at ``positions`` (int64 [T], or [3, T]) go to
        ``slots`` int64 [T] of each layer's cache.
        """
        config, kernels = self.config, self.kernels
        fused = linear(kernels, side_by_side(aux_hidden_states), self.weights.fusion)
        text = kernels.rms_norm(fused, self.weights.hidden_norm, config.rms_eps)
        cos_sin = self._rotary.gather(positions, prompt_lens)
        for weights, pages in zip(self.weights.layers, cache.layers, strict=True):
            assert weights.k_norm is not None  # every DFlash layer has one
            norms = HeadNorms(weights.k_norm, weights.k_norm, config.rms_eps)
            made = self._keys_values(text, weights)
            kernels.head_norm_rope_write_cache(made, norms, RotaryArgs(*cos_sin, *pages, slots))

    def forward(self, inputs: ForwardInput, cache: KVCache) -> Tensor:
        """States [N, H] of blocks, behind the final norm. ``inputs.slots`` lie behind the text that was taken in, and
        ``inputs.attention`` has the mask of the blocks (:class:`~outrider.device.AttentionMetadata`).
        """
        kernels = self.kernels
        cos_sin = self._rotary.gather(inputs.positions, inputs.prompt_lens)
        residual = self.target.embed(inputs.tokens)
        pending: Pending | None = None
        self.target.begin_pass(inputs)
        for index, (layer, pages) in enumerate(zip(self._layers, cache.layers, strict=True)):
            pending = layer.forward(pending, residual, inputs, cos_sin, pages)
            if index == 0:
                inputs = inputs.behind_a_layer()  # the text was taken in before the first one
        assert pending is not None  # there is at least one layer
        return add_rms_norm(pending, residual, self.weights.norm, self.config.rms_eps, kernels)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, Vd] of ``hidden`` [N, H] by the target's output head, of the tokens that this has."""
        return self.target.logits(hidden)

    def _keys_values(self, text: Tensor, weights: LayerWeights) -> Tensor:
        """Keys and values side by side [T, 2 Hkv D]; of a weight that isn't plain, the queries are made as well."""
        queries = self.config.num_heads * self.config.head_size
        bias = weights.qkv_bias
        if isinstance(weights.qkv, Tensor):
            own = None if bias is None else bias[queries:]
            return linear(self.kernels, text, weights.qkv[queries:], own)
        return linear(self.kernels, text, weights.qkv, bias)[:, queries:].contiguous()
