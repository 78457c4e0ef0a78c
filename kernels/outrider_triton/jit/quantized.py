"""Products with quantised weights, few tokens at a time: bytes of the weight are read once, and made numbers on the way.

As in :mod:`outrider_triton.jit.matmul`, the weight is the wide operand of the matrix unit, and a program has ``each`` rows.
Scales meet the sums, not the weight, where a tile has one scale a row: so a weight costs no more instructions than it must.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import ask_for_rows, begin, begin_late
from outrider_triton.jit.matmul import rows_and_tokens

# -- numbers from bytes --------------------------------------------------------------------------------------------


@triton.jit
def _low_and_high(packed, TYPE: tl.constexpr, ASM: tl.constexpr):
    """Both halves of each byte, less 8. ASM: two at a time, by writing them behind the leading bits of 128 or 1024."""
    if ASM and tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 high, bits, ones, less;
            mov.b32 ones, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            shr.u32 high, $4, 4;
            prmt.b32 bits, $4, 0, 0x4140;
            lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, bits, ones, less;
            prmt.b32 bits, $4, 0, 0x4342;
            lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, bits, ones, less;
            prmt.b32 bits, high, 0, 0x4140;
            lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, bits, ones, less;
            prmt.b32 bits, high, 0, 0x4342;
            lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, bits, ones, less;
            }
            """,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif ASM and tl.float16 == TYPE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 high, bits, less;
            mov.b32 less, 0x64086408;
            shr.u32 high, $4, 4;
            prmt.b32 bits, $4, 0, 0x4140;
            lop3.b32 bits, bits, 0x000F000F, 0x64006400, 0xEA;
            sub.f16x2 $0, bits, less;
            prmt.b32 bits, $4, 0, 0x4342;
            lop3.b32 bits, bits, 0x000F000F, 0x64006400, 0xEA;
            sub.f16x2 $1, bits, less;
            prmt.b32 bits, high, 0, 0x4140;
            lop3.b32 bits, bits, 0x000F000F, 0x64006400, 0xEA;
            sub.f16x2 $2, bits, less;
            prmt.b32 bits, high, 0, 0x4342;
            lop3.b32 bits, bits, 0x000F000F, 0x64006400, 0xEA;
            sub.f16x2 $3, bits, less;
            }
            """,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 15).to(tl.int32) - 8).to(tl.float32)
        high = ((packed >> 4).to(tl.int32) - 8).to(tl.float32)
        return low.to(TYPE), high.to(TYPE)


@triton.jit
def _of_e4m3(bits, TYPE: tl.constexpr, FP8: tl.constexpr):
    """Numbers of e4m3 bytes. Without FP8 by hand: a float16 has one exponent bit more, and a bias that is 8 larger."""
    if FP8:
        half = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        # Compute capability 8.9 has no way from float16 to bfloat16 but through float32.
        return half if tl.float16 == TYPE else half.to(tl.float32).to(TYPE)
    else:
        wide = bits.to(tl.int16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        half = tl.where((wide & 0x7F) == 0x7F, float("nan"), half).to(tl.float16)
        return half if tl.float16 == TYPE else half.to(tl.float32).to(TYPE)


# -- weights -------------------------------------------------------------------------------------------------------


@triton.jit
def _number(weight, there, mask, FORMAT: tl.constexpr, TYPE: tl.constexpr, FP8: tl.constexpr):
    """Values of weights of eight bits."""
    bits = tl.load(weight + there, mask=mask, other=0, eviction_policy="evict_first")
    return _of_e4m3(bits, TYPE, FP8) if FORMAT == "fp8" else bits.to(tl.float32).to(TYPE)


@triton.jit
def _spread(grid, place, SHAPE: tl.constexpr, WIDTH: tl.constexpr):
    """A number for each WIDTH columns, beside each other so often."""
    made = tl.load(grid + place).to(tl.float32)
    made = tl.broadcast_to(made[:, :, None], [SHAPE[0], SHAPE[1] // WIDTH, WIDTH])
    return tl.reshape(made, [SHAPE[0], SHAPE[1]])


@triton.jit
def dequantize(
    weight,
    scales,
    zeros,
    out,
    n,
    k,
    scale_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out [n, k]``: the weight as plain numbers, computed in float32 and rounded once. WIDTH: so many columns of a block, a
    power of two, have one scale; 0: each looks for its own.
    """
    begin(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mine = (row < n)[:, None]
    mask = mine & (column < k)[None, :]
    if FORMAT == "int4":
        HALF: tl.constexpr = BLOCK_K // 2
        pair = tl.program_id(1) * HALF + tl.arange(0, HALF)
        held = tl.cdiv(k, 2)
        there = row.to(tl.int64)[:, None] * held + pair[None, :]
        packed = tl.load(weight + there, mask=mine & (pair < held)[None, :], other=0).to(tl.int32)
        both = tl.join(packed & 15, packed >> 4)
        value = (tl.reshape(both, [BLOCK_N, BLOCK_K]) - 8).to(tl.float32)
    else:
        value = _number(weight, row.to(tl.int64)[:, None] * k + column[None, :], mask, FORMAT, tl.float32, FP8)
    if WIDTH:
        groups = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K // WIDTH) * WIDTH) // COLUMNS
        place = (tl.minimum(row, n - 1) // ROWS)[:, None] * scale_columns + tl.minimum(groups, scale_columns - 1)[None, :]
        if ZEROS:
            value -= _spread(zeros, place, [BLOCK_N, BLOCK_K], WIDTH)
        value *= _spread(scales, place, [BLOCK_N, BLOCK_K], WIDTH)
    else:
        place = (row // ROWS)[:, None] * scale_columns + (column // COLUMNS)[None, :]
        if ZEROS:
            value -= tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
        value *= tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64)[:, None] * k + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_products(
    tile,
    column,
    mine,
    real,
    tokens,
    scales,
    first_scale,
    zeros,
    x_scales,
    x_groups,
    scale_columns,
    begins,
    ends,
    held,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    MODE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Of ``tile``, pointers to rows [BLOCK_N, SUB] of the weight (``mine`` of them), and ``column``, to those of x
    [SUB, BLOCK_M] (``real`` ones, in the places ``tokens`` of ``x_scales``): the sum over columns from ``begins`` to
    ``ends``, in float32 [BLOCK_N, BLOCK_M]. Scales of whole rows are the caller's. ``held``: bytes of a row. Else see
    :func:`linear_quantized`.
    """
    PACKED: tl.constexpr = FORMAT == "int4"
    WIDE: tl.constexpr = 2 if PACKED else 1
    HELD: tl.constexpr = SUB // WIDE
    NONE: tl.constexpr = 0.0 if NATIVE and FORMAT == "fp8" else 0
    NOTHING: tl.constexpr = 0 if PACKED or (NATIVE and FORMAT == "int8") else 0.0
    PARTS: tl.constexpr = MODE == "block" or GROUP > 0
    lane = tl.arange(0, HELD)
    known = real[None, :]
    # Scales of a block are on their way while the block before is multiplied. A share may have no columns.
    there = tl.minimum(begins, ends - 1)
    if MODE == "block":
        factor = tl.load(scales + first_scale + there // COLUMNS, mask=mine, other=0.0).to(tl.float32)
        if ZEROS:
            zero = tl.load(zeros + first_scale + there // COLUMNS, mask=mine, other=0).to(tl.float32)
    if GROUP:
        divisor = tl.load(x_scales + tokens * x_groups + there // GROUP, mask=real, other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(begins, ends, BLOCK_K):
        for sub in tl.static_range(BLOCK_K // SUB):
            at = start + sub * SUB
            place = at // WIDE
            after = tl.minimum(at + SUB, ends - 1)
            if EVEN:
                w = tl.load(tile + place, mask=mine[:, None], other=NONE, eviction_policy="evict_first")
                t = tl.load(column + place, mask=known, other=NOTHING)
            else:
                w = tl.load(
                    tile + place,
                    mask=mine[:, None] & (lane[None, :] + place < held),
                    other=NONE,
                    eviction_policy="evict_first",
                )
                t = tl.load(column + place, mask=known & (lane[:, None] + place < held), other=NOTHING)
            if MODE == "fine":
                groups = tl.arange(0, SUB // COLUMNS) + at // COLUMNS
                inside = tl.minimum(groups, scale_columns - 1)
                grid = tl.where(mine, first_scale, 0)[:, None] + inside[None, :]
                factor = _spread(scales, grid, [BLOCK_N, HELD], COLUMNS // WIDE)
                less = _spread(zeros, grid, [BLOCK_N, HELD], COLUMNS // WIDE) if ZEROS else 0.0
            if PACKED:
                low, high = _low_and_high(w, TYPE, ASM)
                even = (t & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
                odd = ((t >> 16) & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
                if MODE == "fine":
                    low = ((low.to(tl.float32) - less) * factor).to(TYPE)
                    high = ((high.to(tl.float32) - less) * factor).to(TYPE)
                part = tl.dot(low, even, tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32) if PARTS else total)
                part = tl.dot(high, odd, part)
            elif NATIVE and FORMAT == "fp8":
                # Hopper's unit adds up e4m3 with few bits: so many columns, then in float32.
                before = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32) if PARTS else total
                part = tl.dot(w, t, before, max_num_imprecise_acc=min(SUB, 128))
            elif NATIVE:
                part = tl.dot(w, t).to(tl.float32)
                if not PARTS:
                    part += total
            else:
                number = _of_e4m3(w, TYPE, FP8) if FORMAT == "fp8" else w.to(tl.float32).to(TYPE)
                if MODE == "fine":
                    number = ((number.to(tl.float32) - less) * factor).to(TYPE)
                part = tl.dot(number, t, tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32) if PARTS else total)
            if MODE == "block":
                if ZEROS:
                    if PACKED:
                        whole = tl.sum(even.to(tl.float32) + odd.to(tl.float32), axis=0)
                    else:
                        whole = tl.sum(t.to(tl.float32), axis=0)
                    part -= zero[:, None] * whole[None, :]
                    zero = tl.load(zeros + first_scale + after // COLUMNS, mask=mine, other=0).to(tl.float32)
                part *= factor[:, None]
                factor = tl.load(scales + first_scale + after // COLUMNS, mask=mine, other=0.0).to(tl.float32)
            if GROUP:
                part *= divisor[None, :]
                divisor = tl.load(x_scales + tokens * x_groups + after // GROUP, mask=real, other=0.0)
            total = total + part if PARTS else part
    return total


@triton.jit(do_not_specialize=["m", "each", "ahead"])
def linear_quantized(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    bias,
    out,
    m,
    n,
    k,
    x_stride,
    x_groups,
    scale_columns,
    each,
    ahead,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ACTIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x [m, k] @ W [n, k].T`` for the weight that ``weight`` stands for, with a scale for each ROWS x COLUMNS of it.

    ``MODE`` "row": a scale for a whole row. "block": for at least the SUB columns that are multiplied at a time. "fine": for
    fewer, of which SUB is a multiple; it's multiplied with the weight. ``NATIVE``: the matrix unit takes both operands as
    they are stored. ``ACTIVE``: x was divided by ``x_scales [m, x_groups]``, one for each GROUP columns (0: for the row).
    Split: part p is ``out [p, m, n]`` in float32, over its own share of k, without bias. ``EVEN``: k is a multiple of
    SPLIT * BLOCK_K. int4: columns come in pairs, a byte each, and ``x`` likewise.
    """
    rows, mine, tokens = rows_and_tokens(each, n, 1, BLOCK_N, BLOCK_M)
    PACKED: tl.constexpr = FORMAT == "int4"
    WIDE: tl.constexpr = 2 if PACKED else 1
    HELD: tl.constexpr = SUB // WIDE
    held = k // WIDE
    share = tl.program_id(2)
    span = tl.cdiv(tl.cdiv(k, SPLIT), BLOCK_K) * BLOCK_K
    begins = share * span
    ends = tl.minimum(begins + span, k)
    if PDL:
        first = weight + tl.minimum(rows, n - 1).to(tl.int64) * held + begins // WIDE
        ask_for_rows(first, tl.minimum(ahead, (ends - begins) // (2 * WIDE)))
    first_scale = (rows // ROWS) * scale_columns
    if MODE == "row":  # weights, too: no kernel writes them
        factor = tl.load(scales + first_scale, mask=mine, other=0.0).to(tl.float32)
    begin_late(PDL)

    lane = tl.arange(0, HELD)
    tile = weight + rows.to(tl.int64)[:, None] * held + lane[None, :]
    known = tokens[None, :] < m
    if PACKED:
        column = x.to(tl.pointer_type(tl.int32)) + tokens.to(tl.int64)[None, :] * (x_stride // 2) + lane[:, None]
    else:
        column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    if ACTIVE and not GROUP:
        divisor = tl.load(x_scales + tokens, mask=tokens < m, other=0.0)
    total = sum_of_products(
        tile,
        column,
        mine,
        tokens < m,
        tokens,
        scales,
        first_scale,
        zeros,
        x_scales,
        x_groups,
        scale_columns,
        begins,
        ends,
        held,
        x.dtype.element_ty,
        FORMAT,
        NATIVE,
        MODE,
        COLUMNS,
        GROUP,
        ZEROS,
        FP8,
        ASM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SUB,
        EVEN,
    )
    if MODE == "row":
        total *= factor[:, None]
    if ACTIVE and not GROUP:
        total *= divisor[None, :]
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
    there = out + share.to(tl.int64) * m * n + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(there, total.to(out.dtype.element_ty), mask=known & mine[:, None])


@triton.jit
def add_parts(parts, bias, out, size, n, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``out [m, n]``, of ``size`` numbers: the sum of PARTS of them, and of ``bias [n]``."""
    begin(PDL)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + lane, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + lane % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + lane, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_products(
    sums,
    x_scales,
    scales,
    bias,
    out,
    n,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out [m, n]``: the library's ``sums`` of whole numbers, times what both operands were divided by, ``x_scales [m]`` and
    one of ``scales`` for ROWS of the n, and ``bias [n]``. Program (row, BLOCK numbers).
    """
    begin(PDL)
    row = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < n
    place = row.to(tl.int64) * n + lane
    total = tl.load(sums + place, mask=inside, other=0).to(tl.float32) * tl.load(x_scales + row)
    total *= tl.load(scales + lane // ROWS, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
