"""How products with quantised weights are computed: TritonFormat for a format of values, ProductPlan for one weight.

A kernel set multiplies by weights in the formats of :data:`TRITON_FORMATS`; the reference multiplies by all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider.device.kernels.formats import FP4, FP8, INT4, INT8, ElementFormat
from outrider_triton.launch import power_of_two
from outrider_triton.quantized.jit.nibble_planes import UNIT_COLUMNS
from outrider_triton.tiles.derive.fits import OperandStorage
from outrider_triton.tiles.facts import DeviceFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonFormat:
    """The products that exist for weights in one format of values."""

    elements: ElementFormat
    convert_instructions: float
    """Estimated number of instructions that convert one weight element for the matrix unit."""
    is_native: Callable[[DeviceFacts], bool] = lambda facts: False
    """Function that returns True for devices whose matrix unit multiplies the values as stored, with activations in the same
    format.
    """
    has_planes: bool = False
    """True if nibble planes exist: :func:`outrider_triton.quantized.jit.nibble_planes.linear_planes`."""
    streams_rows: bool = False
    """True if a streamed kernel takes native values with scales of whole rows."""
    library_dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes of activations for which torch's library multiplies native values with scales of whole rows as stored."""
    prefers_library: bool = False
    """True if the library's product of values as stored is faster for more than 64 tokens
    (docs/evidence/2026-11-28-many-tokens.md).
    """
    scales_library_sums: bool = False
    """True if the library's product returns unscaled sums, which a kernel of this package multiplies by the scales."""

    @property
    def is_packed(self) -> bool:
        """True if a byte of the weight holds two columns, so that kernels read activations in pairs of columns."""
        return self.elements.bits < 8

    @property
    def launch_constants(self) -> dict[str, bool]:
        """Keyword constants by which kernels know how the values are stored."""
        return {"PACKED": self.is_packed, "FLOAT": self.elements.is_float}

    def kernel_data(self, data: Tensor, *, native: bool) -> Tensor:
        """Return the data of a weight as kernels load it: values that the matrix unit doesn't take are loaded as bytes."""
        return data.view(torch.int8) if data.is_floating_point() and not native else data


def kernel_scales(scales: Tensor) -> Tensor:
    """Return the scales of a weight as kernels load them: powers of two as bytes."""
    return scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales


TRITON_FORMATS: Mapping[str, TritonFormat] = MappingProxyType(
    {
        each.elements.name: each
        for each in (
            TritonFormat(
                elements=FP8,
                convert_instructions=1.0,
                is_native=lambda facts: facts.fp8,
                streams_rows=True,
                library_dtypes=frozenset({torch.bfloat16}),
                prefers_library=True,
            ),
            TritonFormat(
                elements=INT8,
                convert_instructions=2.0,
                is_native=lambda facts: facts.capability >= 80,
                library_dtypes=frozenset({torch.bfloat16, torch.float16}),
                scales_library_sums=True,
            ),
            TritonFormat(elements=INT4, convert_instructions=1.7, has_planes=True),
            TritonFormat(elements=FP4, convert_instructions=2.7),
        )
    }
)
"""Formats that these kernels multiply, by the name of their values."""


_COLUMNS_PER_SCALE = 128
"""Number of columns per multiplication if group scales multiply the sums."""


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """The plan by which a kernel computes the product of a weight; see
    :func:`outrider_triton.quantized.jit.products.linear_quantized`.
    """

    mode: str
    """Granularity of the scales: one per ``row``, one per ``block`` of at least the columns of one multiplication, or
    ``fine``, per fewer columns.
    """
    native: bool
    """True if the matrix unit takes both operands as stored."""
    columns: int
    """Number of columns per scale, a power of two."""
    at_once: int
    """Maximum number of columns per multiplication; 0: a whole tile."""
    planes: bool = False
    """True if the product uses nibble planes (:func:`outrider_triton.quantized.jit.nibble_planes.linear_planes`)."""
    library_blocks: bool = False
    """True if torch's library multiplies the operands as stored, with scales of blocks and of groups of 128 columns."""
    can_stream: bool = False
    """True if a streamed kernel exists: with ``planes``
    :func:`outrider_triton.quantized.jit.nibble_planes_streamed.streamed_planes`, else
    :func:`outrider_triton.products.jit.streamed.streamed_linear`.
    """
    shares_units: bool = False
    """True if :func:`outrider_triton.quantized.jit.scaled_blocks.multiply_scaled_blocks` multiplies the operands."""

    def stored(self, format: str) -> OperandStorage:
        """Return the operand storage of a weight in ``format``, from which the time of this plan is estimated."""
        registered = TRITON_FORMATS[format]
        instructions = 0.0 if self.native else registered.convert_instructions * (1.0 if self.mode != "fine" else 1.3)
        instructions = 1.4 if self.planes else instructions
        least = 8 if self.planes or self.native else 16
        return OperandStorage(
            registered.elements.bits,
            1 if self.native else 2,
            self.at_once,
            instructions,
            not self.planes,
            least,
            self.can_stream,
            self.shares_units,
        )


def plan(facts: DeviceFacts, weight: QuantizedWeight, *, planes: bool = True) -> ProductPlan | None:
    """Return the plan for a weight, or None if the kernel can't multiply it. ``planes``: nibble planes may be used.

    The kernel can't multiply four kinds: a format that isn't registered; groups of columns (of the weight or its activations)
    that are neither a power of two nor a multiple of 64 times one; an odd number of four-bit columns; scales in float64.
    """
    k, columns = weight.shape[1], weight.block[1]
    zeros, at_once = weight.zero_points is not None, 0
    registered = TRITON_FORMATS.get(weight.format)
    if registered is None or weight.scales.dtype is torch.float64 or (registered.is_packed and k % 2):
        return None
    if columns >= k:
        mode, columns = ("block" if zeros else "row"), power_of_two(k)
    elif _power_of_two_factor(columns) >= 64:
        mode, at_once = "block", min(_power_of_two_factor(columns), _COLUMNS_PER_SCALE)
    elif _power_of_two_factor(columns) == columns and columns > 1:
        mode, at_once = "fine", 2 * _COLUMNS_PER_SCALE
    else:
        return None
    group = weight.activation_group if weight.activation_group < k else 0
    if group:
        at_once = min(at_once or _COLUMNS_PER_SCALE, _power_of_two_factor(group))
        if at_once < 32 or (mode == "fine" and at_once < columns):
            return None
    native = registered.is_native(facts) and weight.activations == weight.format and not zeros and mode != "fine"
    in_planes = (
        planes
        and registered.has_planes
        and mode != "fine"
        and k % UNIT_COLUMNS.value == 0
        and weight.data.data_ptr() % 4 == 0
    )
    in_planes = in_planes and weight.activations is None
    ring = in_planes and can_stream_nibbles(mode, weight.block, weight.zero_points)
    by_piece = mode == "block" and columns == group == UNIT_COLUMNS.value and weight.scales.shape[1] == k // columns
    by_row = mode == "row" and not group
    ring = ring or (native and registered.streams_rows and (by_row or by_piece) and k % UNIT_COLUMNS.value == 0)
    ring = ring and facts.streams_products and weight.data.data_ptr() % 16 == 0 and weight.scales.is_contiguous()
    ring = ring and weight.data.is_contiguous()
    by_block = native and by_piece and weight.block[0] == UNIT_COLUMNS.value
    shares = by_block and ring and weight.shape[0] % UNIT_COLUMNS.value == 0
    by_block = by_block and _library_scales_blocks(facts, weight)
    return ProductPlan(mode, native, columns, at_once, in_planes, by_block, ring, shares)


def can_stream_nibbles(mode: str, block: Sequence[int], zero_points: Tensor | None) -> bool:
    """Return True if a streamed kernel takes the scales of nibbles: one per row and unit of columns, without zero points."""
    return zero_points is None and mode == "block" and tuple(block) == (1, UNIT_COLUMNS.value)


def _library_scales_blocks(facts: DeviceFacts, weight: QuantizedWeight) -> bool:
    """Return True if cuBLAS multiplies the weight with scales of blocks: from CUDA 12.9 on, on Hopper, if the rows of its
    scales are multiples of 16 bytes.
    """
    version = torch.version.cuda
    known = version is not None and tuple(map(int, version.split(".")[:2])) >= (12, 9)
    return known and facts.capability == 90 and weight.shape[0] % 128 == 0 and weight.scales.shape[1] % 4 == 0


def _power_of_two_factor(value: int) -> int:
    """Return the largest power of two that divides ``value``."""
    return value & -value
