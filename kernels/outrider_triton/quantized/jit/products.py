"""Products with quantised weights for few tokens: weights are read once and dequantised in registers.

As in :mod:`outrider_triton.products.jit.matmul`, the weight is the wide operand of the matrix unit, and a program has
``rows_per_program`` rows. If a tile has one scale per row, the scale multiplies the sums instead of the weight, which saves
instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin, begin_late, prefetch_rows
from outrider_triton.products.jit.matmul import rows_and_tokens

# -- element conversion ----------------------------------------------------------------------------------------


def _unpacking(leading: str, setup: str, subtract: str) -> tl.constexpr:
    """Return inline assembly that makes four registers of two numbers from four bytes: their low nibbles, then the high ones.

    Nibbles are inserted into the mantissas of ``leading``, which ``subtract`` then removes; ``setup`` prepares its operands.
    """
    code = f"{{ .reg .b32 high, bits, ones, less; {setup} shr.u32 high, $4, 4;"
    sources = (("$4", "0x4140"), ("$4", "0x4342"), ("high", "0x4140"), ("high", "0x4342"))
    for result, (source, selected) in enumerate(sources):
        code += f" prmt.b32 bits, {source}, 0, {selected}; lop3.b32 bits, bits, 0x000F000F, {leading}, 0xEA;"
        code += f" {subtract.format(result)};"
    return tl.constexpr(code + " }")


_UNPACK_BF16 = _unpacking(
    "0x43004300", "mov.b32 ones, 0x3F803F80; mov.b32 less, 0xC308C308;", "fma.rn.bf16x2 ${}, bits, ones, less"
)
_UNPACK_FP16 = _unpacking("0x64006400", "mov.b32 less, 0x64086408;", "sub.f16x2 ${}, bits, less")


def _unpacking_floats(shift: int, magnitude: str, multiply: str) -> tl.constexpr:
    """Return inline assembly that makes four registers of two numbers from four bytes of two e2m1 floats: the low nibbles,
    then the high ones.

    The bits of exponent and mantissa become the lowest exponent bits and the highest mantissa bit of a 16-bit float, which
    ``multiply`` scales by the power of two between the two exponents' biases. Subnormal floats stay exact.
    """
    code = "{ .reg .b32 low, bits, size, power, none; mov.b32 none, 0x80008000; shl.b32 low, $4, 4;"
    for result, (source, selected) in enumerate((("low", "0x1404"), ("low", "0x3424"), ("$4", "0x1404"), ("$4", "0x3424"))):
        code += f" prmt.b32 bits, {source}, 0, {selected}; shr.u32 size, bits, {shift}; and.b32 size, size, {magnitude};"
        code += f" lop3.b32 bits, bits, 0x80008000, size, 0xEA; {multiply.format(result)};"
    return tl.constexpr(code + " }")


_FLOATS_BF16 = _unpacking_floats(6, "0x01C001C0", "mov.b32 power, 0x7E807E80; fma.rn.bf16x2 ${}, bits, power, none")
_FLOATS_FP16 = _unpacking_floats(3, "0x0E000E00", "mov.b32 power, 0x74007400; mul.rn.f16x2 ${}, bits, power")


@triton.jit
def _nibble_values(nibbles, FLOAT: tl.constexpr):
    """Return the float32 values of nibbles in int32: e2m1 floats, or integers plus 8."""
    if FLOAT:
        code = (nibbles & 7).to(tl.float32)
        size = tl.where(code < 4.0, code * 0.5, tl.where(code < 6.0, code - 2.0, code * 2.0 - 8.0))
        return tl.where(nibbles < 8, size, -size)
    else:
        return (nibbles - 8).to(tl.float32)


@triton.jit
def _unpack_nibbles(packed, TYPE: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr):
    """Return the values of both nibbles of each byte as TYPE. ASM: convert two at a time; integers are inserted into the
    mantissa of 128 or 1024.
    """
    REGISTERS: tl.constexpr = "=r,=r,=r,=r,r"
    if ASM and FLOAT and tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(_FLOATS_BF16, REGISTERS, [packed], (tl.bfloat16, tl.bfloat16), True, 4)
    elif ASM and FLOAT and tl.float16 == TYPE:
        return tl.inline_asm_elementwise(_FLOATS_FP16, REGISTERS, [packed], (tl.float16, tl.float16), True, 4)
    elif ASM and tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(_UNPACK_BF16, REGISTERS, [packed], (tl.bfloat16, tl.bfloat16), True, 4)
    elif ASM and tl.float16 == TYPE:
        return tl.inline_asm_elementwise(_UNPACK_FP16, REGISTERS, [packed], (tl.float16, tl.float16), True, 4)
    else:
        low = _nibble_values((packed & 15).to(tl.int32), FLOAT)
        high = _nibble_values((packed >> 4).to(tl.int32), FLOAT)
        return low.to(TYPE), high.to(TYPE)


@triton.jit
def _convert_e4m3(bits, TYPE: tl.constexpr, FP8: tl.constexpr):
    """Return e4m3 bytes ``bits`` converted to TYPE. Without FP8 instructions the conversion uses bit operations: float16 has
    one more exponent bit, and a bias larger by 8.
    """
    if FP8:
        half = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        # Compute capability 8.9 converts float16 to bfloat16 only through float32.
        return half if tl.float16 == TYPE else half.to(tl.float32).to(TYPE)
    else:
        wide = bits.to(tl.int16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        half = tl.where((wide & 0x7F) == 0x7F, float("nan"), half).to(tl.float16)
        return half if tl.float16 == TYPE else half.to(tl.float32).to(TYPE)


# -- weights -------------------------------------------------------------------------------------------------------


@triton.jit
def _load_bytes(weight, offset, mask, FLOAT: tl.constexpr, TYPE: tl.constexpr, FP8: tl.constexpr):
    """Load 8-bit weights, zeros where ``mask`` is False, and convert them to TYPE."""
    bits = tl.load(weight + offset, mask=mask, other=0, eviction_policy="evict_first")
    return _convert_e4m3(bits, TYPE, FP8) if FLOAT else bits.to(tl.float32).to(TYPE)


@triton.jit
def scales_of(stored):
    """Return loaded scales as float32. Bytes are exponents of powers of two, with a bias of 127 (e8m0)."""
    if stored.dtype == tl.uint8:
        exponent = stored.to(tl.int32)
        return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def _load_groups(grid, first_scale, column, scale_columns, COLUMNS: tl.constexpr, SUB: tl.constexpr):
    """Load the scales or zero points of the SUB columns from ``column`` on, one per COLUMNS columns."""
    groups = tl.arange(0, SUB // COLUMNS) + column // COLUMNS
    return tl.load(grid + first_scale[:, None] + tl.minimum(groups, scale_columns - 1)[None, :])


@triton.jit
def _repeated(stored, SHAPE: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr = tl.float32):
    """Return loaded scales or zero points as TYPE, each repeated for WIDTH columns."""
    values = scales_of(stored).to(TYPE)
    values = tl.broadcast_to(values[:, :, None], [SHAPE[0], SHAPE[1] // WIDTH, WIDTH])
    return tl.reshape(values, [SHAPE[0], SHAPE[1]])


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
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantize the weight to ``out [n, k]``: compute in float32, round once.

    WIDTH: this many columns of a block, a power of two, share a scale; 0: each column looks up its own.
    """
    begin(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row_mask = (row < n)[:, None]
    mask = row_mask & (column < k)[None, :]
    if PACKED:
        HALF: tl.constexpr = BLOCK_K // 2
        pair = tl.program_id(1) * HALF + tl.arange(0, HALF)
        row_bytes = tl.cdiv(k, 2)
        offset = row.to(tl.int64)[:, None] * row_bytes + pair[None, :]
        packed = tl.load(weight + offset, mask=row_mask & (pair < row_bytes)[None, :], other=0).to(tl.int32)
        both = tl.join(packed & 15, packed >> 4)
        value = _nibble_values(tl.reshape(both, [BLOCK_N, BLOCK_K]), FLOAT)
    else:
        value = _load_bytes(weight, row.to(tl.int64)[:, None] * k + column[None, :], mask, FLOAT, tl.float32, FP8)
    if WIDTH:
        groups = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K // WIDTH) * WIDTH) // COLUMNS
        place = (tl.minimum(row, n - 1) // ROWS)[:, None] * scale_columns + tl.minimum(groups, scale_columns - 1)[None, :]
        if zeros is not None:
            value -= _repeated(tl.load(zeros + place), [BLOCK_N, BLOCK_K], WIDTH)
        value *= _repeated(tl.load(scales + place), [BLOCK_N, BLOCK_K], WIDTH)
    else:
        place = (row // ROWS)[:, None] * scale_columns + (column // COLUMNS)[None, :]
        if zeros is not None:
            value -= tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
        value *= scales_of(tl.load(scales + place, mask=mask, other=0))
    tl.store(out + row.to(tl.int64)[:, None] * k + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_products(
    weights,
    activations,
    begins,
    ends,
    TYPE: tl.constexpr,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    NATIVE: tl.constexpr,
    MODE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return the sum of products over columns from ``begins`` to ``ends``, in float32 [BLOCK_N, BLOCK_M].

    ``weights`` is (tile, row_mask, scales, first_scale, zeros, scale_columns, row_bytes). ``tile`` points to weight rows
    [BLOCK_N, SUB], valid where ``row_mask``; ``row_bytes``: bytes per weight row. ``activations`` is (column, token_mask,
    tokens, x_scales, x_groups). ``column`` points to x [SUB, BLOCK_M], valid where ``token_mask``, at rows ``tokens`` of
    ``x_scales``. The caller applies scales of whole rows. Other operands: see :func:`linear_quantized`.
    """
    tile, row_mask, scales, first_scale, zeros, scale_columns, row_bytes = weights
    column, token_mask, tokens, x_scales, x_groups = activations
    WIDE: tl.constexpr = 2 if PACKED else 1
    SUB_BYTES: tl.constexpr = SUB // WIDE
    WEIGHT_FILL: tl.constexpr = 0.0 if NATIVE and FLOAT else 0
    TOKEN_FILL: tl.constexpr = 0 if PACKED or (NATIVE and not FLOAT) else 0.0
    PARTS: tl.constexpr = MODE == "block" or GROUP > 0
    # The product of a 4-bit float and a power of two is a bfloat16. The interpreter doesn't multiply these.
    EXACT: tl.constexpr = ASM and PACKED and FLOAT and scales.dtype.element_ty == tl.uint8 and tl.bfloat16 == TYPE
    SCALES: tl.constexpr = TYPE if EXACT else tl.float32
    lane = tl.arange(0, SUB_BYTES)
    column_mask = token_mask[None, :]
    # A block's scales are loaded while the preceding block is multiplied. A share may have no columns.
    first_column = tl.minimum(begins, ends - 1)
    if MODE == "block":
        factor = scales_of(tl.load(scales + first_scale + first_column // COLUMNS, mask=row_mask, other=0))
        if zeros is not None:
            zero = tl.load(zeros + first_scale + first_column // COLUMNS, mask=row_mask, other=0).to(tl.float32)
    if MODE == "fine":
        first_group = tl.where(row_mask, first_scale, 0)
        stored = _load_groups(scales, first_group, first_column, scale_columns, COLUMNS, SUB)
    if GROUP:
        divisor = tl.load(x_scales + tokens * x_groups + first_column // GROUP, mask=token_mask, other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(begins, ends, BLOCK_K):
        for sub in tl.static_range(BLOCK_K // SUB):
            column_start = start + sub * SUB
            place = column_start // WIDE
            next_column = tl.minimum(column_start + SUB, ends - 1)
            if EVEN:
                w = tl.load(tile + place, mask=row_mask[:, None], other=WEIGHT_FILL, eviction_policy="evict_first")
                t = tl.load(column + place, mask=column_mask, other=TOKEN_FILL)
            else:
                w = tl.load(
                    tile + place,
                    mask=row_mask[:, None] & (lane[None, :] + place < row_bytes),
                    other=WEIGHT_FILL,
                    eviction_policy="evict_first",
                )
                t = tl.load(column + place, mask=column_mask & (lane[:, None] + place < row_bytes), other=TOKEN_FILL)
            if MODE == "fine":
                factor = _repeated(stored, [BLOCK_N, SUB_BYTES], COLUMNS // WIDE, SCALES)
                stored = _load_groups(scales, first_group, next_column, scale_columns, COLUMNS, SUB)
                zero_points = 0.0
                if zeros is not None:
                    own = _load_groups(zeros, first_group, column_start, scale_columns, COLUMNS, SUB)
                    zero_points = _repeated(own, [BLOCK_N, SUB_BYTES], COLUMNS // WIDE)
            if PACKED:
                low, high = _unpack_nibbles(w, TYPE, FLOAT, ASM)
                even = (t & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
                odd = ((t >> 16) & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
                if MODE == "fine" and EXACT:
                    low *= factor
                    high *= factor
                elif MODE == "fine":
                    low = ((low.to(tl.float32) - zero_points) * factor).to(TYPE)
                    high = ((high.to(tl.float32) - zero_points) * factor).to(TYPE)
                part = tl.dot(low, even, tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32) if PARTS else total)
                part = tl.dot(high, odd, part)
            elif NATIVE and FLOAT:
                # Hopper's unit accumulates e4m3 with few bits: limit the columns, then add in float32.
                initial = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32) if PARTS else total
                part = tl.dot(w, t, initial, max_num_imprecise_acc=min(SUB, 128))
            elif NATIVE:
                part = tl.dot(w, t).to(tl.float32)
                if not PARTS:
                    part += total
            else:
                number = _convert_e4m3(w, TYPE, FP8) if FLOAT else w.to(tl.float32).to(TYPE)
                if MODE == "fine":
                    number = ((number.to(tl.float32) - zero_points) * factor).to(TYPE)
                part = tl.dot(number, t, tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32) if PARTS else total)
            if MODE == "block":
                if zeros is not None:
                    if PACKED:
                        token_sum = tl.sum(even.to(tl.float32) + odd.to(tl.float32), axis=0)
                    else:
                        token_sum = tl.sum(t.to(tl.float32), axis=0)
                    part -= zero[:, None] * token_sum[None, :]
                    zero = tl.load(zeros + first_scale + next_column // COLUMNS, mask=row_mask, other=0).to(tl.float32)
                part *= factor[:, None]
                factor = scales_of(tl.load(scales + first_scale + next_column // COLUMNS, mask=row_mask, other=0))
            if GROUP:
                part *= divisor[None, :]
                divisor = tl.load(x_scales + tokens * x_groups + next_column // GROUP, mask=token_mask, other=0.0)
            total = total + part if PARTS else part
    return total


@triton.jit(do_not_specialize=["m", "rows_per_program", "prefetch_columns"])
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
    rows_per_program,
    prefetch_columns,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    NATIVE: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
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
    """Compute ``x [m, k] @ W [n, k].T`` for the quantised W in ``weight``, with a scale for each ROWS x COLUMNS of it.

    - MODE "row": a scale per whole row. "block": per at least the SUB columns of one multiplication. "fine": per fewer
    columns, of which SUB is a multiple; the scale multiplies the weight.
    - NATIVE: the matrix unit takes both operands as stored.
    - With x_scales, x was divided by ``x_scales [m, x_groups]``, one per GROUP columns (0: per row).
    - SPLIT: part p is ``out [p, m, n]`` in float32, over its own share of k, without bias. EVEN: k is a multiple of SPLIT *
    BLOCK_K.
    - PACKED: a byte holds two columns of four bits, and ``x`` is read in pairs of columns.
    - FLOAT: values are floats. Scales of four-bit floats may be bytes (:func:`scales_of`).
    """
    rows, row_mask, tokens = rows_and_tokens(rows_per_program, n, 1, BLOCK_N, BLOCK_M)
    WIDE: tl.constexpr = 2 if PACKED else 1
    SUB_BYTES: tl.constexpr = SUB // WIDE
    row_bytes = k // WIDE
    share = tl.program_id(2)
    span = tl.cdiv(tl.cdiv(k, SPLIT), BLOCK_K) * BLOCK_K
    begins = share * span
    ends = tl.minimum(begins + span, k)
    if PDL:
        first = weight + tl.minimum(rows, n - 1).to(tl.int64) * row_bytes + begins // WIDE
        prefetch_rows(first, tl.minimum(prefetch_columns, (ends - begins) // (2 * WIDE)))
    first_scale = (rows // ROWS) * scale_columns
    if MODE == "row":  # a weight, so its load may precede the wait
        factor = scales_of(tl.load(scales + first_scale, mask=row_mask, other=0))
    begin_late(PDL)

    lane = tl.arange(0, SUB_BYTES)
    tile = weight + rows.to(tl.int64)[:, None] * row_bytes + lane[None, :]
    column_mask = tokens[None, :] < m
    if PACKED:
        column = x.to(tl.pointer_type(tl.int32)) + tokens.to(tl.int64)[None, :] * (x_stride // 2) + lane[:, None]
    else:
        column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    if x_scales is not None and not GROUP:
        divisor = tl.load(x_scales + tokens, mask=tokens < m, other=0.0)
    weights = tile, row_mask, scales, first_scale, zeros, scale_columns, row_bytes
    activations = column, tokens < m, tokens, x_scales, x_groups
    total = sum_of_products(
        weights, activations, begins, ends, x.dtype.element_ty, PACKED, FLOAT, NATIVE, MODE, COLUMNS, GROUP, FP8, ASM,
        BLOCK_M, BLOCK_N, BLOCK_K, SUB, EVEN,
    )  # fmt: skip
    if MODE == "row":
        total *= factor[:, None]
    if x_scales is not None and not GROUP:
        total *= divisor[None, :]
    if bias is not None:
        total += tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    address = out + share.to(tl.int64) * m * n + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(address, total.to(out.dtype.element_ty), mask=column_mask & row_mask[:, None])


@triton.jit(do_not_specialize=["m"])
def add_parts(parts, bias, out, m, n, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Add PARTS ``parts`` and ``bias [n]`` into ``out [m, n]``; one program per BLOCK elements."""
    begin(PDL)
    size = m * n  # a multiple of 16 if n is, which m must not decide: each number of tokens would need a variant
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + lane, mask=inside, other=0.0)
    if bias is not None:
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scale the library's integer ``sums`` into ``out [m, n]``, and add ``bias [n]``; one program per (row, BLOCK elements).

    The factors are ``x_scales [m]`` and one of ``scales`` per ROWS of the n.
    """
    begin(PDL)
    row = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < n
    offset = row.to(tl.int64) * n + lane
    total = tl.load(sums + offset, mask=inside, other=0).to(tl.float32) * tl.load(x_scales + row)
    total *= tl.load(scales + lane // ROWS, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
