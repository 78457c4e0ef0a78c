"""Schema of config.json: the keys that are read, and the types and limits of their values; and a parser of complete configs.

Only these keys reach transformers, and only with values inside the limits. A config can therefore not make transformers
allocate, loop or execute code without bound. Limits are a multiple of the largest published values.

The parser doesn't import transformers, whose config classes take seconds to import.
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
from outrider.model.config.rope import ROPE_KINDS

MAX_LAYERS = 4096
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_ITEMS = 4096
_MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class Field:
    """The constraint of one config value."""

    expected: str
    """The constraint in words, for error messages."""
    fits: Callable[[Any], bool]
    """The predicate that a value of this field must satisfy."""
    empty: bool = True
    """True if the value may be null."""
    inside: Mapping[str, Field] | None = None
    """Fields of a JSON object that are read; None for other kinds of values."""


def is_whole(value: object, low: int, high: int) -> TypeGuard[int]:
    """Return True if ``value`` is an integer (not a bool) from ``low`` to ``high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def whole_number(low: int, high: int, *, empty: bool = True) -> Field:
    """Return a field that accepts whole numbers from ``low`` to ``high``, and null if ``empty``."""
    return Field(f"a whole number from {low} to {high}", lambda value: is_whole(value, low, high), empty)


def number(low: float, high: float, *, empty: bool = True) -> Field:
    """Return a field that accepts finite numbers from ``low`` to ``high``, and null if ``empty``."""

    def fits(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low <= value <= high and math.isfinite(value)

    return Field(f"a number from {low:g} to {high:g}", fits, empty)


def list_of(item: Field, max_items: int = _MAX_ITEMS) -> Field:
    """Return a field that accepts lists of at most ``max_items`` values, each accepted by ``item``."""
    return Field(
        f"a list of at most {max_items}, each {item.expected}",
        lambda value: isinstance(value, list) and len(value) <= max_items and all(item.fits(each) for each in value),
    )


def either(first: Field, second: Field) -> Field:
    """Return a field that accepts every value that one of two fields accepts."""
    return Field(f"{first.expected}, or {second.expected}", lambda value: first.fits(value) or second.fits(value))


def record(inside: Mapping[str, Field]) -> Field:
    """Return a field that accepts JSON objects, of which the keys in ``inside`` are read."""
    return Field("a JSON object", lambda value: isinstance(value, dict), True, inside)


def choice_of(*values: float | bool) -> Field:
    """Return a field that accepts one of these numbers or booleans."""
    return Field(f"{' or '.join(map(str, values))}", lambda value: any(value is each or value == each for each in values))


def choice(*names: str) -> Field:
    """Return a field that accepts one of these strings."""
    return Field(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


FLAG = Field("true or false", lambda value: isinstance(value, bool))
TEXT = Field("a string", lambda value: isinstance(value, str) and len(value) <= 200)
_WIDTH, _CONTEXT, _HEADS = (
    whole_number(1, _MAX_WIDTH, empty=False),
    whole_number(1, MAX_CONTEXT, empty=False),
    whole_number(1, 1 << 16),
)
_LAYERS = whole_number(1, MAX_LAYERS, empty=False)
_TOKEN = whole_number(0, MAX_VOCABULARY)
_EXPERTS = whole_number(0, _MAX_EXPERTS, empty=False)
_SCALE = number(1e-6, 1e6)
_KIND = choice(*ROPE_KINDS, "mrope")


def _rope_record(inside: Mapping[str, Field]) -> Field:
    """Return a field for rope parameters. An object per layer type is rejected: no supported family has separate angles."""
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
        "original_max_position_embeddings": whole_number(1, MAX_CONTEXT),
        "attention_factor": _SCALE,
        "beta_fast": _SCALE,
        "beta_slow": _SCALE,
        "mscale": number(0, 1e6),
        "mscale_all_dim": number(0, 1e6),
        "truncate": FLAG,
        "short_factor": list_of(_SCALE),
        "long_factor": list_of(_SCALE),
        "llama_4_scaling_beta": number(0, 1e6),
        "mrope_section": list_of(whole_number(0, 1 << 16), 3),
        "mrope_interleaved": FLAG,
    }
)
VISION_ROPE: Mapping[str, Field] = MappingProxyType(
    {"rope_type": choice("axial", "default"), "rope_theta": ROPE["rope_theta"]}
)
TEXT_MODEL: Mapping[str, Field] = MappingProxyType(
    {
        "vocab_size": whole_number(1, MAX_VOCABULARY, empty=False),
        "hidden_size": _WIDTH,
        "intermediate_size": whole_number(1, 4 * _MAX_WIDTH, empty=False),
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": whole_number(1, 1 << 16, empty=False),
        "num_key_value_heads": _HEADS,
        "head_dim": whole_number(1, 1 << 14),
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
        "sliding_window": whole_number(0, 1 << 31),
        "use_sliding_window": FLAG,
        "max_window_layers": whole_number(0, 1 << 31),
        "layer_types": list_of(TEXT),
        "tie_word_embeddings": FLAG,
        "bos_token_id": _TOKEN,
        "eos_token_id": either(_TOKEN, list_of(_TOKEN)),
    }
)
EXPERTS: Mapping[str, Field] = MappingProxyType(
    {
        **TEXT_MODEL,
        "num_local_experts": _EXPERTS,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": whole_number(1, _MAX_EXPERTS, empty=False),
        "moe_intermediate_size": _WIDTH,
        "shared_expert_intermediate_size": _WIDTH,
        "norm_topk_prob": FLAG,
        "decoder_sparse_step": whole_number(0, MAX_LAYERS, empty=False),
        "mlp_only_layers": list_of(whole_number(0, MAX_LAYERS)),
        "qkv_bias": FLAG,
        # Features of other families. Only the values that switch them off are accepted.
        "n_group": choice_of(1),
        "topk_group": choice_of(1),
        "routed_scaling_factor": choice_of(1, 1.0),
        "scoring_func": choice("softmax"),
        "topk_method": choice("greedy"),
        "mlp_bias": choice_of(False),
    }
)
SIGMOID_EXPERTS: Mapping[str, Field] = MappingProxyType(
    {
        **EXPERTS,
        "n_routed_experts": whole_number(1, _MAX_EXPERTS, empty=False),
        "n_shared_experts": whole_number(0, _MAX_EXPERTS, empty=False),
        "first_k_dense_replace": whole_number(0, MAX_LAYERS, empty=False),
        "n_group": whole_number(1, _MAX_EXPERTS, empty=False),
        "topk_group": whole_number(1, _MAX_EXPERTS, empty=False),
        "routed_scaling_factor": number(1e-6, 1e6, empty=False),
        "scoring_func": choice("sigmoid"),
        "topk_method": choice("noaux_tc"),
        "use_qk_norm": FLAG,
        "num_nextn_predict_layers": whole_number(0, MAX_LAYERS),
    }
)
MINIMAX: Mapping[str, Field] = MappingProxyType(
    {
        **EXPERTS,
        "rotary_dim": whole_number(2, 1 << 14, empty=False),
        "scoring_func": choice("sigmoid"),
        "use_routing_bias": choice_of(True),
        "use_qk_norm": choice_of(True),
        "qk_norm_type": choice("per_layer"),
        "attn_type_list": list_of(choice_of(1)),
        "shared_intermediate_size": choice_of(0),
    }
)
HUNYUAN: Mapping[str, Field] = MappingProxyType(
    {
        **EXPERTS,
        "num_shared_experts": whole_number(1, _MAX_EXPERTS, empty=False),
        "router_scaling_factor": number(1e-6, 1e6, empty=False),
        "mlp_layer_types": list_of(TEXT),
        "num_nextn_predict_layers": whole_number(0, MAX_LAYERS),
        **dict.fromkeys(
            ("moe_router_use_sigmoid", "moe_router_enable_expert_bias", "route_norm", "qk_norm"), choice_of(True)
        ),
    }
)
ERNIE: Mapping[str, Field] = MappingProxyType(
    {
        **TEXT_MODEL,
        "use_bias": FLAG,
        "moe_k": whole_number(1, _MAX_EXPERTS, empty=False),
        "moe_num_experts": whole_number(1, _MAX_EXPERTS, empty=False),
        "moe_num_shared_experts": whole_number(0, _MAX_EXPERTS, empty=False),
        "moe_intermediate_size": _WIDTH,
        "moe_layer_start_index": whole_number(0, MAX_LAYERS, empty=False),
        "moe_layer_end_index": whole_number(-1, MAX_LAYERS, empty=False),
        "moe_layer_interval": whole_number(1, MAX_LAYERS, empty=False),
        "moe_norm_min": number(0, 1, empty=False),
    }
)
_HEAD_PART = whole_number(1, 1 << 14, empty=False)
_LATENT_SIGMOID: Mapping[str, Field] = MappingProxyType(
    {
        **SIGMOID_EXPERTS,
        "kv_lora_rank": _WIDTH,
        "q_lora_rank": whole_number(1, _MAX_WIDTH),
        "qk_rope_head_dim": _HEAD_PART,
        "qk_nope_head_dim": _HEAD_PART,
        "v_head_dim": _HEAD_PART,
        "rope_interleave": FLAG,
        "mlp_layer_types": list_of(choice("dense", "sparse")),
        "moe_layer_freq": choice_of(1),
    }
)
_ROUTER = ("n_group", "topk_group", "routed_scaling_factor", "scoring_func", "topk_method")
_LATENT_SOFTMAX: Mapping[str, Field] = MappingProxyType(
    {**_LATENT_SIGMOID, **{name: EXPERTS[name] for name in _ROUTER}, "norm_topk_prob": choice_of(False)}
)
BIASED_EXPERTS: Mapping[str, Field] = MappingProxyType(
    {**EXPERTS, "swiglu_limit": number(0.01, 1e4, empty=False), "swiglu_alpha": number(0.01, 1e4, empty=False)}
)
HYBRID: Mapping[str, Field] = MappingProxyType(
    {
        **EXPERTS,
        "linear_conv_kernel_dim": whole_number(2, 64, empty=False),
        "linear_key_head_dim": whole_number(1, 1 << 14, empty=False),
        "linear_value_head_dim": whole_number(1, 1 << 14, empty=False),
        "linear_num_key_heads": whole_number(1, 1 << 16, empty=False),
        "linear_num_value_heads": whole_number(1, 1 << 16, empty=False),
        "full_attention_interval": whole_number(1, MAX_LAYERS, empty=False),
        "mamba_ssm_dtype": choice("float32", "bfloat16", "float16"),
        "attn_output_gate": choice_of(True),
        "output_gate_type": choice("silu", "swish"),
    }
)
_GLOBAL_LAYER: Mapping[str, Field] = MappingProxyType(
    {"head_dim": whole_number(1, 1 << 14, empty=False), "num_key_value_heads": whole_number(1, 1 << 16, empty=False)}
)


def _is_layer_sizes(value: object) -> bool:
    """Return True for an object that gives layers, by their numbers, other heads and nothing else."""
    return isinstance(value, dict) and all(
        key.isdecimal()
        and len(key) < 6
        and isinstance(each, dict)
        and all(name in _GLOBAL_LAYER and _GLOBAL_LAYER[name].fits(number) for name, number in each.items())
        for key, each in value.items()
    )


_LAYER_ROPE: Mapping[str, Field] = MappingProxyType(
    {
        "rope_type": choice("default", "proportional"),
        "rope_theta": ROPE["rope_theta"],
        "partial_rotary_factor": number(0, 1),
        "factor": _SCALE,
    }
)
SANDWICH: Mapping[str, Field] = MappingProxyType(
    {
        **TEXT_MODEL,
        "rope_parameters": record(
            MappingProxyType({kind: record(_LAYER_ROPE) for kind in ("full_attention", "sliding_attention")})
        ),
        "hidden_activation": TEXT,
        "global_head_dim": whole_number(1, 1 << 14, empty=False),
        "num_global_key_value_heads": _HEADS,
        "per_layer_config": Field("an object of layers with head_dim and num_key_value_heads", _is_layer_sizes),
        "attention_k_eq_v": FLAG,
        "final_logit_softcapping": number(1e-3, 1e6),
        "hidden_size_per_layer_input": whole_number(0, _MAX_WIDTH, empty=False),
        "vocab_size_per_layer_input": whole_number(1, MAX_VOCABULARY, empty=False),
        "num_kv_shared_layers": whole_number(0, MAX_LAYERS, empty=False),
        "enable_moe_block": FLAG,
        "num_experts": whole_number(1, _MAX_EXPERTS),
        "top_k_experts": whole_number(1, _MAX_EXPERTS),
        "moe_intermediate_size": whole_number(1, _MAX_WIDTH),
        "use_double_wide_mlp": FLAG,
        "use_bidirectional_attention": TEXT,
    }
)
_PATCH = whole_number(1, 1024, empty=False)
VISION: Mapping[str, Field] = MappingProxyType(
    {
        "depth": _LAYERS,
        "embed_dim": _WIDTH,
        "hidden_size": _WIDTH,
        "out_hidden_size": _WIDTH,
        "intermediate_size": whole_number(1, 4 * _MAX_WIDTH, empty=False),
        "hidden_act": choice("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"),
        "mlp_ratio": number(0.01, 1024, empty=False),
        "num_heads": whole_number(1, 1 << 16, empty=False),
        "in_channels": whole_number(1, 64, empty=False),
        "patch_size": _PATCH,
        "spatial_merge_size": whole_number(1, 64, empty=False),
        "temporal_patch_size": whole_number(1, 64, empty=False),
        "tokens_per_second": whole_number(0, 1 << 16, empty=False),
        "window_size": whole_number(1, 1 << 16, empty=False),
        "fullatt_block_indexes": list_of(whole_number(0, MAX_LAYERS)),
        "rope_parameters": record(VISION_ROPE),
        "num_position_embeddings": whole_number(1, _MAX_WIDTH, empty=False),
        "deepstack_visual_indexes": list_of(whole_number(0, MAX_LAYERS), 64),
    }
)


def _with_vision(text: Mapping[str, Field]) -> Mapping[str, Field]:
    """Return the fields of a model with a vision tower. ``text`` are those of its text model, here or in an object."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = dict.fromkeys(names, whole_number(0, MAX_VOCABULARY, empty=False))
    return MappingProxyType({**text, "text_config": record(text), "vision_config": record(VISION), **tokens})


FAMILY_FIELDS: Mapping[str, Mapping[str, Field]] = MappingProxyType(
    {
        **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), EXPERTS),
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _with_vision(TEXT_MODEL)),
        "gpt_oss": BIASED_EXPERTS,
        **dict.fromkeys(("dots1", "glm4_moe"), SIGMOID_EXPERTS),
        "minimax_m2": MINIMAX,
        "hy_v3": HUNYUAN,
        **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), ERNIE),
        **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), _LATENT_SIGMOID),
        "deepseek_v2": _LATENT_SOFTMAX,
        **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), SANDWICH),
        **dict.fromkeys(("gemma4", "gemma4_unified"), MappingProxyType({**SANDWICH, "text_config": record(SANDWICH)})),
        "qwen3_vl_moe": _with_vision(EXPERTS),
        **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), HYBRID),
        **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _with_vision(HYBRID)),
    }
)
"""Fields of config.json that a model family has in addition to the common ones, by family."""


def check_fields(raw: Mapping[str, Any], fields: Mapping[str, Field], within: str = "") -> dict[str, Any]:
    """Return the values of ``raw`` that ``fields`` describe; other keys are dropped.

    Raises :class:`ConfigError` with the key, the value and the expected values.
    """
    accepted: dict[str, Any] = {}
    for key, field in fields.items():
        if key not in raw:
            continue
        value = raw[key]
        if value is None and field.empty:
            accepted[key] = None  # a null differs from a missing key: a family may have another default than null
            continue
        if not field.fits(value):
            raise ConfigError(f"{within}{key} is {shown(value)}, expected {field.expected}")
        accepted[key] = value if field.inside is None else check_fields(value, field.inside, f"{within}{key}.")
    return accepted


_LAYER_COUNT_KEYS = re.compile(r"layers?$|blocks?$|depth$")  # a model has at least one tensor for each of these
_COUNT_KEYS = re.compile(r"heads?$|experts?$|labels?$|groups?$")
_EXTERNAL_CODE_KEYS = frozenset(
    {"quantization_config", "transformers_weights", "distributed_config", "fusion_config", "kernel_config", "use_kernels"}
)
_IMPLEMENTATION_KEY = re.compile(r"_implementation(_internal)?$")  # a value with a slash names a repository of kernels
_MAX_NUMBER = (1 << 53) - 1


def check_any_config(raw: Mapping[str, Any], tensors: int) -> None:
    """Raise :class:`ConfigError` if a config of any family has counts that a model constructor would loop over without bound.

    ``tensors`` is the number of tensors in the files, which bounds the number of layers. Keys that load other files, or code
    from outside transformers, are refused too.
    """
    entries: list[tuple[str, Any]] = list(raw.items())
    for key, value in entries:  # grows during the loop, bounded by the size limit of read_json
        foreign_kernels = _IMPLEMENTATION_KEY.search(key) and isinstance(value, str) and "/" in value
        if foreign_kernels or (key in _EXTERNAL_CODE_KEYS and value is not None):
            raise ConfigError(f"{key} is {shown(value)}, which isn't supported")
        if isinstance(value, dict):
            entries += value.items()
        elif isinstance(value, list):
            entries += [(key, each) for each in value if isinstance(each, dict | list | int | float)]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            limit = tensors if _LAYER_COUNT_KEYS.search(key) else MAX_LAYERS if _COUNT_KEYS.search(key) else _MAX_NUMBER
            limit = MAX_CONTEXT if key.endswith("positions") or key == "max_position_embeddings" else limit
            if not -_MAX_NUMBER <= value <= (_MAX_NUMBER if isinstance(value, float) else limit):
                raise ConfigError(f"{key} is {shown(value)}, expected at most {limit} of a checkpoint of {tensors} tensors")


def config_fields(family: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known fields of a config.json of ``family``. Raises the :class:`ConfigError` of :func:`check_fields`."""
    return check_fields(raw, FAMILY_FIELDS.get(family, TEXT_MODEL))


# -- the parser of complete configs ------------------------------------------------------------------------------------


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
