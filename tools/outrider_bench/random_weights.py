"""Models of a published shape with random weights, for measuring: what a step costs doesn't depend on their values.

Nothing that such a model says means anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import Backend
from outrider.model.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.eagle import EagleHead
from outrider.model.head_mapping import eagle_targets, eagle_weights
from outrider.model.mapping import Target, decoder_targets, decoder_weights
from outrider.model.shapes import shape_config
from outrider.model.tensors import placed

__all__ = ["random_decoder", "random_eagle", "shape_config"]


def random_decoder(config: ModelConfig, *, backend: Backend, dtype: torch.dtype) -> Decoder:
    """A decoder of this shape; returns when its weights are there. The same weights each time on one kind of device."""
    with placed(backend, dtype):
        weights = _draw(decoder_targets(config, ()), dtype, backend.device, seed=0)
        return Decoder(config, decoder_weights(config, weights), backend.kernels_in_use)


def random_eagle(target: Decoder, *, backend: Backend) -> EagleHead:
    """An EAGLE head of one layer for ``target``, in the published form: no norm before its attention, no embedding."""
    config = replace(target.config, num_layers=1, windows=(0,))
    with placed(backend, target.dtype):
        weights = _draw(eagle_targets(config, ()), target.dtype, backend.device, seed=1)
        return EagleHead(config, eagle_weights(config, weights, embedding=target.embedding), target)


def _draw(targets: Sequence[Target], dtype: torch.dtype, device: torch.device, *, seed: int) -> dict[str, Tensor]:
    """Norms of ones, matrices whose products keep the size of what goes in."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for target in targets:
        weight = torch.empty(target.shape, dtype=dtype, device=device)
        weights[target.name] = (
            weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(generator=generator).mul_(target.shape[1] ** -0.5)
        )
    return weights
