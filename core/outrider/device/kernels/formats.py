"""ElementFormat: the storage of the values of quantised weights and activations, one entry per format.

:data:`QUANTIZED_FORMATS` is the registry. The torch references, the loader and the conformance kit use its entries alone; a
kernel package registers its own products under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

E4M3_LARGEST = 448.0
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT8_LARGEST = 127.5 + 2.0**-13
"""Divisor of a row's largest magnitude that gives the row's scale: half of the int8 range from -128 to 127, plus 2**-13.

With the divisor 127.5, the largest number would lie between two steps, and its last bit would decide the result.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementFormat:
    """The values q of ``QuantizedWeight.data``: how they are stored, rounded, generated and named in checkpoints.

    This class stores one element of ``dtype`` per value; a subclass packs values.
    """

    name: str
    """Value of ``QuantizedWeight.format`` and of ``QuantizedWeight.activations``."""
    dtype: torch.dtype
    """Dtype of ``QuantizedWeight.data``."""
    bits: int = 8
    """Number of bits that one value takes in ``QuantizedWeight.data``."""
    lowest: float
    """Smallest value that the format represents."""
    highest: float
    """Largest value that the format represents."""
    weight_divisor: float
    """Divisor of a block's largest magnitude that gives the block's scale."""
    activation_divisor: float | None = None
    """Divisor of the largest magnitude of activations that gives their scale. None: no format of activations."""
    random_deviation: float
    """Standard deviation of the values q that :meth:`random_data` generates, before they are clamped to the range."""
    compressed_name: str
    """Name of the storage of such weights in compressed-tensors checkpoints."""
    scale_dtypes: tuple[torch.dtype, ...] = _SCALE_DTYPES
    """Dtypes of ``QuantizedWeight.scales``; float8_e8m0fnu holds powers of two."""

    @property
    def is_float(self) -> bool:
        """True for floating-point values, which have no zero points."""
        return self.dtype.is_floating_point

    def data_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of ``QuantizedWeight.data`` for a weight of ``shape`` [out, in]."""
        return shape

    def round(self, values: Tensor) -> Tensor:
        """Return the nearest values that the format represents, in the dtype of ``values``."""
        if self.is_float:  # the conversion itself gives NaN beyond the range
            return values.clamp(self.lowest, self.highest).to(self.dtype).to(values.dtype)
        return values.round().clamp(self.lowest, self.highest)

    def encode(self, values: Tensor) -> Tensor:
        """Return ``QuantizedWeight.data`` for ``values`` [out, in], which :meth:`round` has rounded."""
        return values.to(self.dtype)

    def decode(self, data: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the values [out, ``columns``] of ``data`` in a floating-point ``dtype``."""
        del columns
        return data.to(dtype)

    def slice_columns(self, data: Tensor, columns: int, start: int, stop: int) -> Tensor:
        """Return columns ``start`` to ``stop`` (exclusive) of ``data``, the data of a weight with ``columns`` columns."""
        del columns
        return data[:, start:stop]

    def random_data(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return random data with the shape and device of ``like``, in a dtype that converts to the format."""
        dtype = torch.bfloat16 if self.is_float else torch.float32
        values = torch.empty(like.shape, dtype=dtype, device=like.device).normal_(generator=generator)
        return values.mul_(self.random_deviation).clamp_(self.lowest, self.highest)


class NibbleFormat(ElementFormat):
    """Four-bit values: a byte holds columns 2j (low half) and 2j + 1 (high half), each as q + 8."""

    __slots__ = ()

    def data_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the bytes [out, ceil(in / 2)], each with two columns."""
        return (shape[0], -(-shape[1] // 2))

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes of rounded values [out, in], each value plus 8."""
        return pack_nibbles((values + 8).to(torch.uint8))

    def decode(self, data: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the values [out, ``columns``] of the bytes ``data``."""
        return unpack_nibbles(data, columns).to(dtype) - 8

    def slice_columns(self, data: Tensor, columns: int, start: int, stop: int) -> Tensor:
        """Return the bytes of columns ``start`` to ``stop`` (exclusive), packed anew: a slice may begin within a byte."""
        return pack_nibbles(unpack_nibbles(data, columns)[:, start:stop])

    def random_data(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return uniformly random bytes, each with two random values."""
        return torch.randint(0, 256, like.shape, dtype=torch.uint8, device=like.device, generator=generator)


class NibbleFloatFormat(NibbleFormat):
    """Floats of four bits (e2m1 of OCP's MX formats): sign, two bits of exponent, one bit of mantissa. A byte holds columns
    2j (low half) and 2j + 1 (high half).
    """

    __slots__ = ()

    @property
    def is_float(self) -> bool:
        """Return True: the values are floats, although bytes hold them."""
        return True

    def round(self, values: Tensor) -> Tensor:
        """Return the nearest values, ties to the even mantissa, in the dtype of ``values``."""
        clamped = values.clamp(self.lowest, self.highest)
        size = clamped.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(values.dtype)
        return (clamped / step).round() * step

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes of rounded values [out, in]."""
        size = values.abs()
        code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
        return pack_nibbles((code + 8 * torch.signbit(values)).to(torch.uint8))

    def decode(self, data: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the values [out, ``columns``] of the bytes ``data``."""
        codes = unpack_nibbles(data, columns)
        code = (codes & 7).to(dtype)
        size = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
        return torch.where(codes < 8, size, -size)


def pack_nibbles(values: Tensor) -> Tensor:
    """Pack 4-bit values [out, in] in uint8 as two per byte: [out, ceil(in / 2)]."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1), value=8)
    return values[:, 0::2] | values[:, 1::2] << 4


def unpack_nibbles(data: Tensor, columns: int) -> Tensor:
    """Unpack the result of :func:`pack_nibbles` into ``columns`` columns."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)[:, :columns]


FP8 = ElementFormat(
    name="fp8",
    dtype=torch.float8_e4m3fn,
    lowest=-E4M3_LARGEST,
    highest=E4M3_LARGEST,
    weight_divisor=E4M3_LARGEST,
    activation_divisor=E4M3_LARGEST,
    random_deviation=60.0,
    compressed_name="float-quantized",
)
INT8 = ElementFormat(
    name="int8",
    dtype=torch.int8,
    lowest=-128,
    highest=127,
    weight_divisor=127.5,
    activation_divisor=INT8_LARGEST,
    random_deviation=40.0,
    compressed_name="int-quantized",
)
INT4 = NibbleFormat(
    name="int4",
    dtype=torch.uint8,
    bits=4,
    lowest=-8,
    highest=7,
    weight_divisor=7.5,
    random_deviation=4.6,
    compressed_name="pack-quantized",
)
FP4 = NibbleFloatFormat(
    name="fp4",
    dtype=torch.uint8,
    bits=4,
    lowest=-6,
    highest=6,
    weight_divisor=6.0,
    random_deviation=2.9,
    compressed_name="mxfp4-pack-quantized",
    scale_dtypes=(*_SCALE_DTYPES, torch.float8_e8m0fnu),
)
QUANTIZED_FORMATS: Mapping[str, ElementFormat] = MappingProxyType({each.name: each for each in (FP8, INT8, INT4, FP4)})
"""Formats of the values of quantised weights, by name."""
ACTIVATION_FORMATS = tuple(each.name for each in QUANTIZED_FORMATS.values() if each.activation_divisor is not None)
"""Names of the formats of quantised activations."""
CACHE_FORMATS: Mapping[str, torch.dtype] = MappingProxyType({FP8.name: FP8.dtype})
"""Quantised formats of KV pages, and the dtype of the pages in each; see ``KernelSet.cache_formats``."""
