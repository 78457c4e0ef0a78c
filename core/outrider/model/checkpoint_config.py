"""From a checkpoint's config.json to a ModelConfig. Facts of the families live here; the model knows none of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.device import ConfigError
from outrider.errors import CheckpointError, shown
from outrider.model.config import ModelConfig, VisionConfig
from outrider.model.config_fields import MAX_CONTEXT, config_fields, is_whole
from outrider.model.expert_configs import (
    EXPERT_FAMILIES,
    REFUSED,
    layer_windows,
    mixtral,
    one_window,
    qwen2_moe,
    qwen3_moe,
)
from outrider.model.location import refuse_other_formats
from outrider.model.plain_config import plain_config
from outrider.model.reading import describe, present, read_json, reading
from outrider.model.rope import ROPE_KINDS, RopeConfig, inverse_frequencies

_DTYPES = MappingProxyType(
    {str(each).removeprefix("torch."): each for each in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
)

# transformers validates and fills in the defaults of each family; what is read from it are plain attributes.
HfConfig = Any


class _NotNative(ConfigError):
    """What isn't done here, and may be done by transformers' own code."""


def read_model_config(
    directory: Path, name: str = "config.json", *, part: str | None = None, drafts: bool = False
) -> ModelConfig:
    """See :meth:`ModelConfig.from_checkpoint`; ``name`` is the file in ``directory`` that the shape is read from, ``part``
    the key in it under which the shape is (None: at its top). ``drafts``: it's of what drafts for another model, which
    transformers' own code can't run.
    """
    path = directory / name
    refuse_other_formats(directory)
    raw = read_json(path)
    if part is not None:
        inner = raw.get(part)
        if not isinstance(inner, dict):
            raise CheckpointError(f"{path}: {part} is {shown(inner)}, expected a config of its own")
        raw = inner
    with reading(path, f"a {shown(raw.get('model_type'))} config"):
        if not drafts:  # a block that's drafted at once sees itself, as its loader reads
            _check_causal(raw)
        try:
            return _model_config(directory, raw)
        except _NotNative as error:
            plain = raw.get("quantization_config") is None
            raise ConfigError(f"{error}; {_DRAFTS if drafts else _DOOR if plain else _QUANTIZED}") from error


def _model_config(directory: Path, raw: dict[str, Any]) -> ModelConfig:
    family = _family(raw)
    whole = _whole(family, raw)
    hf = whole.get_text_config()
    fields = _common(hf) | _FAMILIES[family](hf)
    fields["tie_embeddings"] = bool(whole.tie_word_embeddings)  # a property of the whole, not of its text part
    if family in _VISION_FAMILIES:
        fields["vision"] = _vision(whole)
    fields["eos_token_ids"], fields["bos_token_id"] = special_tokens(directory, hf)
    config = ModelConfig(family=family, rope=_rope(hf, mrope=family in _VISION_FAMILIES), **fields)
    _check_rope(config)
    return config


def _check_causal(raw: Mapping[str, Any]) -> None:
    """Raise where tokens are to see later ones, which transformers' masks let them."""
    text = raw.get("text_config")
    said = (text if isinstance(text, dict) else raw).get("is_causal", True)
    if said is not True:
        raise ConfigError(f"is_causal is {shown(said)}, expected true: a token here sees none that come after it")


def _family(raw: Mapping[str, Any]) -> str:
    """The model type, if it's one of ours."""
    family = raw.get("model_type")
    if isinstance(family, str) and family in _FAMILIES:
        return family
    reason = REFUSED.get(family) if isinstance(family, str) else None
    if reason is not None:
        kind = _NotNative if reason.elsewhere else ConfigError
        raise kind(f"model_type is {shown(family)}, which isn't supported: {reason.why}")
    raise _NotNative(
        f"model_type is {shown(family)} (architectures {shown(raw.get('architectures'))}), which isn't supported; supported "
        f"are {', '.join(sorted(_FAMILIES))}"
    )


def checkpoint_dtype(directory: Path, name: str = "config.json") -> torch.dtype | None:
    """The dtype that the config names for the checkpoint's tensors; None where it names none, or none that we know."""
    raw = read_json(directory / name)
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            found = part.get(key)
            if isinstance(found, str):
                return _DTYPES.get(found.removeprefix("torch."))
    return None


def hf_config(family: str, raw: dict[str, Any]) -> HfConfig:
    """The config as transformers reads it, given the keys that we know alone; :class:`ConfigError` if it can't."""
    return _through_transformers(family, _known(family, raw))


def _whole(family: str, raw: dict[str, Any]) -> HfConfig:
    """The same without transformers where the file leaves nothing to it."""
    known = _known(family, raw)
    return plain_config(family, known) or _through_transformers(family, known)


def _known(family: str, raw: dict[str, Any]) -> dict[str, Any]:
    return config_fields(raw, vision=family in _VISION_FAMILIES, experts=family in EXPERT_FAMILIES)


def _through_transformers(family: str, known: dict[str, Any]) -> HfConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[family].from_dict(known)
    except Exception as error:  # its validators raise many kinds
        raise ConfigError(f"transformers can't read it as a {family} config: {describe(error)}") from error


def _common(hf: HfConfig) -> dict[str, Any]:
    if hf.hidden_act not in _SILU:
        raise _NotNative(f"hidden_act is {shown(hf.hidden_act)}, only 'silu' (also called 'swish') is supported")
    return {
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_size": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "rms_eps": hf.rms_norm_eps,
        "max_context": _context(hf),
    }


def _llama(hf: HfConfig) -> dict[str, Any]:
    return {
        "attention_bias": hf.attention_bias,
        "output_bias": hf.attention_bias,
        "mlp_bias": hf.mlp_bias,
        "windows": one_window(hf, 0),
    }


def _mistral(hf: HfConfig) -> dict[str, Any]:
    # Ministral is published as a mistral model with layer_types, and transformers' Auto classes take it for what it is.
    if getattr(hf, "layer_types", None):
        return {"windows": layer_windows(hf)}
    return {"windows": one_window(hf, hf.sliding_window)}


def _qwen2(hf: HfConfig) -> dict[str, Any]:
    return {"attention_bias": True, "windows": layer_windows(hf)}


def _qwen3(hf: HfConfig) -> dict[str, Any]:
    return {
        "attention_bias": hf.attention_bias,
        "output_bias": hf.attention_bias,
        "qk_norm": True,
        "windows": layer_windows(hf),
    }


_FAMILIES: Mapping[str, Callable[[HfConfig], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "mixtral": mixtral,
        "qwen2": _qwen2,
        "qwen2_5_vl": _qwen2,
        "qwen2_moe": qwen2_moe,
        "qwen2_vl": _qwen2,
        "qwen3": _qwen3,
        "qwen3_moe": qwen3_moe,
    }
)
_VISION_FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl"})
_MROPE_SECTIONS = (16, 24, 24)  # of every published Qwen2-VL, and what a config without the field means


_MAX_ENDS = 1024
_DOOR = "it may run through transformers' own code, slower: --through-transformers"
_QUANTIZED = "transformers' own code runs plain checkpoints alone here (--through-transformers), and this one is quantised"
_DRAFTS = "what drafts runs natively alone (--through-transformers is for the model that it drafts for); take another draft"
_SILU = ("silu", "swish")


def supported_families() -> tuple[str, ...]:
    """Model types that the decoder runs natively."""
    return tuple(sorted(_FAMILIES))


def _vision(hf: HfConfig) -> VisionConfig:
    return VisionConfig(
        image_token=hf.image_token_id,
        video_token=hf.video_token_id,
        merge=hf.vision_config.spatial_merge_size,
        tokens_per_second=getattr(hf.vision_config, "tokens_per_second", 0),
    )


def _rope(hf: HfConfig, *, mrope: bool) -> RopeConfig:
    given = dict(hf.rope_parameters)
    kind = given.get("rope_type", "default")
    if kind is None:  # what else it says would be passed over
        raise ConfigError(f"rope_type of the rope is None, expected one of {', '.join(ROPE_KINDS)}")
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise _NotNative(f"partial_rotary_factor is {given['partial_rotary_factor']}, only 1 is supported")
    optional = {
        name: given[name]
        for name in (
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        )
        if given.get(name) is not None
    }
    if "truncate" in given:  # null is no, as in transformers
        optional["truncate"] = bool(given["truncate"])
    return RopeConfig(
        kind=kind,
        theta=float(given["rope_theta"]),
        factor=_rope_factor(hf),
        original_context=_original_context(hf),
        sections=tuple(given.get("mrope_section") or _MROPE_SECTIONS) if mrope else (),
        **optional,
    )


def _rope_factor(hf: HfConfig) -> float:
    """By how much positions are stretched; of a yarn that says null, from one context to the other, as in transformers."""
    kind, given = hf.rope_parameters.get("rope_type") or "default", hf.rope_parameters.get("factor", 1.0)
    if given is not None or kind == "default":
        return 1.0 if given is None else float(given)
    if kind == "yarn":
        return int(hf.max_position_embeddings) / _original_context(hf)
    raise ConfigError(f"rope_parameters.factor is None, expected a number, by which a rope of kind {kind!r} stretches")


def _original_context(hf: HfConfig) -> int:
    if hf.rope_parameters.get("rope_type") == "dynamic":  # the one kind for which transformers ignores the field
        return int(hf.max_position_embeddings)
    # Beside the rope it goes before what stands in it: transformers reads it so when it makes the model.
    beside = getattr(hf, "original_max_position_embeddings", None)
    return int(beside or hf.rope_parameters.get("original_max_position_embeddings") or hf.max_position_embeddings)


def _context(hf: HfConfig) -> int:
    """The longest sequence that the config promises.

    yarn and dynamic state the original context and the factor, and published configs leave max_position_embeddings at
    the original; for the other kinds max_position_embeddings is the promise.
    """
    declared = int(hf.max_position_embeddings)
    if hf.rope_parameters.get("rope_type") not in ("yarn", "dynamic"):
        return declared
    original, factor = _original_context(hf), _rope_factor(hf)
    if original * factor > MAX_CONTEXT:
        raise ConfigError(f"rope scaling by {factor} of {original} positions gives more than {MAX_CONTEXT}")
    return max(declared, int(original * factor))


def _check_rope(config: ModelConfig) -> None:
    """Values that are possible one by one may still give no angles."""
    if not inverse_frequencies(config.rope, config.head_size).isfinite().all() or not math.isfinite(config.rope.amplitude):
        raise ConfigError(f"its rope parameters give frequencies that aren't finite: {config.rope}")


def special_tokens(directory: Path, hf: HfConfig) -> tuple[tuple[int, ...], int | None]:
    """End and start tokens: generation_config.json decides where it's there, as in transformers' ``generate``."""
    path = directory / "generation_config.json"
    given = read_json(path) if present(path) else {}
    eos = given.get("eos_token_id", getattr(hf, "eos_token_id", None))
    bos = given.get("bos_token_id", getattr(hf, "bos_token_id", None))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for key, tokens in (("eos_token_id", ids), ("bos_token_id", [] if bos is None else [bos])):
        source = path if key in given else directory / "config.json"
        for token in tokens[:_MAX_ENDS]:
            if not is_whole(token, 0, hf.vocab_size - 1):
                raise CheckpointError(
                    f"{source}: {key}: special token {shown(token)} isn't a token id below the vocabulary size "
                    f"{hf.vocab_size}"
                )
        if len(tokens) > _MAX_ENDS:
            raise CheckpointError(f"{source}: {key} has {len(tokens)} tokens, expected at most {_MAX_ENDS}")
    return tuple(ids), bos
