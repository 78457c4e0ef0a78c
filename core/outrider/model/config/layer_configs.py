"""Config fields of mixtures of experts, latent attention and recurrent layers; and reasons why families aren't supported.

Hybrid models alternate recurrent layers with a gated delta rule and layers with attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from outrider.device import ClampedActivation, ConfigError
from outrider.errors import shown
from outrider.model.config.model_config import (
    CorrectedRouterConfig,
    ExpertsConfig,
    LatentConfig,
    RecurrentConfig,
    SandwichConfig,
)
from outrider.model.config.rope import RopeConfig

RUN_THROUGH_TRANSFORMERS = ("exaone_moe",)
"""Families of :data:`REFUSED` that the transformers fallback may run."""
_SPARSE_ATTENTION = "its attention chooses the keys that each token sees; neither is this done here nor through transformers"
_DIFFERENT = "its attention or its router differs from those that are done here"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE_ATTENTION),
        "longcat_flash": "its layers have two attentions each, and experts without weights, which aren't done here",
        **dict.fromkeys(RUN_THROUGH_TRANSFORMERS, _DIFFERENT),
        "qwen4_exp": "its layers aren't those of Qwen3.5, and they aren't done here",
    }
)
"""Unsupported mixture-of-experts families with the reasons."""

HfConfig = Any


def mixtral(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Mixtral config: every layer is a mixture, and ``intermediate_size`` is that of an expert."""
    return {"experts": _experts_of_all_layers(hf), "windows": one_window(hf, hf.sliding_window)}


def gpt_oss(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a gpt-oss config: attention with sinks and biases, and experts with biases in every layer."""
    # Older releases of transformers have no field for the factor, which all published checkpoints share.
    activation = ClampedActivation(float(hf.swiglu_limit), float(getattr(hf, "swiglu_alpha", 1.702)))
    return {
        "attention_bias": hf.attention_bias,
        "output_bias": hf.attention_bias,
        "attention_sinks": True,
        "experts": _experts_of_all_layers(hf, biases=activation),
        "windows": layer_windows(hf),
    }


def qwen2_moe(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Qwen2-MoE config, which has a shared expert that processes every token."""
    experts = experts_of(hf, shared=hf.shared_expert_intermediate_size)
    return {"attention_bias": hf.qkv_bias, "experts": experts, "windows": layer_windows(hf)}


def qwen3_moe(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Qwen3-MoE config, which norms queries and keys like the dense family."""
    return qwen3(hf) | {"experts": experts_of(hf, shared=0), "windows": one_window(hf, hf.sliding_window)}


def qwen3(hf: HfConfig) -> dict[str, Any]:
    """Return the fields that all Qwen3 decoders with attention in every layer share."""
    return {"attention_bias": hf.attention_bias, "output_bias": hf.attention_bias, "qk_norm": True}


def qwen3_vl_moe(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Qwen3-VL-MoE config. Its routing weights are always normalized, whatever the config says."""
    experts = experts_of(hf, shared=0)
    return qwen3(hf) | {"experts": experts and replace(experts, renormalize=True)}


SANDWICH_FAMILIES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
"""Families whose layers norm their results, too, with GELU as activation."""


def gemma4(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Gemma 4 config. Raises :class:`ConfigError` for parts that no published model has."""
    if hf.hidden_activation != "gelu_pytorch_tanh" or hf.use_bidirectional_attention not in (None, "vision"):
        raise ConfigError(
            f"hidden_activation is {shown(hf.hidden_activation)} and use_bidirectional_attention "
            f"{shown(hf.use_bidirectional_attention)}, expected 'gelu_pytorch_tanh' and causal attention to text"
        )
    windows = layer_windows(hf)
    layers = [hf.per_layer_config[index] for index in range(len(windows))]
    sizes = {(bool(window), each.head_dim, each.num_key_value_heads) for each, window in zip(layers, windows, strict=True)}
    if len(sizes) != 2:
        raise ConfigError(
            f"layers have heads of {len(sizes)} kinds (has a window, head_dim, num_key_value_heads): {shown(sorted(sizes))}; "
            "expected two, of full layers and of layers with a window"
        )
    _, head_size, kv_heads = min(sizes)
    rope = hf.rope_parameters["full_attention"]
    is_proportional = rope["rope_type"] == "proportional"
    share = rope.get("partial_rotary_factor")
    return {
        "attention_bias": hf.attention_bias,
        "output_bias": hf.attention_bias,
        "qk_norm": True,
        "windows": windows,
        "experts": _experts_next_to_mlps(hf) if getattr(hf, "enable_moe_block", False) else None,
        "sandwich": SandwichConfig(
            full_layers=tuple(index for index, window in enumerate(windows) if not window),
            kv_heads=kv_heads,
            head_size=head_size,
            rope=RopeConfig(
                kind=rope["rope_type"],
                theta=float(rope["rope_theta"]),
                factor=float(rope.get("factor") or 1.0) if is_proportional else 1.0,
                turning_share=float(share) if is_proportional and share is not None else 1.0,
            ),
            values_are_keys=bool(hf.attention_k_eq_v),
            logit_cap=float(hf.final_logit_softcapping or 0.0),
            **_small_model_parts(hf),
        ),
    }


def _small_model_parts(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of the parts that Gemma 4 E2B and E4B have: layers that share keys and values, per-layer embeddings.

    Raises :class:`ConfigError` for wide MLPs next to experts, and for tokens without per-layer embeddings.
    """
    sharing, size = hf.num_kv_shared_layers, getattr(hf, "hidden_size_per_layer_input", 0)
    is_wide = bool(sharing and hf.use_double_wide_mlp)
    if is_wide and getattr(hf, "enable_moe_block", False):
        raise ConfigError("use_double_wide_mlp and enable_moe_block are true, expected one of them in layers that share keys")
    vocabulary = hf.vocab_size_per_layer_input if size else 0
    if size and vocabulary < hf.vocab_size:
        raise ConfigError(f"vocab_size_per_layer_input is {vocabulary}, expected at least the vocab_size {hf.vocab_size}")
    return {
        "sharing_layers": sharing,
        "has_wide_mlps": is_wide,
        "input_size": size,
        "input_vocabulary": vocabulary,
    }


def _experts_next_to_mlps(hf: HfConfig) -> ExpertsConfig:
    """Return the mixture of a Gemma 4 model, next to whose experts each layer has an MLP, in the place of a shared expert."""
    sizes = {name: getattr(hf, name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    if None in sizes.values():
        raise ConfigError(f"enable_moe_block is true, and the experts are {shown(sizes)}; expected three numbers")
    return ExpertsConfig(
        count=hf.num_experts,
        per_token=hf.top_k_experts,
        intermediate_size=hf.moe_intermediate_size,
        renormalize=True,
        shared_size=hf.intermediate_size,
        activation="gelu_tanh",
    )


def sliding_config(hf: HfConfig) -> HfConfig:
    """Return the part of a Gemma 4 config that describes its sliding layers. Raises :class:`ConfigError` without any."""
    if "sliding_attention" not in hf.layer_types:
        raise ConfigError("layer_types has no 'sliding_attention', expected layers of both kinds")
    return hf.per_layer_config["sliding_attention"]


def sliding_rope(hf: HfConfig) -> RopeConfig:
    """Return the rope of a Gemma 4 model's sliding layers."""
    rope = hf.rope_parameters["sliding_attention"]
    if rope["rope_type"] != "default":
        raise ConfigError(f"rope_type of sliding layers is {shown(rope['rope_type'])}, expected 'default'")
    return RopeConfig(theta=float(rope["rope_theta"]))


def glm4_moe(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a GLM-4.5 config, whose routers have sigmoids."""
    return {
        "attention_bias": hf.attention_bias,
        "qk_norm": hf.use_qk_norm,
        "experts": _sigmoid_experts(hf),
        "windows": one_window(hf, None),
    }


def dots1(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a dots.llm1 config: Qwen3's attention, and routers with sigmoids."""
    return qwen3(hf) | {"experts": _sigmoid_experts(hf), "windows": layer_windows(hf)}


def minimax_m2(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a MiniMax-M2 config, which norms queries and keys over all heads."""
    experts = replace(_experts_of_all_layers(hf), routing=CorrectedRouterConfig(epsilon=0.0))
    return {"qk_norm": True, "joint_qk_norm": True, "experts": experts, "windows": one_window(hf, None)}


def hy_v3(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Hunyuan 3 config. Raises :class:`ConfigError` for layers of unknown kinds."""
    kinds = list(hf.mlp_layer_types)
    if set(kinds) - {"dense", "sparse"} or len(kinds) != hf.num_hidden_layers:
        raise ConfigError(f"mlp_layer_types is {shown(kinds)}, expected {hf.num_hidden_layers} times 'dense' or 'sparse'")
    experts = ExpertsConfig(
        count=hf.num_experts,
        per_token=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        renormalize=True,
        shared_size=hf.num_shared_experts * hf.moe_intermediate_size,
        dense_layers=_dense_layers(kinds),
        routing=CorrectedRouterConfig(factor=float(hf.router_scaling_factor)),
    )
    return qwen3(hf) | {"experts": experts if "sparse" in kinds else None, "windows": one_window(hf, None)}


def ernie4_5(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a dense ERNIE 4.5 config."""
    biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), bool(hf.use_bias))
    return biases | {"windows": one_window(hf, None)}


def ernie4_5_moe(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of an ERNIE 4.5 config with experts. Raises :class:`ConfigError` for biases."""
    if hf.use_bias:
        raise ConfigError("use_bias is true, expected false: shared experts and the output head have no biases here")
    layers, sparse = range(hf.num_hidden_layers), range(hf.moe_layer_start_index, hf.moe_layer_end_index + 1)
    dense = tuple(index for index in layers if index not in sparse or (index + 1) % hf.moe_layer_interval)
    experts = ExpertsConfig(
        count=hf.moe_num_experts,
        per_token=hf.moe_k,
        intermediate_size=hf.moe_intermediate_size,
        renormalize=True,
        shared_size=hf.moe_num_shared_experts * hf.moe_intermediate_size,
        dense_layers=dense,
        routing=CorrectedRouterConfig(epsilon=0.0, minimum=float(hf.moe_norm_min), softmax=True),
    )
    return ernie4_5(hf) | {"experts": experts if len(dense) < len(layers) else None}


LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Families with latent attention."""


def deepseek_v2(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a DeepSeek-V2-Lite config: routers with a softmax, whose weights aren't normalized."""
    dense = range(hf.first_k_dense_replace)
    return _latent_attention(hf, interleaved=True) | {"experts": _deepseek_experts(hf, dense, routing=None)}


def deepseek_v3(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a DeepSeek-V3 config, which Kimi-K2 shares."""
    return _latent_attention(hf, interleaved=bool(hf.rope_interleave)) | {"experts": _sigmoid_experts(hf)}


def glm4_moe_lite(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a GLM-4.7-Flash config, which lists the layers with experts, or has experts in all but the first.

    Raises :class:`ConfigError` if ``first_k_dense_replace``, which transformers ignores, names other layers.
    """
    dense = _dense_layers(hf.mlp_layer_types)
    declared = getattr(hf, "first_k_dense_replace", None)
    if len(hf.mlp_layer_types) != hf.num_hidden_layers or declared not in (None, len(dense)):
        raise ConfigError(
            f"mlp_layer_types has {len(hf.mlp_layer_types)} layers, {len(dense)} of them dense, and first_k_dense_replace is "
            f"{declared}; expected {hf.num_hidden_layers} layers, and one number of dense layers"
        )
    experts = _deepseek_experts(hf, dense, routing=_corrected_router(hf))
    return _latent_attention(hf, interleaved=hf.rope_interleave) | {"experts": experts}


def _latent_attention(hf: HfConfig, *, interleaved: bool) -> dict[str, Any]:
    """Return the fields of latent attention. Raises :class:`ConfigError` for heads that share keys, and for biases."""
    if hf.num_key_value_heads != hf.num_attention_heads or hf.attention_bias:
        raise ConfigError(
            f"num_key_value_heads is {hf.num_key_value_heads} and attention_bias {hf.attention_bias}; expected "
            f"{hf.num_attention_heads}, since latent attention expands a key for each head, and no biases"
        )
    latent = LatentConfig(
        query_rank=hf.q_lora_rank or 0,
        rank=hf.kv_lora_rank,
        rotated_size=hf.qk_rope_head_dim,
        unrotated_size=hf.qk_nope_head_dim,
        value_size=hf.v_head_dim,
        interleaved=interleaved,
    )
    return {"latent": latent, "head_size": latent.head_size, "windows": one_window(hf, None)}


def _dense_layers(kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the layers without experts in a config's list of the ``kinds`` of MLPs."""
    return tuple(index for index, kind in enumerate(kinds) if kind == "dense")


def _sigmoid_experts(hf: HfConfig) -> ExpertsConfig | None:
    """Return the mixture of every layer but the first ones, in DeepSeek-V3's fields; None if every layer is dense."""
    return _deepseek_experts(hf, range(hf.first_k_dense_replace), routing=_corrected_router(hf))


def _corrected_router(hf: HfConfig) -> CorrectedRouterConfig:
    return CorrectedRouterConfig(groups=hf.n_group, chosen_groups=hf.topk_group, factor=float(hf.routed_scaling_factor))


def _deepseek_experts(hf: HfConfig, dense: Sequence[int], *, routing: CorrectedRouterConfig | None) -> ExpertsConfig | None:
    """Return the mixture of every layer but the ``dense`` ones, in DeepSeek's fields; None if every layer is dense."""
    if len(dense) >= hf.num_hidden_layers:
        return None
    return ExpertsConfig(
        count=hf.n_routed_experts,
        per_token=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        renormalize=hf.norm_topk_prob,
        shared_size=hf.n_shared_experts * hf.moe_intermediate_size,
        dense_layers=tuple(dense),
        routing=routing,
    )


def _experts_of_all_layers(hf: HfConfig, *, biases: ClampedActivation | None = None) -> ExpertsConfig:
    """Return the mixture of every layer of a model whose ``intermediate_size`` is that of an expert."""
    return ExpertsConfig(
        count=hf.num_local_experts,
        per_token=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        renormalize=True,
        biases=biases,
    )


def experts_of(hf: HfConfig, *, shared: int) -> ExpertsConfig | None:
    """Return the mixture config, or None if every layer is dense.

    Dense layers are those in ``mlp_only_layers`` and all but every ``decoder_sparse_step``-th layer. Raises
    :class:`ConfigError` for an invalid ``decoder_sparse_step``.
    """
    layers, step = hf.num_hidden_layers, hf.decoder_sparse_step
    if step < 1:
        raise ConfigError(f"decoder_sparse_step is {step}, expected a whole number from 1 on")
    dense = {index for index in range(layers) if (index + 1) % step} | {each for each in hf.mlp_only_layers if each < layers}
    if not hf.num_experts or len(dense) == layers:
        return None
    return ExpertsConfig(
        count=hf.num_experts,
        per_token=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        renormalize=getattr(hf, "norm_topk_prob", True),
        shared_size=shared,
        dense_layers=tuple(sorted(dense)),
    )


def layer_windows(hf: HfConfig) -> tuple[int, ...]:
    """Return the attention window of each layer in positions from ``layer_types``. 0 means full attention.

    Raises :class:`ConfigError` for sliding layers without a window: libraries disagree on their meaning.
    """
    kinds = {"full_attention": 0, "sliding_attention": hf.sliding_window or 0}
    unknown = sorted(set(hf.layer_types) - set(kinds))
    if unknown:
        raise ConfigError(f"layer_types has {shown(unknown)}, expected {' or '.join(kinds)}")
    if not hf.sliding_window and "sliding_attention" in hf.layer_types:
        raise ConfigError(
            "layer_types has 'sliding_attention', but there's no window: sliding_window is 0 or missing, or "
            "use_sliding_window isn't true; expected both, or 'full_attention' for every layer"
        )
    return tuple(kinds[kind] for kind in hf.layer_types)


def one_window(hf: HfConfig, window: int | None) -> tuple[int, ...]:
    """Return the attention window of each layer for a family whose layers all have the same ``window``, or none.

    Raises :class:`ConfigError` if ``layer_types`` lists sliding layers without a window: transformers then masks nothing, but
    drops keys from its cache.
    """
    sliding = sorted(set(getattr(hf, "layer_types", None) or ()) - {"full_attention"})
    if sliding and not window:
        raise ConfigError(
            f"layer_types has {shown(sliding)}, and the layers of this family have no window here; expected 'full_attention' "
            "for every layer, or no layer_types"
        )
    return (window or 0,) * int(hf.num_hidden_layers)


HYBRID_FAMILIES = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})

_KINDS = ("linear_attention", "full_attention")


def qwen3_next(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a Qwen3-Next config: a mixture with a shared expert, with dense layers where listed."""
    return _hybrid(hf) | {"experts": experts_of(hf, shared=hf.shared_expert_intermediate_size)}


def qwen3_5(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of a dense Qwen3.5 config, with recurrent layers and layers with gated attention."""
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
    """Return the fields that all hybrid families share. Raises :class:`ConfigError` for unknown layer types and
    for biases.
    """
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
