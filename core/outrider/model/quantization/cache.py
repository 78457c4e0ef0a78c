"""Quantized KV caches: the scheme in a checkpoint's config, and the scales of keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from outrider.device import CACHE_FORMATS, Backend, CapabilityError, ConfigError, KernelSet
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import CheckpointFiles
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.layer_weights import CacheFormat
from outrider.model.quantization.storages import FLOATS

KEY, MODELOPT_KEY = "kv_cache_scheme", "kv_cache_quant_algo"
_SUPPORTED_VALUES: Mapping[str, object] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
STRATEGIES = ("tensor", "attn_head")
"""Granularity of the scales: one per layer, or one per KV head."""
_SCALE_NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
)
"""Suffixes of the scale names that compressed-tensors, ModelOpt and older writers use."""


def read_scale_strategy(raw: object) -> str:
    """Return the granularity of the fp8 scales, one of :data:`STRATEGIES`, that the config ``kv_cache_scheme`` declares: an
    object, or the word ``static`` of older fp8 writers.

    Raises :class:`ConfigError` with the key for an unsupported value.
    """
    if raw == "static":
        return "tensor"
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{KEY} is {shown(raw)}, expected a JSON object; --kv-dtype plain keeps the cache in the model's dtype"
        )
    if MODELOPT_KEY in raw:
        raise ConfigError(
            f"{MODELOPT_KEY} is {shown(raw[MODELOPT_KEY])}, expected 'FP8': a KV cache is kept in fp8 with stored "
            "scales, or plainly (--kv-dtype plain)"
        )
    defaults = {"symmetric": True, "dynamic": False}
    for name, supported in _SUPPORTED_VALUES.items():
        value = raw.get(name, defaults.get(name))
        if type(value) is not type(supported) or value != supported:
            raise ConfigError(
                f"{KEY}.{name} is {shown(value)}, expected {supported!r}: a KV cache is kept in fp8 "
                "with stored scales, or plainly (--kv-dtype plain)"
            )
    strategy = raw.get("strategy") or "tensor"
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"{KEY}.strategy is {shown(strategy)}, expected {' or '.join(STRATEGIES)}; --kv-dtype plain keeps the "
            "cache in the model's dtype"
        )
    return str(strategy)


def resolve_cache_format(asked: str, strategy: str | None, kernels: KernelSet, backend: Backend, origin: str) -> str | None:
    """Return the format of the KV cache, one of ``CACHE_FORMATS``, or None for the model's dtype.

    ``asked`` is the setting kv_dtype. ``strategy`` is the granularity of the checkpoint's scales, or None without scales.
    Raises :class:`CapabilityError` if ``kernels`` don't support the format.
    """
    format = ("fp8" if strategy is not None else None) if asked == "auto" else None if asked == "plain" else asked
    if format is None or format in kernels.cache_formats:
        return format
    has = ", ".join(sorted(kernels.cache_formats)) or "none"
    whose = f"{origin} says so ({KEY})" if asked == "auto" else "it was asked for"
    raise CapabilityError(
        f"the KV cache is to be kept in {format}, as {whose}, and the kernels {kernels.name!r} of {backend.label} have "
        f"no cache in that format (they declare {has}); keep it in the model's dtype with --kv-dtype plain, or take other "
        "kernels"
    )


def scale_keys(files: CheckpointFiles, prefixes: Iterable[str]) -> set[str]:
    """Return the names of the checkpoint's tensors that hold KV cache scales."""
    ends = [each for pair in _SCALE_NAMES for each in pair]
    return {key for prefix in prefixes for end in ends if (key := f"{prefix}.self_attn.{end}") in files.tensors}


def read_scales(files: CheckpointFiles, prefix: str, strategy: str, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return the scales of keys and of values of layer ``prefix``, each float64 [Hkv] on the host.

    Raises :class:`CheckpointError` with the tensor's name if a scale is missing, or has a shape, dtype or value that
    contradicts ``strategy``.
    """
    keys = [tuple(f"{prefix}.self_attn.{end}" for end in pair) for pair in _SCALE_NAMES]
    present = [each for each in keys if any(key in files.tensors for key in each)] or keys[:1]
    found = [(_scale(files, pair[0], strategy, kv_heads), _scale(files, pair[1], strategy, kv_heads)) for pair in present]
    for pair, scales in zip(present, found, strict=True):
        for side in range(2):
            if not torch.equal(scales[side], found[0][side]):
                raise CheckpointError(
                    f"{files.origin}: tensors {present[0][side]!r} and {pair[side]!r} are both the scale of one cache, and "
                    "differ; expected one of them, or --kv-dtype plain"
                )
    return found[0]


def _scale(files: CheckpointFiles, key: str, strategy: str, kv_heads: int) -> Tensor:
    if strategy == "tensor":
        shapes: tuple[tuple[int, ...], ...] = ((1,), ())
    else:
        shapes = ((kv_heads, 1, 1), (kv_heads,))
    words = " or ".join(str(list(shape)) for shape in shapes)
    if key not in files.tensors:
        raise CheckpointError(
            f"{files.origin}: tensor {key!r} {words} is missing: {KEY} says that the KV cache is quantised by stored scales; "
            "--kv-dtype plain keeps it in the model's dtype"
        )
    where = f"{files.tensors[key].path}: tensor {key!r}"
    if files.shape(key) not in shapes:
        raise CheckpointError(
            f"{where} has shape {list(files.shape(key))}, expected {words}, since {KEY}.strategy is {strategy}"
        )
    if files.dtype(key) not in FLOATS:
        raise CheckpointError(f"{where} is {files.dtype_name(key)}, expected a float")
    scale = files.read_stored(key).to(torch.float64).reshape(-1)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise CheckpointError(f"{where} is {scale.tolist()[:4]}, expected finite scales above 0")
    return scale.expand(kv_heads).contiguous()


def cache_format(
    format: str, scales: tuple[Tensor, Tensor] | None, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> CacheFormat:
    """Return the cache format of a layer with these scales [Hkv] of keys and of values. None means that all scales are 1.

    ``config`` and ``scales`` have the heads of this rank.
    """
    page_dtype = CACHE_FORMATS[format]
    if scales is None or all(bool((each == 1).all()) for each in scales):
        return CacheFormat(dtype=page_dtype)
    keys, values = scales
    group = config.num_heads // config.num_kv_heads
    before = torch.cat((keys.repeat_interleave(group), 1 / keys, 1 / values)).unsqueeze(1)
    after = values.repeat_interleave(group).unsqueeze(1)
    wide = torch.promote_types(dtype, torch.float32)

    def on_device(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=wide, device=device).copy_(tensor.to(wide))

    return CacheFormat(dtype=page_dtype, input_scales=on_device(before), output_scales=on_device(after))
