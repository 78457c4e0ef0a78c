"""Random products with quantised weights. Each activation lies well inside one quantisation step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.device import CACHE_FORMATS, QUANTIZED_FORMATS, KernelSet, QuantizedProduct, QuantizedWeight
from outrider.device.kernels.formats import INT8, ElementFormat
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.attention import (
    BATCHES,
    HEADS,
    ROTARY,
    SIZES,
    TURNED,
    attend_into,
    random_batch,
    rotary_of,
    rotary_operands,
    turned_queries,
    with_padding,
)
from outrider_conformance.random_kernels.dense import EPS, halves
from outrider_conformance.random_kernels.dimensions import among, between
from outrider_conformance.random_kernels.experts import weighted_sum
from outrider_conformance.random_kernels.problem import KernelProblems, Operand, Problem, RandomValues, Shape

_BLOCKS = ("channel", "group", "block", "wide group")


def _block(shape: Shape) -> tuple[int, int]:
    kind = _BLOCKS[shape["blocks"]]
    return {"channel": (1, shape["inner"]), "group": (1, 16), "block": (24, 40), "wide group": (1, 128)}[kind]


def _spread(grid: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    return grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _weight(shape: Shape, format: str, dice: RandomValues) -> tuple[dict[str, Operand], Tensor]:
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
    parts, weight = _weight(shape, format, dice)
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
        made = _record(format, shape, o, "own", (shape["outer"], shape["inner"]), **quantized)
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


def _norm_linear_quantized(format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return a problem with unquantised activations, since the quantisation of a norm depends on its last bit.

    ``linear_quantized`` has problems with quantised activations.
    """
    tokens, hidden, inner = shape["tokens"], 40, shape["inner"]
    first, into = _weight({**shape, "outer": hidden}, format, dice)
    second, out_of = _weight({**shape, "inner": hidden}, format, dice)
    operands = {f"first {name}": each for name, each in first.items()} | {
        f"second {name}": each for name, each in second.items()
    }
    x = dice.factors(tokens, inner * (2 if shape["active"] else 1), dtype=dtype)
    residual, norm = dice.normal(tokens, hidden, dtype=dtype), dice.normal(hidden, dtype=dtype)
    operands |= {"x": Operand(x), "residual": Operand(residual), "norm": Operand(norm)}
    biases = {"first bias": hidden, "second bias": shape["outer"]} if shape["bias"] else {}
    given = {name: dice.normal(size, dtype=dtype) for name, size in biases.items()}
    operands |= {name: Operand(bias) for name, bias in given.items()}
    number = bounds.exact(x)
    if shape["active"]:
        number = bounds.silu_mul(*halves(number), dtype)
    made = bounds.product(_once_more(number, dtype), into, given.get("first bias"), dtype)
    grown = bounds.add(bounds.exact(residual), made, dtype)
    wanted = _normed_product(grown, norm, out_of, given.get("second bias"), dtype)

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"out": kernels.norm_linear_quantized(*_fused_arguments(format, shape, o))}

    return Problem(operands, call, {"out": wanted, "residual": grown})


def _linear_quantized_add(
    format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues, *, normed: bool = False
) -> Problem:
    """Return the problem of the first product and the residual only, followed by a norm if ``normed``."""
    made = _norm_linear_quantized(format, shape, dtype, dice)
    grown = made.wanted["residual"]
    assert isinstance(grown, bounds.Number)
    operands = {name: each for name, each in made.operands.items() if not name.startswith("second")}
    norm = operands["norm"].tensor if normed else operands.pop("norm").tensor
    wanted = bounds.rms_norm(grown, norm, EPS, dtype) if normed else grown

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        added, residual = _first(format, shape, o), o["residual"]
        if normed:
            return {"out": kernels.linear_quantized_add_rms_norm(added, residual, o["norm"], EPS)}
        return {"out": kernels.linear_quantized_add(added, residual)}

    return Problem(operands, call, {"out": wanted, "residual": grown})


def _normed_product(
    grown: bounds.Number, norm: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> bounds.Number:
    """Return the product of the norm of ``grown`` (product plus residual) with ``weight``."""
    return bounds.product(_once_more(bounds.rms_norm(grown, norm, EPS, dtype), dtype), weight, bias, dtype)


def _fused_arguments(
    format: str, shape: Shape, o: Mapping[str, Tensor]
) -> tuple[QuantizedProduct, Tensor, Tensor, float, QuantizedWeight, Tensor | None]:
    """Return the arguments of ``norm_linear_quantized``."""
    second = _record(format, shape, o, "second", (shape["outer"], o["residual"].shape[1]))
    return _first(format, shape, o), o["residual"], o["norm"], EPS, second, o.get("second bias")


def _first(format: str, shape: Shape, o: Mapping[str, Tensor]) -> QuantizedProduct:
    first = _record(format, shape, o, "first", (o["residual"].shape[1], shape["inner"]))
    return QuantizedProduct(o["x"], first, o.get("first bias"), bool(shape["active"]))


def _embed_beside_linear_quantized(format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return a problem with unquantised activations: embeddings joined with hidden states."""
    parts, weight = _weight(shape, format, dice)
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
        own = _record(format, shape, o, "own", (shape["outer"], shape["inner"]))
        joined = kernels.embed_beside_linear_quantized
        return {"out": joined(o["tokens"], o["embedding"], o["hidden"], own, o.get("bias"))}

    return Problem(operands, call, {"out": bounds.product(_once_more(bounds.exact(x), dtype), weight, bias, dtype)})


def _linear_quantized_rope(
    format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None
) -> Problem:
    heads, kv_heads = HEADS[shape["heads"]]
    size = SIZES[shape["size"]]
    shape = {**shape, "outer": (heads + 2 * kv_heads) * size, "active": 0}
    more, real = rotary_operands(shape, dtype, dice, shape["tokens"], kv_heads, size, cache)
    parts, weight = _weight(shape, format, dice)
    x = dice.factors(shape["tokens"], shape["inner"], dtype=dtype)
    bias = dice.normal(shape["outer"], dtype=dtype) if shape["bias"] else None
    operands = {**{f"own {name}": each for name, each in parts.items()}, **more, "x": Operand(x)}
    operands |= {} if bias is None else {"bias": Operand(bias)}
    product = bounds.rounded(bounds.product(_once_more(bounds.exact(x), dtype), weight, bias, dtype), dtype)

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        own = _record(format, shape, o, "own", (shape["outer"], shape["inner"]))
        return {"out": kernels.linear_quantized_rope_write_cache(o["x"], own, o.get("bias"), rotary_of(o))}

    return Problem(operands, call, turned_queries(product, operands, heads, kv_heads, real, dtype))


def _norm_linear_quantized_rope(
    format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None
) -> Problem:
    heads, kv_heads = HEADS[shape["heads"]]
    size = SIZES[shape["size"]]
    shape = {**shape, "outer": (heads + 2 * kv_heads) * size}
    made = _norm_linear_quantized(format, shape, dtype, dice)
    more, real = rotary_operands(shape, dtype, dice, shape["tokens"], kv_heads, size, cache)
    operands = {**made.operands, **more}
    product = made.wanted["out"]
    assert isinstance(product, bounds.Number)
    product = bounds.rounded(product, dtype)
    wanted = turned_queries(product, operands, heads, kv_heads, real, dtype)

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"out": kernels.norm_linear_quantized_rope_write_cache(*_fused_arguments(format, shape, o), rotary_of(o))}

    return Problem(operands, call, {**wanted, "residual": made.wanted["residual"]})


def _attention_norm_linear_quantized(
    format: str, shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None, *, activated: bool = False
) -> Problem:
    """Return a problem with unquantised activations. A kernel may round the attention to the dtype, or not.

    ``activated``: the second weight is gate and up, and the result is the input of the following product.
    """
    batch = random_batch(shape, dtype, dice, cache)
    tokens, inner = batch.operands["q"].tensor.shape[0], batch.operands["q"].tensor[0].numel()
    sizes = {"first": (shape["hidden"], inner), "second": (shape["outer"], shape["hidden"])}
    if activated:
        width = -(-shape["outer"] // 8) * 8  # operands are handed on as words of four bytes
        sizes |= {"second": (2 * width, shape["hidden"]), "down": (shape["hidden"], width)}
    operands = dict(batch.operands)
    exact: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    for name, (rows, columns) in sizes.items():
        parts, exact[name] = _weight({**shape, "outer": rows, "inner": columns}, format, dice)
        operands |= {f"{name} {key}": each for key, each in parts.items()}
        if shape["bias"]:
            given[name] = dice.normal(rows, dtype=dtype)
            operands[f"{name} bias"] = Operand(given[name])
    residual = dice.normal(tokens, shape["hidden"], dtype=dtype)
    # Near zero an activation is linear, and gate and up could be exchanged.
    norm = dice.normal(shape["hidden"], dtype=dtype, scale=3.0 if activated else 1.0)
    operands |= {"residual": Operand(residual), "norm": Operand(norm)}
    grown, outs = [], []
    counts = [len(sequence.q) for sequence in batch.sequences]
    for sequence, rows in zip(batch.sequences, residual[: sum(counts)].split(counts), strict=True):
        attended, off = attend_into(sequence, batch.window, batch.scale, exact["first"], dtype)
        x = bounds.Number(attended.value.flatten(1), attended.error.flatten(1))
        made = bounds.product(_once_more(x, dtype), exact["first"], given.get("first"), dtype)
        made = bounds.Number(made.value, made.error + off * (1 + 4 * bounds.UNIT[dtype]))
        grown.append(bounds.add(bounds.exact(rows), made, dtype))
        outs.append(_normed_product(grown[-1], norm, exact["second"], given.get("second"), dtype))
        if activated:
            outs[-1] = bounds.silu_mul(*halves(outs[-1]), dtype)

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        output, weight, *down = (_record(format, shape, o, name, size) for name, size in sizes.items())
        attended = o["q"], o["k_cache"], o["v_cache"], batch.metadata(o), output, o.get("first bias")
        following = o["residual"], o["norm"], EPS, weight, o.get("second bias")
        how = batch.scale, batch.window
        if not activated:
            joined = kernels.attention_norm_linear_quantized
            return {"out": joined(*attended, *following, scale=how[0], window=how[1])}
        pending = down[0], o.get("down bias")
        made = kernels.attention_norm_linear_silu_mul_quantized(*attended, *following, *pending, scale=how[0], window=how[1])
        return {"out": _taken(made, *pending, real=sum(counts))}

    wanted = {"out": with_padding(outs, batch.padding), "residual": with_padding(grown, batch.padding)}
    return Problem(operands, call, wanted)


def _taken(made: QuantizedProduct, down: QuantizedWeight, bias: Tensor | None, *, real: int) -> Tensor:
    """Return the activated input of a pending product, after checks of its weight, bias and row maxima."""
    assert made.weight is down, "the product that is left to be made is one with another weight"
    assert made.bias is bias, "the product that is left to be made has another bias"
    x = KernelSet().silu_mul(made.x) if made.gated else made.x
    if made.maxima is not None:
        assert made.maxima.dtype is torch.float32, f"maxima are {made.maxima.dtype}, expected torch.float32"
        found, wanted = made.maxima.amax(0)[:real], x[:real].abs().amax(1).float()
        assert torch.equal(found, wanted), "maxima aren't the largest magnitudes of the rows that are multiplied"
    return x


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
        parts, value = _weight({**form, "outer": size[0], "inner": size[1]}, format, dice)
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
        first, second = (_record(format, form, o, name, size) for name, size in sizes.items())
        return {"out": kernels.experts_quantized(o["x"], o["weights"], o["chosen"], first, second)}

    return Problem(operands, call, {"out": wanted})


def _record(
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


_TURNS = {name: each for name, each in _DIMENSIONS.items() if name != "outer"} | ROTARY
_TURNED = tuple({**corner, **TURNED, "tokens": corner["tokens"]} for corner in _CORNERS)
_ATTENDED = {
    **{name: each for name, each in BATCHES.items() if name not in ("new", "context")},
    "new": between(1, 9, 33),
    "context": between(0, 300, 1023),
    "hidden": among(40, 128),
    "outer": among(1, 24, 80, 129),
    "blocks": between(0, 3),
    "zeros": between(0, 1),
    "bias": between(0, 1),
}
_FEW = {"ragged": 0, "tree": 0, "window": 0, "padding": 0, "heads": 0, "size": 2, "page": 1}
_FEW |= {"hidden": 40, "outer": 24, "blocks": 3, "zeros": 0, "bias": 0}
_ATTENDING = (
    {**_FEW, "batch": 3, "new": 1, "context": 600},
    {**_FEW, "batch": 2, "new": 4, "context": 300, "ragged": 1, "padding": 3, "heads": 2, "blocks": 0, "zeros": 1, "bias": 1},
    {**_FEW, "batch": 3, "new": 6, "context": 150, "ragged": 1, "tree": 1, "heads": 3, "hidden": 128, "outer": 80},
    {**_FEW, "batch": 2, "new": 3, "context": 200, "window": 9, "heads": 1, "size": 0, "blocks": 1, "page": 3, "bias": 1},
    {**_FEW, "batch": 2, "new": 33, "context": 70, "ragged": 1, "padding": 5, "size": 1, "blocks": 2},
)
_OVER_CACHES = (
    ("linear_quantized_rope_write_cache", _linear_quantized_rope, _TURNS, _TURNED),
    ("norm_linear_quantized_rope_write_cache", _norm_linear_quantized_rope, _TURNS, _TURNED),
    ("attention_norm_linear_quantized", _attention_norm_linear_quantized, _ATTENDED, _ATTENDING),
    (
        "attention_norm_linear_silu_mul_quantized",
        partial(_attention_norm_linear_quantized, activated=True),
        _ATTENDED,
        _ATTENDING,
    ),
)
QUANTIZED = (
    *(
        KernelProblems(f"{name}, {format}", partial(make, format), _DIMENSIONS, _CORNERS, format=format)
        for name, make in (
            ("linear_quantized", _linear_quantized),
            ("embed_beside_linear_quantized", _embed_beside_linear_quantized),
            ("linear_quantized_add", _linear_quantized_add),
            ("linear_quantized_add_rms_norm", partial(_linear_quantized_add, normed=True)),
            ("norm_linear_quantized", _norm_linear_quantized),
            ("experts_quantized", _experts_quantized),
        )
        for format in QUANTIZED_FORMATS
    ),
    *(
        KernelProblems(
            ", ".join((name, format, *(() if cache is None else (f"cache {cache}",)))),
            partial(make, format, cache=cache),
            dimensions,
            corners,
            format=format,
            cache=cache,
        )
        for name, make, dimensions, corners in _OVER_CACHES
        for format in QUANTIZED_FORMATS
        for cache in (None, *CACHE_FORMATS)
    ),
)
