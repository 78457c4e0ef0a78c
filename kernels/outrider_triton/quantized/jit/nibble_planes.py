"""Products of nibble weights and 16-bit tokens for few tokens, without moving data between unpacking and multiplication.

Two bytes of the weight hold four columns, 4 i to 4 i + 3. Elements at the same position of their two bytes form a *nibble
plane*. The matrix unit's operand for a plane is the two bytes themselves, shifted and masked in place. So the weight is
loaded like a 16-bit operand, and an element costs slightly less than 1.5 instructions. A plane has every fourth column.
Tokens are permuted beforehand: of each UNIT_COLUMNS columns first those of the first plane, then those of the next
(:func:`place_in_planes`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin, begin_late, prefetch_rows
from outrider_triton.products.jit.matmul import rows_and_tokens

UNIT_COLUMNS = tl.constexpr(128)
"""Number of columns of a unit, within which columns are permuted."""


@triton.jit
def place_in_planes(column):
    """Return the position of a token's column ``column`` in the nibble-plane layout."""
    unit: tl.constexpr = UNIT_COLUMNS
    return column // unit * unit + column % 4 * (unit // 4) + column % unit // 4


@triton.jit
def _pack_low_bytes(numbers, COUNT: tl.constexpr):
    """Pack the low bytes of ``numbers [COUNT]``, int32, four per word: [COUNT / 4]."""
    left, right = tl.split(tl.reshape(numbers & 0xFF, [COUNT // 4, 2, 2]))
    first, third = tl.split(left)
    second, fourth = tl.split(right)
    return first | (second << 8) | (third << 16) | (fourth << 24)


@triton.jit
def grain_and_times(largest):
    """Return a unit's grain divided by 16, as ``grains`` stores it, and the factor that makes its elements integers below
    2**14.

    ``largest``: bits of the largest magnitude in float32. If that isn't finite, the grain is NaN.
    """
    exponent = tl.maximum(largest >> 23, 18)  # all are below 2**(exponent - 126)
    grain = tl.where(exponent == 255, 0x7FC00000, (exponent - 17) << 23).to(tl.float32, bitcast=True)
    return grain, ((267 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest_whole(number):
    """Return ``number`` rounded to the nearest integer as int32, ties to even. Valid for magnitudes below 2**22."""
    return (number + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2**23


@triton.jit
def store_in_planes(out, grains, row, begins, value, k, stride, BLOCK: tl.constexpr):
    """Store ``value``, BLOCK columns of a row from ``begins`` on, in nibble-plane layout; columns from k on aren't stored.

    With ``grains``, elements are stored as two int8 components for
    :mod:`outrider_triton.quantized.jit.nibble_planes_streamed`, even columns of a unit before odd ones. Elements of a unit
    are rounded to multiples of its grain, a power of two such that all of them are below 2**14 grains. ``out``, int8 [rows,
    2, stride], receives the signed low bytes, then the high bytes. ``grains``, float32 with a row stride of ``stride / 2``,
    receives a 16th of the grain, since dequantised weights are 16 times too large. If a unit has an element that isn't
    finite, its grain is NaN.
    """
    column = begins + tl.arange(0, BLOCK)
    if grains is None:
        tl.store(out + row * stride + place_in_planes(column), value, mask=column < k)
    else:
        unit: tl.constexpr = UNIT_COLUMNS
        units: tl.constexpr = BLOCK // unit
        values = tl.where(column < k, value.to(tl.float32), 0.0)
        bits = tl.reshape(values, [units, unit]).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        grain, times = grain_and_times(tl.max(bits, axis=1))
        unit_index = begins // unit + tl.arange(0, units)
        tl.store(grains + row * (stride // 2) + unit_index, grain, mask=unit_index * unit < k)
        scaled = tl.reshape(tl.reshape(values, [units, unit]) * times[:, None], [BLOCK])
        even, odd = tl.split(tl.reshape(nearest_whole(scaled), [BLOCK // 2, 2]))
        # Store whole words: single bytes would each be a store.
        word = tl.arange(0, BLOCK // 8)
        unit_words: tl.constexpr = unit // 8  # words of even columns of a unit, and of odd ones
        inside = begins + 8 * word < k
        address = (out + row * (2 * stride) + begins).to(tl.pointer_type(tl.int32), bitcast=True)
        address += word // unit_words * (2 * unit_words) + word % unit_words
        high_offset = stride // 4
        tl.store(address, _pack_low_bytes(even, BLOCK // 2), mask=inside)
        tl.store(address + unit_words, _pack_low_bytes(odd, BLOCK // 2), mask=inside)
        tl.store(address + high_offset, _pack_low_bytes((even + 128) >> 8, BLOCK // 2), mask=inside)
        tl.store(address + high_offset + unit_words, _pack_low_bytes((odd + 128) >> 8, BLOCK // 2), mask=inside)


@triton.jit(do_not_specialize=["x_stride"])
def lay_in_planes(x, out, grains, k, x_stride, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Store a chunk of a row of ``x`` to ``out [m, k]`` as :func:`store_in_planes` does; one program per (row, chunk)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    begins = tl.program_id(1) * BLOCK
    column = begins + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < k, other=0.0)
    store_in_planes(out, grains, row, begins, value, k, stride, BLOCK)


def _halves(shift: int, leading: str, behind: str) -> tl.constexpr:
    """Return inline assembly that makes two elements of a plane from the bits at position ``shift`` in both halves of a
    register.
    """
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
    """Return the values of plane PLANE as TYPE. Each int16 of ``packed`` holds one value of each of the four planes, plus 8.

    ASM: convert two at a time by inserting their bits into the mantissa of 128 or 1024. Each call has one operand and one
    result, so that the compiler loads the bytes in the layout of the product.
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


# A nibble less 8 as a signed nibble is the nibble with its top bit flipped; in the upper half of a byte it is 16 times that.
_LEFT = tl.constexpr("shl.b32 $0, $1, 4; lop3.b32 $0, $0, 0x88888888, 0xF0F0F0F0, 0x28;")
_RIGHT = tl.constexpr("lop3.b32 $0, $1, 0x88888888, 0xF0F0F0F0, 0x28;")


@triton.jit
def bytes_of_half(packed, HALF: tl.constexpr):
    """Return 16 times the values of the even columns (HALF 0) or of the odd columns (HALF 1) as int8. Each byte of ``packed``
    holds one even and one odd column, as value plus 8.

    Four bytes are converted at a time, with one operand and one result, as in :func:`numbers_of_plane`.
    """
    if HALF == 0:
        return tl.inline_asm_elementwise(_LEFT, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(_RIGHT, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit(do_not_specialize=["m", "rows_per_program", "prefetch_columns"])
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
    rows_per_program,
    prefetch_columns,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute :func:`outrider_triton.quantized.jit.products.linear_quantized` for int4 weights and ``x [m, k]`` in
    nibble-plane layout.

    ``weight`` is int16 [n, k / 4]. k is a multiple of UNIT_COLUMNS. SUB is a multiple of 64, and above UNIT_COLUMNS of
    UNIT_COLUMNS.
    """
    rows, row_mask, tokens = rows_and_tokens(rows_per_program, n, 1, BLOCK_N, BLOCK_M)
    TYPE: tl.constexpr = x.dtype.element_ty
    HELD: tl.constexpr = SUB // 4
    unit: tl.constexpr = UNIT_COLUMNS
    share = tl.program_id(2)
    span = tl.cdiv(tl.cdiv(k, SPLIT), BLOCK_K) * BLOCK_K
    begins = share * span
    ends = tl.minimum(begins + span, k)
    if PDL:
        first = weight + tl.minimum(rows, n - 1).to(tl.int64) * (k // 4) + begins // 4
        prefetch_rows(first, tl.minimum(prefetch_columns, (ends - begins) // 4))
    first_scale = (rows // ROWS) * scale_columns
    scale_index = tl.minimum(begins, ends - 1) // COLUMNS  # only weights are read before the wait
    factor = tl.load(scales + first_scale + scale_index, mask=row_mask, other=0.0).to(tl.float32)
    if zeros is not None:
        zero = tl.load(zeros + first_scale + scale_index, mask=row_mask, other=0).to(tl.float32)
    begin_late(PDL)

    lane = tl.arange(0, HELD)
    tile = weight + rows.to(tl.int64)[:, None] * (k // 4) + lane[None, :]
    x_lane = lane
    if unit < SUB:
        x_lane = lane // (unit // 4) * unit + lane % (unit // 4)
    column = x + tokens.to(tl.int64)[None, :] * x_stride + x_lane[:, None]
    token_mask = tokens[None, :] < m
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(begins, ends, BLOCK_K):
        for sub in tl.static_range(BLOCK_K // SUB):
            column_start = start + sub * SUB
            next_column = tl.minimum(column_start + SUB, ends - 1)
            place = tl.multiple_of(column_start // unit * unit + column_start % unit // 4, 16)
            if EVEN:
                w = tl.load(tile + column_start // 4, mask=row_mask[:, None], other=0, eviction_policy="evict_first")
                x_mask = token_mask
            else:
                inside = lane + column_start // 4 < k // 4
                w = tl.load(
                    tile + column_start // 4, mask=row_mask[:, None] & inside[None, :], other=0, eviction_policy="evict_first"
                )
                x_mask = token_mask & inside[:, None]
            if zeros is not None:
                token_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            part = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32) if MODE == "block" else total
            for plane in tl.static_range(4):
                t = tl.load(column + place + plane * (unit // 4), mask=x_mask, other=0.0)
                part = tl.dot(numbers_of_plane(w, plane, TYPE, ASM), t, part)
                if zeros is not None:
                    token_sum += tl.sum(t.to(tl.float32), axis=0)
            if MODE == "block":
                if zeros is not None:
                    part -= zero[:, None] * token_sum[None, :]
                    zero = tl.load(zeros + first_scale + next_column // COLUMNS, mask=row_mask, other=0).to(tl.float32)
                total += part * factor[:, None]
                factor = tl.load(scales + first_scale + next_column // COLUMNS, mask=row_mask, other=0.0).to(tl.float32)
            else:
                total = part
    if MODE == "row":
        total *= factor[:, None]
    if bias is not None:
        total += tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    address = out + share.to(tl.int64) * m * n + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(address, total.to(out.dtype.element_ty), mask=token_mask & row_mask[:, None])
