"""Every proposer over tiny models, as programs for the simulated accelerator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from outrider.device.kernels.weights import plain
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
    Shards,
    or_single_rank,
)
from outrider.model.checkpoint.files import Piece, Target
from outrider.model.checkpoint.mapping import expert_targets, layer_targets, layer_weights, recurrent_targets, table_target
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


def _cut(complete: Mapping[str, Tensor], whole: Sequence[Target], own: Sequence[Target]) -> dict[str, Tensor]:
    """Return the weights ``own`` of a rank by name, read from the weights ``whole`` as from a checkpoint that holds them."""
    stored: dict[str, Tensor] = {}

    def part(piece: Piece) -> Tensor:
        tensor = stored[piece.key]
        return tensor if piece.tensor_slice is None else tensor[piece.tensor_slice.slices(tensor.dim())]

    for target in whole:
        rows = complete[target.name].split([piece.read_shape[0] for piece in target.pieces])
        for piece, values in zip(target.pieces, rows, strict=True):
            stored.setdefault(piece.key, values.new_empty(piece.shape))
            part(piece).copy_(values.view_as(part(piece)))
    cut = {}
    for target in own:
        parts = [part(piece).reshape(piece.read_shape) for piece in target.pieces]
        cut[target.name] = torch.cat((*parts, parts[0].new_zeros((target.padding, *parts[0].shape[1:]))))
    return cut


def layer_part(weights: LayerWeights, config: ModelConfig, shards: Shards) -> LayerWeights:
    """Return this rank's part of a layer; ``config`` describes the complete model."""
    assert weights.cache is None  # only models on one rank have a quantised cache
    attends, mixture = weights.recurrent is None, weights.router is not None
    complete = {
        f"layer.{prefix}{field.name}": value.flatten(0, 1) if value.dim() == 3 else value
        for prefix, record in (("", weights), ("recurrent.", weights.recurrent))
        if record is not None
        for field in dataclasses.fields(record)
        if isinstance(value := getattr(record, field.name), Tensor)
    }

    def targets(read: Shards) -> list[Target]:
        found = layer_targets(
            config,
            "layer",
            "layer",
            attention_norm=weights.attention_norm is not None,
            attention_width=plain(weights.qkv).shape[1],
            attends=attends,
            mlp=not mixture,
            shards=read,
        )
        if not attends:
            found += recurrent_targets(config, "layer", "layer", (), read)
        if mixture:
            found += expert_targets(config, "layer", "layer", (), read)
        return found

    cut = _cut(complete, targets(Shards()), targets(shards))
    return layer_weights(cut, "layer", shards.local(config, "the model").experts if mixture else None)


def part_of(weights: _Weights, config: ModelConfig, shards: Shards) -> _Weights:
    """Return this rank's part of the weights of a decoder or a head with its own embedding; ``config`` describes the complete
    model.
    """
    if shards == Shards():
        return weights
    own: dict[str, Any] = {"layers": tuple(layer_part(layer, config, shards) for layer in weights.layers)}
    for name in ("embedding", "head"):
        table = getattr(weights, name, None)
        if table is not None:
            rows, width = plain(table).shape
            whole, part = (table_target(name, name, rows, width, each) for each in (Shards(), shards))
            own |= _cut({name: plain(table)}, [whole], [part])
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

OTHERS: dict[str, tuple[Callable[[Backend], Decoder], Callable[[Decoder], Proposer]]] = {}
"""Makers of a target and of its proposer, by name; tests add theirs."""
