"""Random mixtures of experts: routing, and the sum of the outputs of a token's experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dense import halves
from outrider_conformance.random_kernels.dimensions import among, between
from outrider_conformance.random_kernels.problem import KernelProblems, Operand, Problem, RandomValues, Shape, kernel_call

_MIN_LOGIT_GAP = 0.25
"""Smallest gap between router logits of a token, so that only one choice of experts is right."""
_EXPERTS = among(1, 2, 5, 8, 60, 128)
_CHOSEN = between(1, 8)
_TOKENS = between(1, 12, 16, 17, 32, 33, 64, 65, 128, 129)
_SIZES = among(8, 24, 40, 136)


def _distinct(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Tensor:
    """Return logits [T, E] in a random order per row, with gaps that survive the rounding to ``dtype``. In every second row,
    experts are equal in pairs.
    """
    tokens, count = shape["tokens"], shape["experts"]
    order = torch.stack([dice.permutation(count) for _ in range(tokens)])
    order[::2] //= 2
    apart = max(_MIN_LOGIT_GAP, 8.0 * count * bounds.UNIT[dtype])
    shift = dice.integers(-3, 4, tokens, 1).double()
    return ((order.double() - count) * apart + shift).to(dtype)


def _route(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    logits = _distinct(shape, dtype, dice)
    count = min(shape["chosen"], shape["experts"])
    exact = logits.double()
    chosen = exact.argsort(dim=-1, descending=True, stable=True)[:, :count]
    weights = exact.softmax(-1).gather(1, chosen)
    if shape["flag"]:
        weights = weights / weights.sum(-1, keepdim=True)
    # Exponentials of differences, a sum over all experts and one over those chosen.
    unit = bounds.wide(dtype)
    spread = exact.amax(-1, keepdim=True) - exact.gather(1, chosen)
    error = weights * unit * (16 + 2 * spread + 2 * bounds.growth(shape["experts"], 1.0)) + 2.0**-140
    wanted: dict[str, bounds.Number | Tensor] = {"weights": bounds.Number(weights, error), "chosen": chosen}

    call = kernel_call("route", "logits", count, results=("weights", "chosen"), renormalize=bool(shape["flag"]))
    return Problem({"logits": Operand(logits)}, call, wanted)


def weighted_sum(
    one: Callable[[int, Tensor], bounds.Number], weights: Tensor, chosen: Tensor, hidden: int, dtype: torch.dtype
) -> bounds.Number:
    """Return the sum over each token's experts, [T, hidden], by the shares ``weights`` and the experts ``chosen``, [T, k].

    ``one(expert, rows)`` returns the output of one expert for these tokens, [rows, hidden].
    """
    value, error, magnitude = (torch.zeros(len(chosen), hidden, dtype=torch.float64) for _ in range(3))
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        made = one(expert, rows)
        share = weights[rows, slots].double().unsqueeze(-1)
        # A kernel may round a share to the dtype of the tokens before it multiplies, and round the product too.
        part = bounds.rounded(bounds.Number(made.value * share, made.error * share), dtype, 2.0)
        value.index_add_(0, rows, part.value)
        error.index_add_(0, rows, part.error)
        magnitude.index_add_(0, rows, part.value.abs())
    # A kernel may keep the sum in the dtype of the tokens.
    return bounds.rounded(bounds.Number(value, error + chosen.shape[1] * bounds.UNIT[dtype] * magnitude), dtype)


def _experts(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    tokens, count, inner, hidden = shape["tokens"], shape["experts"], shape["outer"], shape["inner"]
    k = min(shape["chosen"], count)
    x = dice.factors(tokens, hidden, dtype=dtype)
    gate_up = dice.factors(count, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    down = dice.factors(count, hidden, inner, dtype=dtype, scale=inner**-0.5)
    chosen = torch.stack([dice.permutation(count)[:k] for _ in range(tokens)])
    if shape["flag"]:  # all tokens go to the same experts
        chosen = chosen[:1].expand(tokens, k).contiguous()
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    weights = dice.positive(tokens, k, dtype=kept)
    operands = {"x": Operand(x), "weights": Operand(weights), "chosen": Operand(chosen)}
    operands |= {"gate_up": Operand(gate_up), "down": Operand(down)}

    def one(expert: int, rows: Tensor) -> bounds.Number:
        both = bounds.product(bounds.exact(x[rows]), gate_up[expert], None, dtype)
        return bounds.product(bounds.silu_mul(*halves(both), dtype), down[expert], None, dtype)

    wanted = weighted_sum(one, weights, chosen, hidden, dtype)

    return Problem(operands, kernel_call("experts", *operands), {"out": wanted})


_FLAG = between(0, 1)
EXPERTS = (
    KernelProblems(
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
    KernelProblems(
        "experts",
        _experts,
        {"tokens": _TOKENS, "experts": among(1, 2, 5, 8), "chosen": between(1, 4)}
        | {"inner": _SIZES, "outer": _SIZES, "flag": _FLAG},
        [
            {"tokens": 3, "experts": 5, "chosen": 2, "inner": 40, "outer": 24, "flag": 0},
            {"tokens": 257, "experts": 8, "chosen": 2, "inner": 520, "outer": 136, "flag": 0},
            {"tokens": 65, "experts": 60, "chosen": 4, "inner": 40, "outer": 24, "flag": 1},
            {"tokens": 1, "experts": 8, "chosen": 2, "inner": 520, "outer": 129, "flag": 0},
        ],
    ),
)
