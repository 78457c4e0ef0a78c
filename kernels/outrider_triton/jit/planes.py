"""Products with weights of four bits and plain tokens, a few at a time: nothing is moved between taking bits and multiplying.

Two bytes of the weight are four numbers, from columns 4 i to 4 i + 3. Numbers in the same place of their two bytes are a
*plane*: what the matrix unit takes of a plane are the two bytes themselves, shifted and masked where they are. So the weight
comes to the unit by its own loads, as if it were stored in 16 bits, and takes a half less than one and a half instructions a
number. A plane has every fourth column, and tokens are laid out so beforehand: of each UNIT columns first those of the first
plane, then those of the next (:func:`place_in_planes`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import ask_for_rows, begin, begin_late
from outrider_triton.jit.matmul import rows_and_tokens

UNIT = tl.constexpr(128)
"""Columns that are laid out in planes by themselves."""


@triton.jit
def place_in_planes(column):
    """Where a column of tokens lies, in planes."""
    unit: tl.constexpr = UNIT
    return column // unit * unit + column % 4 * (unit // 4) + column % unit // 4


@triton.jit
def _bytes_of(numbers, COUNT: tl.constexpr):
    """The low bytes of ``numbers [COUNT]``, int32, four in a word: [COUNT / 4]."""
    left, right = tl.split(tl.reshape(numbers & 0xFF, [COUNT // 4, 2, 2]))
    first, third = tl.split(left)
    second, fourth = tl.split(right)
    return first | (second << 8) | (third << 16) | (fourth << 24)


@triton.jit
def grain_and_times(largest):
    """The grain of a unit, a 16th of it as ``grains`` has it, and by what its numbers are multiplied, which makes them whole
    ones below 2**14. ``largest``: bits of its largest magnitude in float32; of one that isn't finite the grain is NaN.
    """
    exponent = tl.maximum(largest >> 23, 18)  # all are below 2**(exponent - 126)
    grain = tl.where(exponent == 255, 0x7FC00000, (exponent - 17) << 23).to(tl.float32, bitcast=True)
    return grain, ((267 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest_whole(number):
    """The nearest whole number, below 2**22, as int32; ties to even."""
    return (number + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2**23


@triton.jit
def keep_in_planes(out, grains, row, begins, value, k, stride, BLOCK: tl.constexpr):
    """Store BLOCK columns from ``begins`` on of a row, ``value``, where planes have them; those from k on aren't stored.

    With ``grains`` in two digits, for :mod:`outrider_triton.jit.planes_ring`, even columns of a unit before odd ones: numbers
    of a unit are rounded to multiples of its grain, a power of two, 2**14 of which are above all of them. ``out``, int8
    [rows, 2, stride], has their low bytes, signed, then the high ones. ``grains``, float32 in rows of ``stride / 2``, are a
    16th of that, since weights are made 16 times too large. Of a unit with a number that isn't finite the grain is NaN.
    """
    column = begins + tl.arange(0, BLOCK)
    if grains is None:
        tl.store(out + row * stride + place_in_planes(column), value, mask=column < k)
    else:
        unit: tl.constexpr = UNIT
        units: tl.constexpr = BLOCK // unit
        wide = tl.where(column < k, value.to(tl.float32), 0.0)
        bits = tl.reshape(wide, [units, unit]).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        grain, times = grain_and_times(tl.max(bits, axis=1))
        which = begins // unit + tl.arange(0, units)
        tl.store(grains + row * (stride // 2) + which, grain, mask=which * unit < k)
        scaled = tl.reshape(tl.reshape(wide, [units, unit]) * times[:, None], [BLOCK])
        even, odd = tl.split(tl.reshape(nearest_whole(scaled), [BLOCK // 2, 2]))
        # Whole words: a byte by itself is a store of its own.
        word = tl.arange(0, BLOCK // 8)
        held: tl.constexpr = unit // 8  # words of even columns of a unit, and of odd ones
        inside = begins + 8 * word < k
        at = (out + row * (2 * stride) + begins).to(tl.pointer_type(tl.int32), bitcast=True)
        at += word // held * (2 * held) + word % held
        behind = stride // 4
        tl.store(at, _bytes_of(even, BLOCK // 2), mask=inside)
        tl.store(at + held, _bytes_of(odd, BLOCK // 2), mask=inside)
        tl.store(at + behind, _bytes_of((even + 128) >> 8, BLOCK // 2), mask=inside)
        tl.store(at + behind + held, _bytes_of((odd + 128) >> 8, BLOCK // 2), mask=inside)


@triton.jit(do_not_specialize=["x_stride"])
def lay_in_planes(x, out, grains, k, x_stride, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``out [m, k]``: the columns of each row of ``x`` as :func:`keep_in_planes` has them. Program (row, chunk)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    begins = tl.program_id(1) * BLOCK
    column = begins + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < k, other=0.0)
    keep_in_planes(out, grains, row, begins, value, k, stride, BLOCK)


def _halves(shift: int, leading: str, behind: str) -> tl.constexpr:
    """Two numbers of a plane from bits that lie ``shift`` up in both halves of a register."""
    bits = f"shr.u32 $0, $1, {shift}; lop3.b32 $0, $0, 0x000F000F, {leading}, 0xEA;"
    return tl.constexpr("{.reg .b32 a, b; " + bits + behind + "}")


_LESS_136 = "mov.b32 a, 0x3F803F80; mov.b32 b, 0xC308C308; fma.rn.bf16x2 $0, $0, a, b;"
_LESS_1032 = "mov.b32 b, 0x64086408; sub.f16x2 $0, $0, b;"
_BF16_0, _BF16_1 = _halves(0, "0x43004300", _LESS_136), _halves(4, "0x43004300", _LESS_136)
_BF16_2, _BF16_3 = _halves(8, "0x43004300", _LESS_136), _halves(12, "0x43004300", _LESS_136)
_FP16_0, _FP16_1 = _halves(0, "0x64006400", _LESS_1032), _halves(4, "0x64006400", _LESS_1032)
_FP16_2, _FP16_3 = _halves(8, "0x64006400", _LESS_1032), _halves(12, "0x64006400", _LESS_1032)


@triton.jit
def numbers_of_plane(packed, PLANE: tl.constexpr, TYPE: tl.constexpr, ASM: tl.constexpr):
    """The numbers of one plane, less 8, from two bytes each. ASM: two at a time, by writing their bits behind those of 128 or
    1024. Each with one operand and one result: the compiler takes the bytes in the layout of the product then.
    """
    if ASM:
        HALF: tl.constexpr = tl.bfloat16 == TYPE
        if PLANE == 0:
            CODE: tl.constexpr = _BF16_0 if HALF else _FP16_0
        elif PLANE == 1:
            CODE: tl.constexpr = _BF16_1 if HALF else _FP16_1
        elif PLANE == 2:
            CODE: tl.constexpr = _BF16_2 if HALF else _FP16_2
        else:
            CODE: tl.constexpr = _BF16_3 if HALF else _FP16_3
        if HALF:
            return tl.inline_asm_elementwise(CODE, "=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(CODE, "=r,r", [packed], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return (((packed.to(tl.int32) >> (4 * PLANE)) & 15) - 8).to(tl.float32).to(TYPE)


# Bits less 8 as a signed number of four bits are those with the first one turned; in the upper half of a byte 16 times that.
_LEFT = tl.constexpr("shl.b32 $0, $1, 4; lop3.b32 $0, $0, 0x88888888, 0xF0F0F0F0, 0x28;")
_RIGHT = tl.constexpr("lop3.b32 $0, $1, 0x88888888, 0xF0F0F0F0, 0x28;")


@triton.jit
def bytes_of_half(packed, HALF: tl.constexpr):
    """16 times the numbers less 8 of even columns (HALF 0) or odd ones, as int8, from a byte each; four at a time, with one
    operand and one result, as :func:`numbers_of_plane`.
    """
    if HALF == 0:
        return tl.inline_asm_elementwise(_LEFT, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(_RIGHT, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit(do_not_specialize=["m", "each", "ahead"])
def linear_planes(
    x,
    weight,
    scales,
    zeros,
    bias,
    out,
    m,
    n,
    k,
    x_stride,
    scale_columns,
    each,
    ahead,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """:func:`outrider_triton.jit.quantized.linear_quantized` for int4 and plain tokens, ``x [m, k]`` laid out in planes.

    ``weight``: int16 [n, k / 4]. k is a multiple of UNIT, SUB of 64 and, above UNIT, of it.
    """
    rows, mine, tokens = rows_and_tokens(each, n, 1, BLOCK_N, BLOCK_M)
    TYPE: tl.constexpr = x.dtype.element_ty
    HELD: tl.constexpr = SUB // 4
    unit: tl.constexpr = UNIT
    share = tl.program_id(2)
    span = tl.cdiv(tl.cdiv(k, SPLIT), BLOCK_K) * BLOCK_K
    begins = share * span
    ends = tl.minimum(begins + span, k)
    if PDL:
        first = weight + tl.minimum(rows, n - 1).to(tl.int64) * (k // 4) + begins // 4
        ask_for_rows(first, tl.minimum(ahead, (ends - begins) // 4))
    first_scale = (rows // ROWS) * scale_columns
    there = tl.minimum(begins, ends - 1) // COLUMNS  # weights, too: no kernel writes them
    factor = tl.load(scales + first_scale + there, mask=mine, other=0.0).to(tl.float32)
    if ZEROS:
        zero = tl.load(zeros + first_scale + there, mask=mine, other=0).to(tl.float32)
    begin_late(PDL)

    lane = tl.arange(0, HELD)
    tile = weight + rows.to(tl.int64)[:, None] * (k // 4) + lane[None, :]
    own = lane
    if unit < SUB:
        own = lane // (unit // 4) * unit + lane % (unit // 4)
    column = x + tokens.to(tl.int64)[None, :] * x_stride + own[:, None]
    known = tokens[None, :] < m
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(begins, ends, BLOCK_K):
        for sub in tl.static_range(BLOCK_K // SUB):
            at = start + sub * SUB
            after = tl.minimum(at + SUB, ends - 1)
            place = tl.multiple_of(at // unit * unit + at % unit // 4, 16)
            if EVEN:
                w = tl.load(tile + at // 4, mask=mine[:, None], other=0, eviction_policy="evict_first")
                real = known
            else:
                inside = lane + at // 4 < k // 4
                w = tl.load(tile + at // 4, mask=mine[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
                real = known & inside[:, None]
            if ZEROS:
                whole = tl.zeros([BLOCK_M], dtype=tl.float32)
            part = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32) if MODE == "block" else total
            for plane in tl.static_range(4):
                t = tl.load(column + place + plane * (unit // 4), mask=real, other=0.0)
                part = tl.dot(numbers_of_plane(w, plane, TYPE, ASM), t, part)
                if ZEROS:
                    whole += tl.sum(t.to(tl.float32), axis=0)
            if MODE == "block":
                if ZEROS:
                    part -= zero[:, None] * whole[None, :]
                    zero = tl.load(zeros + first_scale + after // COLUMNS, mask=mine, other=0).to(tl.float32)
                total += part * factor[:, None]
                factor = tl.load(scales + first_scale + after // COLUMNS, mask=mine, other=0.0).to(tl.float32)
            else:
                total = part
    if MODE == "row":
        total *= factor[:, None]
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
    there_out = out + share.to(tl.int64) * m * n + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(there_out, total.to(out.dtype.element_ty), mask=known & mine[:, None])
