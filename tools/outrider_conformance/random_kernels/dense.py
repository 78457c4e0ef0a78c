"""Random products, norms and activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from outrider.device import KernelSet, Product
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dimensions import MANY, among, between
from outrider_conformance.random_kernels.problem import KernelProblems, Operand, Problem, RandomValues, Shape, kernel_call

TOKENS = between(1, 40, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
_INNER = among(8, 40, 96, 256, 520, 1032)
_OUTER = between(1, 80, 127, 129, 513, 1025)
_HIDDEN = among(8, 24, 64, 136, 576, 1032, 4104)
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


def _linear_silu_mul(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    operands, both = _product(shape, dtype, dice, 2 * shape["outer"])
    wanted = bounds.silu_mul(*halves(both), dtype)
    return Problem(operands, kernel_call("linear_silu_mul", "x", "weight", "bias"), {"out": wanted})


def halves(x: bounds.Number) -> tuple[bounds.Number, bounds.Number]:
    """Return the two halves of ``x`` along the last dimension."""
    size = x.value.shape[-1] // 2
    return bounds.Number(x.value[..., :size], x.error[..., :size]), bounds.Number(x.value[..., size:], x.error[..., size:])


def _added(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> tuple[dict[str, Operand], bounds.Number]:
    operands, product = _product(shape, dtype, dice, shape["outer"])
    residual = dice.normal(shape["tokens"], shape["outer"], dtype=dtype, scale=2.0)
    return {**operands, "residual": Operand(residual)}, bounds.add(product, bounds.exact(residual), dtype)


def _linear_add(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    operands, grown = _added(shape, dtype, dice)

    return Problem(operands, kernel_call("linear_add", "x", "weight", "bias", "residual"), {"out": grown, "residual": grown})


def normed(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> tuple[dict[str, Operand], bounds.Number, bounds.Number]:
    """Return the operands of a product, a residual and a norm; then two results: product plus residual, and its norm."""
    operands, grown = _added(shape, dtype, dice)
    norm = dice.normal(shape["outer"], dtype=dtype)
    # The sum may stay unrounded on its way to the norm: its error covers both.
    return {**operands, "norm": Operand(norm)}, grown, bounds.rms_norm(grown, norm, EPS, dtype)


def _linear_add_rms_norm(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    operands, grown, wanted = normed(shape, dtype, dice)

    call = kernel_call("linear_add_rms_norm", "x", "weight", "bias", "residual", "norm", EPS)
    return Problem(operands, call, {"out": wanted, "residual": grown})


def taken(x: bounds.Number, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bounds.Number:
    """Return the product of a normed matrix with ``weight``.

    A kernel may apply the norm's factor after the product, and then rounds the row before the product.
    """
    once_more = bounds.rounded(x, dtype, 2.0)
    return bounds.rounded(bounds.product(once_more, weight, bias, dtype), dtype)


def _norm_linear_silu_mul(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    operands, grown, middle = normed(shape, dtype, dice)
    gates = _weights(dice, 2 * shape["gates"], shape["outer"], dtype)
    bias = dice.normal(2 * shape["gates"], dtype=dtype) if shape["bias"] else None
    operands["gates"] = Operand(gates)
    if bias is not None:
        operands["gates_bias"] = Operand(bias)
    wanted = bounds.silu_mul(*halves(taken(middle, gates, bias, dtype)), dtype)

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        added = Product(o["x"], o["weight"], o.get("bias"))
        return {"out": kernels.norm_linear_silu_mul(added, o["residual"], o["norm"], EPS, o["gates"], o.get("gates_bias"))}

    return Problem(operands, call, {"out": wanted, "residual": grown})


def _embedding(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    tokens, weight = _tokens(shape, dice), dice.normal(shape["vocabulary"], shape["inner"], dtype=dtype)
    operands = {"tokens": Operand(tokens), "weight": Operand(weight)}
    return Problem(operands, kernel_call("embedding", *operands), {"out": bounds.exact(weight[tokens])})


def _tokens(shape: Shape, dice: RandomValues) -> Tensor:
    tokens = dice.integers(0, shape["vocabulary"], shape["tokens"])
    tokens[-1] = shape["vocabulary"] - 1
    return tokens


def _embed_beside(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    tokens, weight = _tokens(shape, dice), dice.normal(shape["vocabulary"], shape["inner"], dtype=dtype)
    hidden = dice.normal(shape["tokens"], shape["outer"], dtype=dtype)
    operands = {"tokens": Operand(tokens), "weight": Operand(weight), "hidden": Operand(hidden, _LAYOUTS[shape["layout"]])}
    wanted = bounds.exact(torch.cat((weight[tokens], hidden), dim=-1))
    return Problem(operands, kernel_call("embed_beside", *operands), {"out": wanted})


def _row_scales(x: Tensor, dice: RandomValues) -> Tensor:
    """Return a random scale for each row, so that a mean over a wrong row or the whole batch is far off."""
    return (x.double() * (2.0 ** dice.integers(-3, 4, x.shape[0], *[1] * (x.dim() - 1)).double())).to(x.dtype)


def _rms_norm(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return the problem of a norm over rows of a matrix, or over heads of tokens as in the norm of queries."""
    heads, hidden = shape["heads"], shape["hidden"]
    many = (shape["tokens"], heads, hidden) if heads else (shape["tokens"], hidden)
    if heads and hidden > 256:
        many = (shape["tokens"], heads, 136)
    x = _row_scales(dice.factors(*many, dtype=dtype), dice)
    weight = dice.normal(many[-1], dtype=dtype)
    eps = 1e-2 if shape["layout"] == 1 else EPS
    wanted = bounds.rms_norm(bounds.exact(x), weight, eps, dtype)
    operands = {"x": Operand(x, _LAYOUTS[shape["layout"]]), "weight": Operand(weight)}
    return Problem(operands, kernel_call("rms_norm", "x", "weight", eps), {"out": wanted})


def _add_rms_norm(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    many = (shape["tokens"], shape["hidden"])
    x, residual = dice.factors(*many, dtype=dtype), _row_scales(dice.normal(*many, dtype=dtype), dice)
    weight = dice.normal(shape["hidden"], dtype=dtype)
    grown = bounds.add(bounds.exact(x), bounds.exact(residual), dtype)
    operands = {"x": Operand(x, _LAYOUTS[shape["layout"]]), "residual": Operand(residual), "weight": Operand(weight)}
    wanted = {"out": bounds.rms_norm(grown, weight, EPS, dtype), "residual": grown}
    return Problem(operands, kernel_call("add_rms_norm", "x", "residual", "weight", EPS), wanted)


def _silu_mul(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    gate_up = dice.normal(shape["tokens"], 2 * shape["outer"], dtype=dtype, scale=4.0)
    wanted = bounds.silu_mul(*halves(bounds.exact(gate_up)), dtype)
    operands = {"gate_up": Operand(gate_up, _LAYOUTS[shape["layout"]])}
    return Problem(operands, kernel_call("silu_mul", "gate_up"), {"out": wanted})


def _sigmoid_mul(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    x, gate = (dice.normal(shape["tokens"], shape["outer"], dtype=dtype, scale=4.0) for _ in range(2))
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
    make: Callable[[Shape, torch.dtype, RandomValues], Problem],
    *names: str,
    more: Sequence[Shape] = (),
    **fixed: int,
) -> KernelProblems:
    known = {
        "tokens": TOKENS,
        "inner": _INNER,
        "outer": _OUTER,
        "hidden": _HIDDEN,
        "layout": _LAYOUT,
        "bias": _BIAS,
        "levels": _LEVELS,
        "gates": among(20, 96, 264),
        "heads": among(0, 0, 1, 5),
        "vocabulary": among(2, 37, 1025, 2051, rare=(2**15 + 1, MANY)),
    }
    small = {"tokens": 3, "inner": 40, "outer": 24, "hidden": 64, "layout": 0, "bias": 1, "levels": 0, "gates": 20}
    small |= {"heads": 3, "vocabulary": 37}
    large = {"tokens": 257, "inner": 520, "outer": 129, "hidden": 4104, "layout": 1, "bias": 0, "levels": 0, "gates": 96}
    large |= {"heads": 0, "vocabulary": 2051}
    tall = {**small, "tokens": 65, "layout": 2, "hidden": 576}
    one = {**large, "tokens": 1, "bias": 1, "layout": 0}
    corners = [{**{name: corner[name] for name in names}, **fixed} for corner in (small, large, tall, one, *more)]
    return KernelProblems(kernel, make, {name: known[name] for name in names if name not in fixed}, corners)


DENSE = (
    _drawn("linear", _linear, "tokens", "inner", "outer", "layout", "bias", "levels", more=(_DECODE, {**_DECODE, "bias": 1})),
    _drawn("linear_silu_mul", _linear_silu_mul, "tokens", "inner", "outer", "layout", "bias"),
    _drawn("linear_add", _linear_add, "tokens", "inner", "outer", "layout", "bias"),
    _drawn("linear_add_rms_norm", _linear_add_rms_norm, "tokens", "inner", "outer", "layout", "bias"),
    _drawn("norm_linear_silu_mul", _norm_linear_silu_mul, "tokens", "inner", "outer", "layout", "bias", "gates"),
    _drawn("embedding", _embedding, "tokens", "inner", "vocabulary"),
    _drawn("embed_beside", _embed_beside, "tokens", "inner", "outer", "vocabulary", "layout"),
    _drawn("rms_norm", _rms_norm, "tokens", "heads", "hidden", "layout"),
    _drawn("add_rms_norm", _add_rms_norm, "tokens", "hidden", "layout"),
    _drawn("silu_mul", _silu_mul, "tokens", "outer", "layout"),
    _drawn("sigmoid_mul", _sigmoid_mul, "tokens", "outer", "layout"),
)
