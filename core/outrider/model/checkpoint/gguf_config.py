"""The metadata of a GGUF file, the config.json that follows from them, and the layout of hybrid recurrent models.

llama.cpp changes a hybrid model's values at conversion. It stores 1 + w for norms, -exp(A_log), and convolutions without
their middle axis. For Qwen3.5 it also reorders value heads for the broadcasts of ggml: first the first value head of each key
head, then the second. Heads of multi-token prediction follow the layers as further blocks. Source: ``conversion/qwen.py`` in
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, UnionType
from typing import Any

import numpy
import torch
from torch import Tensor

from outrider.device import ConfigError
from outrider.errors import shown
from outrider.model.config.rope import RopeConfig, inverse_frequencies

# -- hybrid recurrent models -------------------------------------------------------------------------------------------


Convert = Callable[[Tensor], Tensor]

_NORMS = MappingProxyType(
    {
        "attn_norm.weight": "input_layernorm.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
    }
)
_MTP_NORMS = MappingProxyType(
    {
        "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "nextn.shared_head_norm.weight": "mtp.norm.weight",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridLayout:
    """Sizes by which llama.cpp's order of rows is undone."""

    layers: int
    """Number of layers, without heads of multi-token prediction."""
    heads: int
    """Number of these heads."""
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    is_tiled: bool
    """Whether value heads are in the order of ggml's broadcasts."""

    def prefix(self, block: int) -> str:
        """Return the name in transformers of a file's block: a layer, or one of the heads after the last layer."""
        return f"model.layers.{block}" if block < self.layers else f"mtp.layers.{block - self.layers}"

    def named(self, block: int, part: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Convert]] | None:
        """Return names, shapes and conversions of the tensor ``part`` of a block; None if it isn't special to hybrids."""
        prefix = self.prefix(block)
        if part in _NORMS:
            return {f"{prefix}.{_NORMS[part]}": (shape, without_one)}
        if part in _MTP_NORMS and block >= self.layers:
            return {_MTP_NORMS[part]: (shape, without_one)}
        if part == "nextn.eh_proj.weight" and block >= self.layers:
            return {"mtp.fc.weight": (shape, _unchanged)}
        if part == "ffn_gate_inp_shexp.weight":
            row = (1, shape[-1])
            return {f"{prefix}.mlp.shared_expert_gate.weight": (row, partial(torch.reshape, shape=row))}
        shared = part.partition("_shexp.")[0].removeprefix("ffn_")
        if shared in ("gate", "up", "down") and "_shexp." in part:
            return {f"{prefix}.mlp.shared_expert.{shared}_proj.weight": (shape, _unchanged)}
        recurrent = self._recurrent(part, shape)
        return {f"{prefix}.linear_attn.{name}": each for name, each in recurrent.items()} or None

    def _recurrent(self, part: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Convert]]:
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        width, group = shape[-1], self.value_heads // self.key_heads
        tables: Mapping[str, Callable[[], dict[str, tuple[tuple[int, ...], Convert]]]] = {
            "attn_qkv.weight": lambda: {"in_proj_qkv.weight": (shape, partial(self._ordered, start=2 * keys))},
            "attn_gate.weight": lambda: {"in_proj_z.weight": (shape, self._ordered)},
            "ssm_beta.weight": lambda: {"in_proj_b.weight": (shape, self._ordered)},
            "ssm_alpha.weight": lambda: {"in_proj_a.weight": (shape, self._ordered)},
            "ssm_ba.weight": lambda: {
                f"in_proj_{name}.weight": ((self.value_heads, width), partial(self._parts, (group, group), which))
                for name, which in (("b", (0,)), ("a", (1,)))
            },
            "ssm_in.weight": lambda: {
                f"in_proj_{name}.weight": (
                    (size, width),
                    partial(self._parts, (*[self.key_size] * 2, *[group * self.value_size] * 2), which),
                )
                for name, size, which in (("qkv", 2 * keys + values, (0, 1, 2)), ("z", values, (3,)))
            },
            "ssm_conv1d.weight": lambda: {
                "conv1d.weight": ((shape[0], 1, width), lambda x: self._ordered(x, start=2 * keys).unsqueeze(1))
            },
            "ssm_dt.bias": lambda: {"dt_bias": (shape, self._ordered)},
            "ssm_a": lambda: {"A_log": (shape, lambda x: self._ordered(x.neg().log()))},
            "ssm_norm.weight": lambda: {"norm.weight": (shape, _unchanged)},
            "ssm_out.weight": lambda: {"out_proj.weight": (shape, lambda x: self._ordered(x.T).T.contiguous())},
        }
        return tables[part]() if part in tables else {}

    def _ordered(self, values: Tensor, start: int = 0) -> Tensor:
        """Return rows from ``start`` on, which belong to value heads, in transformers' order: key head by key head."""
        if not self.is_tiled:
            return values
        rows = values[start:]
        tiled = rows.reshape(self.value_heads // self.key_heads, self.key_heads, -1, *rows.shape[1:])
        return torch.cat((values[:start], tiled.transpose(0, 1).reshape(rows.shape)))

    def _parts(self, sizes: tuple[int, ...], which: tuple[int, ...], values: Tensor) -> Tensor:
        """Return rows of ``values`` regrouped by part. The rows of each key head are divided into parts of ``sizes`` rows.
        The result has part ``which[0]`` of all key heads, then part ``which[1]`` of all key heads, and so on.
        """
        parts = values.reshape(self.key_heads, sum(sizes), *values.shape[1:]).split(sizes, dim=1)
        return torch.cat([parts[each].reshape(-1, *values.shape[1:]) for each in which])


def without_one(values: Tensor) -> Tensor:
    """Return the weight of a norm, which GGUF stores increased by one: ``values`` - 1 in float32."""
    return values.float() - 1


def _unchanged(values: Tensor) -> Tensor:
    return values


# -- metadata and config.json ------------------------------------------------------------------------------------------


HYBRID_FAMILIES = MappingProxyType({"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"})
"""Transformers' model type of hybrid models by the architecture in a GGUF file."""
_FAMILIES = MappingProxyType(
    {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", **HYBRID_FAMILIES}
)
_LLAMA3_FACTORS = (8.0, 32.0)
"""Rope factors of the published Llama 3.1 to 3.3 models; a GGUF file has only the frequencies that follow from them."""


class GgufMetadata:
    """The metadata of a GGUF file by key, with errors that name the key."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields
        self.architecture = str(self.value("general.architecture", str))

    def value(self, key: str, kind: type | UnionType, default: Any = None) -> Any:
        """Return the value of ``key``. Raises :class:`ConfigError` if it is missing without a default, or of another type."""
        field = self._fields.get(key)
        if field is None:
            if default is None:
                raise ConfigError(f"the metadata have no {key}")
            return default
        found = field.contents()
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise ConfigError(f"{key} is {shown(found)}, expected {getattr(kind, '__name__', kind)}")
        return found

    def of_model(self, key: str, kind: type | UnionType, default: Any = None) -> Any:
        """Return the metadata value of ``key``, prefixed with the model architecture of the file. Errors are those of
        :meth:`value`.
        """
        return self.value(f"{self.architecture}.{key}", kind, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float of the architecture, as the shortest decimal that its 32 bits mean: 1e-5, not 9.9999997e-6."""
        return float(str(numpy.float32(self.of_model(key, float, default))))

    def optional(self, key: str, kind: type) -> Any:
        """Return the metadata value of ``key``, or None if the file lacks the key."""
        return self.value(key, kind) if key in self._fields else None

    def named(self, prefix: str) -> dict[str, Any]:
        """Return the text values whose key begins with ``prefix``, by the remaining part of the key."""
        return {key.removeprefix(prefix): self.value(key, str) for key in self._fields if key.startswith(prefix)}


def model_config(
    metadata: GgufMetadata, shapes: Mapping[str, tuple[int, ...]], factors: Tensor | None, dtype: str
) -> dict[str, Any]:
    """Return the model's config.json as transformers writes it. Raises :class:`ConfigError` for metadata that is missing or
    unsupported.
    """
    family = _FAMILIES.get(metadata.architecture)
    if family is None:
        raise ConfigError(f"its architecture is {shown(metadata.architecture)}; supported are {', '.join(sorted(_FAMILIES))}")
    if "token_embd.weight" not in shapes:
        raise ConfigError("tensor 'token_embd.weight' is missing")
    hidden = metadata.of_model("embedding_length", int)
    heads = metadata.of_model("attention.head_count", int)
    head_dim = metadata.of_model("attention.key_length", int, max(hidden // max(heads, 1), 1))
    context = metadata.of_model("context_length", int)
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.of_model("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.of_model("feed_forward_length", int, 1 if family == "qwen3_5_moe_text" else None),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": dtype,
        "rope_parameters": _rope_parameters(metadata, context, head_dim, factors),
    }
    if family == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
        window = metadata.optional("llama.attention.sliding_window", int)
        if window:
            config |= {"model_type": "mistral", "sliding_window": window}
    layout = hybrid_layout(metadata)
    if layout is not None:
        config |= _hybrid_fields(metadata, layout, shapes)
    if family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        config = {
            "num_experts": metadata.of_model("expert_count", int),
            "num_experts_per_tok": metadata.of_model("expert_used_count", int),
            "moe_intermediate_size": metadata.of_model("expert_feed_forward_length", int),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        } | config
    return config


def _kv_heads(metadata: GgufMetadata, heads: int) -> int:
    """Return the number of KV heads of layers with attention. A list of all layers has 0 for recurrent ones."""
    found = metadata.of_model("attention.head_count_kv", int | list, heads)
    return found if isinstance(found, int) else max(found, default=0)


def _rope_parameters(metadata: GgufMetadata, context: int, head_dim: int, factors: Tensor | None) -> dict[str, Any]:
    theta = metadata.number("rope.freq_base", 10000.0)
    rotated = metadata.of_model("rope.dimension_count", int, head_dim)
    common: dict[str, Any] = {"rope_theta": theta}
    if metadata.architecture in HYBRID_FAMILIES:
        sections = [each for each in metadata.of_model("rope.dimension_sections", list, []) if each]
        common |= {"mrope_section": sections, "mrope_interleaved": True} if sections else {}
        common["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ConfigError(
            f"{metadata.architecture}.rope.dimension_count is {rotated}, only the head size {head_dim} is supported"
        )
    kind = metadata.of_model("rope.scaling.type", str, "none")
    if factors is not None:
        return _llama3_parameters(theta, head_dim, factors)
    if kind == "none":
        return {"rope_type": "default", **common}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{metadata.architecture}.rope.scaling.type is {shown(kind)}; supported are none, linear and yarn")
    scaled = {"rope_type": kind, **common, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = metadata.of_model("rope.scaling.original_context_length", int, context)
    return scaled


def _llama3_parameters(theta: float, head_dim: int, factors: Tensor) -> dict[str, Any]:
    """Return the parameters of Llama 3's rope from which the file's frequency divisors were computed."""
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    for factor in _LLAMA3_FACTORS:
        rope = RopeConfig(kind="llama3", theta=theta, factor=factor, original_context=8192)
        scaled = inverse_frequencies(rope, head_dim)
        if factors.shape == plain.shape and torch.allclose((plain / scaled).float(), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_context,
            }
    raise ConfigError(
        "rope_freqs.weight isn't what Llama 3's rope gives for a factor of "
        f"{' or '.join(f'{factor:g}' for factor in _LLAMA3_FACTORS)}; expected the checkpoint in safetensors"
    )


def hybrid_layout(metadata: GgufMetadata) -> HybridLayout | None:
    """Return the layout of a hybrid model's tensors; None for another model. Raises :class:`ConfigError` for sizes that don't
    go together.
    """
    if metadata.architecture not in HYBRID_FAMILIES:
        return None
    heads = metadata.of_model("nextn_predict_layers", int, 0)
    inner, value_heads = metadata.of_model("ssm.inner_size", int), metadata.of_model("ssm.time_step_rank", int)
    key_heads, layers = metadata.of_model("ssm.group_count", int), metadata.of_model("block_count", int) - heads
    if min(key_heads, value_heads, layers) < 1 or value_heads % key_heads or inner % value_heads:
        raise ConfigError(
            f"{layers} layers with {key_heads} key heads and {value_heads} value heads of {inner} values in all don't go "
            "together"
        )
    return HybridLayout(
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=metadata.of_model("ssm.state_size", int),
        value_size=inner // value_heads,
        is_tiled=metadata.architecture != "qwen3next",
    )


def _hybrid_fields(metadata: GgufMetadata, layout: HybridLayout, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of config.json that hybrid models have in addition to other models, or with other values."""
    kinds = ("full_attention", "linear_attention")
    config: dict[str, Any] = {
        "num_hidden_layers": layout.layers,
        "mtp_num_hidden_layers": layout.heads,
        "layer_types": [kinds[f"blk.{layer}.ssm_a" in shapes] for layer in range(layout.layers)],
        "linear_conv_kernel_dim": metadata.of_model("ssm.conv_kernel", int),
        "linear_key_head_dim": layout.key_size,
        "linear_value_head_dim": layout.value_size,
        "linear_num_key_heads": layout.key_heads,
        "linear_num_value_heads": layout.value_heads,
    }
    if metadata.architecture != "qwen35":
        config["shared_expert_intermediate_size"] = metadata.of_model("expert_shared_feed_forward_length", int)
        dense = [layer for layer in range(layout.layers) if f"blk.{layer}.ffn_gate_inp.weight" not in shapes]
        config |= {"mlp_only_layers": dense} if metadata.architecture == "qwen3next" else {}
    return config
