"""Random products with quantised weights. Each activation lies well inside one quantisation step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.device import QUANTIZED_FORMATS, KernelSet, QuantizedWeight
from outrider.device.kernels.formats import INT8, ElementFormat
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dense import halves
from outrider_conformance.random_kernels.dimensions import among, between
from outrider_conformance.random_kernels.experts import weighted_sum
from outrider_conformance.random_kernels.problem import KernelProblems, Operand, Problem, RandomValues, Shape

_BLOCKS = ("channel", "group", "block", "wide group")


def _block(shape: Shape) -> tuple[int, int]:
    kind = _BLOCKS[shape["blocks"]]
    return {"channel": (1, shape["inner"]), "group": (1, 16), "block": (24, 40), "wide group": (1, 128)}[kind]


def _spread(grid: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    return grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def random_weight(shape: Shape, format: str, dice: RandomValues) -> tuple[dict[str, Operand], Tensor]:
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
    parts, weight = random_weight(shape, format, dice)
    operands = {f"own {name}": each for name, each in parts.items()}
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
    once = _once_more(number, dtype)

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        quantized = {
            "activations": None if active is None else active.name,
            "activation_group": 16 if shape["active"] == 2 else 0,
            "input_scale": o.get("input_scale"),
        }
        made = weight_record(format, shape, o, "own", (shape["outer"], shape["inner"]), **quantized)
        return {"out": kernels.linear_quantized(o["x"], made, o.get("bias"))}

    return Problem(operands, call, {"out": bounds.product(once, weight, bias, dtype)})


_DIMENSIONS = {
    "tokens": between(1, 20, 32, 33, 63, 64, 65, 128, 129),
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


def _fuse_embedding(format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return a problem with unquantised activations: embeddings joined with hidden states."""
    parts, weight = random_weight(shape, format, dice)
    wide = shape["inner"] // 4
    embedding = dice.factors(_VOCABULARY, wide, dtype=dtype)
    hidden = dice.factors(shape["tokens"], shape["inner"] - wide, dtype=dtype)
    tokens = dice.integers(0, _VOCABULARY, shape["tokens"])
    tokens[-1] = _VOCABULARY - 1
    bias = dice.normal(shape["outer"], dtype=dtype) if shape["bias"] else None
    operands = {f"own {name}": each for name, each in parts.items()}
    operands |= {"tokens": Operand(tokens), "embedding": Operand(embedding), "hidden": Operand(hidden, "wide")}
    operands |= {} if bias is None else {"bias": Operand(bias)}
    x = torch.cat((embedding[tokens], hidden), dim=-1)

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        own = weight_record(format, shape, o, "own", (shape["outer"], shape["inner"]))
        return {"out": kernels.fuse_embedding(o["tokens"], o["embedding"], o["hidden"], own, o.get("bias"))}

    return Problem(operands, call, {"out": bounds.product(_once_more(bounds.exact(x), dtype), weight, bias, dtype)})


_INNER = 24
_VOCABULARY = 37


def _experts_quantized(format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return a problem with unquantised activations. The weights of all experts are stacked, scaled by row or column
    group.
    """
    tokens, hidden, count = shape["tokens"], shape["inner"], 1 + shape["outer"] % 8
    chosen_each, form = min(1 + shape["active"], count), {**shape, "blocks": shape["blocks"] % 2}
    sizes = {"gates": (count * 2 * _INNER, hidden), "down": (count * hidden, _INNER)}
    operands: dict[str, Operand] = {}
    exact: dict[str, Tensor] = {}
    for name, size in sizes.items():
        parts, value = random_weight({**form, "outer": size[0], "inner": size[1]}, format, dice)
        operands |= {f"{name} {key}": each for key, each in parts.items()}
        exact[name] = value.view(count, -1, size[1])
    x = dice.factors(tokens, hidden, dtype=dtype)
    chosen = torch.stack([dice.permutation(count)[:chosen_each] for _ in range(tokens)])
    weights = dice.positive(tokens, chosen_each, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    operands |= {"x": Operand(x), "weights": Operand(weights), "chosen": Operand(chosen)}

    def one(expert: int, rows: Tensor) -> bounds.Number:
        both = bounds.product(_once_more(bounds.exact(x[rows]), dtype), exact["gates"][expert], None, dtype)
        activated = bounds.silu_mul(*halves(both), dtype)
        return bounds.product(_once_more(activated, dtype), exact["down"][expert], None, dtype)

    wanted = weighted_sum(one, weights, chosen, hidden, dtype)

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        first, second = (weight_record(format, form, o, name, size) for name, size in sizes.items())
        return {"out": kernels.experts_quantized(o["x"], o["weights"], o["chosen"], first, second)}

    return Problem(operands, call, {"out": wanted})


def weight_record(
    format: str, shape: Shape, o: Mapping[str, Tensor], name: str, size: tuple[int, int], **quantized: Any
) -> QuantizedWeight:
    """Return the weight record built from the operands called ``name``; ``quantized`` describes its layer's activations."""
    zeros = o.get(f"{name} zeros")
    return QuantizedWeight(
        format=format,
        data=o[f"{name} data"].view(QUANTIZED_FORMATS[format].dtype),
        scales=o[f"{name} scales"],
        block=_block({**shape, "inner": size[1]}),
        shape=size,
        zero_points=None if zeros is None else zeros.to(torch.int8),
        **quantized,
    )


def _once_more(number: bounds.Number, dtype: torch.dtype) -> bounds.Number:
    """Return the relative error of a weight that a kernel may round to the dtype before the product."""
    return bounds.Number(number.value, number.error + 4 * bounds.UNIT[dtype] * number.value.abs())


QUANTIZED = (
    *(
        KernelProblems(f"{name}, {format}", partial(make, format), _DIMENSIONS, _CORNERS, format=format)
        for name, make in (
            ("linear_quantized", _linear_quantized),
            ("fuse_embedding", _fuse_embedding),
            ("experts_quantized", _experts_quantized),
        )
        for format in QUANTIZED_FORMATS
    ),
)
