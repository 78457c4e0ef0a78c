"""What config.json may say: each key that is read, what its value may be, and how large.

Only these keys reach transformers, and only when their values are possible, so a config can't make it allocate, loop or
run anything. Limits are a multiple of the largest published values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

from outrider.device import ConfigError
from outrider.errors import shown
from outrider.model.rope import ROPE_KINDS

MAX_LAYERS = 4096
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_ITEMS = 4096
_MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class Field:
    """What a value may be: ``expected`` in words, ``fits`` the test of it.

    ``empty``: it may be null. ``inside``: the keys of an object that are read.
    """

    expected: str
    fits: Callable[[Any], bool]
    empty: bool = True
    inside: Mapping[str, Field] | None = None


def is_whole(value: object, low: int, high: int) -> TypeGuard[int]:
    """Whether it's a whole number (no truth value) from ``low`` to ``high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def whole(low: int, high: int, *, empty: bool = True) -> Field:
    """A whole number from ``low`` to ``high``."""
    return Field(f"a whole number from {low} to {high}", lambda value: is_whole(value, low, high), empty)


def number(low: float, high: float, *, empty: bool = True) -> Field:
    """A number from ``low`` to ``high``."""

    def fits(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low <= value <= high and math.isfinite(value)

    return Field(f"a number from {low:g} to {high:g}", fits, empty)


def items(of: Field, most: int = _MAX_ITEMS) -> Field:
    """A list of such values."""
    return Field(
        f"a list of at most {most}, each {of.expected}",
        lambda value: isinstance(value, list) and len(value) <= most and all(of.fits(each) for each in value),
    )


def either(first: Field, second: Field) -> Field:
    """One of two kinds."""
    return Field(f"{first.expected}, or {second.expected}", lambda value: first.fits(value) or second.fits(value))


def record(inside: Mapping[str, Field]) -> Field:
    """A JSON object of such values."""
    return Field("a JSON object", lambda value: isinstance(value, dict), True, inside)


def choice_of(*values: float | bool) -> Field:
    """One of these values."""
    return Field(f"{' or '.join(map(str, values))}", lambda value: any(value is each or value == each for each in values))


def choice(*names: str) -> Field:
    """One of these strings."""
    return Field(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


FLAG = Field("true or false", lambda value: isinstance(value, bool))
TEXT = Field("a string", lambda value: isinstance(value, str) and len(value) <= 200)
_WIDTH, _CONTEXT, _HEADS = whole(1, _MAX_WIDTH, empty=False), whole(1, MAX_CONTEXT, empty=False), whole(1, 1 << 16)
_LAYERS = whole(1, MAX_LAYERS, empty=False)
_TOKEN = whole(0, MAX_VOCABULARY)
_EXPERTS = whole(0, _MAX_EXPERTS, empty=False)
_SCALE = number(1e-6, 1e6)
_KIND = choice(*ROPE_KINDS, "mrope")


def _rope_record(inside: Mapping[str, Field]) -> Field:
    """A rope's object. One with an object for each kind of layer means angles that no family here has."""
    return Field(
        "a JSON object of numbers and names (angles of its own for each kind of layer aren't supported)",
        lambda value: isinstance(value, dict) and not any(isinstance(value[key], dict) for key in value.keys() - inside),
        True,
        inside,
    )


ROPE: Mapping[str, Field] = MappingProxyType(
    {
        "rope_type": _KIND,
        "type": _KIND,
        "rope_theta": number(1.0001, 1e15, empty=False),
        "partial_rotary_factor": number(0, 1),
        "factor": _SCALE,
        "low_freq_factor": _SCALE,
        "high_freq_factor": _SCALE,
        "original_max_position_embeddings": whole(1, MAX_CONTEXT),
        "attention_factor": _SCALE,
        "beta_fast": _SCALE,
        "beta_slow": _SCALE,
        "mscale": number(0, 1e6),
        "mscale_all_dim": number(0, 1e6),
        "truncate": FLAG,
        "mrope_section": items(whole(0, 1 << 16), 3),
    }
)
VISION_ROPE: Mapping[str, Field] = MappingProxyType(
    {"rope_type": choice("axial", "default"), "rope_theta": ROPE["rope_theta"]}
)
TEXT_MODEL: Mapping[str, Field] = MappingProxyType(
    {
        "vocab_size": whole(1, MAX_VOCABULARY, empty=False),
        "hidden_size": _WIDTH,
        "intermediate_size": whole(1, 4 * _MAX_WIDTH, empty=False),
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": whole(1, 1 << 16, empty=False),
        "num_key_value_heads": _HEADS,
        "head_dim": whole(1, 1 << 14),
        "hidden_act": TEXT,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": number(0, 1, empty=False),
        "rope_parameters": _rope_record(ROPE),
        "rope_scaling": _rope_record(ROPE),
        "rope_theta": ROPE["rope_theta"],
        "original_max_position_embeddings": ROPE["original_max_position_embeddings"],
        "partial_rotary_factor": ROPE["partial_rotary_factor"],
        "attention_bias": FLAG,
        "mlp_bias": FLAG,
        "sliding_window": whole(0, 1 << 31),
        "use_sliding_window": FLAG,
        "max_window_layers": whole(0, 1 << 31),
        "layer_types": items(TEXT),
        "tie_word_embeddings": FLAG,
        "bos_token_id": _TOKEN,
        "eos_token_id": either(_TOKEN, items(_TOKEN)),
    }
)
EXPERTS: Mapping[str, Field] = MappingProxyType(
    {
        **TEXT_MODEL,
        "num_local_experts": _EXPERTS,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": whole(1, _MAX_EXPERTS, empty=False),
        "moe_intermediate_size": _WIDTH,
        "shared_expert_intermediate_size": _WIDTH,
        "norm_topk_prob": FLAG,
        "decoder_sparse_step": whole(0, MAX_LAYERS, empty=False),
        "mlp_only_layers": items(whole(0, MAX_LAYERS)),
        "qkv_bias": FLAG,
        # What only other families do: it must be as if it weren't there.
        "n_group": choice_of(1),
        "topk_group": choice_of(1),
        "routed_scaling_factor": choice_of(1, 1.0),
        "scoring_func": choice("softmax"),
        "topk_method": choice("greedy"),
        "mlp_bias": choice_of(False),
    }
)
_PATCH = whole(1, 1024, empty=False)
VISION: Mapping[str, Field] = MappingProxyType(
    {
        "depth": _LAYERS,
        "embed_dim": _WIDTH,
        "hidden_size": _WIDTH,
        "out_hidden_size": _WIDTH,
        "intermediate_size": whole(1, 4 * _MAX_WIDTH, empty=False),
        "hidden_act": TEXT,
        "mlp_ratio": number(0.01, 1024, empty=False),
        "num_heads": whole(1, 1 << 16, empty=False),
        "in_channels": whole(1, 64, empty=False),
        "patch_size": _PATCH,
        "spatial_merge_size": whole(1, 64, empty=False),
        "temporal_patch_size": whole(1, 64, empty=False),
        "tokens_per_second": whole(0, 1 << 16, empty=False),
        "window_size": whole(1, 1 << 16, empty=False),
        "fullatt_block_indexes": items(whole(0, MAX_LAYERS)),
        "rope_parameters": record(VISION_ROPE),
    }
)
_WITH_VISION: Mapping[str, Field] = MappingProxyType(
    {
        **TEXT_MODEL,
        "text_config": record(TEXT_MODEL),
        "vision_config": record(VISION),
        "image_token_id": whole(0, MAX_VOCABULARY, empty=False),
        "video_token_id": whole(0, MAX_VOCABULARY, empty=False),
    }
)


def checked(raw: Mapping[str, Any], fields: Mapping[str, Field], within: str = "") -> dict[str, Any]:
    """The values of ``fields`` that ``raw`` gives; other keys are left out.

    Raises :class:`ConfigError` that names the key and the value, and says what was expected.
    """
    kept: dict[str, Any] = {}
    for key, field in fields.items():
        if key not in raw:
            continue
        value = raw[key]
        if value is None and field.empty:
            kept[key] = None  # not the same as leaving it out: a family may have a default that isn't "none"
            continue
        if not field.fits(value):
            raise ConfigError(f"{within}{key} is {shown(value)}, expected {field.expected}")
        kept[key] = value if field.inside is None else checked(value, field.inside, f"{within}{key}.")
    return kept


_LOOPED = re.compile(r"layers?$|blocks?$|depth$")  # keys of what a model makes one by one, and has tensors of
_COUNTED = re.compile(r"heads?$|experts?$|labels?$|groups?$")
_FOREIGN = frozenset(
    {"quantization_config", "transformers_weights", "distributed_config", "fusion_config", "kernel_config", "use_kernels"}
)
_CODE = re.compile(r"_implementation(_internal)?$")  # a name with a slash is that of a repository of kernels
_MAX_NUMBER = (1 << 53) - 1


def check_any_config(raw: Mapping[str, Any], tensors: int) -> None:
    """Raise :class:`ConfigError` where a config of whatever family has numbers that would be looped over without end.

    ``tensors`` is how many the files hold: no model has more layers than that. Keys that bring in other files or other
    code than transformers' own are refused too.
    """
    waiting: list[tuple[str, Any]] = list(raw.items())
    for key, value in waiting:  # grows while it's gone through; read_json bounds it
        if (key in _FOREIGN and value is not None) or (_CODE.search(key) and isinstance(value, str) and "/" in value):
            raise ConfigError(f"{key} is {shown(value)}, which isn't supported")
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, each) for each in value if isinstance(each, dict | list | int | float)]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = tensors if _LOOPED.search(key) else MAX_LAYERS if _COUNTED.search(key) else _MAX_NUMBER
            most = MAX_CONTEXT if key.endswith("positions") or key == "max_position_embeddings" else most
            if not -_MAX_NUMBER <= value <= (_MAX_NUMBER if isinstance(value, float) else most):
                raise ConfigError(f"{key} is {shown(value)}, expected at most {most} of a checkpoint of {tensors} tensors")


def config_fields(raw: Mapping[str, Any], *, vision: bool, experts: bool = False) -> dict[str, Any]:
    """What of a config.json is read: of a model with ``vision``, with ``experts``, or of neither kind.

    Raises :class:`ConfigError` as :func:`checked` does.
    """
    return checked(raw, _WITH_VISION if vision else EXPERTS if experts else TEXT_MODEL)
