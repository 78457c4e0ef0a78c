"""Random problems of products, norms and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from outrider.device import QUANTIZED_FORMATS, KernelSet
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.problem import (
    MANY,
    KernelProblems,
    Operand,
    Problem,
    RandomValues,
    Shape,
    among,
    between,
    in_formats,
    kernel_call,
    row_counts,
)
from outrider_conformance.random_kernels.quantized import random_matrix

TOKENS = row_counts(1, 40, 63, 127, 255, 300, rare=(4099,))
_INNER = among(8, 40, 96, 256, 520, 1032)
_OUTER = between(1, 80, 127, 129, 513, 1025)
_HIDDEN = among(8, 24, 37, 64, 136, 576, 1032, 4104)
_LAYOUT = between(0, 2)
_LAYOUTS = ("rows", "wide", "columns")
EPS = 1e-5
Mapped = Mapping[str, Tensor]


def _weights(dice: RandomValues, out: int, into: int, dtype: torch.dtype) -> Tensor:
    return dice.factors(out, into, dtype=dtype, scale=into**-0.5)


def _product(shape: Shape, dtype: torch.dtype, dice: RandomValues, out: int) -> tuple[dict[str, Operand], bounds.Number]:
    """Return random operands x, weight and bias, and their product with its error bound."""
    x = dice.factors(shape["tokens"], shape["inner"], dtype=dtype)
    weight, bias = _weights(dice, out, shape["inner"], dtype), dice.normal(out, dtype=dtype)
    operands = {"x": Operand(x, _LAYOUTS[shape["layout"]]), "weight": Operand(weight)}
    if shape["bias"]:
        operands["bias"] = Operand(bias)
    return operands, bounds.product(bounds.exact(x), weight, bias if shape["bias"] else None, dtype)


def _linear(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    operands, wanted = _product(shape, dtype, dice, shape["outer"])

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        x = o["x"]
        if shape["levels"]:  # a tree's levels come with a dimension more
            x = x.view(1, *x.shape)
        return {"out": kernels.linear(x, o["weight"], o.get("bias")).view(-1, shape["outer"])}

    return Problem(operands, call, {"out": wanted})


def halves(x: bounds.Number) -> tuple[bounds.Number, bounds.Number]:
    """Return the two halves of ``x`` along the last dimension."""
    size = x.value.shape[-1] // 2
    return x[..., :size], x[..., size:]


def _tokens(shape: Shape, dice: RandomValues) -> Tensor:
    tokens = dice.integers(0, shape["vocabulary"], shape["tokens"])
    tokens[-1] = shape["vocabulary"] - 1
    return tokens


def _fuse_embedding(shape: Shape, dtype: torch.dtype, dice: RandomValues, format: str | None = None) -> Problem:
    """Return a problem with embeddings joined with hidden states, half and half or a quarter of embeddings."""
    wide = shape["inner"] // (4 if shape["layout"] else 2)
    tokens, table = _tokens(shape, dice), dice.factors(shape["vocabulary"], wide, dtype=dtype)
    hidden = dice.factors(shape["tokens"], shape["inner"] - wide, dtype=dtype)
    weight = random_matrix("weight", shape["outer"], shape["inner"], shape, dtype, dice, format)
    bias = dice.normal(shape["outer"], dtype=dtype) if shape["bias"] else None
    operands = {"tokens": Operand(tokens), "table": Operand(table), "hidden": Operand(hidden, _LAYOUTS[shape["layout"]])}
    operands |= weight.operands
    operands |= {} if bias is None else {"bias": Operand(bias)}
    x = weight.operand(bounds.exact(torch.cat((table[tokens], hidden), dim=-1)))

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        return {"out": kernels.fuse_embedding(o["tokens"], o["table"], o["hidden"], weight.weight(o), o.get("bias"))}

    return Problem(operands, call, {"out": bounds.product(x, weight.values, bias, dtype)})


def scaled_rows(x: Tensor, dice: RandomValues) -> Tensor:
    """Return ``x`` with a random scale of each row, so that a mean over a wrong row or the whole batch is far off. Squares of
    the largest numbers overflow in float16.
    """
    return (x.double() * (2.0 ** dice.integers(-8, 9, x.shape[0], *[1] * (x.dim() - 1)).double())).to(x.dtype)


def norm_weight(size: int, dtype: torch.dtype, shape: Shape, dice: RandomValues) -> Tensor:
    """Return the random weight of a norm of ``dtype``: of the same dtype, or of float32 if ``shape`` has ``wide_norm``."""
    return dice.normal(size, dtype=torch.promote_types(dtype, torch.float32) if shape["wide_norm"] else dtype)


def _rms_norm(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return the problem of a norm over rows of a matrix, or over heads of tokens as in the norm of queries."""
    heads, hidden = shape["heads"], shape["hidden"]
    many = (shape["tokens"], heads, hidden) if heads else (shape["tokens"], hidden)
    if heads and hidden > 256:
        many = (shape["tokens"], heads, 136)
    x = scaled_rows(dice.factors(*many, dtype=dtype), dice)
    weight = norm_weight(many[-1], dtype, shape, dice)
    eps = 1e-2 if shape["layout"] == 1 else EPS
    wanted = bounds.rms_norm(bounds.exact(x), weight, eps, dtype)
    operands = {"x": Operand(x, _LAYOUTS[shape["layout"]]), "weight": Operand(weight)}
    return Problem(operands, kernel_call("rms_norm", "x", "weight", eps), {"out": wanted})


def _add_rms_norm(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    many = (shape["tokens"], shape["hidden"])
    x, residual = dice.factors(*many, dtype=dtype), scaled_rows(dice.normal(*many, dtype=dtype), dice)
    weight = norm_weight(shape["hidden"], dtype, shape, dice)
    grown = bounds.add(bounds.exact(x), bounds.exact(residual), dtype)
    operands = {"x": Operand(x, _LAYOUTS[shape["layout"]]), "residual": Operand(residual), "weight": Operand(weight)}
    wanted = {"out": bounds.rms_norm(grown, weight, EPS, dtype), "residual": grown}
    return Problem(operands, kernel_call("add_rms_norm", "x", "residual", "weight", EPS), wanted)


def _large_in_some_rows(x: Tensor) -> Tensor:
    """Return ``x`` with every second row 16 times as large: exponentials of its numbers overflow."""
    x[::2] *= 16
    return x


def _silu_mul(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    gate_up = _large_in_some_rows(dice.normal(shape["tokens"], 2 * shape["outer"], dtype=dtype, scale=4.0))
    wanted = bounds.silu_mul(*halves(bounds.exact(gate_up)), dtype)
    operands = {"gate_up": Operand(gate_up, _LAYOUTS[shape["layout"]])}
    return Problem(operands, kernel_call("silu_mul", "gate_up"), {"out": wanted})


def _sigmoid_mul(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    x, gate = (_large_in_some_rows(dice.normal(shape["tokens"], shape["outer"], dtype=dtype, scale=4.0)) for _ in range(2))
    wanted = bounds.sigmoid_mul(bounds.exact(x), bounds.exact(gate), dtype)
    layout = _LAYOUTS[shape["layout"]]
    operands = {"x": Operand(x, layout), "gate": Operand(gate, layout)}
    return Problem(operands, kernel_call("sigmoid_mul", "x", "gate"), {"out": wanted})


_FEW, _MANY = {"tokens": 3, "inner": 40, "outer": 24}, {"tokens": 257, "inner": 520, "outer": 129}
_BIAS, _LEVELS = between(0, 1), between(0, 1)


_DECODE = {"tokens": 16, "inner": 2048, "outer": 2048, "layout": 0, "bias": 0, "levels": 0}
"""A weight of 4 Mi numbers, larger than the cache of a core, with the tokens of a decode batch."""


def _drawn(
    kernel: str,
    make: Callable[..., Problem],
    *names: str,
    more: Sequence[Shape] = (),
    formats: Iterable[str | None] = (None,),
) -> tuple[KernelProblems, ...]:
    known = {
        "tokens": TOKENS,
        "inner": _INNER,
        "outer": _OUTER,
        "hidden": _HIDDEN,
        "layout": _LAYOUT,
        "bias": _BIAS,
        "levels": _LEVELS,
        "heads": among(0, 0, 1, 5),
        "blocks": between(0, 2),
        "zeros": between(0, 1),
        "wide_norm": between(0, 1),
        "vocabulary": among(2, 37, 1025, 2051, rare=(2**15 + 1, MANY)),
    }
    small = {"tokens": 3, "inner": 40, "outer": 24, "hidden": 64, "layout": 0, "bias": 1, "levels": 0}
    small |= {"heads": 3, "vocabulary": 37, "blocks": 1, "zeros": 1, "wide_norm": 0}
    large = {"tokens": 257, "inner": 520, "outer": 129, "hidden": 4104, "layout": 1, "bias": 0, "levels": 0}
    large |= {"heads": 0, "vocabulary": 2051, "blocks": 2, "zeros": 0, "wide_norm": 1}
    tall = {**small, "tokens": 65, "layout": 2, "hidden": 576}
    one = {**large, "tokens": 1, "bias": 1, "layout": 0, "blocks": 0}
    corners = [{name: corner[name] for name in names} for corner in (small, large, tall, one, *more)]
    return in_formats(kernel, make, {name: known[name] for name in names}, corners, weights=formats)


_FUSED = ("tokens", "inner", "outer", "vocabulary", "layout", "bias")
DENSE = (
    *_drawn(
        "linear", _linear, "tokens", "inner", "outer", "layout", "bias", "levels", more=(_DECODE, {**_DECODE, "bias": 1})
    ),
    *_drawn("fuse_embedding", _fuse_embedding, *_FUSED),
    *_drawn("fuse_embedding", _fuse_embedding, *_FUSED, "blocks", "zeros", formats=QUANTIZED_FORMATS),
    *_drawn("rms_norm", _rms_norm, "tokens", "heads", "hidden", "layout", "wide_norm"),
    *_drawn("add_rms_norm", _add_rms_norm, "tokens", "hidden", "layout", "wide_norm"),
    *_drawn("silu_mul", _silu_mul, "tokens", "outer", "layout"),
    *_drawn("sigmoid_mul", _sigmoid_mul, "tokens", "outer", "layout"),
)
