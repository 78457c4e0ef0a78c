"""Random products with quantised weights. Each activation lies well inside one quantisation step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from outrider.device import QUANTIZED_FORMATS, KernelSet, QuantizedWeight
from outrider.device.kernels.formats import INT8, ElementFormat
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dimensions import among, between, row_counts
from outrider_conformance.random_kernels.problem import KernelProblems, Operand, Problem, RandomValues, Shape
from outrider_conformance.random_kernels.weights import random_matrix


def _activations(
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


def _linear_quantized(format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    elements = QUANTIZED_FORMATS[format]
    active = (INT8 if elements.activation_divisor is None else elements) if shape["active"] else None
    weight = random_matrix("own", shape["outer"], shape["inner"], shape, dtype, dice, format)
    operands = dict(weight.operands)
    if active is None:
        x = dice.factors(shape["tokens"], shape["inner"], dtype=dtype)
        more, number = {"x": Operand(x)}, bounds.exact(x)
    else:
        more, number = _activations(shape, active, dtype, dice)
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
        return {"out": kernels.linear_quantized(o["x"], own, o.get("bias"))}

    return Problem(operands, call, {"out": bounds.product(weight.operand(number), weight.values, bias, dtype)})


_DIMENSIONS = {
    "tokens": row_counts(1, 20, 63),
    "inner": among(8, 40, 96, 264),
    "outer": between(1, 80, 129),
    "blocks": between(0, 2),
    "zeros": between(0, 1),
    "active": between(0, 3),
    "bias": between(0, 1),
}
_CORNERS = (
    {"tokens": 3, "inner": 40, "outer": 24, "blocks": 1, "zeros": 1, "active": 0, "bias": 1},
    {"tokens": 65, "inner": 264, "outer": 129, "blocks": 2, "zeros": 0, "active": 2, "bias": 0},
    {"tokens": 1, "inner": 96, "outer": 80, "blocks": 0, "zeros": 0, "active": 1, "bias": 0},
    {"tokens": 17, "inner": 40, "outer": 1, "blocks": 0, "zeros": 1, "active": 3, "bias": 1},
)


QUANTIZED = tuple(
    KernelProblems(f"linear_quantized, {format}", partial(_linear_quantized, format), _DIMENSIONS, _CORNERS, format=format)
    for format in QUANTIZED_FORMATS
)
