"""TritonFormat: how Triton's products and the library multiply by weights in one format of values.

A kernel set multiplies by weights in the formats of :data:`TRITON_FORMATS`; the reference multiplies by all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device.kernels.formats import FP8, INT4, INT8, ElementFormat
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
        return {"PACKED": self.is_packed, "E4M3": self.elements.is_float}

    def kernel_data(self, data: Tensor, *, native: bool) -> Tensor:
        """Return the data of a weight as kernels load it: values that the matrix unit doesn't take are loaded as bytes."""
        return data.view(torch.int8) if self.elements.is_float and not native else data


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
        )
    }
)
"""Formats that these kernels multiply, by the name of their values."""
