"""Random weights, quantised or not, and random products with quantised weights.

Each activation lies well inside one quantisation step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.device import QUANTIZED_FORMATS, KernelSet, QuantizedWeight, Weight
from outrider.device.kernels.formats import INT8, ElementFormat
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.problem import (
    Operand,
    Problem,
    RandomValues,
    Shape,
    among,
    between,
    in_formats,
    row_counts,
)

_POWERS = torch.float8_e8m0fnu
"""The dtype of scales that are powers of two; the operand of a problem has their bytes."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
        values = elements.round(dice.normal(*size, dtype=torch.float32, scale=elements.random_deviation)).double()
    else:
        values = dice.integers(int(elements.lowest), int(elements.highest) + 1, *size).double()
    data = elements.encode(values)
    scales = (dice.uniform(*grid) + 0.5) / (values.abs().max() * shape["inner"] ** 0.5)
    if shape["blocks"] and _POWERS in elements.scale_dtypes:
        scales = scales.log2().round().exp2().to(_POWERS)
    else:
        scales = scales.to(_SCALE_DTYPES[shape.get("scale_dtype", 0)])
    stored = scales.view(torch.uint8).to(torch.int16) if scales.dtype is _POWERS else scales
    operands = {"data": Operand(data.view(torch.int32)), "scales": Operand(stored)}
    if shape["zeros"] and not elements.is_float:
        zeros = dice.integers(-8, 9, *grid)
        operands["zeros"] = Operand(zeros)
        values = values - _spread(zeros.double(), block, size)
    return operands, values * _spread(scales.double(), block, size)


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
        zeros, scales = o.get(f"{self.name} zeros"), o[f"{self.name} scales"]
        rows, columns = self.values.shape
        return QuantizedWeight(
            format=self.format,
            data=o[f"{self.name} data"].view(QUANTIZED_FORMATS[self.format].dtype),
            scales=scales.to(torch.uint8).view(_POWERS) if scales.dtype is torch.int16 else scales,
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


def activations_of(elements: ElementFormat) -> ElementFormat:
    """Return a format of activations for weights with these elements."""
    return INT8 if elements.activation_divisor is None else elements


def random_activations(
    shape: Shape, elements: ElementFormat, dtype: torch.dtype, dice: RandomValues
) -> tuple[dict[str, Operand], bounds.Number]:
    """Return random activations x, their values after quantisation, and the operand of a given scale."""
    rows, width = shape["tokens"], shape["inner"]
    if elements.is_float:
        steps = (2.0 ** dice.integers(-4, 8, rows, width).double()) * (1 + dice.integers(0, 8, rows, width).double() / 8)
        near = steps * (1 + (dice.uniform(rows, width).double() - 0.5) * 0.02)
    else:
        steps = dice.integers(1, 60, rows, width).double()
        near = steps + (dice.uniform(rows, width).double() - 0.5) * 0.4
    if rows > 2:
        steps[1] = near[1] = 0
    signs = dice.integers(0, 2, rows, width).double() * 2 - 1
    steps, near = steps * signs, near * signs
    group = {2: 16}.get(shape["active"], width)
    scale = (dice.uniform(rows, -(-width // group)).double() + 0.5) / 16
    if shape["active"] == 3:
        scale = torch.full_like(scale, 0.03125)
        beyond = torch.arange(width) % 5 == 2  # outside the format's range, to which a kernel clamps
        near = torch.where(beyond, near.sign() * (1.5 * elements.highest + near.abs()), near)
        steps = torch.where(beyond, near.clamp(elements.lowest, elements.highest), steps)
    else:  # the largest of each group decides its scale
        steps[:, ::group] = elements.highest
        near[:, ::group] = elements.highest if elements.is_float else elements.highest + 0.5
        if rows > 2:
            steps[1] = near[1] = 0  # a group of zeros stays zeros
    wide = scale.repeat_interleave(group, 1)[:, :width]
    x = (near * wide).to(dtype)
    if shape["active"] != 3:
        assert elements.activation_divisor is not None  # a format of activations
        wide = (x[:, ::group].double() / elements.activation_divisor).repeat_interleave(group, 1)[:, :width]
    value = steps * wide
    operands = {"x": Operand(x)}
    if shape["active"] == 3:
        operands["input_scale"] = Operand(torch.tensor([0.03125]), "alone")
    return operands, bounds.rounded(bounds.rounded(bounds.Number(value, torch.zeros_like(value)), dtype), torch.float32)


def requantized(x: bounds.Number, elements: ElementFormat, scale: float) -> bounds.Number:
    """Return ``x`` quantised with a given ``scale``, with an error of one step, since a number may lie between two steps.

    A number outside the range has the error of ``x`` alone.
    """
    steps = x.value / scale
    apart = steps.abs() / 8 + 2.0**-9 if elements.is_float else torch.ones_like(steps)
    outside = ((x.value.abs() - x.error) / scale - 2 * apart) > elements.highest + 1
    error = torch.where(outside, 0.0, x.error + apart * scale)
    return bounds.Number(elements.round(steps) * scale, error)


def _linear_quantized(shape: Shape, dtype: torch.dtype, dice: RandomValues, *, format: str) -> Problem:
    elements = QUANTIZED_FORMATS[format]
    active = activations_of(elements) if shape["active"] else None
    weight = random_matrix("own", shape["outer"], shape["inner"], shape, dtype, dice, format)
    operands = dict(weight.operands)
    if active is None:
        x = dice.factors(shape["tokens"], shape["inner"], dtype=dtype)
        more, number = {"x": Operand(x)}, bounds.exact(x)
    else:
        more, number = random_activations(shape, active, dtype, dice)
    operands |= more
    bias = dice.normal(shape["outer"], dtype=dtype) if shape["bias"] else None
    if bias is not None:
        operands["bias"] = Operand(bias)
    # The weight may be rounded to the dtype before the product.

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        quantized = {
            "activations": None if active is None else active.name,
            "activation_group": 16 if shape["active"] == 2 else 0,
            "input_scale": o.get("input_scale"),
        }
        own = weight.weight(o, **quantized)
        assert isinstance(own, QuantizedWeight)
        x = o["x"].unsqueeze(0) if shape["levels"] else o["x"]  # a tree's levels come with a dimension more
        return {"out": kernels.linear_quantized(x, own, o.get("bias")).view(-1, shape["outer"])}

    return Problem(operands, call, {"out": bounds.product(weight.operand(number), weight.values, bias, dtype)})


_DIMENSIONS = {
    "tokens": row_counts(1, 20, 63),
    "inner": among(8, 40, 96, 264),
    "outer": between(1, 80, 129),
    "blocks": between(0, 2),
    "zeros": between(0, 1),
    "active": between(0, 3),
    "bias": between(0, 1),
    "levels": between(0, 1),
    "scale_dtype": between(0, 2),
}
_FLOAT_SCALES = {"levels": 0, "scale_dtype": 0}
_CORNERS = (
    {"tokens": 3, "inner": 40, "outer": 24, "blocks": 1, "zeros": 1, "active": 0, "bias": 1, **_FLOAT_SCALES},
    {"tokens": 65, "inner": 264, "outer": 129, "blocks": 2, "zeros": 0, "active": 2, "bias": 0, **_FLOAT_SCALES},
    {"tokens": 1, "inner": 96, "outer": 80, "blocks": 0, "zeros": 0, "active": 1, "bias": 0, **_FLOAT_SCALES},
    {"tokens": 17, "inner": 40, "outer": 1, "blocks": 0, "zeros": 1, "active": 3, "bias": 1, "levels": 1, "scale_dtype": 1},
)


QUANTIZED = in_formats("linear_quantized", _linear_quantized, _DIMENSIONS, _CORNERS, weights=QUANTIZED_FORMATS)
