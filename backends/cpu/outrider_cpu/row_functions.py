"""Compiled functions over the rows of a batch: norms, choice of tokens, positions of tokens.

Each has few operations, so that calls of torch operators would take most of the time. A function runs on one thread and takes
the address of its arguments.
"""

from __future__ import annotations

import math
from functools import partial

from outrider_cpu.code_writer import FLOAT, INT, WORD, CodeValue, CodeWriter, Variable

_FLOAT_BYTES = 4


def write_row_functions(w: CodeWriter) -> None:
    """Write ``normalize``, ``choose`` and ``place``."""
    _write_normalize(w)
    _write_choose(w)
    _write_place(w)


def inverse_norm(w: CodeWriter, row: CodeValue, width: CodeValue, eps: CodeValue) -> CodeValue:
    """Return a vector with the factor of the RMS norm of the ``width`` floats at ``row``; ``eps`` is an address."""
    squares = Variable(w, w.constant(w.vector, 0.0))
    with w.loop(0, width, w.lanes) as index:
        element = w.load(w.vector, row + index * _FLOAT_BYTES)
        squares.set(w.intrinsic("fma", element, element, squares.get()))
    mean = w.splat(w.halves(squares.get(), CodeValue.__add__)) // w.splat(w.convert("sitofp", width, FLOAT))
    return w.constant(w.vector, 1.0) // w.intrinsic("sqrt", mean + w.splat(w.load(FLOAT, eps)))


def _write_normalize(w: CodeWriter) -> None:
    with w.function("normalize", 1) as (arguments,):
        x, weight, out, rows, width = read_ints(w, arguments, 5)
        with w.loop(0, rows) as row:
            start = row * width * _FLOAT_BYTES
            scale = inverse_norm(w, x + start, width, arguments + 5 * 8)
            with w.loop(0, width, w.lanes) as index:
                at = index * _FLOAT_BYTES
                w.store(out + start + at, w.load(w.vector, x + start + at) * scale * w.load(w.vector, weight + at))


def _write_choose(w: CodeWriter) -> None:
    """Write the choice of the largest logit of each row, and the acceptance of the drafted tokens before it.

    The argument after the addresses becomes 1 if the sum of all logits is NaN, else 0.
    """
    lowest, lanes = w.constant(w.vector, -math.inf), w.constant(w.vector, [float(lane) for lane in range(w.lanes)])
    with w.function("choose", 1) as (arguments,):
        logits, drafted, requests, count, width, tokens, accepted = read_ints(w, arguments, 7)
        total = Variable(w, w.constant(w.vector, 0.0))
        with w.loop(0, requests * (count + 1)) as row:
            best, first = Variable(w, lowest), Variable(w, w.constant(w.int_vector, 0))
            with w.loop(0, width, w.lanes) as index:
                values = w.load(w.vector, logits + (row * width + index) * _FLOAT_BYTES)
                total.set(total.get() + values)
                larger = w.compare(">", values, best.get())
                first.set(w.select_value(larger, w.splat(w.convert("trunc", index, WORD)), first.get()))
                best.set(w.select_value(larger, values, best.get()))
            largest = w.splat(w.halves(best.get(), partial(w.intrinsic, "maxnum")))
            found = w.convert("sitofp", first.get(), w.vector) + lanes  # exact, as no vocabulary has 2**24 tokens
            found = w.select_value(w.compare("==", best.get(), largest), found, w.constant(w.vector, math.inf))
            token = w.convert("fptosi", w.halves(found, partial(w.intrinsic, "minnum")), INT)
            w.store(tokens + row * 8, token)
        with w.loop(0, requests) as request:
            agreed, own = Variable(w, w.constant(INT, 0)), tokens + request * (count + 1) * 8
            with w.loop(0, count) as index, w.when(equal(agreed.get(), index)):
                same = equal(w.load(INT, own + index * 8), w.load(INT, drafted + (request * count + index) * 8))
                agreed.set(agreed.get() + w.convert("zext", same, INT))
            w.store(accepted + request * 8, agreed.get())
            with w.loop(agreed.get() + 1, count + 1) as index:
                w.store(own + index * 8, w.constant(INT, -1))
        whole = w.halves(total.get(), CodeValue.__add__)
        w.store(arguments + 7 * 8, w.select_value(equal(whole, whole), w.constant(INT, 0), 1))


def _write_place(w: CodeWriter) -> None:
    """Write the places of the tokens that follow each request's cached tokens. Strides are in bytes."""
    with w.function("place", 1) as (arguments,):
        requests, count, page_size, pages, last, first_end = read_ints(w, arguments, 6)
        lens, tables, *outputs = zip(*[iter(read_ints(w, arguments, 15, 6))] * 3, strict=True)
        capacity = pages * page_size
        with w.loop(0, requests) as request, w.loop(0, count) as index:
            position = w.load(INT, lens[0] + request * lens[1]) + index
            has_page = position < capacity
            page = w.select_value(has_page, position // page_size, pages - 1)
            slot = load_int32(w, tables[0] + request * tables[1] + page * tables[2]) * page_size + position % page_size
            positions, slots, ends = (at + request * row + index * column for at, row, column in outputs)
            w.store(positions, w.select_value(position < last, position, last))
            w.store(slots, w.select_value(has_page, slot, position % page_size))
            with w.when(first_end < index + 1):
                length = w.select_value(has_page, position + 1, capacity)
                w.store(ends - first_end * outputs[2][2], w.convert("trunc", length, WORD))


def read_ints(w: CodeWriter, arguments: CodeValue, count: int, first: int = 0) -> list[CodeValue]:
    """Return ``count`` 64-bit integers at the address ``arguments``, from the number ``first`` on."""
    return [w.load(INT, arguments + (first + index) * 8, align=8) for index in range(count)]


def load_int32(w: CodeWriter, address: CodeValue) -> CodeValue:
    """Return the 32-bit integer at ``address``, as one of 64 bits."""
    return w.convert("sext", w.load(WORD, address), INT)


def equal(value: CodeValue, other: CodeValue | int) -> CodeValue:
    """Return whether the two are equal."""
    return value.writer.compare("==", value, other)
