"""Models of a published shape with random weights: the cost of an iteration doesn't depend on their values.

Their text has no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Required, TypedDict, Unpack

import torch

from outrider.device import Backend, CapabilityError, ConfigError
from outrider.device.kernels.weight_formats import weight_format
from outrider.device.kernels.weights import SplitWeight, Weight
from outrider.model.checkpoint.files import Target
from outrider.model.checkpoint.loading import loading_stream
from outrider.model.checkpoint.mapping import decoder_targets, decoder_weights
from outrider.model.config.model_config import ModelConfig
from outrider.model.config.shapes import shape_config
from outrider.model.heads.dflash import DFlashHead, dflash_targets
from outrider.model.heads.draft_head import head_weights
from outrider.model.heads.draft_output import round_products
from outrider.model.heads.eagle import EagleHead, eagle_targets
from outrider.model.heads.mtp import HEAD_NAME, MtpHead, chained_head_config, chained_mtp_targets, mtp_weights
from outrider.model.layers.decoder import Decoder
from outrider.model.layers.ranks import ModelRanks, Shards, or_single_rank
from outrider.model.quantization.cache import cache_format, resolve_cache_format
from outrider_bench.random_checkpoint import eagle_head_config

_SEEDS_PER_RANK = 1000
"""Distance between the seeds of two ranks."""

_UNQUANTIZED_PIECES = ("in_proj_b.weight", "in_proj_a.weight")
"""Names of the pieces of a product that published checkpoints leave unquantized."""

_QUANTIZED = frozenset({"qkv", "output", "gate_up", "down", "q_up"})
"""Last name components of the weights of layers that are quantized."""

__all__ = ["random_decoder", "random_dflash", "random_eagle", "random_mtp", "shape_config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomQuantization:
    """The quantization of random weights: layer weights in the format called ``name``, and with ``head`` the output head too.

    Embeddings, norms and routers stay unquantized. Experts are quantised like other matrices. A model whose checkpoints hold
    all experts of a layer in one tensor has only these quantised.
    """

    name: str
    head: bool

    def __post_init__(self) -> None:
        weight_format(self.name)

    def covers(self, target: Target, *, only_stacks: bool = False) -> bool:
        """Return True if the weight of ``target`` is quantised. ``only_stacks``: of the layers' weights only those that are
        read from a tensor of all experts.
        """
        last = target.name.rpartition(".")[2]
        if last == "fusion":
            return target.name == last  # published heads of multi-token prediction have an unquantised one
        if last == "head":
            return self.head
        return last in _QUANTIZED and (not only_stacks or target.pieces[0].stack)

    def check(self, backend: Backend) -> None:
        """Raise :class:`CapabilityError` if the backend has no kernels for the format."""
        format, has = weight_format(self.name).elements.name, sorted(backend.capabilities.quantized_formats)
        if format not in has:
            raise CapabilityError(
                f"{backend.label} has no kernels for weights in {format} (it declares {', '.join(has) or 'none'}); measure "
                "unquantized weights, or another backend"
            )


def random_decoder(
    config: ModelConfig,
    *,
    backend: Backend,
    dtype: torch.dtype,
    ranks: ModelRanks | None = None,
    quantization: RandomQuantization | None = None,
    kv_dtype: str = "auto",
) -> Decoder:
    """Return a decoder of this shape, or this rank's part of it, once its weights are on the device.

    The weights are the same in each run on one kind of device with the same number of ranks. ``kv_dtype``: format of the KV
    cache; its scales are 1.
    """
    format = resolve_cache_format(kv_dtype, None, backend.kernels_in_use, backend, "the random model")
    if quantization is not None:
        quantization.check(backend)
    shards = or_single_rank(ranks).shards
    local = shards.local(config, config.family)
    with loading_stream(backend, dtype):
        targets = decoder_targets(config, (), shards)
        weights = _random_weights(targets, dtype, backend.device, seed=0, shards=shards, quantization=quantization)
        record = decoder_weights(local, weights)
        if format is not None:
            kept = cache_format(format, None, local, dtype=dtype, device=backend.device)
            record = replace(record, layers=tuple(replace(each, cache=kept) for each in record.layers))
        return Decoder(local, record, backend.kernels_in_use, ranks)


class HeadFormats(TypedDict, total=False):
    """The device of a draft head's random weights, and the formats of its weights and of its products."""

    backend: Required[Backend]
    quantization: RandomQuantization | None
    rounding: str | None


def random_eagle(target: Decoder, whole: ModelConfig | None = None, **formats: Unpack[HeadFormats]) -> EagleHead:
    """Return an EAGLE head of one layer for ``target``, in the published form.

    It has no norm before its attention and no embedding. ``whole``: the config of a target that several ranks share.
    """
    whole = eagle_head_config(whole or target.config)
    weights = _head_weights(target, eagle_targets(whole, (), target.shards), seed=1, **formats)
    config = target.shards.local(whole, whole.family)
    return EagleHead(config, head_weights(weights, config.num_layers, embedding=target.embedding), target)


def random_mtp(target: Decoder, whole: ModelConfig | None = None, **formats: Unpack[HeadFormats]) -> MtpHead:
    """Return a head of multi-token prediction for ``target`` in the form of Qwen3.5: one layer with attention, which drafts a
    chain. The other arguments are those of :func:`random_eagle`.
    """
    whole = chained_head_config(whole or target.config)
    if whole.experts is not None:
        whole = replace(whole, experts=replace(whole.experts, dense_layers=()))
    weights = _head_weights(target, chained_mtp_targets(whole, (), target.shards), seed=3, **formats)
    config = target.shards.local(whole, whole.family)
    return MtpHead(config, mtp_weights(weights, HEAD_NAME, config.experts), target, ahead=1, embedding_first=True)


def random_dflash(
    target: Decoder,
    whole: ModelConfig | None = None,
    *,
    layers: int,
    block_size: int,
    **formats: Unpack[HeadFormats],
) -> DFlashHead:
    """Return a DFlash head of ``layers`` Qwen3 layers of the target's sizes, in the published form.

    The head reads as many layers of the target. The other arguments are those of :func:`random_eagle`. Raises
    :class:`ConfigError` for a target with too few layers to read.
    """
    whole = whole or target.config
    read = layers_read(whole.num_layers, layers)
    whole = replace(
        whole,
        family="qwen3",
        num_layers=layers,
        windows=(0,) * layers,
        experts=None,
        latent=None,
        qk_norm=True,
        attention_bias=False,
    )
    weights = _head_weights(target, dflash_targets(whole, len(read), target.shards), seed=2, **formats)
    config = target.shards.local(whole, whole.family)
    return DFlashHead(
        config,
        head_weights(weights, config.num_layers),
        target,
        block_size=block_size,
        mask_token=whole.vocab_size - 1,
        aux_hidden_state_layers=read,
    )


def _head_weights(
    target: Decoder,
    targets: Sequence[Target],
    *,
    seed: int,
    backend: Backend,
    quantization: RandomQuantization | None = None,
    rounding: str | None = None,
) -> dict[str, Weight]:
    """Return the random weights of a draft head, once they are on the device; ``rounding`` is the format of its products."""
    with loading_stream(backend, target.dtype):
        weights = _random_weights(
            targets, target.dtype, backend.device, seed=seed, shards=target.shards, quantization=quantization
        )
        if rounding is not None:
            round_products(weights, rounding)
        return weights


def layers_read(depth: int, count: int) -> tuple[int, ...]:
    """Return the layers of a target of ``depth`` layers whose input a DFlash head of ``count`` layers reads.

    They are spread as in published heads, from the output of the second layer to that of the third last. Raises
    :class:`ConfigError` for a ``count`` that the target has no layers for.
    """
    if not 1 <= count <= depth - 1:
        raise ConfigError(
            f"--draft-layers is {count}; each layer of a block drafter reads one of the target's {depth}, the last aside: "
            f"expected 1 to {depth - 1}"
        )
    first, last = (1, depth - 3) if depth - 3 >= count else (0, depth - 2)
    if count == 1:
        return (first + (last - first) // 2 + 1,)
    return tuple(first + round(each * (last - first) / (count - 1)) + 1 for each in range(count))


def _random_weights(
    targets: Sequence[Target],
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int,
    shards: Shards,
    quantization: RandomQuantization | None,
) -> dict[str, Weight]:
    """Return norms of ones, biases of zeros, and matrices that keep the scale of their input; replicated weights agree on all
    ranks.

    With other biases all tokens would become alike, and choose the same experts.
    """
    own = torch.Generator(device).manual_seed(seed + _SEEDS_PER_RANK * shards.mlp.rank)
    shared = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Weight] = {}
    has_stacks = any(piece.stack for target in targets for piece in target.pieces)
    for target in targets:
        generator = own if any(piece.tensor_slice is not None for piece in target.pieces) else shared
        stored = torch.promote_types(dtype, torch.float32) if target.wide else dtype
        rows, columns = target.shape[0], target.shape[-1]
        unquantized, made = rows, None
        if quantization is not None and quantization.covers(target, only_stacks=has_stacks):
            unquantized = sum(piece.read_shape[0] for piece in target.pieces if piece.key.endswith(_UNQUANTIZED_PIECES))
            made = weight_format(quantization.name).random_weight(
                rows - unquantized, columns, device=device, generator=generator, scales_dtype=dtype
            )
        if made is not None and not unquantized:
            weights[target.name] = made
            continue
        weight = torch.empty((unquantized, *target.shape[1:]), dtype=stored, device=device)
        if target.name.endswith("_bias"):
            weight.zero_()
        elif weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(generator=generator).mul_(columns**-0.5)
        weights[target.name] = weight if made is None else SplitWeight((made, weight))
    return weights
