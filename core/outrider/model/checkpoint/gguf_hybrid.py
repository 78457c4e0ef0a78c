"""Hybrid recurrent models in GGUF: transformers' names of their tensors, their values, and the config.

llama.cpp changes values at conversion. It stores 1 + w for norms, -exp(A_log), and convolutions without their middle axis.
For Qwen3.5 it also reorders value heads for ggml's broadcasts: first the first value head of each key head, then the second.
Heads of multi-token prediction follow the layers as further blocks. Source: ``conversion/qwen.py`` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.device import ConfigError

HYBRID_FAMILIES = MappingProxyType({"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"})
"""Transformers' model type by the architecture in a GGUF file."""
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


class Metadata(Protocol):
    """Metadata of a GGUF file. Missing keys without a default raise :class:`ConfigError`."""

    architecture: str

    def of_model(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of the architecture."""


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

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> HybridLayout:
        """Return the layout of a file. Raises :class:`ConfigError` for sizes that don't go together."""
        heads = metadata.of_model("nextn_predict_layers", int, 0)
        inner, value_heads = metadata.of_model("ssm.inner_size", int), metadata.of_model("ssm.time_step_rank", int)
        key_heads, layers = metadata.of_model("ssm.group_count", int), metadata.of_model("block_count", int) - heads
        if min(key_heads, value_heads, layers) < 1 or value_heads % key_heads or inner % value_heads:
            raise ConfigError(
                f"{layers} layers with {key_heads} key heads and {value_heads} value heads of {inner} values in all don't go "
                "together"
            )
        return cls(
            layers=layers,
            heads=heads,
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=metadata.of_model("ssm.state_size", int),
            value_size=inner // value_heads,
            is_tiled=metadata.architecture != "qwen3next",
        )

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


def hybrid_config(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of config.json that hybrid models have in addition to other models, or with other values."""
    layout = HybridLayout.from_metadata(metadata)
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
