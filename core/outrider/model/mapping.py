"""Which tensors of a checkpoint make up which weights, and what shape each must have.

With ``head_mapping`` the only place that knows the names in checkpoints. A :class:`Target` is a weight as the model
wants it; its pieces are the checkpoint's tensors, stacked along the first dimension.

Letters: H hidden size, Hq query heads, Hkv key heads, D head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from outrider.model.config import ModelConfig
from outrider.model.cuts import Cut
from outrider.model.decoder import DecoderWeights
from outrider.model.expert_mapping import expert_targets, stacked
from outrider.model.layer import LayerWeights
from outrider.model.pieces import Piece, Target
from outrider.model.shards import Shards

WHOLE = Shards()
"""One rank that holds everything."""


def layer_targets(
    config: ModelConfig,
    prefix: str,
    name: str,
    *,
    attention_norm: bool = True,
    attention_width: int | None = None,
    mlp: bool = True,
    shards: Shards = WHOLE,
) -> list[Target]:
    """Weights of one layer, called ``name`` in the model, ``prefix`` in the checkpoint.

    ``config`` is that of the checkpoint, ``shards`` what is read of it. ``attention_width`` is what the attention reads, the
    hidden size unless told; ``mlp``: whether the layer has one. Biases of what several ranks sum are read by the first of
    them.
    """
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    width = attention_width or hidden
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    heads, kv_heads = shards.heads(config), shards.kv_heads(config)
    own_inner = shards.mlp.even(inner)
    own = {
        "q_proj": (0, heads[0] * size, heads[1] * size),
        "k_proj": (0, kv_heads[0] * size, kv_heads[1] * size),
        "v_proj": (0, kv_heads[0] * size, kv_heads[1] * size),
        "o_proj": (1, heads[0] * size, heads[1] * size),
        "gate_proj": (0, *own_inner),
        "up_proj": (0, *own_inner),
        "down_proj": (1, *own_inner),
    }

    def target(field: str, *pieces: tuple[str, tuple[int, ...]]) -> Target:
        return Target(f"{name}.{field}", tuple(Piece(f"{prefix}.{key}", shape, cut(key, shape)) for key, shape in pieces))

    def cut(key: str, shape: tuple[int, ...]) -> Cut | None:
        part = next((part for part in own if f".{part}." in key), None)
        if part is None or own[part][0] >= len(shape):
            return None
        dim, start, stop = own[part]
        return None if stop - start == shape[dim] else Cut(dim, start, stop)

    def attention(part: str, kind: str, *shape: int) -> tuple[str, tuple[int, ...]]:
        return f"self_attn.{part}.{kind}", shape

    def gated(part: str, kind: str, *shape: int) -> tuple[str, tuple[int, ...]]:
        return f"mlp.{part}.{kind}", shape

    targets = [
        target(
            "qkv",
            attention("q_proj", "weight", queries, width),
            attention("k_proj", "weight", keys, width),
            attention("v_proj", "weight", keys, width),
        ),
        target("output", attention("o_proj", "weight", hidden, queries)),
        target("mlp_norm", ("post_attention_layernorm.weight", (hidden,))),
    ]
    if mlp:
        targets.append(
            target("gate_up", gated("gate_proj", "weight", inner, hidden), gated("up_proj", "weight", inner, hidden))
        )
        targets.append(target("down", gated("down_proj", "weight", hidden, inner)))
    if attention_norm:
        targets.append(target("attention_norm", ("input_layernorm.weight", (hidden,))))
    if config.attention_bias:
        targets.append(
            target(
                "qkv_bias",
                attention("q_proj", "bias", queries),
                attention("k_proj", "bias", keys),
                attention("v_proj", "bias", keys),
            )
        )
    if config.output_bias and shards.attention.rank == 0:
        targets.append(target("output_bias", attention("o_proj", "bias", hidden)))
    if config.mlp_bias:
        targets.append(target("gate_up_bias", gated("gate_proj", "bias", inner), gated("up_proj", "bias", inner)))
    if config.mlp_bias and shards.mlp.rank == 0:
        targets.append(target("down_bias", gated("down_proj", "bias", hidden)))
    if config.qk_norm:
        targets.append(target("q_norm", ("self_attn.q_norm.weight", (config.head_size,))))
        targets.append(target("k_norm", ("self_attn.k_norm.weight", (config.head_size,))))
    return targets


def layer_weights(weights: Mapping[str, Any], name: str) -> LayerWeights:
    """The layer's record from the loaded targets."""
    prefix = f"{name}."
    return LayerWeights(**{key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)})


def table_target(name: str, key: str, rows: int, width: int, shards: Shards) -> Target:
    """A table with a row for each token, of which a rank holds its part of the vocabulary, padded to that of the first."""
    start, stop = shards.vocabulary.uneven(rows)
    cut = None if stop - start == rows else Cut(0, start, stop)
    return Target(name, (Piece(key, (rows, width), cut),), shards.vocabulary.width(rows) - (stop - start))


def decoder_stem(present: Container[str]) -> str:
    """What the names of a decoder's tensors begin with."""
    return "model.language_model" if "model.language_model.embed_tokens.weight" in present else "model"


def decoder_targets(config: ModelConfig, present: Container[str], shards: Shards = WHOLE) -> list[Target]:
    """Weights of a decoder, with the names that transformers gives a causal language model.

    ``present`` are the checkpoint's tensor names: a vision-language model's come in two spellings. ``config`` is that of the
    checkpoint, ``shards`` what is read of it.
    """
    stem = decoder_stem(present)
    vocabulary, hidden = config.vocab_size, config.hidden_size
    targets = [table_target("embedding", f"{stem}.embed_tokens.weight", vocabulary, hidden, shards)]
    for index in range(config.num_layers):
        prefix, mixture = f"{stem}.layers.{index}", config.has_experts(index)
        targets += layer_targets(config, prefix, f"layers.{index}", mlp=not mixture, shards=shards)
        if mixture:
            targets += expert_targets(config, prefix, f"layers.{index}", present, shards)
    targets.append(Target("norm", (Piece(f"{stem}.norm.weight", (config.hidden_size,)),)))
    if not config.tie_embeddings:
        targets.append(table_target("head", "lm_head.weight", vocabulary, hidden, shards))
    return targets


def decoder_weights(config: ModelConfig, weights: Mapping[str, Any]) -> DecoderWeights:
    """The decoder's record from the loaded targets."""
    return DecoderWeights(
        embedding=weights["embedding"],
        head=weights["embedding"] if config.tie_embeddings else weights["head"],
        norm=weights["norm"],
        layers=tuple(
            LayerWeights(**stacked(config, weights, f"layers.{index}"))
            if config.has_experts(index)
            else layer_weights(weights, f"layers.{index}")
            for index in range(config.num_layers)
        ),
    )


def vision_name(key: str) -> str | None:
    """A tensor's name within the vision tower, or None for a tensor of the decoder."""
    for stem in ("visual.", "model.visual."):
        if key.startswith(stem):
            return key.removeprefix(stem)
    return None


def ignored(key: str) -> bool:
    """Whether a tensor may be there without being used: rotary frequencies that old checkpoints stored."""
    return key.endswith("rotary_emb.inv_freq")
