"""The decoder: embedding, layers, final norm, output head.

Letters: T new tokens, N rows of logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import ConfigError, KernelSet
from outrider.model.config.model_config import ModelConfig
from outrider.model.config.rope import query_scales
from outrider.model.config.shapes import decoder_shape
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel, SideBySide
from outrider.model.layers.layer import LayerWeights
from outrider.model.layers.mixture import create_layer
from outrider.model.layers.pending import Pending, add_rms_norm
from outrider.model.layers.products import Weight, linear
from outrider.model.layers.ranks import ModelRanks
from outrider.model.layers.recurrent import commit_states
from outrider.model.layers.rotary import make_rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights:
    """Device tensors of a decoder. A tensor-parallel rank holds its slices, with the vocabulary padded by zero rows."""

    embedding: Tensor
    """[V, H]. The same tensor as ``head`` if the embeddings are tied."""
    head: Weight
    """The output head [V, H], possibly quantized."""
    norm: Tensor
    """Weight [H] of the final norm."""
    layers: tuple[LayerWeights, ...]


class Decoder(LanguageModel):
    """A Llama-style decoder that calls the kernels of one backend.

    ``weights`` are on the device of ``kernels``. ``ranks`` are the tensor-parallel ranks, or None for a single rank.
    ``config`` then has the number of heads and the intermediate size of this rank.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, kernels: KernelSet, ranks: ModelRanks | None = None
    ) -> None:
        kernels = kernels.for_shape(decoder_shape(config, weights.embedding.dtype))
        super().__init__(config, kernels, ranks)
        self.weights = weights
        self._output_ids: Tensor | None = None
        self._rotary = make_rotary(
            config.rope, config.head_size, config.max_context, kernels=kernels, dtype=self.dtype, device=self.device
        )
        self._layers = tuple(
            create_layer(config, layer, kernels, window=window, ranks=ranks, index=index)
            for index, (layer, window) in enumerate(zip(weights.layers, config.windows, strict=True))
        )

    @property
    def embedding(self) -> Tensor:
        """The embedding table [V, H]."""
        return self.weights.embedding

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the KV cache: that of the layers' cache format, or of the weights."""
        format = self.weights.layers[self.config.attention_layers[0]].cache
        return self.dtype if format is None else format.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [T, H] of int64 ``tokens`` [T]."""
        return self.embed_from_table(tokens, self.weights.embedding)

    def forward_with_aux_hidden_states(
        self, inputs: ForwardInput, cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run all layers. Attention metadata is ``settled`` after the first layer. See the base class for the results."""
        missing = [layer for layer in layers if not 0 <= layer <= len(self._layers)]
        if missing:
            raise ConfigError(f"there are no layers {missing} to capture, the decoder has {len(self._layers)}")
        cos_sin = self._rotary.gather(inputs.positions, inputs.prompt_lens)
        residual = self._embed_inputs(inputs)
        if self.config.rope.query_beta:
            inputs = replace(inputs, query_scales=query_scales(self.config.rope, inputs.positions).to(self.dtype))
        if inputs.states is not None and inputs.states.window is None:
            counts = inputs.attention.query_start.diff().to(torch.int64)
            inputs = replace(inputs, states=replace(inputs.states, counts=counts))
        states: tuple[Tensor, ...] = ()
        if layers:
            width = residual.shape[1]
            states = SideBySide(residual.new_empty((residual.shape[0], len(layers) * width)), width)
        pending: Pending | None = None
        self.begin_pass(inputs)
        last, reads_output = len(self._layers) - 1, len(self._layers) in layers
        pages_of_layers, states_of_layers = iter(cache.layers), iter(cache.states)
        for index, layer in enumerate(self._layers):
            pages = next(pages_of_layers if layer.recurrent is None else states_of_layers)
            captured = tuple(state for state, wanted in zip(states, layers, strict=True) if wanted == index)
            if index == last and not reads_output:
                pending, residual = layer.forward_last(pending, residual, inputs, cos_sin, pages, captured)
            else:
                pending = layer.forward(pending, residual, inputs, cos_sin, pages, captured)
            if index == 0:
                inputs = inputs.after_first_layer()
        assert pending is not None  # there is at least one layer
        final = add_rms_norm(pending, residual, self.weights.norm, self.config.rms_eps, self.kernels)
        if reads_output:
            for state in (state for state, wanted in zip(states, layers, strict=True) if wanted > last):
                self.kernels.copy_rows(residual, state)
            final = inputs.select_rows(final, self.kernels)
        return final, states

    def commit(self, inputs: ForwardInput, cache: KVCache, accepted: Tensor) -> None:
        """Run the recurrent layers over the accepted tokens again and write their states."""
        blocks = tuple(layer.recurrent for layer in self._layers if layer.recurrent is not None)
        commit_states(blocks, cache.states, inputs, accepted)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, Vd] of ``hidden`` [N, H], gathered from all ranks."""
        return self.gather_logits(linear(self.kernels, hidden, self.weights.head), self.output_size)

    @property
    def output_ids(self) -> Tensor | None:
        """int64 [Vd] token ids of the output head, or None if the head covers the vocabulary."""
        return self._output_ids

    def with_head(self, head: Weight, ids: Tensor | None = None) -> Decoder:
        """Return a decoder that shares everything with this one except for its output head [Vd, H].

        On several ranks ``head`` is split like this decoder's own head. ``ids`` int64 [Vd] on the device are the tokens of
        its rows; None means that the rows cover the vocabulary.
        """
        decoder = copy(self)
        decoder.weights = replace(self.weights, head=head)
        decoder._output_ids = ids
        return decoder

    def _embed_inputs(self, inputs: ForwardInput) -> Tensor:
        embedded = self.embed(inputs.tokens)
        if inputs.embeddings is None or inputs.embedded is None:
            return embedded
        return torch.where(inputs.embedded.unsqueeze(-1), inputs.embeddings, embedded)
