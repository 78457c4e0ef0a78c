"""Every proposer over tiny models, as programs for the simulated accelerator.

:func:`quantised_target` and :func:`quantised_proposer` have weights in every format, quantised activations, a split weight
and a quantised KV cache: the first layer has a scale per KV head, the other layers have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from outrider.device import DeltaRuleWeights, QuantizedWeight
from outrider.device.kernels.formats import FP8
from outrider.device.kernels.weight_formats import weight_format
from outrider.device.kernels.weights import SplitWeight, plain
from outrider.model import (
    Decoder,
    DecoderWeights,
    DFlashHead,
    Eagle3Head,
    EagleHead,
    HeadWeights,
    LayerWeights,
    ModelConfig,
    ModelRanks,
    MtpHead,
    RecurrentConfig,
    Shards,
    or_single_rank,
)
from outrider.model.layers.layer_weights import CacheFormat
from outrider.model.quantization.cache import cache_format
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer, HybridDraftModelProposer
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.lookup import CombinedProposer, NgramProposer, SuffixProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.parallel import BlockProposer, PEagleProposer
from outrider.speculative.tree import DynamicTree
from outrider_proof import tiny

if TYPE_CHECKING:
    from outrider.device import Backend, KernelSet
    from outrider.speculative.proposer import Proposer


_Weights = TypeVar("_Weights", bound=DecoderWeights | HeadWeights)
_Head = TypeVar("_Head", EagleHead, Eagle3Head, DFlashHead, MtpHead)


def table_part(table: Tensor, shards: Shards) -> Tensor:
    """Return this rank's rows of an embedding or head, [vocabulary, hidden], padded with zeros to the first rank's size."""
    start, stop = shards.vocabulary.uneven(table.shape[0])
    missing = shards.vocabulary.width(table.shape[0]) - (stop - start)
    return torch.nn.functional.pad(table[start:stop], (0, 0, 0, missing)).contiguous()


def layer_part(weights: LayerWeights, config: ModelConfig, shards: Shards) -> LayerWeights:
    """Return this rank's part of a layer; ``config`` describes the complete model."""
    size, heads, kv_heads = config.head_size, config.num_heads, config.num_kv_heads
    own, own_kv, inner = shards.heads(config), shards.kv_heads(config), shards.mlp.even(config.intermediate_size)

    def rows(part: Tensor, between: tuple[int, int], unit: int) -> Tensor:
        return part[between[0] * unit : between[1] * unit]

    def qkv(stacked: Tensor | None) -> Tensor | None:
        if stacked is None:
            return None
        widths = (heads * size, kv_heads * size, kv_heads * size)
        q, k, v, gate = stacked.split((*widths, stacked.shape[0] - sum(widths)))
        return torch.cat((rows(q, own, size), rows(k, own_kv, size), rows(v, own_kv, size), rows(gate, own, size)))

    def gate_up(stacked: Tensor | None) -> Tensor | None:
        return None if stacked is None else torch.cat([rows(half, inner, 1) for half in stacked.chunk(2)])

    output = plain(weights.output)[:, own[0] * size : own[1] * size].contiguous()
    if weights.recurrent is not None and config.recurrent is not None:
        projections: Tensor | None
        projections, output, recurrent = _recurrent_part(weights, weights.recurrent, config.recurrent, shards)
        weights = replace(weights, recurrent=recurrent)
    else:
        projections = qkv(plain(weights.qkv))
    assert projections is not None
    if weights.router is None:
        gates, down = gate_up(plain(weights.gate_up)), plain(weights.down)[:, inner[0] : inner[1]].contiguous()
        assert gates is not None
    else:
        gates, down = plain(weights.gate_up), plain(weights.down)
        held = shards.held_experts(gates.shape[0])
        gates, down = _experts_part(gates, down, shards) if held is None else (gates[slice(*held)], down[slice(*held)])
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        stacked = _experts_part(plain(weights.shared_gate_up)[None], plain(weights.shared_down)[None], shards)
        weights = replace(weights, shared_gate_up=stacked[0][0], shared_down=stacked[1][0])
    if weights.cache is not None and weights.cache.input_scales is not None and weights.cache.output_scales is not None:
        q, k, v = weights.cache.input_scales.split((heads, kv_heads, kv_heads))
        before = torch.cat((rows(q, own, 1), rows(k, own_kv, 1), rows(v, own_kv, 1)))
        weights = replace(
            weights,
            cache=replace(weights.cache, input_scales=before, output_scales=rows(weights.cache.output_scales, own, 1)),
        )
    return replace(
        weights,
        qkv=projections,
        qkv_bias=qkv(weights.qkv_bias),
        output=output,
        output_bias=weights.output_bias if shards.attention.rank == 0 else None,
        gate_up=gates,
        gate_up_bias=gate_up(weights.gate_up_bias),
        down=down,
        down_bias=weights.down_bias if shards.mlp.rank == 0 else None,
    )


def _recurrent_part(
    weights: LayerWeights, recurrent: DeltaRuleWeights, config: RecurrentConfig, shards: Shards
) -> tuple[Tensor, Tensor, DeltaRuleWeights]:
    """Return this rank's part of a recurrent layer: the product of q, k, v and gates, the output, and the other weights."""
    first, last = shards.attention.even(config.key_heads)
    keys = slice(first * config.key_size, last * config.key_size)
    repeats = config.value_heads // config.key_heads
    heads = slice(first * repeats, last * repeats)
    values = slice(heads.start * config.value_size, heads.stop * config.value_size)
    widths = (config.key_width, config.key_width, config.value_width)

    def channels(stacked: Tensor) -> list[Tensor]:
        return [part[own] for part, own in zip(stacked.split(widths), (keys, keys, values), strict=True)]

    mixed, gate, b, a = plain(weights.qkv).split((config.channels, config.value_width, *[config.value_heads] * 2))
    own = replace(
        recurrent,
        convolution=torch.cat(channels(recurrent.convolution)),
        a_log=recurrent.a_log[heads],
        dt_bias=recurrent.dt_bias[heads],
    )
    return torch.cat((*channels(mixed), gate[values], b[heads], a[heads])), plain(weights.output)[:, values].contiguous(), own


def _experts_part(gate_up: Tensor, down: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    """Return this rank's inner columns of stacked MLPs: (gate and up, down)."""
    first, last = shards.mlp.even(down.shape[2])
    gates = torch.cat([half[:, first:last] for half in gate_up.chunk(2, dim=1)], dim=1)
    return gates, down[:, :, first:last].contiguous()


def part_of(weights: _Weights, config: ModelConfig, shards: Shards) -> _Weights:
    """Return this rank's part of the weights of a decoder or a head with its own embedding; ``config`` describes the complete
    model.
    """
    own: dict[str, Any] = {"layers": tuple(layer_part(layer, config, shards) for layer in weights.layers)}
    for name in ("embedding", "head"):
        table = getattr(weights, name, None)
        if table is not None:
            own[name] = table_part(plain(table), shards)
    return replace(weights, **own)


def copy_to_device(value: Any, device: torch.device) -> Any:
    """Copy weights to a device: a tensor, or the tensors of tuples and dataclasses; other values are returned unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(copy_to_device(each, device) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: copy_to_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def decoder(
    model: Decoder, backend: Backend, ranks: ModelRanks | None = None, *, kernels: KernelSet | None = None
) -> Decoder:
    """Return the model on another backend with its kernels, or with ``kernels``; with ranks, this rank's part."""
    shards = or_single_rank(ranks).shards
    weights = copy_to_device(part_of(model.weights, model.config, shards), backend.device)
    return Decoder(shards.local(model.config, "the model"), weights, kernels or backend.kernels_in_use, ranks)


def head_for(head: _Head, target: Decoder) -> _Head:
    """Return a tiny draft head for ``target`` on its device; with ranks, this rank's part."""
    weights = copy_to_device(part_of(head.weights, head.config, target.shards), target.device)
    given = signature(type(head)).parameters.values()
    own = [each.name for each in given if each.kind is each.KEYWORD_ONLY and hasattr(head, each.name)]
    config: Any = target.shards.local(head.config, "the head")
    return type(head)(config, weights, target, **{name: getattr(head, name) for name in own})


def _mtp_heads(target: Decoder) -> list[MtpHead]:
    return [head_for(head, target) for head in tiny.mtp_heads()]


def shape() -> DynamicTree:
    """Return the tree shape of every tree proposer in this module."""
    return DynamicTree(topk=3, depth=3)


MAKERS: dict[str, Callable[[Decoder, Backend], Proposer | None]] = {
    "eagle": lambda t, _: EagleProposer(head_for(tiny.eagle_head(), t), draft_tokens=3),
    "eagle-tree": lambda t, _: EagleTreeProposer(head_for(tiny.eagle_head(), t), shape()),
    "eagle3": lambda t, _: EagleProposer(head_for(tiny.eagle3_head(), t), draft_tokens=3),
    "eagle3-tree": lambda t, _: EagleTreeProposer(head_for(tiny.eagle3_head(), t), shape()),
    "mtp": lambda t, _: MtpProposer(_mtp_heads(t)),
    "mtp-tree": lambda t, _: MtpProposer(_mtp_heads(t), branches=3),
    "peagle": lambda t, _: PEagleProposer(head_for(tiny.peagle_head(), t), draft_tokens=3),
    "dflash": lambda t, _: BlockProposer(head_for(tiny.dflash_head(), t)),
    "draft-model": lambda t, b: DraftModelProposer(decoder(tiny.draft_model(), b, t.ranks), target=t, draft_tokens=3),
    "draft-model-tree": lambda t, b: DraftModelTreeProposer(decoder(tiny.draft_model(), b, t.ranks), target=t, shape=shape()),
    "none": lambda t, _: None,
    "ngram": lambda t, _: NgramProposer(vocab_size=t.config.vocab_size, draft_tokens=3),
    "ngram-tree": lambda t, _: NgramProposer(vocab_size=t.config.vocab_size, draft_tokens=3, branches=3),
    "suffix": lambda t, _: SuffixProposer(vocab_size=t.config.vocab_size, draft_tokens=3),
    "suffix+eagle": lambda t, _: CombinedProposer(
        SuffixProposer.for_target(t, 3), EagleProposer(head_for(tiny.eagle_head(), t), draft_tokens=3), least=2
    ),
}
"""Makers of the tiny proposers, by name, for a target on a backend; a maker that returns None stands for non-speculative
decoding.
"""


def untrained(target: Decoder) -> EagleHead:
    """Return the EAGLE head with a negated fusion matrix, so that nearly all drafts are rejected."""
    head = head_for(tiny.eagle_head(), target)
    assert head.weights.fusion is not None
    return EagleHead(head.config, dataclasses.replace(head.weights, fusion=plain(head.weights.fusion).flip(0)), target)


EXTREMES: dict[str, Callable[[Decoder, Backend], Proposer | None]] = {
    "eagle, untrained": lambda t, _: EagleProposer(untrained(t), draft_tokens=3),
    "draft-model, itself": lambda t, b: DraftModelProposer(decoder(tiny.target(), b), target=t, draft_tokens=3),
}
"""Makers of proposers whose drafts are nearly all rejected, or all accepted, by name."""

CHAINED: dict[str, Callable[[Decoder, Backend], Proposer | None]] = {
    "mtp-chain": lambda t, _: EagleProposer(_mtp_heads(t)[0], draft_tokens=3),
    "hybrid-draft": lambda t, b: HybridDraftModelProposer(
        decoder(tiny.hybrid(tiny.WIDE_RECURRENT), b, t.ranks), target=t, draft_tokens=3
    ),
    "hybrid-draft, itself": lambda t, _: HybridDraftModelProposer(t, target=t, draft_tokens=3),
    "suffix+hybrid-draft, itself": lambda t, _: CombinedProposer(
        SuffixProposer.for_target(t, 3), HybridDraftModelProposer(t, target=t, draft_tokens=3), least=2
    ),
}
"""Makers of proposers of hybrid models, by name: a head of multi-token prediction that is applied to its own state again, a
draft model with recurrent layers, and the hybrid target itself, whose drafts are all accepted.
"""


QUANTISED = "eagle, quantised"


def _fp8(weight: torch.Tensor) -> QuantizedWeight:
    """Return ``weight`` [out, in] quantised to FP8 with one scale per row; activations are quantised per token."""
    return weight_format("fp8").quantize(weight)


def _int8(weight: torch.Tensor) -> QuantizedWeight:
    """Return ``weight`` [out, in] quantised to INT8 with one scale per row; activations are quantised with one
    stored scale.
    """
    return replace(weight_format("int8").quantize(weight), input_scale=torch.tensor([0.05]))


def _int4(weight: torch.Tensor) -> QuantizedWeight:
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


def _scales(model: Decoder) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Return the (key, value) scales of each layer's cache, [KV heads] each, or None."""
    first = torch.linspace(0.004, 0.02, tiny.KV_HEADS, dtype=torch.float64)
    return [(first, first.flip(0)), *[None] * (len(model.weights.layers) - 1)]


def quantised_target(backend: Backend) -> Decoder:
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
    return Decoder(model.config, copy_to_device(weights, backend.device), backend.kernels_in_use)


def quantised_proposer(model: Decoder) -> Proposer:
    """Return a proposer with the quantised tiny EAGLE head.

    It drafts a subset of the vocabulary with an FP8 copy of the output head.
    """
    head = tiny.eagle_head()
    token_ids = torch.arange(tiny.VOCABULARY)[torch.arange(tiny.VOCABULARY) % 8 != 5]
    copy = _fp8(plain(tiny.target().weights.head)[token_ids])
    draft_target = model.with_head(copy_to_device(copy, model.device), token_ids.to(model.device))
    assert head.weights.fusion is not None
    weights = replace(
        head.weights,
        fusion=_int8(plain(head.weights.fusion)),
        layers=tuple(_quantise_layer(each) for each in head.weights.layers),
    )
    return EagleProposer(EagleHead(head.config, copy_to_device(weights, model.device), draft_target), draft_tokens=3)
