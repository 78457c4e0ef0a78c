"""Random bookkeeping of an iteration: row copies, token positions, accepted tokens, and findings of probes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import KernelSet, RequestInputs, RequestRows
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.problem import (
    MANY,
    KernelProblems,
    Operand,
    Problem,
    RandomValues,
    Shape,
    Wanted,
    among,
    between,
    kernel_call,
    row_counts,
)

Mapped = Mapping[str, Tensor]


def _rows(dice: RandomValues, batch: int, requests: int) -> Tensor:
    """Return distinct indices of request rows, among them the last one, with padding (row 0) in larger batches."""
    rows = torch.cat((torch.tensor([requests - 1]), dice.permutation(requests - 2)[: batch - 1] + 1))
    if batch > 2:
        rows[1] = 0
    if batch > 4:
        rows[-1] = 0
    return rows


def _requests_of(shape: Shape) -> int:
    return MANY if shape.get("far") else shape["batch"] + 4


def _state(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Tensor:
    many = (_requests_of(shape), *((3,) if shape["deep"] else ()), shape["width"])
    return _numbers(shape, dtype, dice, *many)


def _numbers(shape: Shape, dtype: torch.dtype, dice: RandomValues, *many: int) -> Tensor:
    """Return random numbers of ``dtype``, or integers that no floating-point number holds if ``shape`` has ``whole``."""
    return dice.integers(-(1 << 62), 1 << 62, *many) if shape["whole"] else dice.normal(*many, dtype=dtype)


def _stale(like: Tensor) -> Tensor:
    """Return the contents of an output before the call, which the kernel must overwrite: NaN, or the number 7."""
    return torch.full_like(like, torch.nan if like.is_floating_point() else 7)


def _unchanged(x: Tensor) -> Wanted:
    """Return the expected result of a copy of ``x``."""
    return bounds.exact(x) if x.is_floating_point() else x


def _gather(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    state = _state(shape, dtype, dice)
    rows = dice.integers(0, state.shape[0], shape["batch"])
    rows[-1] = state.shape[0] - 1
    if not shape["whole"]:  # a product with zeros isn't zero
        unread = torch.ones(len(state), dtype=torch.bool)
        unread[rows] = False
        state[unread] = torch.nan
    operands = {"state": Operand(state, "rows" if shape["deep"] else "wide"), "rows": Operand(rows)}
    return Problem(operands, kernel_call("gather_rows", *operands), {"out": _unchanged(state[rows])})


def _copy(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    source = dice.normal(shape["batch"], shape["width"], dtype=dtype)
    out = Operand(_stale(source), "wide")
    operands = {"source": Operand(source, "wide" if shape["flag"] else "rows"), "out": out}

    return Problem(operands, kernel_call("copy_rows", *operands), {"out": bounds.exact(source)})


def _scatter(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    state = _state(shape, dtype, dice)
    rows = _rows(dice, shape["batch"], state.shape[0])
    values = _numbers(shape, dtype, dice, shape["batch"], *state.shape[1:])
    if not shape["whole"]:
        state[rows[rows > 0]] = torch.nan
    after = state.clone()
    after[rows[rows > 0]] = values[rows > 0]
    operands = {"state": Operand(state), "rows": Operand(rows), "values": Operand(values, "wide")}

    return Problem(operands, kernel_call("scatter_rows", *operands), {"state": _unchanged(after)})


_OF_REQUESTS = ("rows", "lens", "last_tokens", "seeds", "temperature", "tables")


def _requests(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    batch, requests, by_row = shape["batch"], _requests_of(shape), bool(shape["flag"])
    rows = _rows(dice, batch, requests)
    state = {
        "rows": rows,
        "lens": dice.indices(2 * MANY, requests if by_row else batch),
        "last_tokens": dice.integers(0, 1 << 20, requests),
        "seeds": dice.integers(-(1 << 62), 1 << 62, requests),
        "temperature": dice.uniform(requests),
        "tables": dice.integers(0, 1 << 20, requests, shape["width"], dtype=torch.int32),
    }
    wanted: dict[str, Wanted] = {}
    for name, value in state.items():
        taken = value if name == "rows" or (name == "lens" and not by_row) else value[rows]
        wanted[f"own_{name}"] = taken if not taken.is_floating_point() else bounds.exact(taken)
    own = {f"own_{name}": Operand(_stale(value[rows] if len(value) == requests else value)) for name, value in state.items()}
    wanted["found"] = torch.full((batch, 6), -1)
    operands = {name: Operand(value) for name, value in state.items()} | own
    operands["found"] = Operand(_stale(torch.zeros(batch, 6, dtype=torch.int64)), "wide")

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        read = RequestRows(o["last_tokens"], o["seeds"], o["temperature"], o["tables"])
        mine = RequestInputs(*(o[f"own_{name}"] for name in _OF_REQUESTS))
        kernels.gather_requests(o["rows"], o["lens"], read, mine, o["found"], lens_by_row=by_row)
        return {}

    return Problem(operands, call, wanted)


def _spoil(numbers: Tensor, dice: RandomValues) -> Tensor:
    """Write NaN to random rows, also at both ends and several per row, and infinity, which the kernel must not report."""
    flat = numbers.view(numbers.shape[0], -1)
    size = flat.shape[1]
    flat[0, -1] = torch.nan
    for row in range(1, flat.shape[0]):
        kind = int(dice.integers(0, 4, 1))
        if kind == 1:
            flat[row, dice.integers(0, size, 3)] = torch.nan
        elif kind == 2:
            flat[row, 0] = flat[row, -1] = torch.nan
        elif kind == 3:
            flat[row, 0], flat[row, -1] = -torch.inf, torch.inf  # the sum of a row with both is NaN
    return numbers


def _first(bad: Tensor, values: Tensor | None) -> Tensor:
    index = torch.where(bad.any(1), bad.to(torch.int8).argmax(1), -1)
    value = torch.full_like(index, -1)
    if values is not None:
        value = torch.where(index >= 0, values.gather(1, index.clamp(min=0).unsqueeze(1)).squeeze(1), -1)
    return torch.stack((index, value), dim=1)


def _find(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    x = _spoil(dice.normal(shape["batch"], shape["width"], dtype=dtype), dice)
    operands = {
        "x": Operand(x, "wide" if shape["flag"] else "rows"),
        "found": Operand(_stale(torch.zeros(shape["batch"], 2, dtype=torch.int64)), "wide"),
    }

    return Problem(operands, kernel_call("find_nan", *operands), {"found": _first(x.isnan(), None)})


def _checked(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return random floating rows, some with NaN, as operands of the check for NaN."""
    source = _spoil(dice.normal(shape["batch"] + 3, 2, shape["width"], dtype=dtype), dice)
    return _checked_gather(source, None, shape, dice)


def _checked_tokens(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return random tokens within the vocabulary's bounds, outside them by one, or far outside."""
    low, high = int(dice.integers(-3, 3, 1)), int(dice.integers(5, 2000, 1))
    source = dice.integers(low, high, shape["batch"] + 3, shape["width"] % 30 + 1)
    for row in range(source.shape[0]):
        bad = (None, low - 1, high, 1 << 40, -(1 << 40), high - 1)[int(dice.integers(0, 6, 1))]
        if bad is not None:
            source[row, dice.integers(0, source.shape[1], 2)] = bad
    source[0, -1] = high
    return _checked_gather(source, (low, high), shape, dice)


def _checked_gather(source: Tensor, limits: tuple[int, int] | None, shape: Shape, dice: RandomValues) -> Problem:
    rows = dice.integers(0, source.shape[0], shape["batch"]) if shape["flag"] else None
    value = source if rows is None else source[rows]
    flat = value.reshape(value.shape[0], -1)
    if limits is None:
        found = _first(flat.isnan(), None)
        out: Wanted = bounds.exact(value)
    else:
        found = _first((flat < limits[0]) | (flat >= limits[1]), flat)
        out = torch.where((found[:, :1] < 0), value, limits[0])
    operands = {
        "source": Operand(source),
        "out": Operand(_stale(value)),
        "found": Operand(_stale(found), "wide"),
    }
    if rows is not None:
        operands["rows"] = Operand(rows)

    call = kernel_call("gather_checked", "source", "rows", "out", "found", bounds=limits)
    return Problem(operands, call, {"out": out, "found": found})


def _place(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    batch, count, page = shape["batch"], shape["count"], (4, 16, 128)[shape["page"]]
    pages = MANY // page if shape["far"] else shape["width"] % 40 + 1
    ends = int(dice.integers(1, count + 1, 1))
    capacity = pages * page
    lens = dice.indices(capacity, batch)
    lens[-1] = capacity - 1  # the table ends among the new tokens
    if batch > 1:
        lens[0] = 0
    tables = dice.indices(1 << 20, batch, pages, dtype=torch.int32) + 1
    last = int(dice.integers(capacity // 2, capacity + count, 1))
    positions, slots = (torch.zeros(batch, count, dtype=torch.int64) for _ in range(2))
    seq_lens = torch.zeros(batch, ends, dtype=torch.int32)
    for row in range(batch):
        for node in range(count):
            at = int(lens[row]) + node
            positions[row, node] = min(at, last)
            index = at // page
            slots[row, node] = (int(tables[row, index]) if index < pages else 0) * page + at % page
            if node >= count - ends:
                seq_lens[row, node - count + ends] = min(at + 1, capacity)
    names = ("positions", "slots", "seq_lens")
    values = (positions, slots, seq_lens)
    operands = {"lens": Operand(lens), "tables": Operand(tables)}
    layouts = ("wide", "columns", "wide")
    operands |= {n: Operand(_stale(v), how) for n, v, how in zip(names, values, layouts, strict=True)}

    return Problem(
        operands, kernel_call("place_tokens", "lens", "tables", page, last, *names), dict(zip(names, values, strict=True))
    )


def _decided(dice: RandomValues, batch: int, count: int) -> tuple[Tensor, Tensor]:
    """Return random tokens [B, E] with -1 after the decided token, and accepted counts, among them zero and the maximum."""
    accepted = dice.integers(0, count, batch)
    accepted[0] = count - 1
    tokens = dice.integers(0, 1 << 20, batch, count)
    tokens[torch.arange(count) > accepted.unsqueeze(1)] = -1
    return tokens, accepted


def _publish(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    batch, requests = shape["batch"], _requests_of(shape)
    rows = _rows(dice, batch, requests)
    tokens, accepted = _decided(dice, batch, shape["count"])
    lens = dice.indices(2 * MANY, batch)
    lengths, last = dice.integers(0, 5000, requests), dice.integers(0, 1 << 20, requests)
    pending = dice.integers(-5, 6, requests)
    lengths[0] = last[0] = 7 if 0 in rows else 0  # padding makes it 0
    pending[0] = lengths[0] if shape["flag"] else 0
    wanted_lengths, wanted_last, wanted_pending = lengths.clone(), last.clone(), pending.clone()
    for index, row in enumerate(rows.tolist()):
        wanted_lengths[row] = lens[index] + accepted[index] + 1 if row else 0
        wanted_last[row] = tokens[index, accepted[index]] if row else 0
        if shape["flag"]:
            wanted_pending[row] = (accepted[index] + 1) * (-1 if pending[row] > 0 else 1) if row else 0
    wanted: dict[str, Wanted] = {
        "lengths": wanted_lengths,
        "last_tokens": wanted_last,
        "pending": wanted_pending,
        "results": torch.cat((accepted.unsqueeze(1), tokens), dim=1),
        "own_tokens": tokens,
        "own_accepted": accepted,
    }
    operands = {name: Operand(value) for name, value in (("rows", rows), ("lens", lens), ("tokens", tokens))}
    operands |= {"accepted": Operand(accepted), "lengths": Operand(lengths), "last_tokens": Operand(last)}
    operands["results"] = Operand(_stale(torch.zeros(batch, 1 + shape["count"], dtype=torch.int64)), "wide")
    operands |= {"own_tokens": Operand(_stale(tokens)), "own_accepted": Operand(_stale(accepted))}
    operands["pending"] = Operand(pending)

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        decided, own = (o["tokens"], o["accepted"]), (o["own_tokens"], o["own_accepted"])
        held = o["pending"] if shape["flag"] else None
        kernels.publish_accepted(o["rows"], o["lens"], decided, o["lengths"], o["last_tokens"], o["results"], own, held)
        return {}

    return Problem(operands, call, wanted)


def _extend(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    batch, count = shape["batch"], shape["count"]
    tokens, accepted = _decided(dice, batch, count)
    lens = dice.indices(2 * MANY, batch)
    wanted: dict[str, Wanted] = {
        "following": tokens.clamp(min=0),
        "last": torch.arange(batch) * count + accepted,
        "positions": lens + accepted + 2,
    }
    operands = {"lens": Operand(lens), "tokens": Operand(tokens), "accepted": Operand(accepted)}
    operands |= {name: Operand(_stale(value)) for name, value in wanted.items() if isinstance(value, Tensor)}

    names = ("lens", "tokens", "accepted", "following", "last", "positions")
    return Problem(operands, kernel_call("place_accepted", *names), wanted)


_BATCH = row_counts(1, 9)
_WIDTH = between(1, 70, 1024, 1025, 4099)
_FLAG = between(0, 1)
_FAR = {"far": among(0, rare=(1,))}
_COUNT = between(1, 9)
_FEW, _WIDE, _TALL = {"batch": 6, "width": 24}, {"batch": 3, "width": 4099}, {"batch": 300, "width": 35}


def _corners(**more: int) -> list[dict[str, int]]:
    return [{**corner, **more} for corner in (_FEW, _WIDE, _TALL)]


_ROWS = {"batch": _BATCH, "width": _WIDTH, "deep": _FLAG, "whole": _FLAG}
_LOOKED = {"batch": _BATCH, "width": _WIDTH, "flag": _FLAG}
_DECIDED = {"batch": _BATCH, "count": _COUNT}
BOOKKEEPING = (
    KernelProblems(
        "gather_rows",
        _gather,
        _ROWS | _FAR,
        [*_corners(deep=1, whole=0), *_corners(deep=0, whole=1), {"batch": 1, "width": 1024, "deep": 0, "whole": 0}],
    ),
    KernelProblems("copy_rows", _copy, _LOOKED, [*_corners(flag=0), *_corners(flag=1)]),
    KernelProblems("scatter_rows", _scatter, _ROWS | _FAR, [*_corners(deep=1, whole=0), *_corners(deep=0, whole=1)]),
    KernelProblems("gather_requests", _requests, _LOOKED | _FAR, [*_corners(flag=0), *_corners(flag=1)], choices=True),
    KernelProblems(
        "find_nan",
        _find,
        _LOOKED | {"width": between(1, 70, 1024, 1025, 4099, rare=(MANY,))},
        [*_corners(flag=0), *_corners(flag=1)],
    ),
    KernelProblems("gather_checked", _checked, _LOOKED, [*_corners(flag=0), *_corners(flag=1)]),
    KernelProblems(
        "gather_checked, whole numbers", _checked_tokens, _LOOKED, [*_corners(flag=0), *_corners(flag=1)], choices=True
    ),
    KernelProblems(
        "place_tokens",
        _place,
        {"batch": _BATCH, "width": _WIDTH, "count": _COUNT, "page": between(0, 2)} | _FAR,
        [*_corners(count=5, page=0, far=0), *_corners(count=9, page=1, far=0), *_corners(count=1, page=2, far=0)],
        choices=True,
    ),
    KernelProblems(
        "publish_accepted",
        _publish,
        {"batch": _BATCH, "count": _COUNT, "flag": _FLAG} | _FAR,
        [*_corners(count=5, flag=0)[::2], *_corners(count=5, flag=1)[::2]],
        choices=True,
    ),
    KernelProblems("place_accepted", _extend, _DECIDED, _corners(count=5)[::2], choices=True),
)
