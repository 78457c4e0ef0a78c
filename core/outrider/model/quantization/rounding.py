"""Plain weights made quantised ones, each number rounded to the nearest: as checkpoints store them, as products take them.

``fp8``: a scale for each row, activations by the token. ``int8``: the same in int8. ``int4``: a scale for each group of
columns, activations plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import ConfigError, QuantizedWeight
from outrider.model.quantization.layouts import packed_halves, wide_scales

GROUP = 128
"""Columns that share a scale in int4, by default."""
_E4M3_MAX = 448.0


def _scale(largest: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """Scales as they're stored, in the weight's dtype; 1 for zeros."""
    scale = (largest / most).to(dtype)
    return torch.where(scale > 0, scale, 1.0).to(dtype)


def _fp8(weight: Tensor, group: int) -> dict[str, Tensor]:
    del group
    wide = weight.to(torch.float32)
    scale = _scale(wide.abs().amax(1, keepdim=True), _E4M3_MAX, weight.dtype)
    values = (wide / scale.to(torch.float32)).clamp(-_E4M3_MAX, _E4M3_MAX)
    return {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scale}


def _int8(weight: Tensor, group: int) -> dict[str, Tensor]:
    del group
    wide = weight.to(torch.float32)
    scale = _scale(wide.abs().amax(1, keepdim=True), 127.5, weight.dtype)
    values = (wide / scale.to(torch.float32)).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}


def _int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    grouped = weight.to(torch.float32).unflatten(1, (-1, group))
    scale = _scale(grouped.abs().amax(-1), 7.5, weight.dtype)
    values = (grouped / scale.to(torch.float32).unsqueeze(-1)).round().clamp(-8, 7).flatten(1)
    return {
        "weight_packed": packed_halves((values + 8).to(torch.uint8)).view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


ROUND: Mapping[str, Callable[..., dict[str, Tensor]]] = MappingProxyType({"fp8": _fp8, "int8": _int8, "int4": _int4})
"""By format: tensors that a checkpoint of compressed-tensors has for a plain weight [out, in], by the ends of their names.

Called with the weight and ``group``, columns that share a scale in int4, of which ``in`` is a multiple.
"""


_GROUPS = (GROUP, 64, 32, 16, 8)
_ACTIVATIONS = MappingProxyType({"fp8": "fp8", "int8": "int8", "int4": None})
_ROWS_AT_ONCE = 8192


def rounded(weight: Tensor, format: str) -> QuantizedWeight:
    """A plain weight [out, in] as a quantised one on its device, some rows at a time: in float32 it takes twice its bytes.

    In int4 as many columns share a scale as divide ``in``, :data:`GROUP` at most. Raises :class:`ConfigError` where ``in`` is
    no multiple of 8 in int4.
    """
    rows, columns = shape = (weight.shape[0], weight.shape[1])
    group = next((each for each in _GROUPS if columns % each == 0), 0)
    if format == "int4" and not group:
        raise ConfigError(f"a weight of {rows} x {columns} has no groups in int4: expected columns in multiples of 8")
    block = (1, group if format == "int4" else columns)
    parts = [ROUND[format](part, group=group) for part in weight.split(_ROWS_AT_ONCE)]
    data = torch.cat([part["weight_packed" if format == "int4" else "weight"] for part in parts])
    return QuantizedWeight(
        format=format,
        data=data.view(torch.uint8) if format == "int4" else data,
        scales=wide_scales(torch.cat([part["weight_scale"] for part in parts]), block, shape),
        block=block,
        shape=shape,
        activations=_ACTIVATIONS[format],
    )
