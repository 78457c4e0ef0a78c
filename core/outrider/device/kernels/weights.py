"""Weights of products in any format: unquantized tensors, quantised weights (one record for every checkpoint format), and
weights that are split by rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.device.errors import ConfigError
from outrider.device.kernels.formats import ACTIVATION_FORMATS, QUANTIZED_FORMATS, ElementFormat

if TYPE_CHECKING:
    from outrider.device.kernels.kernelset import KernelSet
    from outrider.device.kernels.model_kernels import ModelKernels


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """The weight [out, in] of a product, quantised: ``W[o, i] = (q[o, i] - z[o // R, i // C]) * s[o // R, i // C]``.

    *Values.* ``data`` holds q on the device. ``fp8``: float8_e4m3fn [out, in]. ``int8``: int8 [out, in]. ``int4``: uint8
    [out, ceil(in / 2)]; a byte holds columns 2j (low half) and 2j + 1 (high half), each as q + 8, q from -8 to 7. ``fp4``:
    the same bytes, with q as a float: the codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and bit 3 is the sign.

    *Scales.* ``scales`` holds s in float32, bfloat16, float16 or float64, [ceil(out / R), ceil(in / C)] with ``block`` =
    (R, C); for ``fp4`` also in float8_e8m0fnu, without NaN. A scale per channel has the block (1, in). ``zero_points`` holds
    z as int8 of the same shape; None: all are 0.

    *Activations.* ``activations`` is the format to which x is quantised before the product: ``fp8``, ``int8``, or None if x
    isn't quantised. ``input_scale`` (float32 [1], on the device) is one scale for all of x. Without it, each group of
    ``activation_group`` columns of a row has its own scale; 0: each whole row. The last group may be shorter. See
    :meth:`~outrider.device.KernelSet.linear_quantized`.

    The tensors are contiguous and never written. Raises :class:`ConfigError` for an inconsistent record.
    """

    format: str
    data: Tensor
    scales: Tensor
    block: tuple[int, int]
    shape: tuple[int, int]
    zero_points: Tensor | None = None
    activations: str | None = None
    activation_group: int = 0
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in QUANTIZED_FORMATS:
            raise _wrong("format", self.format, f"one of {', '.join(QUANTIZED_FORMATS)}")
        if min(*self.shape, *self.block) < 1:
            raise _wrong("shape and block", (self.shape, self.block), "two pairs of positive numbers")
        rows, columns = self.shape
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        _check("data", self.data, self.elements.data_shape(self.shape), (self.elements.dtype,))
        _check("scales", self.scales, grid, self.elements.scale_dtypes)
        if self.zero_points is not None:
            _check("zero_points", self.zero_points, grid, (torch.int8,))
            if self.elements.is_float:
                raise _wrong("zero_points", "given", f"none for {self.format}")
        if self.activations not in (None, *ACTIVATION_FORMATS):
            raise _wrong("activations", self.activations, f"None or one of {', '.join(ACTIVATION_FORMATS)}")
        if self.activation_group < 0:
            raise _wrong("activation_group", self.activation_group, "a number of at least 0")
        if self.input_scale is not None:
            _check("input_scale", self.input_scale, (1,), (torch.float32,))
            if self.activations is None or self.activation_group:
                raise _wrong("input_scale", "given", "none without activations, or with an activation_group")

    @property
    def elements(self) -> ElementFormat:
        """Return the format of the values."""
        return QUANTIZED_FORMATS[self.format]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all tensors."""
        tensors = (self.data, self.scales, self.zero_points, self.input_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.data.device

    @property
    def label(self) -> str:
        """Return the format in words: ``int4 group 128``, ``fp8 block 128x128, activations fp8``."""
        rows, columns = self.block
        width = self.shape[1]
        across = "per channel" if columns >= width else f"group {columns}"
        blocks = across if rows == 1 else f"block {rows}x{columns}"
        zero = "" if self.zero_points is None else ", zero points"
        if self.activations is None:
            return f"{self.format} {blocks}{zero}"
        if self.input_scale is not None:
            return f"{self.format} {blocks}{zero}, static {self.activations} activations"
        grouped = f" in groups of {self.activation_group}" if self.activation_group else ""
        return f"{self.format} {blocks}{zero}, {self.activations} activations{grouped}"


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A weight whose row blocks are stored in different formats, for example q quantised and k unquantized."""

    parts: tuple[Tensor | QuantizedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all parts together, and their columns."""
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)


Weight = Tensor | QuantizedWeight | SplitWeight
"""A weight [out, in] of a product."""


def linear(kernels: ModelKernels, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` [T, in] @ ``weight.T`` + ``bias`` [out] → [T, out], with the kernel of the weight's format.

    A split weight takes one product per part.
    """
    if isinstance(weight, Tensor):
        return kernels.linear(x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return kernels.linear_quantized(x, weight, bias)
    product = torch.cat([linear(kernels, x, part) for part in weight.parts], dim=-1)
    return product if bias is None else product + bias


def prepare(kernels: KernelSet, *weights: Weight | None) -> None:
    """Ask ``kernels`` about the unquantized ones of ``weights``, which a model multiplies by outside of its blocks. A kernel
    set that packs weights packs them then, at load.
    """
    for weight in weights:
        if isinstance(weight, Tensor):
            kernels.is_native("linear", weight)


def plain(weight: Weight) -> Tensor:
    """Return an unquantized weight as a tensor. Raises :class:`ConfigError` for a quantised weight."""
    if not isinstance(weight, Tensor):
        raise ConfigError(f"expected a plain weight, found {label(weight)}")
    return weight


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return an unquantized weight unchanged, or the values of a quantised one in ``dtype``."""
    from outrider.device.kernels.reference.model import dequantize

    if isinstance(weight, SplitWeight):
        return torch.cat([dequantized(part, dtype) for part in weight.parts])
    if isinstance(weight, Tensor):
        return weight
    stored = weight.data, weight.scales, weight.zero_points, weight.format, weight.block, weight.shape
    return dequantize(*stored, dtype)


def label(weight: Weight) -> str:
    """Return the storage format of a weight in words."""
    if isinstance(weight, SplitWeight):
        return " and ".join(dict.fromkeys(label(part) for part in weight.parts))
    return "plain" if isinstance(weight, Tensor) else weight.label


def quantized_products(record: object) -> Counter[str]:
    """Count the quantised products in a record of weights, by the words of their format."""
    if isinstance(record, QuantizedWeight):
        return Counter((record.label,))
    if isinstance(record, SplitWeight):
        return sum((quantized_products(part) for part in record.parts), Counter())
    if isinstance(record, tuple):
        return sum((quantized_products(each) for each in record), Counter())
    if is_dataclass(record) and not isinstance(record, type):
        return sum((quantized_products(getattr(record, each.name)) for each in fields(record)), Counter())
    return Counter()


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise _wrong(name, f"{list(tensor.shape)} {tensor.dtype}", f"{list(shape)} {words}")


def _wrong(name: str, found: object, expected: str) -> ConfigError:
    return ConfigError(f"quantised weight: {name} is {found}, expected {expected}")
