"""Functions that multiply by block-quantized weights, and that compute the halves of a layer with such weights.

A weight [N, K] of G = K / 32 groups per row is stored in tiles of 32 rows. A tile has a record per group: 32-bit words with
the values of 8 rows side by side, then 32 float16 scales and, of 4-bit values, 32 float16 minima.

x is rounded to 16-bit integers with a float32 scale per group: the error of an element is at most 2**-16 of the group's
largest magnitude. Products of integers are summed exactly within a group. Each row of x has a fixed order of sums, which
depends on neither the number of rows nor the number of threads.

All functions run on each thread of a team and share the work.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial, reduce
from types import MappingProxyType

from llvmlite import ir

from outrider_cpu.code_writer import FLOAT, INT, WORD, CodeValue, CodeWriter, Variable
from outrider_cpu.packed_weights import GROUP, TILE
from outrider_cpu.row_functions import equal, inverse_norm, load_int32, read_ints, write_row_functions

_MAX_ROWS = MappingProxyType({8: 5, 16: 6})
"""Maximum number of rows of x for which a function keeps all sums in registers, by the number of elements of a vector."""
_MAX_SHARED_HEADS = MappingProxyType({8: 1, 16: 4})
"""Maximum number of query heads that read keys together, by the number of elements of a vector."""
_ATTENTION_SUMS = 12
"""Maximum number of vectors of weighted values that attention sums at a time, in registers."""
_WORD_BYTES = TILE * 4
_SCALE_BYTES = TILE * 2
_FLOAT_BYTES = 4
_CACHE_LINE_BYTES = 64
_PREFETCH_BYTES = 4096
"""Bytes ahead of a record that are fetched. The processor's own prefetching ends at each page of memory."""
_GROUP_BYTES = GROUP * 2
"""Bytes of a group of x in int16."""
_SUMS_BYTES = 2 * _FLOAT_BYTES
"""Bytes of the scale and the sum of a group of x."""
_LARGEST_INTEGER = 32767.0
_MIN_MAGNITUDE = 1e-30
"""Lower limit of a group's largest magnitude in the computation of its scale, whose reciprocal is then finite."""
_LARGEST_EXPONENT = 87.0
"""The exponential function of this number is finite in float32, and that of its negative is normal."""
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXPONENTIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0)
"""Coefficients of Cephes' polynomial for the exponential function."""


def record_bytes(bits: int) -> int:
    """Return the number of bytes of a group's record in a tile."""
    return bits * _WORD_BYTES + _SCALE_BYTES * (2 if bits == 4 else 1)


class BlockFunctions:
    """Writes the functions. ``thread`` and ``threads`` are the addresses of OpenMP's functions, or None for one thread."""

    def __init__(self, openmp: dict[str, int] | None) -> None:
        self._writer = CodeWriter()
        self._max_rows = _MAX_ROWS[self._writer.lanes]
        self.max_shared_heads = _MAX_SHARED_HEADS[self._writer.lanes]
        self._openmp = openmp

    def write_products(self) -> CodeWriter:
        """Write ``prepare``, ``product``, ``multiply`` and ``mlp``, and the functions of rows."""
        for bits in (4, 8):
            for rows in range(1, self._max_rows + 1):
                self._write_tile(bits, rows)
            self._write_columns(bits)
        self._write_prepare()
        self._write_product()
        self._write_multiply()
        self._write_mlp()
        write_row_functions(self._writer)
        return self._writer

    def write_attention(self, head_size: int, shared: int, products: dict[str, int]) -> CodeWriter:
        """Write ``attention`` for heads of ``head_size``, ``shared`` query heads at a time, which read the same keys.

        ``products`` are the addresses of the functions for products.
        """
        self._write_attention(head_size, shared, products)
        return self._writer

    def _write_tile(self, bits: int, rows: int) -> None:
        """Write the product of ``rows`` rows of x with one tile."""
        w = self._writer
        vectors = TILE // w.lanes if rows < 3 else 2
        with w.function(f"tile{bits}x{rows}", 7) as (tile, x, sums, out, groups, out_stride, accumulate):
            zero = w.constant(w.vector, 0.0)
            for first in range(0, TILE // w.lanes, vectors):
                totals = [[Variable(w, zero) for _ in range(vectors)] for _ in range(rows)]
                with w.loop(0, groups) as group:
                    record = tile + group * record_bytes(bits)
                    if first == 0:
                        for line in range(0, record_bytes(bits), _CACHE_LINE_BYTES):
                            w.prefetch(record + (_PREFETCH_BYTES + line))
                    x_group = x + group * _GROUP_BYTES
                    partial = [[Variable(w, w.constant(w.int_vector, 0)) for _ in range(vectors)] for _ in range(rows)]
                    with w.loop(0, bits) as word:
                        columns = [first + index for index in range(vectors)]
                        words = [
                            w.load(w.int_vector, record + word * _WORD_BYTES + column * w.lanes * 4) for column in columns
                        ]
                        for pair in range(16 // bits):
                            values = [_lowest_values(bits, each) for each in words]
                            words = [each >> bits for each in words]
                            for row in range(rows):
                                at = x_group + word * (64 // bits) + groups * (row * _GROUP_BYTES) + pair * 4
                                number = w.splat(w.load(WORD, at))
                                for value, each in zip(values, partial[row], strict=True):
                                    each.set(each.get() + w.add_products(value, number))
                    for index in range(vectors):
                        at = record + (bits * _WORD_BYTES + (first + index) * w.lanes * 2)
                        scale = w.load_halves(at)
                        for row in range(rows):
                            sum_at = sums + group * _SUMS_BYTES + groups * (row * _SUMS_BYTES)
                            step = scale * w.splat(w.load(FLOAT, sum_at))
                            whole = w.convert("sitofp", partial[row][index].get(), w.vector)
                            added = w.intrinsic("fma", step, whole, totals[row][index].get())
                            if bits == 4:
                                minimum = w.load_halves(at + _SCALE_BYTES)
                                added = w.intrinsic("fma", minimum, w.splat(w.load(FLOAT, sum_at + _FLOAT_BYTES)), added)
                            totals[row][index].set(added)
                for row, totals_of_row in enumerate(totals):
                    for index, total in enumerate(totals_of_row):
                        address = out + out_stride * row + (first + index) * w.lanes * _FLOAT_BYTES
                        with w.when(w.constant(INT, 0) < accumulate):
                            total.set(total.get() + w.load(w.vector, address))
                        w.store(address, total.get())

    def _write_columns(self, bits: int) -> None:
        """Write the product of any number of rows with one tile, as few blocks of rows of similar size."""
        w = self._writer
        with w.function(f"columns{bits}", 8) as (tile, x, sums, out, groups, rows, out_stride, accumulate):
            done = Variable(w, w.constant(INT, 0))
            blocks = (rows + (self._max_rows - 1)) // self._max_rows
            with w.loop(0, blocks) as block:
                start = done.get()
                count = (rows - start + (blocks - block - 1)) // (blocks - block)
                operands = x + start * groups * _GROUP_BYTES, sums + start * groups * _SUMS_BYTES
                for number in range(1, self._max_rows + 1):
                    with w.when(equal(count, number)):
                        at = out + start * out_stride
                        w.call(f"tile{bits}x{number}", tile, *operands, at, groups, out_stride, accumulate)
                done.set(start + count)

    def _write_prepare(self) -> None:
        """Write the rounding of x to int16, after its norm if ``eps`` isn't 0, and the scale and sum of each group."""
        w = self._writer
        with w.function("prepare", 7) as (x, norm, eps, rounded, sums, rows, groups), w.loop(0, rows) as row:
            start, stride = row * groups, GROUP * _FLOAT_BYTES
            scale = Variable(w, w.constant(w.vector, 1.0))
            with w.when(w.constant(INT, 0) < norm):
                scale.set(inverse_norm(w, x + start * stride, groups * GROUP, eps))
            with w.loop(0, groups) as group:
                values = []
                for part in range(0, stride, w.lanes * _FLOAT_BYTES):
                    value = Variable(w, w.load(w.vector, x + start * stride + group * stride + part))
                    with w.when(w.constant(INT, 0) < norm):
                        value.set(value.get() * scale.get() * w.load(w.vector, norm + group * stride + part))
                    values.append(value.get())
                maximum = partial(w.intrinsic, "maxnum")
                largest = w.halves(reduce(maximum, [w.intrinsic("fabs", each) for each in values]), maximum)
                factor = w.constant(w.vector, _LARGEST_INTEGER) // maximum(
                    w.splat(largest), w.constant(w.vector, _MIN_MAGNITUDE)
                )
                values = [w.intrinsic("roundeven", each * factor) for each in values]
                for part, each in enumerate(values):
                    at = rounded + (start + group) * _GROUP_BYTES + part * w.lanes * 2
                    w.store(at, w.narrow(w.convert("fptosi", each, w.int_vector), 16))
                total = w.halves(reduce(CodeValue.__add__, values), CodeValue.__add__)
                step = largest * (1 / _LARGEST_INTEGER) + total * 0.0  # NaN if an element is
                at = sums + (start + group) * _SUMS_BYTES
                w.store(at, step)
                w.store(at + _FLOAT_BYTES, total * step)

    def _write_product(self) -> None:
        """Write the product with one tile of either format, and with this thread's tiles of a weight."""
        w = self._writer
        with w.function("tile", 9) as (bits, *operands):
            for each in (4, 8):
                with w.when(equal(bits, each)):
                    w.call(f"columns{each}", *operands)
        with w.function("product", 10) as (bits, packed, x, sums, out, groups, tiles, rows, out_stride, accumulate):
            first, end = self._share(tiles)
            with w.loop(first, end) as index:
                tile = packed + index * groups * _record_bytes(w, bits)
                at = out + index * (TILE * _FLOAT_BYTES)
                w.call("tile", bits, tile, x, sums, at, groups, rows, out_stride, accumulate)

    def _write_multiply(self) -> None:
        w = self._writer
        with w.function("multiply", 1) as (arguments,):
            bits, packed, groups, tiles, x, rows, out, scratch, scratch_stride = read_ints(w, arguments, 9)
            rounded = scratch + self._thread() * scratch_stride
            sums = rounded + rows * groups * _GROUP_BYTES
            w.call("prepare", x, 0, 0, rounded, sums, rows, groups)
            w.call("product", bits, packed, rounded, sums, out, groups, tiles, rows, tiles * (TILE * _FLOAT_BYTES), 0)

    def _write_mlp(self) -> None:
        w = self._writer
        with w.function("mlp", 1) as (arguments,):
            rows, count, norm, groups, bits, packed, inner, down_bits, down, scratch, scratch_stride, both, gated = read_ints(
                w, arguments, 13
            )
            eps = arguments + 13 * 8
            rounded = scratch + self._thread() * scratch_stride
            sums = rounded + count * w.select_value(groups < inner, inner, groups) * _GROUP_BYTES
            w.call("prepare", rows, norm, eps, rounded, sums, count, groups)
            first, end = self._share(inner)
            stride, width = inner * (2 * TILE * _FLOAT_BYTES), TILE * _FLOAT_BYTES
            with w.loop(first, end) as index:
                for start in (index, index + inner):
                    tile = packed + start * groups * _record_bytes(w, bits)
                    w.call("tile", bits, tile, rounded, sums, both + start * width, groups, count, stride, 0)
                with w.loop(0, count) as row:
                    for part in range(0, width, w.lanes * _FLOAT_BYTES):
                        gate, up = (
                            w.load(w.vector, both + row * stride + each * width + part) for each in (index, index + inner)
                        )
                        silu = gate // (_exponential(w, w.constant(w.vector, 0.0) - gate) + 1.0)
                        w.store(gated + (row * inner + index) * width + part, silu * up)
            self._wait()
            w.call("prepare", gated, 0, 0, rounded, sums, count, inner)
            w.call("product", down_bits, down, rounded, sums, rows, inner, groups, count, groups * width, 1)

    def _write_attention(self, head_size: int, shared: int, products: dict[str, int]) -> None:
        w = self._writer
        with w.function("attention", 1) as (arguments,):
            rows, norm, bits, packed, output_bits, output, k_cache, v_cache, window = read_ints(w, arguments, 9)
            eps, scale = arguments + 9 * 8, arguments + 10 * 8
            source, count, groups, scratch, scratch_stride, qkv, attended, cos, sin, slots = read_ints(w, arguments, 10, 11)
            starts, lens, tables, row_stride, requests, heads, kv_heads, page_size, angle_stride = read_ints(
                w, arguments, 9, 21
            )
            kept, kept_count, output_tiles = read_ints(w, arguments, 3, 30)
            head_bytes = head_size * _FLOAT_BYTES
            all_heads, output_groups = heads + kv_heads * 2, heads * (head_size // GROUP)
            own = scratch + self._thread() * scratch_stride
            sums = own + count * groups * _GROUP_BYTES
            w.call_address(products["prepare"], source, norm, eps, own, sums, count, groups)
            tiles = all_heads * (head_size // TILE)
            stride = all_heads * head_bytes
            w.call_address(products["product"], bits, packed, own, sums, qkv, groups, tiles, count, stride, 0)
            self._wait()
            thread, threads = self._thread(), self._threads()
            with w.loop(thread, count * kv_heads, threads) as unit:
                row, head = unit // kv_heads, unit % kv_heads
                slot = w.load(INT, slots + row * 8)
                target = (slot * kv_heads + head) * head_bytes
                key = qkv + row * stride + (heads + head) * head_bytes
                operands = cos + row * angle_stride, sin + row * angle_stride
                _rotate(w, key, k_cache + target, *operands, head_size, w.constant(w.vector, 1.0))
                for part in range(0, head_bytes, w.lanes * _FLOAT_BYTES):
                    w.store(v_cache + target + part, w.load(w.vector, key + kv_heads * head_bytes + part))
            self._wait()
            request = Variable(w, w.constant(INT, 0))
            factor = w.splat(w.load(FLOAT, scale))
            with w.loop(0, kept_count) as row:
                with w.loop(request.get(), requests - 1) as index:  # the request whose new tokens include the row
                    request.set(
                        w.select_value(load_int32(w, starts + request.get() * 4 + 4) < row + 1, index + 1, request.get())
                    )
                which = request.get()
                stop = load_int32(w, starts + which * 4 + 4)
                length = load_int32(w, lens + which * 4)
                end = w.select_value(row < stop, _at_least_zero(w, length - stop + row + 1), w.constant(INT, 0))
                begin = w.select_value(w.constant(INT, 0) < window, _at_least_zero(w, end - window), w.constant(INT, 0))
                units, token = heads // shared, w.load(INT, kept + row * 8)
                with w.loop(0, units) as unit, w.when(equal((row * units + unit) % threads, thread)):
                    for start in range(0, shared * head_size * _FLOAT_BYTES, head_size * _FLOAT_BYTES):
                        query = qkv + token * stride + unit * (shared * head_bytes) + start
                        operands = cos + token * angle_stride, sin + token * angle_stride
                        _rotate(w, query, own + start, *operands, head_size, factor)
                    kv_head = unit * shared // (heads // kv_heads) * head_bytes
                    _attend_keys(
                        w,
                        own,
                        (k_cache + kv_head, v_cache + kv_head),
                        attended + (row * units + unit) * (shared * head_bytes),
                        (shared, head_size),
                        _KeyRange(w, begin, end, tables + which * row_stride * 4, page_size, kv_heads * head_bytes),
                    )
            self._wait()
            sums = own + kept_count * output_groups * _GROUP_BYTES
            w.call_address(products["prepare"], attended, 0, 0, own, sums, kept_count, output_groups)
            w.call_address(
                products["product"],
                *(output_bits, output, own, sums, rows, output_groups, output_tiles, kept_count),
                *(output_tiles * (TILE * _FLOAT_BYTES), 1),
            )

    def _thread(self) -> CodeValue:
        return self._openmp_number("omp_get_thread_num", 0)

    def _threads(self) -> CodeValue:
        return self._openmp_number("omp_get_num_threads", 1)

    def _openmp_number(self, name: str, single: int) -> CodeValue:
        w = self._writer
        if self._openmp is None:
            return w.constant(INT, single)
        return w.convert("sext", w.call_address(self._openmp[name], result=ir.IntType(32)), INT)

    def _share(self, count: CodeValue) -> tuple[CodeValue, CodeValue]:
        """Return this thread's first and last (exclusive) item of ``count``."""
        thread, threads = self._thread(), self._threads()
        return count * thread // threads, count * (thread + 1) // threads

    def _wait(self) -> None:
        """Wait until all threads of the team are here."""
        if self._openmp is not None:
            self._writer.call_address(self._openmp["GOMP_barrier"])


class _KeyRange:
    """The cached tokens ``begin`` to ``end`` (exclusive) of a request, in the pages of its table."""

    def __init__(
        self, w: CodeWriter, begin: CodeValue, end: CodeValue, table: CodeValue, page_size: CodeValue, token_bytes: CodeValue
    ) -> None:
        self.begin, self.end = begin, end
        self._writer, self._table, self._page_size, self._token_bytes = w, table, page_size, token_bytes

    @contextmanager
    def each(self) -> Generator[tuple[CodeValue, CodeValue]]:
        """Repeat the scope for each token, with its index from 0 and the offset of its keys in the cache."""
        w, size = self._writer, self._page_size
        with w.loop(self.begin // size, (self.end + size - 1) // size) as page:
            slot = load_int32(w, self._table + page * 4) * size
            first, last = _at_least_zero(w, self.begin - page * size), self.end - page * size
            with w.loop(first, w.select_value(last < size, last, size)) as offset:
                yield page * size + offset - self.begin, (slot + offset) * self._token_bytes


def _attend_keys(
    w: CodeWriter,
    queries: CodeValue,
    caches: tuple[CodeValue, CodeValue],
    out: CodeValue,
    shape: tuple[int, int],
    keys: _KeyRange,
) -> None:
    """Attend with rotated and scaled queries of one shape that read the same keys. The scores follow them in memory."""
    shared, head_size = shape
    head_bytes, step = head_size * _FLOAT_BYTES, w.lanes * _FLOAT_BYTES
    parts, zero = range(0, head_bytes, step), w.constant(w.vector, 0.0)
    length = keys.end - keys.begin
    scores = [queries + shared * head_bytes + (length + w.lanes) * (index * _FLOAT_BYTES) for index in range(shared)]
    with keys.each() as (index, offset):
        sums = [zero] * shared
        for part in parts:
            key = w.load(w.vector, caches[0] + offset + part)
            sums = [
                w.intrinsic("fma", key, w.load(w.vector, queries + (n * head_bytes + part)), each)
                for n, each in enumerate(sums)
            ]
        for at, products in zip(scores, sums, strict=True):
            w.store(at + index * _FLOAT_BYTES, w.halves(products, CodeValue.__add__))
    totals = []
    for at in scores:
        lowest = w.constant(w.vector, -math.inf)
        w.store(at + length * _FLOAT_BYTES, lowest)
        largest, total = Variable(w, lowest), Variable(w, zero)
        with w.loop(0, length, w.lanes) as index:
            largest.set(w.intrinsic("maxnum", largest.get(), w.load(w.vector, at + index * _FLOAT_BYTES)))
        maximum = w.splat(w.halves(largest.get(), partial(w.intrinsic, "maxnum")))
        with w.loop(0, length, w.lanes) as index:
            weights = _exponential(w, w.load(w.vector, at + index * _FLOAT_BYTES) - maximum)
            w.store(at + index * _FLOAT_BYTES, weights)
            total.set(total.get() + weights)
        totals.append(w.splat(w.halves(total.get(), CodeValue.__add__)))
    count = max(1, _ATTENTION_SUMS // shared)
    for some in (parts[first : first + count] for first in range(0, len(parts), count)):
        values = [[Variable(w, zero) for _ in some] for _ in scores]
        with keys.each() as (index, offset):
            weights_of_key = [w.splat(w.load(FLOAT, at + index * _FLOAT_BYTES)) for at in scores]
            for number, part in enumerate(some):
                value = w.load(w.vector, caches[1] + offset + part)
                for weight, sums_of_head in zip(weights_of_key, values, strict=True):
                    each = sums_of_head[number]
                    each.set(w.intrinsic("fma", weight, value, each.get()))
        for head, (whole, sums_of_head) in enumerate(zip(totals, values, strict=True)):
            for each, part in zip(sums_of_head, some, strict=True):
                at = out + (head * head_bytes + part)
                w.store(at, zero)
                with w.when(w.constant(INT, 0) < length):
                    w.store(at, each.get() // whole)


def _rotate(
    w: CodeWriter,
    source: CodeValue,
    target: CodeValue,
    cos: CodeValue,
    sin: CodeValue,
    head_size: int,
    factor: CodeValue,
) -> None:
    """Rotate the halves of a head and multiply them by ``factor``."""
    half = head_size * _FLOAT_BYTES // 2
    for part in range(0, half, w.lanes * _FLOAT_BYTES):
        first, second = (w.load(w.vector, source + start + part) * factor for start in (0, half))
        w.store(target + part, first * w.load(w.vector, cos + part) - second * w.load(w.vector, sin + part))
        at = half + part
        w.store(target + at, second * w.load(w.vector, cos + at) + first * w.load(w.vector, sin + at))


def _exponential(w: CodeWriter, x: CodeValue) -> CodeValue:
    """Return the exponential function, of Cephes; arguments are clamped so that results are finite and not zero."""
    limited = w.intrinsic("minnum", x, w.constant(w.vector, _LARGEST_EXPONENT))
    x = w.intrinsic("maxnum", limited, w.constant(w.vector, -_LARGEST_EXPONENT))
    power = w.intrinsic("floor", x * _LOG2_E + 0.5)
    rest = x - power * _LN2_HIGH - power * _LN2_LOW
    result = w.constant(w.vector, _EXPONENTIAL[0])
    for coefficient in _EXPONENTIAL[1:]:
        result = w.intrinsic("fma", result, rest, w.constant(w.vector, coefficient))
    exponent = (w.convert("fptosi", power, w.int_vector) + 127) << 23
    return result * w.convert("bitcast", exponent, w.vector)


def _lowest_values(bits: int, words: CodeValue) -> CodeValue:
    """Return the value in the lowest bits of each half of the words, as 16-bit integers."""
    if bits == 4:
        return words & 0x000F000F
    w = words.writer
    return w.convert("sext", w.narrow(w.convert("bitcast", words, w.pairs), 8), w.pairs)


def _record_bytes(w: CodeWriter, bits: CodeValue) -> CodeValue:
    return w.select_value(bits < 8, w.constant(INT, record_bytes(4)), record_bytes(8))


def _at_least_zero(w: CodeWriter, value: CodeValue) -> CodeValue:
    return w.select_value(value < 0, w.constant(INT, 0), value)
