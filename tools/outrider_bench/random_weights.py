"""Models of a published shape with random weights, for measuring: what a step costs doesn't depend on their values.

Nothing that such a model says means anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import Backend, ConfigError
from outrider.model.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.eagle import EagleHead
from outrider.model.head_mapping import eagle_targets, eagle_weights
from outrider.model.mapping import Target, decoder_targets, decoder_weights
from outrider.model.rope import RopeConfig
from outrider.model.tensors import placed

SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-3.1-8b": ModelConfig(
            family="llama",
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_size=128,
            rms_eps=1e-5,
            max_context=131072,
            rope=RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_context=8192),
        ),
        "tiny": ModelConfig(
            family="llama",
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_size=16,
            rms_eps=1e-5,
            max_context=1024,
        ),
    }
)
"""Shapes by name."""


def shape_config(name: str) -> ModelConfig:
    """The config of a shape. Raises :class:`ConfigError` for a name that isn't in :data:`SHAPES`."""
    if name not in SHAPES:
        raise ConfigError(f"there is no shape {name!r}; expected one of {', '.join(sorted(SHAPES))}")
    return SHAPES[name]


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
