"""Random mixtures of experts: routing, and the sum of the outputs of a token's experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.device import (
    QUANTIZED_FORMATS,
    ClampedActivation,
    CorrectedRouting,
    ExpertBiases,
    KernelSet,
    QuantizedWeight,
)
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dense import Mapped, halves
from outrider_conformance.random_kernels.problem import (
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
from outrider_conformance.random_kernels.quantized import activations_of, random_activations, random_matrix, requantized

_DOWN_STEP = 2.0**-13
"""Scale of the quantised inputs of the experts' second products."""
CLAMPED = ClampedActivation(3.0, 1.702)
"""The activation of experts with biases; many of the random gates exceed its limit."""
_MIN_LOGIT_GAP = 0.25
"""Minimum gap between the router logits of a token, so that only one choice of experts is right."""
_MIN_SCORE_GAP = 4e-6
"""Minimum gap between the scores of two experts, or of two groups, so that float32 tells them apart."""
_MAX_DRAWS = 1000
_SCORINGS: tuple[dict[str, Any], ...] = (
    {"factor": 2.5},
    {"factor": 2.5, "epsilon": 0.25},
    {"factor": 0.5, "epsilon": 0.125, "minimum": 0.5, "softmax": True},
)
"""Fields of routers with corrections. Unlike those of published models, each changes the weights of most tokens."""
_EXPERTS = among(1, 2, 5, 8, 60, 128)
_CHOSEN = between(1, 8)
_TOKENS = row_counts(1, 12)
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
    held = _held_experts(shape["experts"], shape["held"])
    options: dict[str, object] = {"renormalize": bool(shape["flag"])}
    if held is not None:
        is_held = (chosen >= held[0]) & (chosen < held[1])
        weights, error = weights * is_held, error * is_held
        chosen = torch.where(is_held, chosen - held[0], -1)
        options["held"] = held
    wanted: dict[str, bounds.Number | Tensor] = {"weights": bounds.Number(weights, error), "chosen": chosen}

    call = kernel_call("route", "logits", count, results=("weights", "chosen"), **options)
    return Problem({"logits": Operand(logits)}, call, wanted)


def _route_by_correction(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    count, experts, tokens = min(shape["chosen"], shape["experts"]), shape["experts"], shape["tokens"]
    groups = next(each for each in (4, 2, 1) if (experts % each == 0 and experts >= 2 * each) or each == 1)
    taken = max(groups // 2, -(-count * groups // experts))
    correction = dice.normal(experts, dtype=torch.float32, scale=0.3)
    scoring = CorrectedRouting(correction, groups, taken, **_SCORINGS[shape["scoring"]])
    wide = torch.promote_types(dtype, torch.float32)
    logits = dice.normal(tokens, experts, dtype=wide, scale=1.5)
    for _ in range(_MAX_DRAWS):
        scores = logits.double().softmax(-1) if scoring.softmax else logits.double().sigmoid()
        ranked = scores + correction.double()
        members = ranked.unflatten(1, (groups, -1))
        sums = members.topk(min(2, members.shape[2]), dim=-1)[0].sum(-1)
        is_close = (_smallest_gap(ranked) < _MIN_SCORE_GAP) | (_smallest_gap(sums) < _MIN_SCORE_GAP)
        if not is_close.any():
            break
        logits[is_close] = dice.normal(int(is_close.sum()), experts, dtype=wide, scale=1.5)
    left_out = sums.argsort(dim=-1, descending=True)[:, taken:]
    ranked = members.scatter(1, left_out.unsqueeze(-1).expand(-1, -1, members.shape[2]), -torch.inf).flatten(1)
    chosen = ranked.argsort(dim=-1, descending=True)[:, :count]
    weights = scores.gather(1, chosen)
    if shape["flag"]:
        weights = weights / (weights.sum(-1, keepdim=True) + scoring.epsilon).clamp(min=scoring.minimum)
    weights = scoring.factor * weights
    # Of a softmax also exponentials of differences, and a sum over all experts.
    spread = logits.double().amax(-1, keepdim=True) - logits.double().gather(1, chosen)
    unit = bounds.wide(dtype)
    error = weights * unit * (32 + 4 * count + 2 * spread + 2 * bounds.growth(experts, 1.0)) + 2.0**-140
    wanted: dict[str, bounds.Number | Tensor] = {"weights": bounds.Number(weights, error), "chosen": chosen}

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        routing = scoring._replace(correction=o["correction"])
        made = kernels.route(o["logits"], count, renormalize=bool(shape["flag"]), routing=routing)
        return dict(zip(("weights", "chosen"), made, strict=True))

    return Problem({"logits": Operand(logits), "correction": Operand(correction)}, call, wanted)


def _smallest_gap(values: Tensor) -> Tensor:
    """Return the smallest difference between two numbers of each row [T, N]; infinity for rows of one number."""
    gaps = values.sort(dim=-1)[0].diff(dim=-1)
    return gaps.amin(-1) if gaps.shape[1] else gaps.new_full((gaps.shape[0],), torch.inf)


def _held_experts(count: int, part: int) -> tuple[int, int] | None:
    """Return the first and last (exclusive) expert of rank ``part`` of three, counted from 1, that divide ``count`` experts;
    None for part 0, which holds all.
    """
    first = count * (part - 1) // 3
    return None if not part else (first, max(count * part // 3, first + 1))


def weighted_sum(
    one: Callable[[int, Tensor], bounds.Number], weights: Tensor, chosen: Tensor, hidden: int, dtype: torch.dtype
) -> bounds.Number:
    """Return the sum over each token's experts, [T, hidden], by the shares ``weights`` and the experts ``chosen``, [T, k].

    ``one(expert, rows)`` returns the output of one expert for these tokens, [rows, hidden].
    """
    value, error, magnitude = (torch.zeros(len(chosen), hidden, dtype=torch.float64) for _ in range(3))
    for expert in chosen[chosen >= 0].unique().tolist():
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


def _experts(
    shape: Shape,
    dtype: torch.dtype,
    dice: RandomValues,
    format: str | None = None,
    *,
    has_biases: bool = False,
    has_gelu: bool = False,
) -> Problem:
    """Return a problem with the stacked weights of all experts, with biases and their activation if ``has_biases``, with GELU
    if ``has_gelu``.
    """
    tokens, count, inner, hidden = shape["tokens"], shape["experts"], shape["outer"], shape["inner"]
    k = min(shape["chosen"], count)
    active = activations_of(QUANTIZED_FORMATS[format]) if format is not None and shape["active"] else None
    if active is None:
        own, inputs = {"x": Operand(x := dice.factors(tokens, hidden, dtype=dtype))}, bounds.exact(x)
    else:  # a scale for all inputs of the first products, and a smaller one, so that many inputs of the second are clamped
        own, inputs = random_activations({**shape, "active": 3}, active, dtype, dice)
        own["down_scale"] = Operand(torch.tensor([_DOWN_STEP]), "alone")
    gate_up = random_matrix("gate_up", count * 2 * inner, hidden, shape, dtype, dice, format)
    down = random_matrix("down", count * hidden, inner, shape, dtype, dice, format)
    chosen = torch.stack([dice.permutation(count)[:k] for _ in range(tokens)])
    if shape["flag"]:  # all tokens go to the same experts
        chosen = chosen[:1].expand(tokens, k).contiguous()
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    weights = dice.positive(tokens, k, dtype=kept)
    if shape["held"]:  # every third expert is on another rank
        is_held = chosen % 3 != shape["held"] - 1
        weights, chosen = weights * is_held, torch.where(is_held, chosen, -1)
    operands = {**own, "weights": Operand(weights), "chosen": Operand(chosen)}
    operands |= {**gate_up.operands, **down.operands}
    gates, outputs = gate_up.values.view(count, -1, hidden), down.values.view(count, hidden, inner)
    biases = None
    if has_biases:
        gate_up_bias, down_bias = (dice.normal(count, rows, dtype=dtype) for rows in (2 * inner, hidden))
        biases = ExpertBiases(gate_up_bias, down_bias, CLAMPED)
        operands |= {"gate_up bias": Operand(biases.gate_up), "down bias": Operand(biases.down)}

    def one(expert: int, rows: Tensor) -> bounds.Number:
        first_bias, second_bias = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        both = halves(bounds.product(gate_up.operand(inputs[rows]), gates[expert], first_bias, dtype))
        unbiased = bounds.gelu_mul if has_gelu else bounds.silu_mul
        activated = unbiased(*both, dtype) if biases is None else bounds.clamped_mul(*both, *CLAMPED, dtype)
        if active is not None:
            activated = bounds.rounded(requantized(activated, active, _DOWN_STEP), dtype)
        return bounds.product(down.operand(activated), outputs[expert], second_bias, dtype)

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        scales = {"activations": None if active is None else active.name}
        first = gate_up.weight(o, **scales, input_scale=o.get("input_scale"))
        second = down.weight(o, **scales, input_scale=o.get("down_scale"))
        options: dict[str, Any] = {"activation": "gelu_tanh"} if has_gelu else {}
        if has_biases:
            options["biases"] = ExpertBiases(o["gate_up bias"], o["down bias"], CLAMPED)
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            first, second = first.view(count, -1, hidden), second.view(count, hidden, inner)
            return {"out": kernels.experts(o["x"], o["weights"], o["chosen"], first, second, **options)}
        assert isinstance(first, QuantizedWeight)
        assert isinstance(second, QuantizedWeight)
        return {"out": kernels.experts_quantized(o["x"], o["weights"], o["chosen"], first, second, **options)}

    return Problem(operands, call, {"out": weighted_sum(one, weights, chosen, hidden, dtype)})


_FLAG = between(0, 1)
_HELD = between(0, 3)
_EXPERTS_SHAPE = {
    "tokens": _TOKENS,
    "experts": among(1, 2, 5, 8),
    "chosen": between(1, 4),
    "inner": _SIZES,
    "outer": _SIZES,
    "flag": _FLAG,
    "held": _HELD,
}
_ALIGNED_CORNERS = (
    {"tokens": 3, "experts": 5, "chosen": 2, "inner": 40, "outer": 24, "flag": 0, "held": 0},
    {"tokens": 65, "experts": 8, "chosen": 2, "inner": 264, "outer": 136, "flag": 0, "held": 2},
    {"tokens": 65, "experts": 60, "chosen": 4, "inner": 40, "outer": 24, "flag": 1, "held": 0},
)
_EXPERTS_CORNERS = (
    *_ALIGNED_CORNERS,
    {"tokens": 257, "experts": 8, "chosen": 2, "inner": 520, "outer": 136, "flag": 1, "held": 0},
    {"tokens": 1, "experts": 8, "chosen": 2, "inner": 520, "outer": 129, "flag": 0, "held": 0},
)
_PLAIN_EXPERTS = KernelProblems("experts", _experts, _EXPERTS_SHAPE, _EXPERTS_CORNERS)
_QUANTIZED_EXPERTS, _BIASED_QUANTIZED_EXPERTS, _GELU_QUANTIZED_EXPERTS = (
    in_formats(
        "experts_quantized",
        make,
        _EXPERTS_SHAPE | {"blocks": between(0, 1), "zeros": _FLAG, "active": _FLAG},
        [
            {**corner, "blocks": number % 2, "zeros": number // 2, "active": number % 2}
            for number, corner in enumerate(_ALIGNED_CORNERS)
        ],
        weights=QUANTIZED_FORMATS,
    )
    for make in (_experts, partial(_experts, has_biases=True), partial(_experts, has_gelu=True))
)
_ROUTE = KernelProblems(
    "route",
    _route,
    {"tokens": _TOKENS, "experts": _EXPERTS, "chosen": _CHOSEN, "flag": _FLAG, "held": _HELD},
    [
        {"tokens": 3, "experts": 8, "chosen": 2, "flag": 1, "held": 2},
        {"tokens": 300, "experts": 128, "chosen": 8, "flag": 0, "held": 0},
        {"tokens": 65, "experts": 60, "chosen": 4, "flag": 0, "held": 0},
        {"tokens": 1, "experts": 1, "chosen": 1, "flag": 1, "held": 0},
    ],
)
_CORRECTED_ROUTE = replace(
    _ROUTE.with_operand("corrected_routing", _route_by_correction),
    dimensions={**_ROUTE.dimensions, "scoring": between(0, len(_SCORINGS) - 1)},
    corners=[{**corner, "scoring": number % len(_SCORINGS)} for number, corner in enumerate(_ROUTE.corners)],
)
EXPERTS = (
    _ROUTE,
    _CORRECTED_ROUTE,
    _PLAIN_EXPERTS,
    _PLAIN_EXPERTS.with_operand("expert_biases", partial(_experts, has_biases=True)),
    _PLAIN_EXPERTS.with_operand("expert_gelu", partial(_experts, has_gelu=True)),
    *_QUANTIZED_EXPERTS,
    *(each.with_operand("expert_biases", each.make) for each in _BIASED_QUANTIZED_EXPERTS),
    *(each.with_operand("expert_gelu", each.make) for each in _GELU_QUANTIZED_EXPERTS),
)
