"""Every proposer over tiny models, as programs for the simulated accelerator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from outrider import Engine, SamplingParams
from outrider.model import (
    Decoder,
    DFlashHead,
    Eagle3Head,
    EagleHead,
    ModelConfig,
    ModelRanks,
    MtpHead,
    PEagleHead,
    or_single_rank,
)
from outrider.model.layers.products import plain
from outrider.speculative.block import BlockProposer
from outrider.speculative.combined import CombinedProposer
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.ngram import NgramProposer
from outrider.speculative.peagle import PEagleProposer
from outrider.speculative.suffix import SuffixProposer
from outrider.speculative.tree import DynamicTree, FixedTree
from outrider_proof import tiny
from outrider_proof.rank_parts import decoder_part, dflash_part, eagle3_part, eagle_part, mtp_part
from outrider_proof.tiny import plain_config

if TYPE_CHECKING:
    from outrider.device import Backend, KernelSet
    from outrider.speculative.proposer import Proposer

PROMPTS: list[tuple[int, ...]] = [(3,), (1, 2, 3, 4, 5)]
NEW_TOKENS = 10


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
    weights = copy_to_device(decoder_part(model.weights, model.config, shards), backend.device)
    return Decoder(shards.local(model.config, "the model"), weights, kernels or backend.kernels_in_use, ranks)


def eagle(target: Decoder) -> EagleHead:
    """Return the tiny EAGLE head on the device of its target."""
    head = tiny.eagle_head()
    weights = eagle_part(head.weights, head.config, target.shards)
    return EagleHead(_local(head.config, target), copy_to_device(weights, target.device), target)


def eagle3(target: Decoder) -> Eagle3Head:
    """Return the tiny EAGLE-3 head on the device of its target."""
    head = tiny.eagle3_head()
    weights = eagle3_part(head.weights, head.config, target.shards)
    return Eagle3Head(
        _local(head.config, target),
        copy_to_device(weights, target.device),
        target,
        aux_hidden_state_layers=head.aux_hidden_state_layers,
    )


def peagle(target: Decoder) -> PEagleHead:
    """Return the tiny P-EAGLE head on the device of its target."""
    head = tiny.peagle_head()
    return PEagleHead(
        _local(head.config, target),
        copy_to_device(eagle3_part(head.weights, head.config, target.shards), target.device),
        target,
        mask_token=head.mask_token,
        aux_hidden_state_layers=head.aux_hidden_state_layers,
    )


def dflash(target: Decoder) -> DFlashHead:
    """Return the tiny DFlash head on the device of its target."""
    head = tiny.dflash_head()
    return DFlashHead(
        _local(head.config, target),
        copy_to_device(dflash_part(head.weights, head.config, target.shards), target.device),
        target,
        block_size=head.block_size,
        mask_token=head.mask_token,
        aux_hidden_state_layers=head.aux_hidden_state_layers,
    )


def mtp(target: Decoder) -> list[MtpHead]:
    """Return the tiny MTP heads on the device of their target."""
    return [
        MtpHead(
            _local(head.config, target),
            copy_to_device(mtp_part(head.weights, head.config, target.shards), target.device),
            target,
            ahead=head.ahead,
        )
        for head in tiny.mtp_heads()
    ]


def _local(config: ModelConfig, target: Decoder) -> ModelConfig:
    return target.shards.local(config, "the head")


def shape() -> DynamicTree:
    """Return the tree shape of every tree proposer in this module."""
    return DynamicTree(topk=3, depth=3)


MAKERS: dict[str, Callable[[Decoder, Backend], Proposer | None]] = {
    "eagle": lambda t, _: EagleProposer(eagle(t), draft_tokens=3),
    "eagle-tree": lambda t, _: EagleTreeProposer(eagle(t), shape()),
    "eagle-fixed-tree": lambda t, _: EagleTreeProposer(eagle(t), FixedTree.regular((3, 2, 1))),
    "eagle3": lambda t, _: EagleProposer(eagle3(t), draft_tokens=3),
    "eagle3-tree": lambda t, _: EagleTreeProposer(eagle3(t), shape()),
    "mtp": lambda t, _: MtpProposer(mtp(t)),
    "mtp-tree": lambda t, _: MtpProposer(mtp(t), branches=3),
    "peagle": lambda t, _: PEagleProposer(peagle(t), draft_tokens=3),
    "dflash": lambda t, _: BlockProposer(dflash(t)),
    "draft-model": lambda t, b: DraftModelProposer(decoder(tiny.draft_model(), b, t.ranks), target=t, draft_tokens=3),
    "draft-model-tree": lambda t, b: DraftModelTreeProposer(decoder(tiny.draft_model(), b, t.ranks), target=t, shape=shape()),
    "none": lambda t, _: None,
    "ngram": lambda t, _: NgramProposer(vocab_size=t.config.vocab_size, draft_tokens=3),
    "ngram-tree": lambda t, _: NgramProposer(vocab_size=t.config.vocab_size, draft_tokens=3, branches=3),
    "suffix": lambda t, _: SuffixProposer(vocab_size=t.config.vocab_size, draft_tokens=3),
    "suffix+eagle": lambda t, _: CombinedProposer(
        SuffixProposer.for_target(t, 3), EagleProposer(eagle(t), draft_tokens=3), least=2
    ),
}
"""A proposer by its name, for a target on a backend; None: plain decoding."""


def untrained(target: Decoder) -> EagleHead:
    """Return the EAGLE head with a negated fusion matrix, so that nearly all drafts are rejected."""
    head = eagle(target)
    return EagleHead(head.config, dataclasses.replace(head.weights, fusion=plain(head.weights.fusion).flip(0)), target)


EXTREMES: dict[str, Callable[[Decoder, Backend], Proposer | None]] = {
    "eagle, untrained": lambda t, _: EagleProposer(untrained(t), draft_tokens=3),
    "draft-model, itself": lambda t, b: DraftModelProposer(decoder(tiny.target(), b), target=t, draft_tokens=3),
}
"""Proposers whose drafts are nearly all rejected, and all accepted."""

CHAINED: dict[str, Callable[[Decoder, Backend], Proposer | None]] = {
    "mtp-chain": lambda t, _: EagleProposer(mtp(t)[0], draft_tokens=3),
}
"""A head of multi-token prediction that drafts a chain by itself, as the hybrid models have it."""


def program(name: str, **config: Any) -> Callable[[Backend], None]:
    """Return a program that generates with one proposer, greedy and sampled, and checks the greedy tokens."""
    config = {"max_context": 32, "max_requests": 2, "page_size": 4, "prefill_chunk": 4, "overlap": True} | config

    def run(backend: Backend) -> None:
        loading = backend.create_stream("load")
        with backend.on(loading):
            target = decoder(tiny.target(), backend)
            proposer = MAKERS[name](target, backend)
        loading.synchronize()
        engine = Engine(target, backend, proposer=proposer, config=plain_config(dtype="float64", **config))
        results = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.token_ids == tiny.plain(prompt, NEW_TOKENS)
        engine.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=1.0))

    return run
