"""Conversion of a checkpoint's config.json to a ModelConfig. This module holds the differences between model families."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.device import ConfigError
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import describe, present, read_json, wrap_read_errors
from outrider.model.checkpoint.location import refuse_other_formats
from outrider.model.config.config_fields import MAX_CONTEXT, config_fields, is_whole, parse_config
from outrider.model.config.layer_configs import (
    HYBRID_FAMILIES,
    LATENT_FAMILIES,
    REFUSED,
    RUN_THROUGH_TRANSFORMERS,
    SANDWICH_FAMILIES,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    hy_v3,
    layer_windows,
    minimax_m2,
    mixtral,
    one_window,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl_moe,
    sliding_config,
    sliding_rope,
)
from outrider.model.config.model_config import ModelConfig, VisionConfig
from outrider.model.config.rope import ROPE_KINDS, RopeConfig, inverse_frequencies, long_frequencies

_DTYPES = MappingProxyType(
    {str(each).removeprefix("torch."): each for each in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
)

# transformers validates the config and fills in each family's defaults; this module only reads its attributes.
HfConfig = Any


class _NotNativeError(ConfigError):
    """A config that the native decoder cannot run, but transformers' own code may."""


def read_model_config(
    directory: Path, name: str = "config.json", *, part: str | None = None, drafts: bool = False
) -> ModelConfig:
    """Read ``name`` in ``directory`` and ``generation_config.json`` as a ModelConfig.

    Raises :class:`CheckpointError` if there is no readable config, if its architecture is unknown (the error lists the known
    ones), or if it asks for an unsupported feature. The error names the file and the field.

    ``part`` is the key of the object that holds the shape; None means the top level. ``drafts`` is true for the config of a
    draft model or head, which cannot fall back to transformers' own code.
    """
    path = directory / name
    refuse_other_formats(directory)
    raw = read_json(path)
    if part is not None:
        inner = raw.get(part)
        if not isinstance(inner, dict):
            raise CheckpointError(f"{path}: {part} is {shown(inner)}, expected a config of its own")
        raw = inner
    with wrap_read_errors(path, f"a {shown(raw.get('model_type'))} config"):
        if not drafts:  # the loader of a block drafter reads whether its block attends to later positions
            _check_causal(raw)
        try:
            return _model_config(directory, raw)
        except _NotNativeError as error:
            fallback = _TRY_TRANSFORMERS if raw.get("quantization_config") is None else _TRY_UNQUANTIZED
            raise ConfigError(f"{error}; {_DRAFTS_NATIVE_ONLY if drafts else fallback}") from error


def _model_config(directory: Path, raw: dict[str, Any]) -> ModelConfig:
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in TEXT_ALONE:
        raw = _text_alone(raw)
    family = _family(raw)
    full_config = _parse_config(family, raw)
    hf = full_config.get_text_config()
    is_sandwich = family in SANDWICH_FAMILIES
    fields = _common_fields(sliding_config(hf) if is_sandwich else hf, family) | _FAMILIES[family](hf)
    fields["tie_embeddings"] = bool(full_config.tie_word_embeddings)  # the top-level value, not the text config's
    sections, alternating = _MROPE_SECTIONS.get(family, ()), has_alternating_axes(family)
    if family in HYBRID_FAMILIES and raw.get("vision_config") is None:
        sections = ()  # text alone, whose positions are equal on all axes
    if sections:
        fields["vision"] = _vision(full_config, timed=alternating)
    fields["eos_token_ids"], fields["bos_token_id"] = special_tokens(directory, hf)
    if is_sandwich:
        return ModelConfig(family=family, rope=sliding_rope(hf), **fields)
    rope = _rope(hf, sections, alternating=alternating, partial=family in _PARTIAL_ROPE)
    if family in LATENT_FAMILIES:
        rope = replace(rope, rotated_share=fields["latent"].rotated_size / fields["head_size"])
    config = ModelConfig(family=family, rope=rope, **fields)
    _check_rope(config)
    return config


def _text_alone(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model in that of a vision-language model. Raises :class:`ConfigError` without one."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"text_config is {shown(text)}, expected the config of the text model")
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "model_type": TEXT_ALONE[raw["model_type"]], "tie_word_embeddings": tied}


def _check_causal(raw: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` if the config asks for attention to later tokens, which transformers' masks allow."""
    text = raw.get("text_config")
    is_causal = (text if isinstance(text, dict) else raw).get("is_causal", True)
    if is_causal is not True:
        raise ConfigError(f"is_causal is {shown(is_causal)}, expected true: a token here sees none that come after it")


def _family(raw: Mapping[str, Any]) -> str:
    """Return the config's model type, or that of the family with the same decoder. Raises :class:`ConfigError` for an
    unsupported one.
    """
    family = raw.get("model_type")
    if isinstance(family, str) and (known := _SAME_DECODER.get(family, family)) in _FAMILIES:
        is_text = f"{known}_text" in _FAMILIES and raw.get("text_config") is None and "hidden_size" in raw
        return f"{known}_text" if is_text else known
    reason = REFUSED.get(family) if isinstance(family, str) else None
    if reason is not None:
        kind = _NotNativeError if family in RUN_THROUGH_TRANSFORMERS else ConfigError
        raise kind(f"model_type is {shown(family)}, which isn't supported: {reason}")
    raise _NotNativeError(
        f"model_type is {shown(family)} (architectures {shown(raw.get('architectures'))}), which isn't supported; supported "
        f"are {', '.join(supported_families())}"
    )


def checkpoint_dtype(directory: Path, name: str = "config.json") -> torch.dtype | None:
    """Return the dtype that the config declares for the tensors, or None if it declares none or an unknown one."""
    raw = read_json(directory / name)
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            found = part.get(key)
            if isinstance(found, str):
                return _DTYPES.get(found.removeprefix("torch."))
    return None


def hf_config(family: str, raw: dict[str, Any]) -> HfConfig:
    """Parse the known keys of ``raw`` with transformers. Raises :class:`ConfigError` if transformers rejects them."""
    return _through_transformers(family, config_fields(family, raw))


def _parse_config(family: str, raw: dict[str, Any]) -> HfConfig:
    """Parse the known keys of ``raw``, without transformers if they determine every attribute."""
    known = config_fields(family, raw)
    return parse_config(family, known) or _through_transformers(family, known)


def _through_transformers(family: str, known: dict[str, Any]) -> HfConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[family].from_dict(known)
    except Exception as error:  # its validators raise many kinds
        raise ConfigError(f"transformers can't read it as a {family} config: {describe(error)}") from error


def _common_fields(hf: HfConfig, family: str) -> dict[str, Any]:
    if family not in SANDWICH_FAMILIES and hf.hidden_act not in _SILU:
        raise _NotNativeError(f"hidden_act is {shown(hf.hidden_act)}, only 'silu' (also called 'swish') is supported")
    return {
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        # A mixture in every layer has no other intermediate size than that of its experts.
        "intermediate_size": getattr(hf, "intermediate_size", None) or hf.moe_intermediate_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_size": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "rms_eps": hf.rms_norm_eps,
        "max_context": _max_context(hf),
    }


def _llama(hf: HfConfig) -> dict[str, Any]:
    return {
        "attention_bias": hf.attention_bias,
        "output_bias": hf.attention_bias,
        "mlp_bias": hf.mlp_bias,
        "windows": one_window(hf, 0),
    }


def _mistral(hf: HfConfig) -> dict[str, Any]:
    # Ministral is published as a mistral model with layer_types, and transformers' Auto classes recognize it by them.
    if getattr(hf, "layer_types", None):
        return {"windows": layer_windows(hf)}
    return {"windows": one_window(hf, hf.sliding_window)}


def _qwen2(hf: HfConfig) -> dict[str, Any]:
    return {"attention_bias": True, "windows": layer_windows(hf)}


def _qwen3(hf: HfConfig) -> dict[str, Any]:
    return qwen3(hf) | {"windows": layer_windows(hf)}


_FAMILIES: Mapping[str, Callable[[HfConfig], dict[str, Any]]] = MappingProxyType(
    {
        "deepseek_v2": deepseek_v2,
        "deepseek_v3": deepseek_v3,
        "dots1": dots1,
        "ernie4_5": ernie4_5,
        "ernie4_5_moe": ernie4_5_moe,
        **dict.fromkeys(SANDWICH_FAMILIES, gemma4),
        "glm4_moe": glm4_moe,
        "glm4_moe_lite": glm4_moe_lite,
        "gpt_oss": gpt_oss,
        "hy_v3": hy_v3,
        "llama": _llama,
        "minimax_m2": minimax_m2,
        "ministral3": _mistral,
        "mistral": _mistral,
        "mixtral": mixtral,
        "qwen2": _qwen2,
        "qwen2_5_vl": _qwen2,
        "qwen2_moe": qwen2_moe,
        "qwen2_vl": _qwen2,
        "qwen3": _qwen3,
        "qwen3_5": qwen3_5,
        "qwen3_5_moe": qwen3_5_moe,
        "qwen3_5_moe_text": qwen3_5_moe,
        "qwen3_5_text": qwen3_5,
        "qwen3_moe": qwen3_moe,
        "qwen3_next": qwen3_next,
        "qwen3_vl": qwen3,
        "qwen3_vl_moe": qwen3_vl_moe,
    }
)
_SAME_DECODER: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3", "mimo": "qwen2"})
"""Model types whose decoder and config are those of another family, and which transformers does not know."""
TEXT_ALONE: Mapping[str, str] = MappingProxyType({"kimi_k25": "deepseek_v3"})
"""Vision-language models of which the text model runs, without images, with the family of that."""
_PARTIAL_ROPE = HYBRID_FAMILIES | {"glm4_moe", "minimax_m2"}
"""Families whose rope may rotate a part of each head."""
_CONSECUTIVE_AXES = ("qwen2_vl", "qwen2_5_vl")
_MROPE_SECTIONS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_CONSECUTIVE_AXES, (16, 24, 24)),
        **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), (24, 20, 20)),
        **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), (11, 11, 10)),
    }
)
"""Rope sections of the families with a vision tower, where the config doesn't give them. Those of ``_CONSECUTIVE_AXES``
follow one another; the axes of other families alternate.
"""


_MAX_SPECIAL_TOKENS = 1024
_TRY_TRANSFORMERS = "it may run through transformers' own code, slower: --through-transformers"
_TRY_UNQUANTIZED = (
    "transformers' own code runs plain checkpoints alone here (--through-transformers), and this one is quantised"
)
_DRAFTS_NATIVE_ONLY = (
    "what drafts runs natively alone (--through-transformers is for the model that it drafts for); take another draft"
)
_SILU = ("silu", "swish")


def supported_families() -> tuple[str, ...]:
    """Return the model types that the decoder runs natively, sorted."""
    return tuple(sorted({*_FAMILIES, *_SAME_DECODER, *TEXT_ALONE}))


def has_alternating_axes(family: str) -> bool:
    """Return True for a family with a vision tower whose rope alternates between the axes. Its prompts state the times of a
    video's frames as text.
    """
    return family in _MROPE_SECTIONS and family not in _CONSECUTIVE_AXES


def _vision(hf: HfConfig, *, timed: bool) -> VisionConfig:
    """Return the vision fields of a config. Raises :class:`ConfigError` for deepstack layers that the tower lacks.

    ``timed``: the prompts of the family state the times of a video's frames.
    """
    stack = list(getattr(hf.vision_config, "deepstack_visual_indexes", None) or ())
    if stack != sorted(set(stack)) or (stack and stack[-1] >= hf.vision_config.depth):
        raise ConfigError(
            f"vision_config.deepstack_visual_indexes is {shown(stack)}, expected ascending indices below the depth "
            f"{hf.vision_config.depth}"
        )
    return VisionConfig(
        image_token=hf.image_token_id,
        video_token=hf.video_token_id,
        merge=hf.vision_config.spatial_merge_size,
        tokens_per_second=getattr(hf.vision_config, "tokens_per_second", 0),
        frame_marks=(hf.vision_start_token_id, hf.vision_end_token_id) if timed else None,
        deepstack=len(stack),
    )


def _rope(hf: HfConfig, sections: tuple[int, ...], *, alternating: bool, partial: bool) -> RopeConfig:
    """Return the rope of a config. ``sections`` are those of an mrope without the field, or empty for a rope of one axis."""
    parameters = dict(hf.rope_parameters)
    if sections and alternating and parameters.get("mrope_interleaved") is False:
        raise ConfigError("mrope_interleaved is false, expected true: the axes of this family alternate")
    kind = parameters.get("rope_type", "default")
    if kind is None:  # transformers would ignore the other parameters
        raise ConfigError(f"rope_type of the rope is None, expected one of {', '.join(ROPE_KINDS)}")
    if parameters.get("partial_rotary_factor") not in (None, 1.0) and not partial:
        raise _NotNativeError(f"partial_rotary_factor is {parameters['partial_rotary_factor']}, only 1 is supported")
    optional = {
        name: parameters[name]
        for name in (
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        )
        if parameters.get(name) is not None
    }
    if "truncate" in parameters:  # null means false, as in transformers
        optional["truncate"] = bool(parameters["truncate"])
    if kind == "longrope":
        optional |= {f"{name}_factors": tuple(parameters.get(f"{name}_factor") or ()) for name in ("short", "long")}
    if parameters.get("partial_rotary_factor") is not None:
        optional["rotated_share"] = float(parameters["partial_rotary_factor"])
    if parameters.get("llama_4_scaling_beta") is not None:
        optional["query_beta"] = float(parameters["llama_4_scaling_beta"])
    return RopeConfig(
        kind=kind,
        theta=float(parameters["rope_theta"]),
        factor=_rope_factor(hf),
        original_context=_original_context(hf),
        sections=tuple(parameters.get("mrope_section") or sections) if sections else (),
        interleaved=bool(sections) and alternating,
        **optional,
    )


def _rope_factor(hf: HfConfig) -> float:
    """Return the factor by which the rope stretches the context.

    For a yarn rope whose factor is null, and for longrope without one, it is the ratio of the two context lengths, as in
    transformers.
    """
    kind = hf.rope_parameters.get("rope_type") or "default"
    factor = hf.rope_parameters.get("factor", None if kind == "longrope" else 1.0)
    if factor is not None or kind == "default":
        return 1.0 if factor is None else float(factor)
    if kind in ("yarn", "longrope"):
        return int(hf.max_position_embeddings) / _original_context(hf)
    raise ConfigError(f"rope_parameters.factor is None, expected a number, by which a rope of kind {kind!r} stretches")


def _original_context(hf: HfConfig) -> int:
    if hf.rope_parameters.get("rope_type") == "dynamic":  # the one kind for which transformers ignores the field
        return int(hf.max_position_embeddings)
    # The top-level value takes precedence over the one in the rope parameters, as when transformers builds the model.
    top_level = getattr(hf, "original_max_position_embeddings", None)
    return int(top_level or hf.rope_parameters.get("original_max_position_embeddings") or hf.max_position_embeddings)


def _max_context(hf: HfConfig) -> int:
    """Return the longest sequence that the config supports, in tokens.

    Published yarn and dynamic configs often keep the original context in max_position_embeddings, so the context is computed
    from the original context and the factor. For the other rope kinds max_position_embeddings is the context.
    """
    declared = int(hf.max_position_embeddings)
    if hf.rope_parameters.get("rope_type") not in ("yarn", "dynamic"):
        return declared
    original, factor = _original_context(hf), _rope_factor(hf)
    if original * factor > MAX_CONTEXT:
        raise ConfigError(f"rope scaling by {factor} of {original} positions gives more than {MAX_CONTEXT}")
    return max(declared, int(original * factor))


def _check_rope(config: ModelConfig) -> None:
    """Raise :class:`ConfigError` if rope parameters that are valid one by one give frequencies that are not finite."""
    frequencies = [inverse_frequencies(config.rope, config.head_size)]
    if config.rope.kind == "longrope":
        frequencies.append(long_frequencies(config.rope, config.head_size))
    if not all(each.isfinite().all() for each in frequencies) or not math.isfinite(config.rope.amplitude):
        raise ConfigError(f"its rope parameters give frequencies that aren't finite: {config.rope}")


def special_tokens(directory: Path, hf: HfConfig) -> tuple[tuple[int, ...], int | None]:
    """Return the end-of-sequence tokens and the start token (or None).

    generation_config.json takes precedence over config.json, as in transformers' ``generate``. Raises
    :class:`CheckpointError` for a token outside the vocabulary, or for too many tokens.
    """
    path = directory / "generation_config.json"
    generation = read_json(path) if present(path) else {}
    eos = generation.get("eos_token_id", getattr(hf, "eos_token_id", None))
    bos = generation.get("bos_token_id", getattr(hf, "bos_token_id", None))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for key, tokens in (("eos_token_id", ids), ("bos_token_id", [] if bos is None else [bos])):
        source = path if key in generation else directory / "config.json"
        for token in tokens[:_MAX_SPECIAL_TOKENS]:
            if not is_whole(token, 0, hf.vocab_size - 1):
                raise CheckpointError(
                    f"{source}: {key}: special token {shown(token)} isn't a token id below the vocabulary size "
                    f"{hf.vocab_size}"
                )
        if len(tokens) > _MAX_SPECIAL_TOKENS:
            raise CheckpointError(f"{source}: {key} has {len(tokens)} tokens, expected at most {_MAX_SPECIAL_TOKENS}")
    return tuple(ids), bos
