"""Random problems of the kernels of recurrent layers. A loop over tokens in float64 computes the expected results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from outrider.device import KernelSet, RecurrentBatch, Stream
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dense import EPS, Mapped, norm_weight, scaled_rows
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
    least = 0 if shape.get("windowed") else 1  # a sequence without new tokens is settled alone
    counts = [most] * batch if not shape["ragged"] else [int(dice.integers(least, most + 1, 1)) for _ in range(batch)]
    counts[-1] = max(counts[-1], 1)
    starts = [sum(counts[:number]) for number in range(batch + 1)]
    rows = (dice.permutation(batch + 1)[:batch] + 1).tolist()
    if shape["padding"] and batch > 1:  # sequences of padding share row 0
        rows[-1] = rows[batch // 2] = 0
    # Of a batch with windows, sequences of padding alone have no earlier tokens.
    fresh = [not row if shape.get("windowed") else dice.coin() for row in rows]
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
    return RecurrentBatch(o["rows"], o["query_start"], o["seq_lens"], shape["new"], uniform=uniform, pending=o.get("pending"))


def _pending(shape: Shape, sequences: Sequences, dice: RandomValues) -> tuple[Tensor, int]:
    """Return the signed number of pending tokens of each row, and the number of tokens of a window."""
    tokens = shape["new"] + 1
    pending = torch.zeros(shape["batch"] + 2, dtype=torch.int64)
    for row, *_ in sequences:
        if row:
            pending[row] = int(dice.integers(0, tokens + 1, 1)) * (1 if dice.coin() else -1)
    return pending, tokens


def _largest(value: Tensor) -> float:
    """Return 1 plus the largest magnitude in ``value``, NaN left out."""
    return 1.0 + float(value.abs().nan_to_num(0.0).max())


def _with_error(value: Tensor, steps: int, dtype: torch.dtype) -> bounds.Number:
    """Return ``value`` with the error of ``steps`` tokens, relative to its largest magnitude."""
    error = torch.full_like(value, _ROUNDINGS * steps * bounds.wide(dtype) * _largest(value))
    return bounds.Number(value, error)


def _convolve(o: Mapping[str, Operand], sequences: Sequences) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the convolution in float64, and the state and the window after it."""
    x, weight, state = (o[name].tensor for name in ("x", "weight", "state"))
    kernel, made, after = weight.shape[1], torch.zeros(x.shape, dtype=torch.float64), state.clone()
    window = o["window"].tensor.clone() if "window" in o else None
    for row, start, count, fresh in sequences:
        before, new = torch.zeros_like(state[row]) if fresh else state[row], x[start : start + count]
        if window is not None:
            pending = 0 if fresh else int(o["pending"].tensor[row].abs())
            before = torch.cat((before, window[row]))[pending : pending + kernel - 1]
            window[row, :count] = new
        inputs = torch.cat((before, new))
        for token in range(count):
            summed = (inputs[token : token + kernel].double() * weight.double().T).sum(0)
            made[start + token] = summed * torch.sigmoid(summed)
        after[row] = (before if window is not None else inputs[count:]).to(state.dtype)
    return made, after, window


def _short_convolution(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    operands, sequences, tokens = _sequences(shape, dice)
    channels, kernel = shape["channels"], shape["kernel_size"]
    x, weight = dice.normal(tokens, channels, dtype=dtype), dice.normal(channels, kernel, dtype=dtype)
    state = _spoil_unread(dice.normal(shape["batch"] + 2, kernel - 1, channels, dtype=dtype), sequences)
    operands |= {"x": Operand(x, "wide"), "weight": Operand(weight), "state": Operand(state)}
    if shape["windowed"]:
        pending, kept = _pending(shape, sequences, dice)
        window = dice.normal(shape["batch"] + 2, kept, channels, dtype=dtype)
        for row, count in enumerate(pending.abs().tolist()[1:], 1):
            window[row, count:] = torch.nan
        operands |= {"pending": Operand(pending), "window": Operand(window)}
    made, after, window_after = _convolve(operands, sequences)

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        return {"out": kernels.short_convolution(o["x"], o["weight"], o["state"], _batch(o, shape), o.get("window"))}

    unit = _of_tokens(bounds.rounded(_with_error(made, kernel, dtype), dtype, 2.0), sequences)
    wanted: dict[str, bounds.Number | Tensor] = {"out": unit, "state": _of_rows(bounds.exact(after))}
    if window_after is not None:
        wanted["window"] = _of_rows(bounds.exact(window_after))
    return Problem(operands, call, wanted)


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


def _apply_rule(o: Mapping[str, Operand], sequences: Sequences) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the delta rule of ``mixed`` in float64, and the state and the updates after it."""
    mixed, gates, state = (o[name].tensor for name in ("mixed", "gates", "state"))
    heads, key, value = state.shape[1:]
    width = (mixed.shape[1] - heads * value) // 2
    made, after = torch.zeros(mixed.shape[0], heads, value, dtype=torch.float64), state.to(torch.float64, copy=True)
    updates = o["updates"].tensor.to(torch.float64, copy=True) if "updates" in o else None
    q, k, v = mixed.double().split((width, width, heads * value), dim=1)

    def of_heads(each: Tensor) -> Tensor:
        repeated: Tensor = each.unflatten(-1, (-1, key)).repeat_interleave(heads * key // width, dim=-2)
        return repeated

    def normalized(each: Tensor) -> Tensor:
        each = each.unflatten(1, (-1, key))
        return (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(1)

    q, keys, v = of_heads(normalized(q)) / key**0.5, normalized(k), v.unflatten(1, (heads, value))
    k = of_heads(keys)
    beta, a = gates.double().chunk(2, dim=1)
    rate = o["a_log"].tensor.double().exp()
    factor = torch.exp(-rate * torch.nn.functional.softplus(a + o["dt_bias"].tensor.double()))
    for row, start, count, fresh in sequences:
        current = torch.zeros_like(after[row]) if fresh else state[row].double()
        half = 0
        if updates is not None:
            pending = int(o["pending"].tensor[row])
            half = int(pending > 0)
            for update in updates[row, int(pending < 0), : 0 if fresh else abs(pending)]:
                own, corrections, factors = update.split((width, heads * value, heads))
                added = torch.einsum("hk,he->hke", of_heads(own), corrections.view(heads, value))
                current = current * factors.view(-1, 1, 1) + added
            after[row] = current
        for token in range(start, start + count):
            current = current * factor[token].view(-1, 1, 1)
            read = torch.einsum("hke,hk->he", current, k[token])
            write = beta[token].sigmoid().unsqueeze(1) * (v[token] - read)
            current = current + torch.einsum("hk,he->hke", k[token], write)
            made[token] = torch.einsum("hke,hk->he", current, q[token])
            if updates is not None:
                updates[row, half, token - start] = torch.cat((keys[token], write.flatten(), factor[token]))
        if updates is None:
            after[row] = current
    return made, after, updates


def _rule_operands(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> tuple[dict[str, Operand], Sequences]:
    """Return random operands of the delta rule."""
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
    }
    if shape.get("windowed"):
        pending, kept = _pending(shape, sequences, dice)
        updates = dice.normal(len(pending), 2, kept, key_heads * key + heads * value + heads, dtype=_wide(dtype))
        updates[..., : key_heads * key] *= key**-0.5
        updates[..., -heads:] = updates[..., -heads:].sigmoid()
        for row, count in enumerate(pending.tolist()[1:], 1):
            updates[row, int(count < 0), abs(count) :] = updates[row, int(count >= 0)] = torch.nan
        operands |= {"pending": Operand(pending), "updates": Operand(updates)}
    return operands, sequences


def _rule(shape: Shape, dtype: torch.dtype, dice: RandomValues, *, chunks: bool) -> Problem:
    operands, sequences = _rule_operands(shape, dtype, dice)
    made, after, updates = _apply_rule(operands, sequences)

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        given = o["mixed"], o["gates"], o["a_log"], o["dt_bias"], o["state"], _batch(o, shape)
        return {
            "out": kernels.chunk_gated_delta_rule(*given) if chunks else kernels.gated_delta_rule(*given, o.get("updates"))
        }

    steps = 2 * shape["new"] + 1 + shape["key_size"]
    if chunks and dtype.itemsize < 4:  # the products of a chunk may round their operands
        factor = _CHUNK_ROUNDINGS * torch.finfo(dtype).eps
        errors = [torch.full_like(each, factor * _largest(each)) for each in (made, after)]
        out = _of_tokens(bounds.rounded(bounds.Number(made, errors[0]), dtype), sequences)
        return Problem(operands, call, {"out": out, "state": _of_rows(bounds.Number(after, errors[1]))})
    out = _of_tokens(bounds.rounded(_with_error(made, steps, dtype), dtype), sequences)
    wanted: dict[str, bounds.Number | Tensor] = {"out": out, "state": _of_rows(_with_error(after, steps, dtype))}
    if updates is not None:
        wanted["updates"] = _of_rows(_with_error(updates, steps, dtype))
    return Problem(operands, call, wanted)


def _gated_rms_norm(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    size = shape["outer"]
    x, gate = (dice.normal(shape["tokens"], shape["heads"], size, dtype=dtype) for _ in range(2))
    x = scaled_rows(x, dice)
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
RECURRENT = (
    KernelProblems(
        "short_convolution",
        _short_convolution,
        {**_BATCH, "new": between(1, 9), "channels": among(8, 24, 136), "kernel_size": between(2, 5)} | {"windowed": _FLAG},
        [
            {**_SMALL, "new": 4, "channels": 24, "kernel_size": 4, "windowed": 1},
            {**_SMALL, "new": 1, "channels": 24, "kernel_size": 4, "windowed": 1},
            {"batch": 4, "ragged": 1, "padding": 1, "new": 9, "channels": 8, "kernel_size": 4, "windowed": 0},
        ],
    ),
    KernelProblems(
        "gated_delta_rule",
        partial(_rule, chunks=False),
        {**_BATCH, **_HEADS, "new": between(1, 6), "windowed": _FLAG},
        [
            {**_SMALL, "heads": 2, "repeats": 3, "key_size": 8, "value_size": 24, "new": 4, "windowed": 1},
            {**_SMALL, "heads": 2, "repeats": 1, "key_size": 8, "value_size": 8, "new": 4, "windowed": 1},
            {**_SMALL, "heads": 1, "repeats": 2, "key_size": 20, "value_size": 4, "new": 1, "windowed": 0},
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

    A window of drafts is verified as a whole, then its accepted tokens are settled, alone or by the next window. Chunks end
    where prompts are cut.
    """
    kernels, chunks = lab.backend.kernels_in_use, kernel.startswith("chunk")
    new = kernels.state_interval + 2 if chunks else 5
    form = {"batch": 3, "ragged": 0, "padding": 0, "new": new, "windowed": 0 if chunks else 1}
    form |= {"channels": 24, "kernel_size": 4, "heads": 2, "repeats": 2, "key_size": 8, "value_size": 8}
    make = _short_convolution if kernel == "short_convolution" else partial(_rule, chunks=chunks)
    operands = make(form, torch.float32, RandomValues(seed)).operands
    host = {name: operand.tensor for name, operand in operands.items()}
    host["state"] = RandomValues(seed).normal(*host["state"].shape, dtype=host["state"].dtype)  # every row is read here
    o = lab.upload(stream, host)
    batch = form["batch"]

    def results(
        first: int, count: int, state: Tensor, window: Tensor | None = None, pending: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the results of ``count`` tokens from ``first`` on, and the state. A ``window`` is changed."""
        state = state.clone()
        tokens = (torch.arange(batch).unsqueeze(1) * new + torch.arange(first, first + max(count, 1))).flatten()
        starts = torch.arange(batch + 1, dtype=torch.int32) * count
        lens = torch.full((batch,), (0 if chunks else 5) + first + count, dtype=torch.int32)
        counts = torch.full((batch + 2,), pending)
        given = lab.upload(stream, {"tokens": tokens, "starts": starts, "lens": lens, "pending": counts})
        rows = RecurrentBatch(o["rows"], given["starts"], given["lens"], max(count, 1), uniform=count > 0)
        with lab.backend.on(stream):
            own = {name: o[name].index_select(0, given["tokens"]) for name in ("x", "mixed", "gates") if name in o}
            if window is not None:
                rows = rows._replace(pending=given["pending"])
            if kernel == "short_convolution":
                out = kernels.short_convolution(own["x"], o["weight"], state, rows, window)
            elif chunks:
                out = kernels.chunk_gated_delta_rule(own["mixed"], own["gates"], o["a_log"], o["dt_bias"], state, rows)
            else:
                out = kernels.gated_delta_rule(own["mixed"], own["gates"], o["a_log"], o["dt_bias"], state, rows, window)
        stream.synchronize()
        return out.cpu().unflatten(0, (batch, -1)), state

    def expect_equal(one: Tensor, other: Tensor, what: str) -> None:
        assert same_bits(one.contiguous(), other.contiguous()), (
            f"{kernel}: {what}; compute each token in the same order of operations, independent of the other tokens"
        )

    if chunks:
        cut = kernels.state_interval
        whole, _ = results(0, new, o["state"])
        _, state = results(0, cut, o["state"])
        rest, _ = results(cut, new - cut, state)
        expect_equal(whole[:, cut:], rest, f"a pass that begins at token {cut} gives other bits than one that began earlier")
        return
    kept = o["window" if kernel == "short_convolution" else "updates"]
    whole, unchanged = results(0, new, o["state"], kept)
    expect_equal(unchanged.cpu(), host["state"], "a window without pending tokens changes the state")
    for count in range(1, new):
        part, state = results(0, count, o["state"])
        # A negative number of pending tokens is in the second half of the updates.
        halves = kept if kernel == "short_convolution" else kept.flip(1)
        _, settled = results(count, 0, o["state"], halves.clone(), -count)
        rest, late = results(count, new - count, o["state"], kept.clone(), count)
        expect_equal(whole[:, :count], part, f"{count} tokens alone give other bits than with {new - count} more")
        expect_equal(state.cpu(), settled.cpu(), f"the state after {count} of {new} tokens of a window has other bits")
        expect_equal(state.cpu(), late.cpu(), f"the state after {count} tokens has other bits if a window follows")
        expect_equal(whole[:, count:], rest, f"a window that follows {count} pending tokens gives other bits")
