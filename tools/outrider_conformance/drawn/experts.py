"""Drawn mixtures of experts: routing, and what the experts of a token compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from torch import Tensor

from outrider.device import KernelSet
from outrider_conformance.drawn import bounds
from outrider_conformance.drawn.problem import Dice, Drawn, Operand, Problem, Shape

_APART = 0.25
"""Router logits of a token differ by so much at least, so that one choice alone is right."""
_EXPERTS = st.sampled_from((1, 2, 5, 8, 60, 128))
_CHOSEN = st.integers(1, 8)
_TOKENS = st.one_of(st.integers(1, 12), st.sampled_from((33, 64, 129)))
_SIZES = st.sampled_from((8, 24, 40, 136))


def _distinct(shape: Shape, dtype: torch.dtype, dice: Dice) -> Tensor:
    """Logits [T, E] in an order of their own in each row, one far from the next, also after rounding to ``dtype``."""
    tokens, count = shape["tokens"], shape["experts"]
    order = torch.stack([dice.order(count) for _ in range(tokens)])
    apart = max(_APART, 8.0 * count * bounds.UNIT[dtype])
    shift = dice.whole(-3, 4, tokens, 1).double()
    return ((order.double() - count) * apart + shift).to(dtype)


def _route(shape: Shape, dtype: torch.dtype, dice: Dice) -> Problem:
    logits = _distinct(shape, dtype, dice)
    count = min(shape["chosen"], shape["experts"])
    exact = logits.double()
    chosen = exact.argsort(-1, descending=True)[:, :count]
    weights = exact.softmax(-1).gather(1, chosen)
    if shape["flag"]:
        weights = weights / weights.sum(-1, keepdim=True)
    # Exponentials of differences, a sum over all experts and one over those chosen.
    unit = bounds.wide(dtype)
    spread = exact.amax(-1, keepdim=True) - exact.gather(1, chosen)
    error = weights * unit * (16 + 2 * spread + 2 * bounds.growth(shape["experts"], 1.0)) + 2.0**-140
    wanted: dict[str, bounds.Number | Tensor] = {"weights": bounds.Number(weights, error), "chosen": chosen}

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        made = kernels.route(o["logits"], count, renormalize=bool(shape["flag"]))
        return {"weights": made[0], "chosen": made[1]}

    return Problem({"logits": Operand(logits)}, call, wanted)


def _experts(shape: Shape, dtype: torch.dtype, dice: Dice) -> Problem:
    tokens, count, inner, hidden = shape["tokens"], shape["experts"], shape["outer"], shape["inner"]
    k = min(shape["chosen"], count)
    x = dice.factors(tokens, hidden, dtype=dtype)
    gate_up = dice.factors(count, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    down = dice.factors(count, hidden, inner, dtype=dtype, scale=inner**-0.5)
    chosen = torch.stack([dice.order(count)[:k] for _ in range(tokens)])
    if shape["flag"]:  # all tokens go to the same experts
        chosen = chosen[:1].expand(tokens, k).contiguous()
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    weights = dice.positive(tokens, k, dtype=kept)
    operands = {"x": Operand(x), "weights": Operand(weights), "chosen": Operand(chosen)}
    operands |= {"gate_up": Operand(gate_up), "down": Operand(down)}
    value, error = torch.zeros(tokens, hidden, dtype=torch.float64), torch.zeros(tokens, hidden, dtype=torch.float64)
    magnitude = torch.zeros_like(value)
    for expert in range(count):
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        both = bounds.product(bounds.exact(x[rows]), gate_up[expert], None, dtype)
        gate, up = (
            bounds.Number(part, off) for part, off in zip(both.value.chunk(2, -1), both.error.chunk(2, -1), strict=True)
        )
        made = bounds.product(bounds.silu_mul(gate, up, dtype), down[expert], None, dtype)
        share = weights[rows, slots].double().unsqueeze(-1)
        # A share may be rounded to the dtype of the tokens before it's multiplied, and so may the product.
        part = bounds.rounded(bounds.Number(made.value * share, made.error * share), dtype, 2.0)
        value.index_add_(0, rows, part.value)
        error.index_add_(0, rows, part.error)
        magnitude.index_add_(0, rows, part.value.abs())
    # What is added up may be kept in the dtype of the tokens.
    wanted = bounds.rounded(bounds.Number(value, error + k * bounds.UNIT[dtype] * magnitude), dtype)

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"out": kernels.experts(o["x"], o["weights"], o["chosen"], o["gate_up"], o["down"])}

    return Problem(operands, call, {"out": wanted})


_FLAG = st.integers(0, 1)
EXPERTS = (
    Drawn(
        "route",
        _route,
        {"tokens": _TOKENS, "experts": _EXPERTS, "chosen": _CHOSEN, "flag": _FLAG},
        [
            {"tokens": 3, "experts": 8, "chosen": 2, "flag": 1},
            {"tokens": 300, "experts": 128, "chosen": 8, "flag": 0},
            {"tokens": 65, "experts": 60, "chosen": 4, "flag": 0},
            {"tokens": 1, "experts": 1, "chosen": 1, "flag": 1},
        ],
    ),
    Drawn(
        "experts",
        _experts,
        {"tokens": _TOKENS, "experts": st.sampled_from((1, 2, 5, 8)), "chosen": st.integers(1, 4)}
        | {"inner": _SIZES, "outer": _SIZES, "flag": _FLAG},
        [
            {"tokens": 3, "experts": 5, "chosen": 2, "inner": 40, "outer": 24, "flag": 0},
            {"tokens": 257, "experts": 8, "chosen": 2, "inner": 520, "outer": 136, "flag": 0},
            {"tokens": 65, "experts": 60, "chosen": 4, "inner": 40, "outer": 24, "flag": 1},
            {"tokens": 1, "experts": 8, "chosen": 2, "inner": 520, "outer": 129, "flag": 0},
        ],
    ),
)
