"""Random weights of products: unquantised ones, and quantised ones in each format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.device import QUANTIZED_FORMATS, QuantizedWeight, Weight
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.problem import Operand, RandomValues, Shape

_BLOCKS = ("channel", "group", "block", "wide group")


def _block(shape: Shape) -> tuple[int, int]:
    kind = _BLOCKS[shape["blocks"]]
    return {"channel": (1, shape["inner"]), "group": (1, 16), "block": (24, 40), "wide group": (1, 128)}[kind]


def _spread(grid: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    return grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _quantized(shape: Shape, format: str, dice: RandomValues) -> tuple[dict[str, Operand], Tensor]:
    """Return a random quantised weight as kernel operands, with its data as 32-bit words, and its values in float64."""
    size, block = (shape["outer"], shape["inner"]), _block(shape)
    grid = (-(-size[0] // block[0]), -(-size[1] // block[1]))
    elements = QUANTIZED_FORMATS[format]
    if elements.is_float:
        random = dice.normal(*size, dtype=torch.float32, scale=elements.random_deviation)
        values = random.clamp(elements.lowest, elements.highest).to(elements.dtype).double()
    else:
        values = dice.integers(int(elements.lowest), int(elements.highest) + 1, *size).double()
    data = elements.encode(values)
    scales = (dice.uniform(*grid) + 0.5) / (values.abs().max() * shape["inner"] ** 0.5)
    operands = {"data": Operand(data.view(torch.int32)), "scales": Operand(scales.float())}
    if shape["zeros"] and not elements.is_float:
        zeros = dice.integers(-8, 9, *grid)
        operands["zeros"] = Operand(zeros)
        values = values - _spread(zeros.double(), block, size)
    return operands, values * _spread(scales.float().double(), block, size)


@dataclass(frozen=True, slots=True)
class RandomMatrix:
    """A weight [rows, columns] of a product."""

    name: str
    operands: Mapping[str, Operand]
    """The operands of the kernel that make up the weight, by name."""
    values: Tensor
    """Its values: in float64 if quantised, else in the model's dtype."""
    dtype: torch.dtype
    """The dtype of the model, in which the kernel computes."""
    format: str | None
    block: tuple[int, int]

    def weight(self, o: Mapping[str, Tensor], **quantized: Any) -> Weight:
        """Return the weight among the operands ``o`` of a call; ``quantized`` describes its layer's activations."""
        if self.format is None:
            return o[self.name]
        zeros = o.get(f"{self.name} zeros")
        rows, columns = self.values.shape
        return QuantizedWeight(
            format=self.format,
            data=o[f"{self.name} data"].view(QUANTIZED_FORMATS[self.format].dtype),
            scales=o[f"{self.name} scales"],
            block=self.block,
            shape=(rows, columns),
            zero_points=None if zeros is None else zeros.to(torch.int8),
            **quantized,
        )

    def operand(self, x: bounds.Number) -> bounds.Number:
        """Return ``x`` with the relative error of a weight that a kernel may round to the dtype before the product."""
        if self.format is None:
            return x
        return bounds.Number(x.value, x.error + 4 * bounds.UNIT[self.dtype] * x.value.abs())


def random_matrix(
    name: str, rows: int, columns: int, shape: Shape, dtype: torch.dtype, dice: RandomValues, format: str | None
) -> RandomMatrix:
    """Return a random weight. ``shape`` has the kind of scales (``blocks``) and zero points (``zeros``) of a format."""
    if format is None:
        values = dice.factors(rows, columns, dtype=dtype, scale=columns**-0.5)
        return RandomMatrix(name, {name: Operand(values)}, values, dtype, None, (1, columns))
    form = {**shape, "outer": rows, "inner": columns}
    parts, values = _quantized(form, format, dice)
    return RandomMatrix(name, {f"{name} {key}": each for key, each in parts.items()}, values, dtype, format, _block(form))
