"""Scheme: the quantization format of one module's weight, and the names, shapes and dtypes of its stored tensors."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)
_INTEGERS = (torch.int32, torch.int64)
SUFFIXES = frozenset(
    {
        "activation_scale",
        "g_idx",
        "input_scale",
        "qweight",
        "qzeros",
        "scales",
        "weight_g_idx",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_shape",
        "weight_zero_point",
    }
)
"""Suffixes of tensor names that only quantized weights have."""
_FORMAT_OF_DTYPE: Mapping[torch.dtype, str] = MappingProxyType({torch.float8_e4m3fn: "fp8", torch.int8: "int8"})
# vLLM's writers and transformers use different suffixes for the same scale.
_ALTERNATIVE_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"weight_scale": "weight_scale_inv", "weight_scale_inv": "weight_scale", "input_scale": "activation_scale"}
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor that stores part of a module's weight."""

    suffix: str
    """Suffix of its name."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes that it may have."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes that it may have."""
    optional: bool = False
    """True if a module may lack it."""
    other: str = ""
    """Suffix that other writers use, or empty."""

    def key(self, module: str, present: Container[str]) -> str:
        """Return the tensor's name among the names ``present``, or its default name if it is missing."""
        key, other = f"{module}.{self.suffix}", f"{module}.{self.other}"
        return other if self.other and key not in present and other in present else key


@dataclass(frozen=True, slots=True)
class Activations:
    """Quantization of a module's input."""

    format: str
    """``fp8`` or ``int8``."""
    static: bool = False
    """True for one stored scale. Otherwise scales are computed for each row or column group."""
    group: int = 0
    """Columns of a row that share a dynamic scale. 0 means the whole row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """Storage format of a quantized weight [out, in] in a checkpoint."""

    storage: str
    """``values`` (a tensor of the quantized ``dtype``), ``packed`` (compressed-tensors), ``awq`` or ``gptq``."""
    block: tuple[int, int]
    """Rows and columns that share a scale. 0 means all of them."""
    source: str
    """Location of the scheme in the config, for error messages."""
    bits: int = 8
    """Bits of a packed value, 4 or 8."""
    dtype: torch.dtype = torch.int8
    symmetric: bool = True
    """True if no zero points are stored."""
    scale: str = "weight_scale"
    """Suffix of the scale's name."""
    packed_zeros: bool = True
    """True if the zero points of packed values are packed too."""
    zero_offset: int = 0
    """Number that is added to stored zero points."""
    activations: Activations | None = None

    @property
    def format(self) -> str:
        """The weight's format, see ``QuantizedWeight.format``."""
        return _FORMAT_OF_DTYPE[self.dtype] if self.storage == "values" else f"int{self.bits}"

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns that share a scale in a weight of this shape."""
        return (self.block[0] or shape[0], self.block[1] or shape[1])

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of scales along rows and columns."""
        rows, columns = self.block_of(shape)
        return (-(-shape[0] // rows), -(-shape[1] // columns))

    def stored(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """Return the tensors that store a weight of this shape."""
        rows, columns = shape
        grid, packed = self.grid(shape), 32 // self.bits
        if self.storage == "awq":
            return (
                StoredTensor("qweight", ((columns, -(-rows // packed)),), _INTEGERS[:1]),
                StoredTensor("qzeros", ((grid[1], -(-rows // packed)),), _INTEGERS[:1], self.symmetric),
                StoredTensor("scales", ((grid[1], rows),), FLOATS),
            )
        if self.storage == "gptq":
            return (
                StoredTensor("qweight", ((-(-columns // packed), rows),), _INTEGERS[:1]),
                StoredTensor("qzeros", ((grid[1], -(-rows // packed)),), _INTEGERS[:1], self.symmetric),
                StoredTensor("scales", ((grid[1], rows),), FLOATS),
                StoredTensor("g_idx", ((columns,),), _INTEGERS, True),
            )
        tensors = []
        if self.storage == "packed":
            tensors.append(StoredTensor("weight_packed", ((rows, -(-columns // packed)),), _INTEGERS[:1]))
            tensors.append(StoredTensor("weight_shape", ((2,),), _INTEGERS))
        else:
            tensors.append(StoredTensor("weight", (shape,), (self.dtype,)))
        tensors.append(StoredTensor(self.scale, _scale_shapes(grid), _SCALE_DTYPES, other=_ALTERNATIVE_SUFFIXES[self.scale]))
        if not self.symmetric and self.storage == "packed" and self.packed_zeros:
            tensors.append(StoredTensor("weight_zero_point", ((-(-grid[0] // packed), grid[1]),), _INTEGERS[:1]))
        elif not self.symmetric:
            tensors.append(StoredTensor("weight_zero_point", _scale_shapes(grid), (torch.int8,)))
        if self.activations is not None and self.activations.static:
            tensors.append(
                StoredTensor("input_scale", ((1,), (), (1, 1)), FLOATS, other=_ALTERNATIVE_SUFFIXES["input_scale"])
            )
        return tuple(tensors)


def _scale_shapes(grid: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    if grid == (1, 1):
        return ((1,), (), (1, 1))
    return (grid, (grid[0],)) if grid[1] == 1 else (grid,)
