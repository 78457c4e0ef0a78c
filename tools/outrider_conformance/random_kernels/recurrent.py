"""Random problems of the kernels of recurrent layers. A loop over tokens in float64 computes the expected results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from outrider.device import KernelSet, RecurrentBatch, Stream
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dense import EPS, Mapped, norm_weight
from outrider_conformance.random_kernels.problem import (
    KernelProblems,
    Operand,
    Problem,
    RandomValues,
    Shape,
    among,
    between,
    row_counts,
    same_bits,
)

_ROUNDINGS = 64.0
"""Number of roundings of one token's step through the state, relative to the largest magnitude; norms and exponentials
included.
"""
_CHUNK_ROUNDINGS = 16.0
"""Number of roundings to 16 bits of the operands of a chunk's products, relative to the largest magnitude."""
Sequences = list[tuple[int, int, int, bool]]
"""For each sequence: its state row, its first token, its number of tokens, and True if it has no earlier token."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _sequences(shape: Shape, dice: RandomValues) -> tuple[dict[str, Operand], Sequences, int]:
    """Return the operands of a batch, its sequences (row, first token, tokens, whether it starts), and its tokens."""
    batch, most = shape["batch"], shape["new"]
    counts = [most] * batch if not shape["ragged"] else [int(dice.integers(1, most + 1, 1)) for _ in range(batch)]
    starts = [sum(counts[:number]) for number in range(batch + 1)]
    rows = (dice.permutation(batch + 1)[:batch] + 1).tolist()
    if shape["padding"] and batch > 1:  # sequences of padding share row 0
        rows[-1] = rows[batch // 2] = 0
    fresh = [dice.coin() for _ in range(batch)]
    lens = [count if first else count + 5 for count, first in zip(counts, fresh, strict=True)]
    operands = {
        "rows": Operand(torch.tensor(rows)),
        "query_start": Operand(torch.tensor(starts, dtype=torch.int32)),
        "seq_lens": Operand(torch.tensor(lens, dtype=torch.int32)),
    }
    padding = 2 if shape["padding"] else 0
    return operands, list(zip(rows, starts[:-1], counts, fresh, strict=True)), starts[-1] + padding


def _spoil_unread(state: Tensor, sequences: Sequences) -> Tensor:
    """Write NaN to the rows of ``state`` that no sequence reads: also to those of sequences without earlier tokens."""
    read = {row for row, _, _, fresh in sequences if not fresh}
    state[[row for row in range(1, len(state)) if row not in read]] = torch.nan
    return state


def _batch(o: Mapped, shape: Shape) -> RecurrentBatch:
    uniform = not shape["ragged"] and not shape["padding"]
    return RecurrentBatch(o["rows"], o["query_start"], o["seq_lens"], shape["new"], uniform=uniform)


def _committed(shape: Shape, count: int, dice: RandomValues) -> int:
    return int(dice.integers(1, count + 1, 1)) if shape["partial_commit"] else count


def _largest(value: Tensor) -> float:
    """Return 1 plus the largest magnitude in ``value``, NaN left out."""
    return 1.0 + float(value.abs().nan_to_num(0.0).max())


def _with_error(value: Tensor, steps: int, dtype: torch.dtype) -> bounds.Number:
    """Return ``value`` with the error of ``steps`` tokens, relative to its largest magnitude."""
    error = torch.full_like(value, _ROUNDINGS * steps * bounds.wide(dtype) * _largest(value))
    return bounds.Number(value, error)


def _convolve(x: Tensor, weight: Tensor, state: Tensor, sequences: Sequences, commit: Tensor) -> tuple[Tensor, Tensor]:
    """Return the convolution in float64, and the state after the committed tokens."""
    kernel = weight.shape[1]
    made, after = torch.zeros(x.shape, dtype=torch.float64), state.clone()
    for number, (row, start, count, fresh) in enumerate(sequences):
        before = torch.zeros_like(state[row]) if fresh else state[row]
        inputs = torch.cat((before, x[start : start + count])).double()
        for token in range(count):
            summed = (inputs[token : token + kernel] * weight.double().T).sum(0)
            made[start + token] = summed * torch.sigmoid(summed)
        after[row] = inputs[commit[number] : commit[number] + kernel - 1].to(state.dtype)
    return made, after


def _short_convolution(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    operands, sequences, tokens = _sequences(shape, dice)
    channels, kernel = shape["channels"], shape["kernel_size"]
    x, weight = dice.normal(tokens, channels, dtype=dtype), dice.normal(channels, kernel, dtype=dtype)
    state = _spoil_unread(dice.normal(shape["batch"] + 2, kernel - 1, channels, dtype=dtype), sequences)
    commit = torch.tensor([_committed(shape, count, dice) for _, _, count, _ in sequences])
    made, after = _convolve(x, weight, state, sequences, commit)
    operands |= {"x": Operand(x, "wide"), "weight": Operand(weight), "state": Operand(state), "commit": Operand(commit)}

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        committed = None if shape["uncommitted"] else o["commit"]
        return {"out": kernels.short_convolution(o["x"], o["weight"], o["state"], _batch(o, shape), committed)}

    unit = _of_tokens(bounds.rounded(_with_error(made, kernel, dtype), dtype, 2.0), sequences)
    wanted = bounds.exact(state) if shape["uncommitted"] else _of_rows(bounds.exact(after))
    return Problem(operands, call, {"out": unit, "state": wanted})


def _of_tokens(x: bounds.Number, sequences: Sequences) -> bounds.Number:
    """Return the results ``x``: without an error for tokens of no sequence, which are zeros, and with any finite numbers for
    sequences of padding.
    """
    x.error[sequences[-1][1] + sequences[-1][2] :] = 0
    for row, start, count, _ in sequences:
        x.error[start : start + count] += 0 if row else torch.inf
    return x


def _of_rows(state: bounds.Number) -> bounds.Number:
    """Return ``state`` with any finite numbers in row 0, which takes padding."""
    state.error[0] = torch.inf
    return state


def _apply_rule(o: Mapping[str, Operand], sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return the delta rule of ``mixed`` in float64, and the state after the committed tokens."""
    mixed, gates, state, commit = (o[name].tensor for name in ("mixed", "gates", "state", "commit"))
    heads, key, value = state.shape[1:]
    width = (mixed.shape[1] - heads * value) // 2
    made, after = torch.zeros(mixed.shape[0], heads, value, dtype=torch.float64), state.to(torch.float64, copy=True)
    q, k, v = mixed.double().split((width, width, heads * value), dim=1)

    def normalized(each: Tensor) -> Tensor:
        each = each.unflatten(1, (-1, key))
        return (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(heads * key // width, dim=1)

    q, k, v = normalized(q) / key**0.5, normalized(k), v.unflatten(1, (heads, value))
    beta, a = gates.double().chunk(2, dim=1)
    rate = o["a_log"].tensor.double().exp()
    factor = torch.exp(-rate * torch.nn.functional.softplus(a + o["dt_bias"].tensor.double()))
    for number, (row, start, count, fresh) in enumerate(sequences):
        current = torch.zeros_like(after[row]) if fresh else state[row].double()
        after[row] = current
        for token in range(start, start + count):
            current = current * factor[token].view(-1, 1, 1)
            read = torch.einsum("hke,hk->he", current, k[token])
            write = beta[token].sigmoid().unsqueeze(1) * (v[token] - read)
            current = current + torch.einsum("hk,he->hke", k[token], write)
            made[token] = torch.einsum("hke,hk->he", current, q[token])
            if token - start < commit[number]:
                after[row] = current
    return made, after


def _rule_operands(
    shape: Shape, dtype: torch.dtype, dice: RandomValues, *, whole: bool = False
) -> tuple[dict[str, Operand], Sequences]:
    """Return random operands of the delta rule. ``whole``: all tokens are committed."""
    operands, sequences, tokens = _sequences(shape, dice)
    key_heads, key, value = shape["heads"], shape["key_size"], shape["value_size"]
    heads = key_heads * shape["repeats"]
    gates = dice.normal(tokens, 2 * heads, dtype=dtype)
    gates[::3] *= 16  # exponentials overflow
    mixed = dice.normal(tokens, 2 * key_heads * key + heads * value, dtype=dtype)
    mixed[1::3] *= 2.0**-9  # the number under the root of a norm counts
    mixed[2::6] = 0
    state = dice.normal(shape["batch"] + 2, heads, key, value, dtype=_wide(dtype))
    operands |= {
        "mixed": Operand(mixed),
        "gates": Operand(gates, "wide"),
        "a_log": Operand(dice.normal(heads, dtype=_wide(dtype))),
        "dt_bias": Operand(dice.normal(heads, dtype=_wide(dtype))),
        "state": Operand(_spoil_unread(state, sequences)),
        "commit": Operand(torch.tensor([each[2] if whole else _committed(shape, each[2], dice) for each in sequences])),
    }
    return operands, sequences


def _rule(shape: Shape, dtype: torch.dtype, dice: RandomValues, *, chunks: bool) -> Problem:
    operands, sequences = _rule_operands(shape, dtype, dice, whole=chunks)
    made, after = _apply_rule(operands, sequences)
    real = sequences[-1][1] + sequences[-1][2]
    writes = chunks or not shape["uncommitted"]
    counts = operands["commit"].tensor.tolist() if writes else [count for _, _, count, _ in sequences]
    kept = [start + i for (_, start, _, _), count in zip(sequences, counts, strict=True) for i in range(count)]
    kept += range(real, made.shape[0])
    operands["defined"] = Operand(defined := torch.tensor(kept))  # on the device, since a capture can't upload it

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        given = o["mixed"], o["gates"], o["a_log"], o["dt_bias"], o["state"], _batch(o, shape)
        if chunks:
            return {"out": kernels.chunk_gated_delta_rule(*given)}
        out = kernels.gated_delta_rule(*given, o["commit"] if writes else None)
        return {"out": out.index_select(0, o["defined"])}

    steps = shape["new"] + shape["key_size"]
    if chunks and dtype.itemsize < 4:  # the products of a chunk may round their operands
        factor = _CHUNK_ROUNDINGS * torch.finfo(dtype).eps
        errors = [torch.full_like(each, factor * _largest(each)) for each in (made, after)]
        out = _of_tokens(bounds.rounded(bounds.Number(made, errors[0]), dtype), sequences)
        return Problem(operands, call, {"out": out, "state": _of_rows(bounds.Number(after, errors[1]))})
    out = _of_tokens(bounds.rounded(_with_error(made, steps, dtype), dtype), sequences)
    wanted: dict[str, bounds.Number | Tensor] = {"out": out[defined]}
    wanted["state"] = _of_rows(_with_error(after, steps, dtype)) if writes else bounds.exact(operands["state"].tensor)
    return Problem(operands, call, wanted)


def _gated_rms_norm(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    size = shape["outer"]
    x, gate = (dice.normal(shape["tokens"], shape["heads"], size, dtype=dtype) for _ in range(2))
    gate[::2] *= 32
    weight = norm_weight(size, dtype, shape, dice)
    wide = bounds.rounded(bounds.rms_norm(bounds.exact(x), weight, EPS, dtype), dtype, 2.0)
    wanted = bounds.rounded(bounds.silu_mul(bounds.exact(gate), wide, dtype), dtype, 2.0)
    # The gate is a part of the columns of a product.
    operands = {"x": Operand(x), "gate": Operand(gate.flatten(1), "wide"), "weight": Operand(weight)}

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        return {"out": kernels.gated_rms_norm(o["x"], o["gate"].unflatten(1, (-1, size)), o["weight"], EPS)}

    return Problem(operands, call, {"out": wanted})


_FLAG = between(0, 1)
_BATCH = {"batch": row_counts(1, 5), "ragged": _FLAG, "padding": _FLAG}
_HEADS = {"heads": between(1, 3), "repeats": between(1, 3), "key_size": among(4, 8, 20)} | {"value_size": among(4, 8, 24)}
_SMALL = {"batch": 3, "ragged": 0, "padding": 0}
_PARTLY = {"partial_commit": 1, "uncommitted": 0}
_WHOLLY = {"partial_commit": 0, "uncommitted": 0}
_UNCOMMITTED = {"partial_commit": 0, "uncommitted": 1}
RECURRENT = (
    KernelProblems(
        "short_convolution",
        _short_convolution,
        {**_BATCH, "new": between(1, 9), "channels": among(8, 24, 136), "kernel_size": between(2, 5)}
        | {"partial_commit": _FLAG, "uncommitted": _FLAG},
        [
            {**_SMALL, "new": 4, "channels": 24, "kernel_size": 4, **_PARTLY},
            {**_SMALL, "new": 1, "channels": 24, "kernel_size": 4, **_UNCOMMITTED},
            {"batch": 4, "ragged": 1, "padding": 1, "new": 9, "channels": 8, "kernel_size": 4, **_WHOLLY},
        ],
    ),
    KernelProblems(
        "gated_delta_rule",
        partial(_rule, chunks=False),
        {**_BATCH, **_HEADS, "new": between(1, 6), "partial_commit": _FLAG, "uncommitted": _FLAG},
        [
            {**_SMALL, "heads": 2, "repeats": 3, "key_size": 8, "value_size": 24, "new": 4, **_PARTLY},
            {**_SMALL, "heads": 2, "repeats": 1, "key_size": 8, "value_size": 8, "new": 4, **_UNCOMMITTED},
            {**_SMALL, "heads": 1, "repeats": 2, "key_size": 20, "value_size": 4, "new": 1, **_WHOLLY},
        ],
    ),
    KernelProblems(
        "chunk_gated_delta_rule",
        partial(_rule, chunks=True),
        {**_BATCH, **_HEADS, "batch": between(1, 5), "new": among(1, 3, 20, 63, 64, 65, 130)},
        [
            {"batch": 2, "ragged": 1, "padding": 1, "heads": 1, "repeats": 2, "key_size": 8, "value_size": 8, "new": 130},
            {**_SMALL, "heads": 2, "repeats": 1, "key_size": 4, "value_size": 8, "new": 64},
        ],
    ),
    KernelProblems(
        "gated_rms_norm",
        _gated_rms_norm,
        {"tokens": row_counts(1, 9), "heads": between(1, 4), "outer": among(4, 8, 20, 128), "wide_norm": _FLAG},
        [{"tokens": 5, "heads": 3, "outer": 20, "wide_norm": 1}],
    ),
)


def check_equal_bits(lab: Lab, stream: Stream, kernel: str, seed: int) -> None:
    """Check that the results of a token, and the state after it, have the same bits however many tokens follow.

    A verified window is computed as a whole, then its accepted tokens are committed. Chunks end where prompts are cut.
    """
    kernels, chunks = lab.backend.kernels_in_use, kernel.startswith("chunk")
    new = kernels.state_interval + 2 if chunks else 5
    form = {"batch": 3, "ragged": 0, "padding": 0, "new": new, "partial_commit": 0, "uncommitted": 1}
    form |= {"channels": 24, "kernel_size": 4, "heads": 2, "repeats": 2, "key_size": 8, "value_size": 8}
    make = _short_convolution if kernel == "short_convolution" else partial(_rule, chunks=chunks)
    operands = make(form, torch.float32, RandomValues(seed)).operands
    host = {name: operand.tensor for name, operand in operands.items()}
    host["state"] = RandomValues(seed).normal(*host["state"].shape, dtype=host["state"].dtype)  # every row is read here
    o = lab.upload(stream, host)
    batch = form["batch"]

    def results(first: int, count: int, before: int, state: Tensor, commit: int | None) -> tuple[Tensor, Tensor]:
        """Return the results of ``count`` tokens from ``first`` on, after ``before`` earlier tokens, and the state."""
        state = state.clone()
        tokens = (torch.arange(batch).unsqueeze(1) * new + torch.arange(first, first + count)).flatten()
        starts = torch.arange(0, batch * count + 1, count, dtype=torch.int32)
        lens = torch.full((batch,), before + count, dtype=torch.int32)
        given = lab.upload(stream, {"tokens": tokens, "starts": starts, "lens": lens})
        counts = None if commit is None else lab.upload(stream, {"counts": torch.full((batch,), commit)})["counts"]
        rows = RecurrentBatch(o["rows"], given["starts"], given["lens"], count, uniform=True)
        with lab.backend.on(stream):
            own = {name: o[name].index_select(0, given["tokens"]) for name in ("x", "mixed", "gates") if name in o}
            if kernel == "short_convolution":
                out = kernels.short_convolution(own["x"], o["weight"], state, rows, counts)
            elif chunks:
                out = kernels.chunk_gated_delta_rule(own["mixed"], own["gates"], o["a_log"], o["dt_bias"], state, rows)
            else:
                out = kernels.gated_delta_rule(own["mixed"], own["gates"], o["a_log"], o["dt_bias"], state, rows, counts)
        stream.synchronize()
        return out.cpu().unflatten(0, (batch, count)), state

    def expect_equal(one: Tensor, other: Tensor, what: str) -> None:
        assert same_bits(one.contiguous(), other.contiguous()), (
            f"{kernel}: {what}; compute each token in the same order of operations, independent of the other tokens"
        )

    if chunks:
        cut = kernels.state_interval
        whole, _ = results(0, new, 0, o["state"], None)
        _, state = results(0, cut, 0, o["state"], None)
        rest, _ = results(cut, new - cut, cut, state, None)
        expect_equal(whole[:, cut:], rest, f"a pass that begins at token {cut} gives other bits than one that began earlier")
        return
    whole, _ = results(0, new, 5, o["state"], None)
    for count in range(1, new):
        part, state = results(0, count, 5, o["state"], count)
        again, committed = results(0, new, 5, o["state"], count)
        expect_equal(whole[:, :count], part, f"{count} tokens alone give other bits than with {new - count} more")
        expect_equal(whole[:, :count], again[:, :count], f"results change with the commit of {count} of {new} tokens")
        expect_equal(state.cpu(), committed.cpu(), f"the state after a commit of {count} of {new} tokens has other bits")
