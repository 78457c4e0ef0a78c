"""What the configs of families with experts say, and why others of them aren't run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from outrider.device import ConfigError
from outrider.errors import shown
from outrider.model.config import ExpertsConfig

EXPERT_FAMILIES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a family isn't run. ``elsewhere``: transformers' own code may run it on the paged cache."""

    why: str
    elsewhere: bool = False


_LATENT = Refusal(
    "its attention (MLA) caches one latent vector a token, and the paged cache holds keys and values of one size; it doesn't "
    "run through transformers here either"
)
_GROUPS = Refusal("its experts are chosen by a sigmoid with a bias, in groups of them, which isn't done here", elsewhere=True)
_SINKS = Refusal("its attention has sinks and its experts have biases and a clamped activation, which aren't done here")
_LATENTS = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "kimi_k25",
    "longcat_flash",
    "glm4_moe_lite",
    "glm_moe_dsa",
)
_GROUPED = ("glm4_moe", "dots1", "exaone_moe", "ernie4_5_moe", "minimax_m2")
REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        **dict.fromkeys(_LATENTS, _LATENT),
        **dict.fromkeys(_GROUPED, _GROUPS),
        "gpt_oss": _SINKS,
    }
)
"""Model types with experts that aren't run, and why."""

Hf = Any


def mixtral(hf: Hf) -> dict[str, Any]:
    """Every layer is a mixture; the experts' size is the config's intermediate_size."""
    experts = ExpertsConfig(
        count=hf.num_local_experts,
        per_token=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        renormalize=True,
    )
    return {"experts": experts, "windows": one_window(hf, hf.sliding_window)}


def qwen2_moe(hf: Hf) -> dict[str, Any]:
    """With a shared expert, which every token goes to."""
    experts = _experts(hf, shared=hf.shared_expert_intermediate_size)
    return {"attention_bias": hf.qkv_bias, "experts": experts, "windows": layer_windows(hf)}


def qwen3_moe(hf: Hf) -> dict[str, Any]:
    """With norms of queries and keys, as in the dense family."""
    return {
        "attention_bias": hf.attention_bias,
        "output_bias": hf.attention_bias,
        "qk_norm": True,
        "experts": _experts(hf, shared=0),
        "windows": one_window(hf, hf.sliding_window),
    }


def _experts(hf: Hf, *, shared: int) -> ExpertsConfig | None:
    """Layers without experts are those in mlp_only_layers, and all but every decoder_sparse_step-th."""
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
        renormalize=hf.norm_topk_prob,
        shared_size=shared,
        dense_layers=tuple(sorted(dense)),
    )


def layer_windows(hf: Hf) -> tuple[int, ...]:
    """What a token of each layer sees, by layer_types. A sliding layer needs a window: what one without it does differs."""
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


def one_window(hf: Hf, window: int | None) -> tuple[int, ...]:
    """What a token of each layer sees, in a family whose layers all have the one ``window``, or none.

    Raises :class:`ConfigError` where layer_types says that some layers have one, and there's none: transformers masks
    nothing then, and drops keys from its cache all the same.
    """
    others = sorted(set(getattr(hf, "layer_types", None) or ()) - {"full_attention"})
    if others and not window:
        raise ConfigError(
            f"layer_types has {shown(others)}, and the layers of this family have no window here; expected 'full_attention' "
            "for every layer, or no layer_types"
        )
    return (window or 0,) * int(hf.num_hidden_layers)
