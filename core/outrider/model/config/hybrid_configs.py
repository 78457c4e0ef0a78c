"""Config fields of hybrid models: recurrent layers with a gated delta rule between layers with attention.

Their checkpoints may have a vision tower. Here they run on text, whose positions are equal on all axes, so that the
interleaved axes of the rope have no effect.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.device import ConfigError
from outrider.errors import shown
from outrider.model.config.expert_configs import experts_of
from outrider.model.config.model_config import ExpertsConfig, RecurrentConfig

HYBRID_FAMILIES = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})

_KINDS = ("linear_attention", "full_attention")

HfConfig = Any


def qwen3_next(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Qwen3-Next config: a mixture with a shared expert, with dense layers where listed."""
    return _hybrid(hf) | {"experts": experts_of(hf, shared=hf.shared_expert_intermediate_size)}


def qwen3_5(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a dense Qwen3.5 config."""
    return _hybrid(hf)


def qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Qwen3.5 config whose layers all are mixtures with a shared expert."""
    experts = ExpertsConfig(
        count=hf.num_experts,
        per_token=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        renormalize=True,
        shared_size=hf.shared_expert_intermediate_size,
    )
    return _hybrid(hf) | {"experts": experts}


def _hybrid(hf: HfConfig) -> dict[str, Any]:
    """Return the fields that all families have. Raises :class:`ConfigError` for unknown kinds of layers and for biases."""
    kinds = list(hf.layer_types)
    if set(kinds) - set(_KINDS) or len(kinds) != hf.num_hidden_layers:
        raise ConfigError(
            f"layer_types is {shown(kinds)}, expected {hf.num_hidden_layers} times {' or '.join(map(repr, _KINDS))}"
        )
    if hf.attention_bias:
        raise ConfigError("attention_bias is true, expected false: gated attention has no biases here")
    recurrent = tuple(index for index, kind in enumerate(kinds) if kind == _KINDS[0])
    dtype: torch.dtype = getattr(torch, getattr(hf, "mamba_ssm_dtype", None) or "float32")
    return {
        "qk_norm": True,
        "attention_gate": True,
        "norm_offset": 1.0,
        "recurrent": RecurrentConfig(
            layers=recurrent,
            key_heads=hf.linear_num_key_heads,
            value_heads=hf.linear_num_value_heads,
            key_size=hf.linear_key_head_dim,
            value_size=hf.linear_value_head_dim,
            kernel_size=hf.linear_conv_kernel_dim,
            state_dtype=dtype,
        )
        if recurrent
        else None,
    }
