"""Parser of complete config.json files that doesn't import transformers, whose config classes take seconds to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_ROPE_PARAMETERS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
"""Supported rope types, and the parameters that each must define."""
_TOP_LEVEL_ROPE_KEYS = frozenset({"partial_rotary_factor", "original_max_position_embeddings"})
_ROPE_TYPE_KEYS = ("rope_type", "type")  # the current key and its older name
_FLAG_KEYS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
_WITH_LAYER_TYPES = ("qwen2", "qwen3")
_WITHOUT_LAYER_TYPES = ("llama", "mistral")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedConfig:
    """Attributes of transformers' config for the same file, under the same names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    head_dim: int | None
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    layer_types: tuple[str, ...]
    rope_parameters: Mapping[str, Any]
    bos_token_id: int | None
    eos_token_id: int | list[int] | None

    def get_text_config(self) -> ParsedConfig:
        """Return this config, because only text models are supported."""
        return self


def parse_config(family: str, fields: Mapping[str, Any]) -> ParsedConfig | None:
    """Return the config of ``family`` for ``fields`` that :func:`.config_fields` has checked.

    Returns None if a value depends on a family's default or is unusual. Transformers then parses the config, and its messages
    explain what is wrong.
    """
    if family not in (*_WITH_LAYER_TYPES, *_WITHOUT_LAYER_TYPES) or any(fields.get(name) is None for name in _REQUIRED_KEYS):
        return None
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    flags = {name: fields.get(name, False) for name in _FLAG_KEYS}
    rope = _rope(fields)
    if (
        rope is None
        or hidden % heads
        or heads % fields["num_key_value_heads"]
        or fields.get("hidden_act") != "silu"
        or not isinstance(fields["rms_norm_eps"], float)
        or None in flags.values()
        or not _TOP_LEVEL_ROPE_KEYS.isdisjoint(fields)
        or not {"bos_token_id", "eos_token_id"} <= fields.keys()
    ):
        return None
    full_attention, window = ["full_attention"] * fields["num_hidden_layers"], fields.get("sliding_window")
    if family in _WITH_LAYER_TYPES:
        if fields.get("use_sliding_window", False) is not False or fields.get("layer_types") not in (None, full_attention):
            return None
        window = None
    elif "layer_types" in fields or (family == "mistral" and "sliding_window" not in fields):
        return None
    if family == "qwen3" and fields.get("head_dim") is None:  # its default is independent of the other fields
        return None
    return ParsedConfig(
        **{name: fields[name] for name in _REQUIRED_KEYS},
        **flags,
        hidden_act=fields["hidden_act"],
        head_dim=fields.get("head_dim") or hidden // heads,
        sliding_window=window,
        layer_types=tuple(full_attention) if family in _WITH_LAYER_TYPES else (),
        rope_parameters=rope,
        bos_token_id=fields["bos_token_id"],
        eos_token_id=fields["eos_token_id"],
    )


def _rope(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rope parameters in the current spelling, or None if they are contradictory or of another rope type."""
    spellings = [dict(fields[name]) for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
    if len(spellings) == 2 and spellings[0] != spellings[1]:
        return None
    parameters = spellings[0] if spellings else {}
    kinds = {parameters.pop(name) for name in _ROPE_TYPE_KEYS if name in parameters} or {"default"}
    thetas = {each["rope_theta"] for each in (parameters, fields) if "rope_theta" in each}
    parameters.pop("rope_theta", None)
    if len(kinds) != 1 or len(thetas) != 1:
        return None
    (kind,), (theta,) = kinds, thetas
    if kind not in _ROPE_PARAMETERS or parameters.keys() != _ROPE_PARAMETERS[kind] or None in parameters.values():
        return None
    if kind == "llama3" and not _is_unremarkable_llama3(parameters, fields["max_position_embeddings"]):
        return None
    return {**parameters, "rope_type": kind, "rope_theta": theta}


def _is_unremarkable_llama3(parameters: Mapping[str, Any], context: int) -> bool:
    """Return True if the rope extends a shorter context and transformers would accept its factors without a warning."""
    factors = [parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor")]
    return (
        all(isinstance(each, float) for each in factors)
        and parameters["factor"] >= 1
        and parameters["low_freq_factor"] < parameters["high_freq_factor"]
        and parameters["original_max_position_embeddings"] < context
    )
