"""Hybrid recurrent models in GGUF: transformers' names of their tensors, and their values.

llama.cpp changes values at conversion. It stores 1 + w for norms, -exp(A_log), and convolutions without their middle axis.
For Qwen3.5 it also reorders value heads for ggml's broadcasts: first the first value head of each key head, then the second.
Heads of multi-token prediction follow the layers as further blocks. Source: ``conversion/qwen.py`` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

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
