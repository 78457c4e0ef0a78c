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
from outrider.model.ranks import ModelRanks
from outrider.model.shapes import shape_config
from outrider.model.shards import Shards
from outrider.model.tensors import placed

_APART = 1000
"""Between the seeds of two ranks."""

__all__ = ["random_decoder", "random_eagle", "shape_config"]


def random_decoder(config: ModelConfig, *, backend: Backend, dtype: torch.dtype, ranks: ModelRanks | None = None) -> Decoder:
    """A decoder of this shape, or the part of it that is this rank's; returns when its weights are there. The same weights
    each time on one kind of device and as many ranks.
    """
    shards = Shards() if ranks is None else ranks.shards
    local = shards.local(config, config.family)
    with placed(backend, dtype):
        weights = _draw(decoder_targets(config, (), shards), dtype, backend.device, seed=0, shards=shards)
        return Decoder(local, decoder_weights(local, weights), backend.kernels_in_use, ranks)


def random_eagle(target: Decoder, whole: ModelConfig | None = None, *, backend: Backend) -> EagleHead:
    """An EAGLE head of one layer for ``target``, in the published form: no norm before its attention, no embedding.

    ``whole``: the config of a target that several ranks share.
    """
    whole, shards = replace(whole or target.config, num_layers=1, windows=(0,), experts=None), target.shards
    config = shards.local(whole, whole.family)
    with placed(backend, target.dtype):
        weights = _draw(eagle_targets(whole, (), shards), target.dtype, backend.device, seed=1, shards=shards)
        return EagleHead(config, eagle_weights(config, weights, embedding=target.embedding), target)


def _draw(
    targets: Sequence[Target], dtype: torch.dtype, device: torch.device, *, seed: int, shards: Shards
) -> dict[str, Tensor]:
    """Norms of ones, matrices whose products keep the size of what goes in. What every rank holds is the same on all."""
    own = torch.Generator(device).manual_seed(seed + _APART * shards.mlp.rank)
    alike = torch.Generator(device).manual_seed(seed)
    weights = {}
    for target in targets:
        generator = own if any(piece.cut is not None for piece in target.pieces) else alike
        weight = torch.empty(target.shape, dtype=dtype, device=device)
        weights[target.name] = (
            weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(generator=generator).mul_(target.shape[1] ** -0.5)
        )
    return weights
