"""Which tensors of a checkpoint make up which weights, and what shape each must have.

With ``head_mapping`` the only place that knows the names in checkpoints. A :class:`Target` is a weight as the model
wants it; its pieces are the checkpoint's tensors, stacked along the first dimension.

Letters: H hidden size, Hq query heads, Hkv key heads, D head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from torch import Tensor

from outrider.model.config import ModelConfig
from outrider.model.decoder import DecoderWeights
from outrider.model.layer import LayerWeights


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint: its name and the shape that it must have."""

    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A weight of the model: its name there, and the pieces that it's stacked from."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stacked weight."""
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])


def layer_targets(
    config: ModelConfig, prefix: str, name: str, *, attention_norm: bool = True, attention_width: int | None = None
) -> list[Target]:
    """Weights of one layer, called ``name`` in the model, ``prefix`` in the checkpoint.

    ``attention_width`` is what the attention reads, the hidden size unless told.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    width = attention_width or hidden
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

    def target(field: str, *pieces: tuple[str, tuple[int, ...]]) -> Target:
        return Target(f"{name}.{field}", tuple(Piece(f"{prefix}.{key}", shape) for key, shape in pieces))

    def attention(part: str, kind: str, *shape: int) -> tuple[str, tuple[int, ...]]:
        return f"self_attn.{part}.{kind}", shape

    def mlp(part: str, kind: str, *shape: int) -> tuple[str, tuple[int, ...]]:
        return f"mlp.{part}.{kind}", shape

    targets = [
        target(
            "qkv",
            attention("q_proj", "weight", queries, width),
            attention("k_proj", "weight", keys, width),
            attention("v_proj", "weight", keys, width),
        ),
        target("output", attention("o_proj", "weight", hidden, queries)),
        target("gate_up", mlp("gate_proj", "weight", inner, hidden), mlp("up_proj", "weight", inner, hidden)),
        target("down", mlp("down_proj", "weight", hidden, inner)),
        target("mlp_norm", ("post_attention_layernorm.weight", (hidden,))),
    ]
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
    if config.output_bias:
        targets.append(target("output_bias", attention("o_proj", "bias", hidden)))
    if config.mlp_bias:
        targets.append(target("gate_up_bias", mlp("gate_proj", "bias", inner), mlp("up_proj", "bias", inner)))
        targets.append(target("down_bias", mlp("down_proj", "bias", hidden)))
    if config.qk_norm:
        targets.append(target("q_norm", ("self_attn.q_norm.weight", (config.head_size,))))
        targets.append(target("k_norm", ("self_attn.k_norm.weight", (config.head_size,))))
    return targets


def layer_weights(weights: Mapping[str, Tensor], name: str) -> LayerWeights:
    """The layer's record from the loaded targets."""
    prefix = f"{name}."
    return LayerWeights(**{key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)})


def decoder_targets(config: ModelConfig, present: Container[str]) -> list[Target]:
    """Weights of a decoder, with the names that transformers gives a causal language model.

    ``present`` are the checkpoint's tensor names: a vision-language model's come in two spellings.
    """
    stem = "model.language_model" if "model.language_model.embed_tokens.weight" in present else "model"
    table = (config.vocab_size, config.hidden_size)
    targets = [Target("embedding", (Piece(f"{stem}.embed_tokens.weight", table),))]
    for index in range(config.num_layers):
        targets += layer_targets(config, f"{stem}.layers.{index}", f"layers.{index}")
    targets.append(Target("norm", (Piece(f"{stem}.norm.weight", (config.hidden_size,)),)))
    if not config.tie_embeddings:
        targets.append(Target("head", (Piece("lm_head.weight", table),)))
    return targets


def decoder_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> DecoderWeights:
    """The decoder's record from the loaded targets."""
    return DecoderWeights(
        embedding=weights["embedding"],
        head=weights["embedding"] if config.tie_embeddings else weights["head"],
        norm=weights["norm"],
        layers=tuple(layer_weights(weights, f"layers.{index}") for index in range(config.num_layers)),
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
