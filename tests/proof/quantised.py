"""A target and its EAGLE head with weights in every format, quantised activations, a split weight and a quantised KV cache.

The first layer's cache has a scale per KV head, the other layers' have none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import Backend, QuantizedWeight
from outrider.device.kernels.formats import FP8
from outrider.device.kernels.weight_formats import weight_format
from outrider.device.kernels.weights import SplitWeight, plain
from outrider.model import Decoder, EagleHead, LayerWeights
from outrider.model.layers.layer_weights import CacheFormat
from outrider.model.quantization.cache import cache_format
from outrider.speculative.eagle import EagleProposer
from outrider.speculative.proposer import Proposer
from outrider_proof import proposers, tiny

QUANTISED = "eagle, quantised"


def _fp8(weight: Tensor) -> QuantizedWeight:
    """Return ``weight`` [out, in] quantised to FP8 with one scale per row; activations are quantised per token."""
    return weight_format("fp8").quantize(weight)


def _int8(weight: Tensor) -> QuantizedWeight:
    """Return ``weight`` [out, in] quantised to INT8 with one scale per row; activations are quantised with one
    stored scale.
    """
    return replace(weight_format("int8").quantize(weight), input_scale=torch.tensor([0.05]))


def _int4(weight: Tensor) -> QuantizedWeight:
    """Return ``weight`` [out, in] quantised to INT4 with a scale and a zero point per group of columns; activations stay
    unquantised.
    """
    made = weight_format("int4").fitted(weight.shape[1]).quantize(weight)
    return replace(made, zero_points=torch.zeros(made.scales.shape, dtype=torch.int8))


def _quantise_layer(weights: LayerWeights) -> LayerWeights:
    """Return the layer with quantised weights: queries and keys in FP8, values unquantised, and each other weight in a
    different format.
    """
    qkv = plain(weights.qkv)
    rows = tiny.KV_HEADS * tiny.HEAD_SIZE
    return replace(
        weights,
        qkv=SplitWeight((_fp8(qkv[:-rows]), qkv[-rows:].contiguous())),
        output=_int8(plain(weights.output)),
        gate_up=_int4(plain(weights.gate_up)),
        down=_fp8(plain(weights.down)),
    )


def _scales(model: Decoder) -> list[tuple[Tensor, Tensor] | None]:
    """Return the (key, value) scales of each layer's cache, [KV heads] each, or None."""
    first = torch.linspace(0.004, 0.02, tiny.KV_HEADS, dtype=torch.float64)
    return [(first, first.flip(0)), *[None] * (len(model.weights.layers) - 1)]


def _target(backend: Backend) -> Decoder:
    """Return the tiny target with quantised layers and output head, and a quantised cache if the kernels support it."""
    model = tiny.target()
    caches: list[CacheFormat | None] = [None] * len(model.weights.layers)
    if FP8.name in backend.kernels_in_use.cache_formats:
        caches = [
            cache_format(FP8.name, scales, model.config, dtype=model.dtype, device=model.device) for scales in _scales(model)
        ]
    layers = zip(model.weights.layers, caches, strict=True)
    weights = replace(
        model.weights,
        head=_int4(plain(model.weights.head)),
        layers=tuple(replace(_quantise_layer(each), cache=kept) for each, kept in layers),
    )
    return Decoder(model.config, proposers.copy_to_device(weights, backend.device), backend.kernels_in_use)


def _proposer(model: Decoder) -> Proposer:
    """Return a proposer with the quantised tiny EAGLE head.

    It drafts a subset of the vocabulary with an FP8 copy of the output head.
    """
    head = tiny.eagle_head()
    token_ids = torch.arange(tiny.VOCABULARY)[torch.arange(tiny.VOCABULARY) % 8 != 5]
    copy = _fp8(plain(tiny.target().weights.head)[token_ids])
    draft_target = model.with_head(proposers.copy_to_device(copy, model.device), token_ids.to(model.device))
    assert head.weights.fusion is not None
    weights = replace(
        head.weights,
        fusion=_int8(plain(head.weights.fusion)),
        layers=tuple(_quantise_layer(each) for each in head.weights.layers),
    )
    return EagleProposer(
        EagleHead(head.config, proposers.copy_to_device(weights, model.device), draft_target), draft_tokens=3
    )


proposers.OTHERS[QUANTISED] = (_target, _proposer)
