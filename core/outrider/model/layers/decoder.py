"""The decoder: embedding, layers, final norm, output head.

Letters: T new tokens, N rows of logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.device import ConfigError, KernelSet, RecurrentBatch, RecurrentWindow, ResidualStream, Weight
from outrider.device.kernels.kernelset import BLOCKS, kernel_names
from outrider.device.kernels.weights import linear, prepare
from outrider.model.config.model_config import ModelConfig
from outrider.model.config.rope import query_scales
from outrider.model.config.shapes import decoder_shape
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel, SideBySide
from outrider.model.layers.layer import RecurrentLayer, create_layers
from outrider.model.layers.layer_weights import LayerWeights
from outrider.model.layers.per_layer_inputs import PerLayerEmbedding, PerLayerEmbeddingWeights
from outrider.model.layers.ranks import ModelRanks
from outrider.model.layers.rotary import Rotary, make_rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights:
    """Device tensors of a decoder. A tensor-parallel rank holds its slices, with the vocabulary padded by zero rows."""

    embedding: Tensor
    """Embedding table [V, H]; the same tensor as ``head`` if the embeddings are tied."""
    head: Weight
    """The output head [V, H], possibly quantized."""
    norm: Tensor
    """Weight [H] of the final norm."""
    layers: tuple[LayerWeights, ...]
    per_layer: PerLayerEmbeddingWeights | None = None
    """Table of the layers' own inputs; None for models without per-layer embeddings."""


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
        self._rotary = self._make_rotary(config)
        full = None if config.sandwich is None else config.of_layer(config.sandwich.full_layers[0])
        self._full_rotary = None if full is None else self._make_rotary(full)
        # Rounded to the dtype, as transformers does.
        self._embedding_scale = 1.0 if full is None else float(torch.tensor(config.hidden_size**0.5, dtype=self.dtype))
        self._layers = create_layers(config, weights.layers, kernels, ranks)
        self._cache_indices = tuple(map(config.cache_index, config.attention_layers))
        self._per_layer = None
        if weights.per_layer is not None:
            self._per_layer = PerLayerEmbedding(weights.per_layer, kernels, config.rms_eps)
        prepare(kernels, weights.head)

    def _make_rotary(self, config: ModelConfig) -> Rotary:
        return make_rotary(
            config.rope, config.head_size, config.max_context, kernels=self.kernels, dtype=self.dtype, device=self.device
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

    def implementations(self) -> dict[str, Any]:
        """Return the implementation of each block of each layer and of each primitive, by name: ``native``, ``composed`` or
        ``reference``.
        """
        primitives = (name for name in kernel_names() if name not in BLOCKS)
        return {
            "blocks": [{block.name: block.implementation for block in layer.blocks} for layer in self._layers],
            "primitives": {name: self.kernels.implementation(name) for name in primitives},
        }

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [T, H] of int64 ``tokens`` [T]."""
        rows = self.embed_from_table(tokens, self.weights.embedding)
        return rows if self._embedding_scale == 1.0 else rows.mul_(self._embedding_scale)

    def forward_with_aux_hidden_states(
        self, inputs: ForwardInput, cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run all layers. After the first layer, attention reads the ``settled`` metadata. See the base class for arguments
        and results.

        Raises :class:`ConfigError` for layers that the decoder lacks.
        """
        missing = [layer for layer in layers if not 0 <= layer <= len(self._layers)]
        if missing:
            raise ConfigError(f"there are no layers {missing} to capture, the decoder has {len(self._layers)}")
        angles = self._angles(inputs)
        x = ResidualStream(self.kernels, self.embed_inputs(inputs))
        if self._per_layer is not None:
            inputs = replace(inputs, per_layer=self._per_layer(inputs.tokens, x.rows))
        features = () if inputs.embeddings is None else inputs.embeddings.split(self.config.hidden_size, dim=1)
        if self.config.rope.query_beta:
            inputs = replace(inputs, query_scales=query_scales(self.config.rope, inputs.positions).to(self.dtype))
        windows: Sequence[RecurrentWindow | None] = (None,) * len(cache.states)
        if inputs.states is not None and inputs.states.decodes and cache.windows:
            windows, inputs = cache.windows, replace(inputs, states=replace(inputs.states, pending=cache.pending))
        states: tuple[Tensor, ...] = ()
        if layers:
            width = x.rows.shape[1]
            states = SideBySide(x.rows.new_empty((x.rows.shape[0], len(layers) * width)), width)
        self.begin_pass(inputs)
        last = self.config.num_writing_layers - 1  # the layers after it need the kept rows alone
        reads_all_rows = any(layer > last for layer in layers)
        keeps_rows = inputs.kept is not None and not reads_all_rows and last + 1 < len(self._layers)
        pages_of_layers = (cache.layers[index] for index in self._cache_indices)
        states_of_layers = zip(cache.states, windows, strict=True)
        whole = inputs.whole
        for index, layer in enumerate(self._layers):
            pages: tuple[Any, Any] = next(states_of_layers if layer.is_recurrent else pages_of_layers)
            captured = tuple(state for state, wanted in zip(states, layers, strict=True) if wanted == index)
            x = layer.forward(x, inputs if index == last and not reads_all_rows else whole, angles[index], pages, captured)
            if index + 1 < len(features):
                x.rows.add_(features[index + 1])
            if index == 0:
                inputs, whole = inputs.after_first_layer(), whole.after_first_layer()
            if index == last and keeps_rows:
                whole = inputs.kept_batch(self.kernels)
                angles = self._angles(whole)
        final = x.norm(self.weights.norm, self.config.rms_eps)
        for state in (state for state, wanted in zip(states, layers, strict=True) if wanted == len(self._layers)):
            self.kernels.copy_rows(x.rows, state)
        return inputs.select_rows(final, self.kernels) if reads_all_rows else final, states

    def _angles(self, inputs: ForwardInput) -> list[tuple[Tensor, Tensor]]:
        """Return the rotation of the tokens of ``inputs`` in each layer."""
        angles = [self._rotary(inputs.positions, inputs.prompt_lens)] * len(self._layers)
        if self._full_rotary is not None and self.config.sandwich is not None:
            full = self._full_rotary(inputs.positions, inputs.prompt_lens)
            for index in self.config.sandwich.full_layers:
                angles[index] = full
        return angles

    def settle(self, cache: KVCache, rows: Tensor) -> None:
        """Write the pending tokens of the windows of ``rows`` to the states."""
        if cache.pending is None:
            return
        starts = torch.zeros(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        batch = RecurrentBatch(rows, starts, starts[1:] + 1, 1, pending=cache.pending)
        sizes = cache.windows[0].inputs.shape[2], 2 * cache.states[0].delta.shape[1]
        padding = torch.zeros((1, sum(sizes)), dtype=self.dtype, device=rows.device).split(sizes, dim=1)
        layers = (layer for layer in self._layers if isinstance(layer, RecurrentLayer))
        for layer, state, window in zip(layers, cache.states, cache.windows, strict=True):
            layer.settle(state, window, batch, padding)
        cache.pending.index_fill_(0, rows, 0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, Vd] of ``hidden`` [N, H], gathered from all ranks."""
        logits = self.ranks.logits(linear(self.kernels, hidden, self.weights.head), self.output_size)
        cap = 0.0 if self.config.sandwich is None else self.config.sandwich.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

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
        prepare(self.kernels, head)
        return decoder
