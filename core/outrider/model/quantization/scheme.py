"""Scheme: how one module's weight is quantised and stored. Which tensors that takes, in which shapes and dtypes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALES = (*FLOATS, torch.float8_e8m0fnu)
_WHOLE = (torch.int32, torch.int64)
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
"""Ends of names that tensors of plain weights don't have."""
_NAMES: Mapping[torch.dtype, str] = MappingProxyType({torch.float8_e4m3fn: "fp8", torch.int8: "int8"})
# What stands for the same number: vLLM's writers name a scale the one way, transformers the other.
_OTHERS: Mapping[str, str] = MappingProxyType(
    {"weight_scale": "weight_scale_inv", "weight_scale_inv": "weight_scale", "input_scale": "activation_scale"}
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that a module's weight is stored in: the end of its name, the shapes and the dtypes that it may have.

    ``optional``: a module may lack it. ``other``: how other writers end its name; empty: all end it alike.
    """

    suffix: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    other: str = ""

    def key(self, module: str, present: Container[str]) -> str:
        """Its name in a checkpoint with the tensors ``present``, whether it's among them or not."""
        key, other = f"{module}.{self.suffix}", f"{module}.{self.other}"
        return other if self.other and key not in present and other in present else key


@dataclass(frozen=True, slots=True)
class Activations:
    """What a module's input is quantised to, ``fp8`` or ``int8``. ``static``: by a stored scale; else by one for each
    ``group`` columns of a row, 0: for each row.
    """

    format: str
    static: bool = False
    group: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How a weight [out, in] is stored.

    ``storage``: ``values`` (a tensor of the quantised dtype ``dtype``), ``packed`` (compressed-tensors), ``awq`` or
    ``gptq``. ``bits``: of a value in the last three, 4 or 8. ``block``: rows and columns that share a scale; 0: all of them.
    ``symmetric``: without stored zero points. ``scale``: the end of the scale's name. ``packed_zeros``: zero points of
    packed values are packed as well. ``zero_offset``: what is added to stored zero points. ``source``: where the config says
    so, for messages.
    """

    storage: str
    block: tuple[int, int]
    source: str
    bits: int = 8
    dtype: torch.dtype = torch.int8
    symmetric: bool = True
    scale: str = "weight_scale"
    packed_zeros: bool = True
    zero_offset: int = 0
    activations: Activations | None = None

    @property
    def format(self) -> str:
        """The format of the weight that is made of it, see ``QuantizedWeight.format``."""
        return _NAMES[self.dtype] if self.storage == "values" else f"int{self.bits}"

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share a scale in a weight of this shape."""
        return (self.block[0] or shape[0], self.block[1] or shape[1])

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many scales there are, down and across."""
        rows, columns = self.block_of(shape)
        return (-(-shape[0] // rows), -(-shape[1] // columns))

    def stored(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        """The tensors of a weight of this shape."""
        out, into = shape
        grid, words = self.grid(shape), 32 // self.bits
        if self.storage == "awq":
            return (
                Stored("qweight", ((into, -(-out // words)),), _WHOLE[:1]),
                Stored("qzeros", ((grid[1], -(-out // words)),), _WHOLE[:1], self.symmetric),
                Stored("scales", ((grid[1], out),), FLOATS),
            )
        if self.storage == "gptq":
            return (
                Stored("qweight", ((-(-into // words), out),), _WHOLE[:1]),
                Stored("qzeros", ((grid[1], -(-out // words)),), _WHOLE[:1], self.symmetric),
                Stored("scales", ((grid[1], out),), FLOATS),
                Stored("g_idx", ((into,),), _WHOLE, True),
            )
        found = []
        if self.storage == "packed":
            found.append(Stored("weight_packed", ((out, -(-into // words)),), _WHOLE[:1]))
            found.append(Stored("weight_shape", ((2,),), _WHOLE))
        else:
            found.append(Stored("weight", (shape,), (self.dtype,)))
        found.append(Stored(self.scale, _scale_shapes(grid), _SCALES, other=_OTHERS[self.scale]))
        if not self.symmetric and self.storage == "packed" and self.packed_zeros:
            found.append(Stored("weight_zero_point", ((-(-grid[0] // words), grid[1]),), _WHOLE[:1]))
        elif not self.symmetric:
            found.append(Stored("weight_zero_point", _scale_shapes(grid), (torch.int8,)))
        if self.activations is not None and self.activations.static:
            found.append(Stored("input_scale", ((1,), (), (1, 1)), FLOATS, other=_OTHERS["input_scale"]))
        return tuple(found)


def _scale_shapes(grid: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    if grid == (1, 1):
        return ((1,), (), (1, 1))
    return (grid, (grid[0],)) if grid[1] == 1 else (grid,)
