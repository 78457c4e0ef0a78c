"""WeightFormat: a format of quantised weights, with its scales and activations, and the registry of named formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device.errors import ConfigError
from outrider.device.kernels.formats import FP4, FP8, INT4, INT8, ElementFormat
from outrider.device.kernels.reference.model import spread
from outrider.device.kernels.weights import QuantizedWeight

_MIN_GROUP_COLUMNS = 8
_E8M0_BIAS = 127
_ROWS_AT_ONCE = 8192
"""Rows of a weight that are quantised or generated at a time: their float32 copy takes twice the bytes of bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """The values of a quantised weight [out, in], the block of a scale, and the quantisation of activations."""

    name: str = ""
    """Key in :data:`WEIGHT_FORMATS`; empty for a format that only a checkpoint describes."""
    elements: ElementFormat
    """Format of the values q of the weight."""
    rows: int = 1
    """Number of a weight's rows that share a scale. 0 means all of them."""
    columns: int = 0
    """Number of a weight's columns that share a scale. 0 means all of them."""
    zeros: bool = False
    """True if each scale has a zero point, which is subtracted from the values before they are scaled."""
    power_scales: bool = False
    """True if scales are powers of two, in float8_e8m0fnu."""
    activations: ElementFormat | None = None
    """Format to which the product rounds activations. None: it leaves them as they are."""
    activation_group: int = 0
    """Number of columns of activations that share a dynamic scale. 0 means a whole row."""
    static: bool = False
    """True if one scale, stored in the checkpoint, quantises all activations of the product."""

    @property
    def is_grouped(self) -> bool:
        """True if groups of columns of a row share a scale."""
        return self.rows == 1 and self.columns > 0

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of rows and columns that share a scale in a weight of ``shape`` [out, in]."""
        return (self.rows or shape[0], self.columns or shape[1])

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of scales along the rows and along the columns of a weight of ``shape`` [out, in]."""
        rows, columns = self.block_of(shape)
        return (-(-shape[0] // rows), -(-shape[1] // columns))

    def weight(
        self,
        shape: tuple[int, int],
        data: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        *,
        block: tuple[int, int] | None = None,
        input_scale: Tensor | None = None,
    ) -> QuantizedWeight:
        """Return the record of a weight of this format. ``block`` replaces the block of its scales."""
        return QuantizedWeight(
            format=self.elements.name,
            data=data.contiguous(),
            scales=scales.contiguous(),
            block=block or self.block_of(shape),
            shape=shape,
            zero_points=None if zero_points is None else zero_points.contiguous(),
            activations=None if self.activations is None else self.activations.name,
            activation_group=self.activation_group,
            input_scale=input_scale,
        )

    def fitted(self, columns: int) -> WeightFormat:
        """Return the format with groups that divide a weight's ``columns``: halved until they do.

        Raises :class:`ConfigError` if no group of at least eight columns divides them.
        """
        if not self.is_grouped:
            return self
        group = self.columns
        while columns % group and group > _MIN_GROUP_COLUMNS:
            group //= 2
        if columns % group:
            raise ConfigError(
                f"a weight of {columns} columns has no groups in {self.elements.name}: expected columns in multiples of "
                f"{_MIN_GROUP_COLUMNS}"
            )
        return replace(self, columns=group)

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """Round a weight [out, in] to the nearest values, on its device. Scales are rounded to its dtype first."""
        shape = (weight.shape[0], weight.shape[1])
        block, elements = self.block_of(shape), self.elements
        step = max(1, _ROWS_AT_ONCE // block[0]) * block[0] if self.rows else _ROWS_AT_ONCE
        scales, zeros = self._scales(weight, block, step)
        wide_scales = scales.to(torch.float32)
        data = []
        for start in range(0, shape[0], step):
            part = weight[start : start + step].to(torch.float32)
            grid = slice(start // block[0], -(-(start + part.shape[0]) // block[0]))
            values = part / spread(wide_scales[grid], block, part.shape)
            if zeros is not None:
                values = values + spread(zeros[grid], block, part.shape)
            data.append(elements.encode(elements.round(values)))
        return self.weight(shape, torch.cat(data), widen_scales(scales, block, shape), zeros)

    def _scales(self, weight: Tensor, block: tuple[int, int], step: int) -> tuple[Tensor, Tensor | None]:
        """Return the scales in the weight's dtype or as powers of two, 1 for blocks of zeros, and the zero points in int8."""
        divisor = self.elements.weight_divisor
        lows, highs = zip(*(_extremes(part.to(torch.float32), block) for part in weight.split(step)), strict=True)
        low, high = torch.cat(lows), torch.cat(highs)
        if not self.rows:
            low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
        largest = (high - low) / 2 if self.zeros else torch.maximum(high, -low)
        if self.power_scales:  # the largest exponent of a block becomes the largest exponent of the format (OCP MX 1.0)
            exponents = torch.frexp(largest).exponent - math.frexp(self.elements.highest)[1]
            return _powers_of_two(torch.where(largest > 0, exponents, 0)), None
        scales = (largest / divisor).to(weight.dtype)
        scales = torch.where(scales > 0, scales, 1.0).to(weight.dtype)
        if not self.zeros:
            return scales, None
        smallest = -(divisor + 0.5)
        return scales, self.elements.round(smallest - low / scales.to(torch.float32)).to(torch.int8)

    def random_weight(
        self,
        rows: int,
        columns: int,
        *,
        device: torch.device,
        generator: torch.Generator | None = None,
        scales_dtype: torch.dtype = torch.float32,
    ) -> QuantizedWeight:
        """Return a random weight [rows, columns] whose products have about the magnitude of their input.

        Scales have the model's dtype ``scales_dtype``, as in checkpoints; scales of whole rows are float32, as after loading.
        """
        shape, elements = (rows, columns), self.elements
        block, grid = self.block_of(shape), self.grid(shape)
        data = torch.empty(elements.data_shape(shape), dtype=elements.dtype, device=device)
        for part in data.split(_ROWS_AT_ONCE // 2):
            part.copy_(elements.random_data(part, generator))
        scale = columns**-0.5 / elements.random_deviation
        scales = torch.empty(grid, dtype=torch.float32, device=device).uniform_(0.9 * scale, 1.1 * scale, generator=generator)
        if self.power_scales:
            scales = _powers_of_two(scales.log2().round())
        elif block[1] < columns:
            scales = scales.to(scales_dtype)
        zeros = torch.randint(-2, 3, grid, dtype=torch.int8, device=device, generator=generator) if self.zeros else None
        return self.weight(shape, data, scales, zeros)


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to the power of each of ``exponents`` in float8_e8m0fnu, within the range of that dtype."""
    return (exponents.clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _extremes(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the smallest value up to 0 and the largest value from 0 of each block."""
    rows, columns = min(block[0], weight.shape[0]), block[1]
    padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    padded = torch.nn.functional.pad(weight, padding) if any(padding) else weight
    low, high = padded.unflatten(1, (-1, columns)).aminmax(dim=-1)
    low, high = low.unflatten(0, (-1, rows)).amin(1), high.unflatten(0, (-1, rows)).amax(1)
    return low.clamp(max=0), high.clamp(min=0)


def widen_scales(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Return ``scales`` in the dtype that product kernels expect.

    Libraries take per-row scales in float32 only, and would convert others for every product, so these few scales are
    converted once. Scales of column groups stay in their stored dtype, because they are a large share of the weight's bytes.
    So do powers of two.
    """
    per_row = block[1] == shape[1] and scales.dtype.itemsize > 1
    return scales.to(torch.promote_types(scales.dtype, torch.float32)) if per_row else scales


WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            WeightFormat(name="fp8", elements=FP8, activations=FP8),
            WeightFormat(name="fp8-tensor", elements=FP8, rows=0, activations=FP8),
            WeightFormat(name="fp8-block", elements=FP8, rows=128, columns=128, activations=FP8, activation_group=128),
            WeightFormat(name="int8", elements=INT8, activations=INT8),
            WeightFormat(name="int4", elements=INT4, columns=128),
            WeightFormat(name="int4-zeros", elements=INT4, columns=128, zeros=True),
            WeightFormat(name="int4-32", elements=INT4, columns=32),
            WeightFormat(name="mxfp4", elements=FP4, columns=32, power_scales=True),
        )
    }
)
"""Formats that ``outrider quantize`` writes and that random weights have, by name."""


def weight_format(name: str) -> WeightFormat:
    """Return the format called ``name``. Raises :class:`ConfigError` for an unknown name."""
    if name not in WEIGHT_FORMATS:
        raise ConfigError(f"the weight format is {name!r}, expected one of {', '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS[name]
