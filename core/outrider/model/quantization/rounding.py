"""Quantization of weights by rounding to the nearest value, in the tensors that checkpoints store and products read.

``fp8`` and ``int8``: one scale per row, activations quantized per token. ``int4``: one scale per group of columns,
activations not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import ConfigError, QuantizedWeight
from outrider.model.quantization.layouts import pack_nibbles, wide_scales

DEFAULT_GROUP_COLUMNS = 128
"""Default number of columns that share a scale in int4."""
_E4M3_MAX = 448.0


def _stored_scale(max_magnitude: Tensor, max_value: float, dtype: torch.dtype) -> Tensor:
    """Return scales in the weight's dtype; 1 for all-zero rows."""
    scale = (max_magnitude / max_value).to(dtype)
    return torch.where(scale > 0, scale, 1.0).to(dtype)


def _scaled_rows(weight: Tensor, max_value: float) -> tuple[Tensor, Tensor]:
    """Return the weight divided by one scale per row, in float32, and the scales."""
    wide = weight.to(torch.float32)
    scale = _stored_scale(wide.abs().amax(1, keepdim=True), max_value, weight.dtype)
    return wide / scale.to(torch.float32), scale


def _fp8(weight: Tensor, group: int) -> dict[str, Tensor]:
    del group
    values, scale = _scaled_rows(weight, _E4M3_MAX)
    return {"weight": values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), "weight_scale": scale}


def _int8(weight: Tensor, group: int) -> dict[str, Tensor]:
    del group
    values, scale = _scaled_rows(weight, 127.5)
    return {"weight": values.round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}


def _int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    grouped = weight.to(torch.float32).unflatten(1, (-1, group))
    scale = _stored_scale(grouped.abs().amax(-1), 7.5, weight.dtype)
    values = (grouped / scale.to(torch.float32).unsqueeze(-1)).round().clamp(-8, 7).flatten(1)
    return {
        "weight_packed": pack_nibbles((values + 8).to(torch.uint8)).view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


ROUND_BY_FORMAT: Mapping[str, Callable[..., dict[str, Tensor]]] = MappingProxyType(
    {"fp8": _fp8, "int8": _int8, "int4": _int4}
)
"""Function by format that rounds a weight [out, in] and returns the tensors of a compressed-tensors checkpoint by name
suffix.

Its arguments are the weight and ``group``, the columns that share a scale in int4, which must divide ``in``.
"""


_GROUP_SIZES = (DEFAULT_GROUP_COLUMNS, 64, 32, 16, 8)
_ACTIVATIONS = MappingProxyType({"fp8": "fp8", "int8": "int8", "int4": None})
_ROWS_AT_ONCE = 8192


def quantize_weight(weight: Tensor, format: str) -> QuantizedWeight:
    """Quantize a weight [out, in] on its device, in blocks of rows, because the float32 copy takes twice the weight's bytes.

    In int4 the group size is the largest one up to :data:`DEFAULT_GROUP_COLUMNS` that divides ``in``. Raises
    :class:`ConfigError` if ``in`` is not a multiple of 8 in int4.
    """
    rows, columns = shape = (weight.shape[0], weight.shape[1])
    group = next((each for each in _GROUP_SIZES if columns % each == 0), 0)
    if format == "int4" and not group:
        raise ConfigError(f"a weight of {rows} x {columns} has no groups in int4: expected columns in multiples of 8")
    block = (1, group if format == "int4" else columns)
    parts = [ROUND_BY_FORMAT[format](part, group=group) for part in weight.split(_ROWS_AT_ONCE)]
    data = torch.cat([part["weight_packed" if format == "int4" else "weight"] for part in parts])
    return QuantizedWeight(
        format=format,
        data=data.view(torch.uint8) if format == "int4" else data,
        scales=wide_scales(torch.cat([part["weight_scale"] for part in parts]), block, shape),
        block=block,
        shape=shape,
        activations=_ACTIVATIONS[format],
    )
