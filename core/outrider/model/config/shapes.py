"""Shapes of published decoders by name, for benchmarks and tuning without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.device import ClampedActivation, ConfigError, DecoderShape
from outrider.model.config.model_config import ExpertsConfig, ModelConfig, RecurrentConfig
from outrider.model.config.rope import RopeConfig
from outrider.model.layers.ranks import Shard, Shards

_LLAMA3 = RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_context=8192)
_LLAMA32 = RopeConfig(kind="llama3", theta=500000.0, factor=32.0, original_context=8192)


def _shape(
    family: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    context: int,
    **other: Any,
) -> ModelConfig:
    """Return a ModelConfig of these sizes. ``heads`` are the number of query heads, the number of KV heads and the
    head size.
    """
    return ModelConfig(
        family=family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=heads[2],
        max_context=context,
        **{"rms_eps": 1e-5, **other},
    )


def _llama3(hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **other: Any) -> ModelConfig:
    return _shape("llama", hidden, inner, layers, heads, 128256, 131072, **{"rope": _LLAMA3, **other})


def _qwen2(hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocabulary: int, **other: Any) -> ModelConfig:
    rope = RopeConfig(theta=1000000.0)
    return _shape(
        "qwen2", hidden, inner, layers, heads, vocabulary, 32768, rope=rope, rms_eps=1e-6, attention_bias=True, **other
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **other: Any) -> ModelConfig:
    rope = RopeConfig(theta=1000000.0)
    family = other.pop("family", "qwen3")
    return _shape(family, hidden, inner, layers, heads, 151936, 40960, rope=rope, rms_eps=1e-6, qk_norm=True, **other)


def _qwen35(hidden: int, inner: int, layers: int, heads: tuple[int, int, int], value_heads: int, **other: Any) -> ModelConfig:
    """Return the ModelConfig of a hybrid model with attention in each fourth layer and recurrent layers between."""
    recurrent = RecurrentConfig(
        layers=tuple(index for index in range(layers) if index % 4 != 3),
        key_heads=16,
        value_heads=value_heads,
        key_size=128,
        value_size=128,
        kernel_size=4,
    )
    rope = RopeConfig(theta=10000000.0, rotated_share=0.25)
    common = {"rms_eps": 1e-6, "qk_norm": True, "attention_gate": True, "norm_offset": 1.0, "recurrent": recurrent}
    family = other.pop("family", "qwen3_5")
    return _shape(family, hidden, inner, layers, heads, 248320, 262144, rope=rope, **common, **other)


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    """Return the ModelConfig of a gpt-oss model, of whose layers every second one has a window of 128 tokens."""
    rope = RopeConfig(kind="yarn", theta=150000.0, factor=32.0, original_context=4096, truncate=False)
    return _shape(
        "gpt_oss",
        2880,
        2880,
        layers,
        (64, 8, 64),
        201088,
        131072,
        rope=rope,
        attention_bias=True,
        output_bias=True,
        attention_sinks=True,
        windows=(128, 0) * (layers // 2),
        experts=replace(_mixture(experts, 4, 2880), biases=ClampedActivation(7.0, 1.702)),
    )


def _mixture(count: int, per_token: int, inner: int) -> ExpertsConfig:
    return ExpertsConfig(count=count, per_token=per_token, intermediate_size=inner, renormalize=True)


SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "llama-2-7b": _shape("llama", 4096, 11008, 32, (32, 32, 128), 32000, 4096),
        "llama-2-13b": _shape("llama", 5120, 13824, 40, (40, 40, 128), 32000, 4096),
        "llama-3.1-8b": _llama3(4096, 14336, 32, (32, 8, 128)),
        "llama-3.1-70b": _llama3(8192, 28672, 80, (64, 8, 128)),
        "llama-3.2-1b": _llama3(2048, 8192, 16, (32, 8, 64), rope=_LLAMA32, tie_embeddings=True),
        "llama-3.2-3b": _llama3(3072, 8192, 28, (24, 8, 128), rope=_LLAMA32, tie_embeddings=True),
        "mistral-7b": _shape("mistral", 4096, 14336, 32, (32, 8, 128), 32768, 32768, rope=RopeConfig(theta=1000000.0)),
        "mixtral-8x7b": _shape(
            "mixtral",
            4096,
            14336,
            32,
            (32, 8, 128),
            32000,
            32768,
            rope=RopeConfig(theta=1000000.0),
            experts=_mixture(8, 2, 14336),
        ),
        "phi-3-mini": _shape("llama", 3072, 8192, 32, (32, 32, 96), 32064, 4096),
        "qwen2.5-0.5b": _qwen2(896, 4864, 24, (14, 2, 64), 151936, tie_embeddings=True),
        "qwen2.5-1.5b": _qwen2(1536, 8960, 28, (12, 2, 128), 151936, tie_embeddings=True),
        "qwen2.5-7b": _qwen2(3584, 18944, 28, (28, 4, 128), 152064),
        "qwen2.5-14b": _qwen2(5120, 13824, 48, (40, 8, 128), 152064),
        "qwen2.5-32b": _qwen2(5120, 27648, 64, (40, 8, 128), 152064),
        "qwen2.5-72b": _qwen2(8192, 29568, 80, (64, 8, 128), 152064),
        "qwen3-0.6b": _qwen3(1024, 3072, 28, (16, 8, 128), tie_embeddings=True),
        "qwen3-1.7b": _qwen3(2048, 6144, 28, (16, 8, 128), tie_embeddings=True),
        "qwen3-4b": _qwen3(2560, 9728, 36, (32, 8, 128), tie_embeddings=True),
        "qwen3-8b": _qwen3(4096, 12288, 36, (32, 8, 128)),
        "qwen3-14b": _qwen3(5120, 17408, 40, (40, 8, 128)),
        "qwen3-32b": _qwen3(5120, 25600, 64, (64, 8, 128)),
        "qwen3-30b-a3b": _qwen3(2048, 6144, 48, (32, 4, 128), family="qwen3_moe", experts=_mixture(128, 8, 768)),
        "qwen3.5-27b": _qwen35(5120, 17408, 64, (24, 4, 256), 48),
        "qwen3.5-35b-a3b": _qwen35(
            2048, 512, 40, (16, 2, 256), 32, family="qwen3_5_moe", experts=replace(_mixture(256, 8, 512), shared_size=512)
        ),
        "tiny": _shape("llama", 64, 128, 2, (4, 2, 16), 512, 1024),
    }
)
"""Model shapes by name. ``phi-3-mini`` is a Llama with heads of 96; ``tiny`` is for tests."""


def shape_config(shape: str) -> ModelConfig:
    """Return the config of ``shape``: a name in :data:`SHAPES`, or the path of a checkpoint's config.json or directory.

    ``NAME/RANKS`` is one rank's shard of that shape, see :func:`shard_config`. Raises :class:`ConfigError` for an unknown
    name, and :class:`CheckpointError` for an unreadable config.
    """
    if shape in SHAPES:
        return SHAPES[shape]
    name, _, ranks = shape.rpartition("/")
    if name in SHAPES and ranks.isdecimal():
        return shard_config(SHAPES[name], int(ranks))
    file = shape_file(shape)
    if file is not None:
        from outrider.model.config.checkpoint_config import read_model_config

        return read_model_config(file.parent, file.name)
    raise ConfigError(
        f"there is no shape {shape!r}; expected one of {', '.join(sorted(SHAPES))}, one of them followed by /RANKS "
        "(one rank's shard), or the path of a config.json"
    )


def shape_file(shape: str) -> Path | None:
    """Return the config.json if ``shape`` is its path or its directory's path, and None for a name."""
    path = Path(shape)
    if shape in SHAPES or not (path.is_dir() or path.suffix == ".json"):
        return None
    return path / "config.json" if path.is_dir() else path


def decoder_shape(config: ModelConfig, dtype: torch.dtype) -> DecoderShape:
    """Return the sizes of a decoder for which kernels are tuned. Its ``fused`` width is that of a published EAGLE head's
    fusion.
    """
    return DecoderShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        fused=2 * config.hidden_size,
        bias=config.attention_bias,
        qk_norm=config.qk_norm,
        dtype=dtype,
    )


def shard_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return the shape of one of ``ranks`` tensor-parallel ranks: its slice of heads, intermediate size and vocabulary.

    With fewer KV heads than ranks, each rank has one. Raises :class:`ConfigError` if heads or intermediate size can't be
    divided.
    """
    if ranks < 1:
        raise ConfigError(f"a model can't be shared out among {ranks} ranks; expected at least 1")
    first = Shard(0, ranks)
    local = Shards(attention=first, mlp=first, vocabulary=first).local(config, f"a {config.family}")
    return replace(local, vocab_size=first.width(config.vocab_size))
