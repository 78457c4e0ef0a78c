"""DFlash: a head that drafts a whole block in one pass. Every position of the block attends to the block and the text before
it.

Letters: T tokens of text, N new tokens, H hidden size, A number of captured target layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from outrider.device import HeadNorms, ResidualStream, RotaryArgs, Weight
from outrider.device.kernels.weights import linear
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.draft_head import BaseDraftHead
from outrider.model.inputs import ForwardInput
from outrider.model.language_model import LanguageModel, side_by_side
from outrider.model.layer import DecoderLayer
from outrider.model.layer_weights import LayerWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashWeights:
    """Device tensors of a DFlash head."""

    fusion: Weight
    """[H, A H]."""
    hidden_norm: Tensor
    """[H]."""
    norm: Tensor
    """Weight [H] of the final norm."""
    layers: tuple[LayerWeights, ...]
    """Layers with q and k norms."""
    embedding: Tensor | None = None
    """[V, H]. None means the target's."""


class DFlashHead(BaseDraftHead):
    """Draft head that predicts a block of tokens from the target's intermediate hidden states.

    Placement and capture follow the rules of :class:`LanguageModel`. :meth:`write_text_cache` computes the keys and values of
    the text from the target's states alone, without running the layers. Keys and values of a block are valid for that block
    only.

    ``block_size`` counts the positions of a block, the last known token's included. The other positions hold ``mask_token``.
    In ``causal`` layers, one value for all or one for each, a position attends only to earlier positions of the block.
    ``aux_hidden_state_layers`` are the target's layers whose inputs the head reads. ``head`` and ``ids`` are those of
    :class:`BaseDraftHead`.
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
        causal: bool | tuple[bool, ...] = False,
        head: Weight | None = None,
        ids: Tensor | None = None,
    ) -> None:
        super().__init__(config, target, head=head, ids=ids)
        self.weights = weights
        self.block_size = block_size
        self.mask_token = mask_token
        self._causal = (causal,) * config.num_layers if isinstance(causal, bool) else causal
        self.aux_hidden_state_layers = aux_hidden_state_layers

        self._layers = tuple(
            DecoderLayer(config, layer, self.kernels, window=window, ranks=target.ranks)
            for layer, window in zip(weights.layers, config.windows, strict=True)
        )

    def write_text_cache(
        self,
        aux_hidden_states: tuple[Tensor, ...],
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        prompt_lens: Tensor | None = None,
    ) -> None:
        """Write keys and values of T tokens of text to ``slots`` int64 [T] of each layer's cache.

        ``aux_hidden_states`` are the target's states [T, H]. ``positions`` are int64 [T] or [3, T].
        """
        config, kernels = self.config, self.kernels
        fused = linear(kernels, side_by_side(aux_hidden_states), self.weights.fusion)
        text = kernels.rms_norm(fused, self.weights.hidden_norm, config.rms_eps)
        cos_sin = self._rotary.gather(positions, prompt_lens)
        for weights, pages in zip(self.weights.layers, cache.layers, strict=True):
            assert weights.k_norm is not None  # every DFlash layer has one
            norms = HeadNorms(weights.k_norm, weights.k_norm, config.rms_eps)
            keys_values = self._keys_values(text, weights)
            kernels.head_norm_rope_write_cache(keys_values, norms, RotaryArgs(*cos_sin, *pages, slots))

    def forward(self, inputs: ForwardInput, cache: KVCache) -> Tensor:
        """Return the block's hidden states [N, H] after the final norm.

        ``inputs.slots`` follow the slots of the text, whose keys and values :meth:`write_text_cache` has written.
        ``inputs.attention`` holds a mask by which a block sees itself (:class:`~outrider.device.AttentionMetadata`).
        """
        cos_sin = self._rotary.gather(inputs.positions, inputs.prompt_lens)
        table = self.weights.embedding
        embedded = self.target.embed(inputs.tokens) if table is None else self.target.embed_from_table(inputs.tokens, table)
        causal_inputs = replace(inputs, attention=replace(inputs.attention, tree_mask=None))
        x = ResidualStream(self.kernels, embedded)
        self.target.begin_pass(inputs)
        for index, (layer, pages) in enumerate(zip(self._layers, cache.layers, strict=True)):
            seen = causal_inputs if self._causal[index] else inputs
            x = layer.forward(x, seen, cos_sin, pages)
            if index == 0:  # write_text_cache wrote the text's keys and values before the first layer
                inputs, causal_inputs = inputs.after_first_layer(), causal_inputs.after_first_layer()
        return x.norm(self.weights.norm, self.config.rms_eps)

    def _keys_values(self, text: Tensor, weights: LayerWeights) -> Tensor:
        """Return keys and values side by side, [T, 2 Hkv D].

        An unquantized weight is sliced. A quantized weight multiplies the query rows too, and their result is dropped.
        """
        queries = self.config.num_heads * self.config.head_size
        bias = weights.qkv_bias
        if isinstance(weights.qkv, Tensor):
            key_value_bias = None if bias is None else bias[queries:]
            return linear(self.kernels, text, weights.qkv[queries:], key_value_bias)
        return linear(self.kernels, text, weights.qkv, bias)[:, queries:].contiguous()
