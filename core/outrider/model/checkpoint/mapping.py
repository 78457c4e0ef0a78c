"""Mapping from a checkpoint's tensors to the weights of a decoder, with the shape that each tensor must have.

Only this package and ``heads`` know the tensor names in checkpoints. A :class:`Target` is a weight of the model. Its
pieces are the checkpoint's tensors, concatenated along the first dimension.

Letters: H hidden size, Hq query heads, Hkv KV heads, D head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from outrider.model.checkpoint.expert_mapping import expert_targets, stack_experts
from outrider.model.checkpoint.hybrid_mapping import gated_queries, nest_recurrent, offset_norms, recurrent_targets
from outrider.model.checkpoint.pieces import Piece, Target, TensorSlice
from outrider.model.config.model_config import ExpertsConfig, ModelConfig
from outrider.model.layers.decoder import DecoderWeights
from outrider.model.layers.layer_weights import LayerWeights
from outrider.model.layers.ranks import Shards

MTP_PREFIXES: Mapping[str, str] = MappingProxyType({"model.mtp_layers.": "mimo", "mtp.": "chained"})
"""Format of heads of multi-token prediction by the prefix of their tensors' names."""
SINGLE_RANK = Shards()
"""A single rank that holds the whole model."""


def _projection_slices(config: ModelConfig, shards: Shards) -> dict[str, tuple[int, int, int]]:
    """Return this rank's slice of each projection of a layer, by projection name: (dimension, start, stop)."""
    size = config.head_size
    heads, kv_heads, inner = shards.heads(config), shards.kv_heads(config), shards.mlp.even(config.intermediate_size)
    queries, keys = (heads[0] * size, heads[1] * size), (kv_heads[0] * size, kv_heads[1] * size)
    return {
        "q_proj": (0, *queries),
        "k_proj": (0, *keys),
        "v_proj": (0, *keys),
        "o_proj": (1, *queries),
        "gate_proj": (0, *inner),
        "up_proj": (0, *inner),
        "down_proj": (1, *inner),
    }


def layer_targets(
    config: ModelConfig,
    prefix: str,
    name: str,
    *,
    attention_norm: bool = True,
    attention_width: int | None = None,
    attends: bool = True,
    mlp: bool = True,
    shards: Shards = SINGLE_RANK,
) -> list[Target]:
    """Return the weights of one layer, called ``name`` in the model and ``prefix`` in the checkpoint.

    ``config`` is the checkpoint's; ``shards`` are the slices that this rank reads. ``attention_width`` is the width of the
    attention's input, by default the hidden size. ``attention_norm`` is false for a layer without a norm before attention,
    ``attends`` for a layer without attention, ``mlp`` for one without an MLP. A bias of a sum over ranks is read by the first
    of these ranks only.
    """
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    width = attention_width or hidden
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    slices = _projection_slices(config, shards)

    def target(field: str, *pieces: tuple[str, tuple[int, ...]]) -> Target:
        return Target(
            f"{name}.{field}", tuple(Piece(f"{prefix}.{key}", shape, slice_of(key, shape)) for key, shape in pieces)
        )

    def slice_of(key: str, shape: tuple[int, ...]) -> TensorSlice | None:
        part = next((part for part in slices if f".{part}." in key), None)
        if part is None or slices[part][0] >= len(shape):
            return None
        dim, start, stop = slices[part]
        return None if stop - start == shape[dim] else TensorSlice(dim, start, stop)

    def attention(part: str, kind: str, *shape: int) -> tuple[str, tuple[int, ...]]:
        return f"self_attn.{part}.{kind}", shape

    def gated(part: str, kind: str, *shape: int) -> tuple[str, tuple[int, ...]]:
        return f"mlp.{part}.{kind}", shape

    targets = [target("mlp_norm", ("post_attention_layernorm.weight", (hidden,)))]
    if attends:
        qkv = target(
            "qkv",
            attention("q_proj", "weight", queries, width),
            attention("k_proj", "weight", keys, width),
            attention("v_proj", "weight", keys, width),
        )
        targets.append(gated_queries(qkv, config, shards) if config.attention_gate else qkv)
        targets.append(target("output", attention("o_proj", "weight", hidden, queries)))
    if mlp:
        targets.append(
            target("gate_up", gated("gate_proj", "weight", inner, hidden), gated("up_proj", "weight", inner, hidden))
        )
        targets.append(target("down", gated("down_proj", "weight", hidden, inner)))
    if attention_norm:
        targets.append(target("attention_norm", ("input_layernorm.weight", (hidden,))))
    if config.attention_bias and attends:
        targets.append(
            target(
                "qkv_bias",
                attention("q_proj", "bias", queries),
                attention("k_proj", "bias", keys),
                attention("v_proj", "bias", keys),
            )
        )
    if config.output_bias and attends and shards.attention.rank == 0:
        targets.append(target("output_bias", attention("o_proj", "bias", hidden)))
    if config.mlp_bias:
        targets.append(target("gate_up_bias", gated("gate_proj", "bias", inner), gated("up_proj", "bias", inner)))
    if config.mlp_bias and shards.mlp.rank == 0:
        targets.append(target("down_bias", gated("down_proj", "bias", hidden)))
    if config.qk_norm and attends:
        targets.append(target("q_norm", ("self_attn.q_norm.weight", (config.head_size,))))
        targets.append(target("k_norm", ("self_attn.k_norm.weight", (config.head_size,))))
    return targets


def layer_weights(weights: Mapping[str, Any], name: str, experts: ExpertsConfig | None = None) -> LayerWeights:
    """Return a layer's weights from the loaded tensors. ``experts`` is the config of a layer that is a mixture."""
    prefix = f"{name}."
    fields = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    return LayerWeights(**nest_recurrent(fields if experts is None else stack_experts(experts, fields)))


def table_target(name: str, key: str, rows: int, width: int, shards: Shards) -> Target:
    """Return the target ``name``: a table [rows, width] with one row per token, read from tensor ``key``.

    Each rank holds a slice of the vocabulary, padded to the size of the first rank's slice.
    """
    start, stop = shards.vocabulary.uneven(rows)
    tensor_slice = None if stop - start == rows else TensorSlice(0, start, stop)
    return Target(name, (Piece(key, (rows, width), tensor_slice),), shards.vocabulary.width(rows) - (stop - start))


def decoder_stem(present: Container[str]) -> str:
    """Return the prefix of the names of a decoder's tensors, empty for a base model that was saved without its head."""
    stems = ("model.", "model.language_model.", "")
    return next((stem for stem in stems if f"{stem}embed_tokens.weight" in present), stems[0])


def is_model(present: Container[str]) -> bool:
    """Return True if a checkpoint with the tensor names ``present`` holds a decoder, and not only draft heads."""
    return f"{decoder_stem(present)}embed_tokens.weight" in present


def decoder_targets(config: ModelConfig, present: Container[str], shards: Shards = SINGLE_RANK) -> list[Target]:
    """Return the targets of a decoder's weights, by transformers' tensor names of a causal language model.

    ``present`` holds the checkpoint's tensor names, because vision-language models have two spellings. ``config`` is the
    checkpoint's; ``shards`` are the slices that this rank reads.
    """
    stem = decoder_stem(present)
    vocabulary, hidden = config.vocab_size, config.hidden_size
    targets = [table_target("embedding", f"{stem}embed_tokens.weight", vocabulary, hidden, shards)]
    for index in range(config.num_layers):
        prefix, mixture = f"{stem}layers.{index}", config.has_experts(index)
        attends = index in config.attention_layers
        targets += layer_targets(config, prefix, f"layers.{index}", attends=attends, mlp=not mixture, shards=shards)
        if not attends:
            targets += recurrent_targets(config, prefix, f"layers.{index}", present, shards)
        if mixture:
            targets += expert_targets(config, prefix, f"layers.{index}", present, shards)
    targets.append(Target("norm", (Piece(f"{stem}norm.weight", (config.hidden_size,)),)))
    if not config.tie_embeddings:
        targets.append(table_target("head", "lm_head.weight", vocabulary, hidden, shards))
    return list(offset_norms(config, targets))


def decoder_weights(config: ModelConfig, weights: Mapping[str, Any]) -> DecoderWeights:
    """Return the decoder's weights from ``weights``, the loaded tensors by target name."""
    return DecoderWeights(
        embedding=weights["embedding"],
        head=weights["embedding"] if config.tie_embeddings else weights["head"],
        norm=weights["norm"],
        layers=tuple(
            layer_weights(weights, f"layers.{index}", config.experts if config.has_experts(index) else None)
            for index in range(config.num_layers)
        ),
    )


def vision_name(key: str) -> str | None:
    """Return a tensor's name within the vision tower, or None for a tensor of the decoder."""
    for stem in ("visual.", "model.visual."):
        if key.startswith(stem):
            return key.removeprefix(stem)
    return None


def is_mtp_tensor(key: str) -> bool:
    """Return True if ``key`` names a tensor of multi-token prediction heads."""
    return key.startswith(tuple(MTP_PREFIXES))


def mtp_format(present: Iterable[str]) -> str | None:
    """Return the format of the heads of multi-token prediction, a value of ``MTP_PREFIXES``, or None without such heads."""
    return next((MTP_PREFIXES[prefix] for key in present for prefix in MTP_PREFIXES if key.startswith(prefix)), None)


def is_unused_tensor(key: str) -> bool:
    """Return True if ``key`` names a tensor that loading accepts and ignores: rotary frequencies in old checkpoints."""
    return key.endswith("rotary_emb.inv_freq")
