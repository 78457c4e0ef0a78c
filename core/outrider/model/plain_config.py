"""A config.json that says all it means, read without transformers: importing its config classes takes seconds of a start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_ROPES: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
"""Kinds of rope, and what else each states."""
_ROPE_BESIDE = frozenset({"partial_rotary_factor", "original_max_position_embeddings"})  # what a rope may say outside of it
_KINDS = ("rope_type", "type")  # today's key, and the older one
_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
_WINDOWED = ("qwen2", "qwen3")  # families in which each layer has a kind
_ALIKE = ("llama", "mistral")  # families whose layers are all of one kind


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainConfig:
    """What transformers' config of the same file has under the same names."""

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

    def get_text_config(self) -> PlainConfig:
        """Itself: it's of a model of text alone."""
        return self


def plain_config(family: str, fields: Mapping[str, Any]) -> PlainConfig | None:
    """The config of ``family`` that says ``fields``, which :func:`~outrider.model.config_fields.config_fields` let pass.

    None where anything is left to a family's defaults, or is out of the ordinary in some other way: that is for transformers,
    whose messages say what is wrong with it.
    """
    if family not in (*_WINDOWED, *_ALIKE) or any(fields.get(name) is None for name in _NEEDED):
        return None
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    flags = {name: fields.get(name, False) for name in _FLAGS}
    rope = _rope(fields)
    if (
        rope is None
        or hidden % heads
        or heads % fields["num_key_value_heads"]
        or fields.get("hidden_act") != "silu"
        or not isinstance(fields["rms_norm_eps"], float)
        or None in flags.values()
        or not _ROPE_BESIDE.isdisjoint(fields)
        or not {"bos_token_id", "eos_token_id"} <= fields.keys()
    ):
        return None
    full, window = ["full_attention"] * fields["num_hidden_layers"], fields.get("sliding_window")
    if family in _WINDOWED:
        if fields.get("use_sliding_window", False) is not False or fields.get("layer_types") not in (None, full):
            return None
        window = None
    elif "layer_types" in fields or (family == "mistral" and "sliding_window" not in fields):
        return None
    if family == "qwen3" and fields.get("head_dim") is None:  # its default doesn't follow from the rest
        return None
    return PlainConfig(
        **{name: fields[name] for name in _NEEDED},
        **flags,
        hidden_act=fields["hidden_act"],
        head_dim=fields.get("head_dim") or hidden // heads,
        sliding_window=window,
        layer_types=tuple(full) if family in _WINDOWED else (),
        rope_parameters=rope,
        bos_token_id=fields["bos_token_id"],
        eos_token_id=fields["eos_token_id"],
    )


def _rope(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Today's spelling of what it says; None where it says it twice differently, or isn't of a kind that is told here."""
    spelt = [dict(fields[name]) for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
    if len(spelt) == 2 and spelt[0] != spelt[1]:
        return None
    given = spelt[0] if spelt else {}
    kinds = {given.pop(name) for name in _KINDS if name in given} or {"default"}
    thetas = {each["rope_theta"] for each in (given, fields) if "rope_theta" in each}
    given.pop("rope_theta", None)
    if len(kinds) != 1 or len(thetas) != 1:
        return None
    (kind,), (theta,) = kinds, thetas
    if kind not in _ROPES or given.keys() != _ROPES[kind] or None in given.values():
        return None
    if kind == "llama3" and not _is_usual(given, fields["max_position_embeddings"]):
        return None
    return {**given, "rope_type": kind, "rope_theta": theta}


def _is_usual(rope: Mapping[str, Any], context: int) -> bool:
    """Whether such a rope extends a shorter context by numbers that transformers has nothing to say about."""
    factors = [rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor")]
    return (
        all(isinstance(each, float) for each in factors)
        and rope["factor"] >= 1
        and rope["low_freq_factor"] < rope["high_freq_factor"]
        and rope["original_max_position_embeddings"] < context
    )
