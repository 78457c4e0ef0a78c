"""Per-layer embeddings (Gemma 4 E2B and E4B): an input of each layer for each token, of a table and the token's embedding.

Letters: T new tokens, H hidden size, V tokens of the table, L layers, P size of a layer's input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import KernelSet, Weight
from outrider.device.kernels.weights import linear, prepare


class PerLayerEmbeddingWeights(NamedTuple):
    """Device tensors of the inputs of all layers."""

    table: Tensor
    """Inputs of the layers for each token, [V, L P]."""
    projection: Weight
    """Product [L P, H] for the part of the inputs that comes from the token's embedding."""
    norm: Tensor
    """Norm weight [P] of that part."""


class PerLayerEmbedding:
    """The computation of the layers' inputs, by ``kernels``. It reads token ids on the device, so a graph may hold it."""

    def __init__(self, weights: PerLayerEmbeddingWeights, kernels: KernelSet, eps: float) -> None:
        self._weights, self._kernels, self._eps = weights, kernels, eps
        # Rounded to the dtype, as transformers does.
        self._scale = float(torch.tensor(weights.norm.shape[0] ** 0.5, dtype=weights.table.dtype))
        prepare(kernels, weights.projection)

    def __call__(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        """Return the inputs [T, L, P] for int64 ``tokens`` [T] with the scaled ``embeddings`` [T, H]."""
        kernels, (table, projection, norm) = self._kernels, self._weights
        rows = kernels.gather_rows(table, tokens).mul_(self._scale)
        projected = linear(kernels, embeddings, projection).mul_(embeddings.shape[1] ** -0.5)
        normed = kernels.rms_norm(projected.view(rows.shape[0], -1, norm.shape[0]), norm, self._eps)
        return normed.add_(rows.view(normed.shape)).mul_(2**-0.5)
