"""Products of experts with quantised weights: the expert lookup of unquantized experts, and the quantised product."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.experts.jit.unquantized import own_pairs
from outrider_triton.jit.dependent import begin
from outrider_triton.quantized.jit.products import sum_of_products


@triton.jit(do_not_specialize=["m"])
def expert_quantized(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    shares,
    chosen,
    order,
    expert_of,
    out,
    m,
    count,
    n,
    k,
    x_stride,
    x_groups,
    scale_columns,
    BY_PAIR: tl.constexpr,
    PACKED: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    ASM: tl.constexpr,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply by an expert's quantised ``weight [experts * n, k]`` into ``out [pairs, n]``.

    BY_PAIR: a row of ``x`` belongs to a token-expert pair, and the result is multiplied by the pair's share; else a row
    belongs to a token. Other operands are those of :func:`outrider_triton.quantized.jit.products.linear_quantized`.
    """
    begin(PDL)
    expert, pairs = own_pairs(chosen, order, expert_of, m, count, SORTED, PAIRS, COUNT, BLOCK_M)
    if expert >= 0:
        WIDE: tl.constexpr = 2 if PACKED else 1
        pair_mask = pairs >= 0
        column_mask = pair_mask[None, :]
        source = tl.where(pair_mask, pairs if BY_PAIR else pairs // count, 0)
        row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = row < n
        rows = expert * n + tl.minimum(row, n - 1)
        row_bytes = k // WIDE
        lane = tl.arange(0, SUB // WIDE)
        tile = weight + rows.to(tl.int64)[:, None] * row_bytes + lane[None, :]
        if WIDE == 2:
            column = x.to(tl.pointer_type(tl.int32)) + source.to(tl.int64)[None, :] * (x_stride // 2) + lane[:, None]
        else:
            column = x + source.to(tl.int64)[None, :] * x_stride + lane[:, None]
        first_scale = (rows // ROWS) * scale_columns
        # Loaded before the loop: one compiler release fails to lower these loads after it.
        factor = tl.where(pair_mask, 1.0, 0.0)
        if x_scales is not None and not GROUP:
            factor *= tl.load(x_scales + source, mask=pair_mask, other=0.0)
        if BY_PAIR:
            factor *= tl.load(shares + source, mask=pair_mask, other=0.0)
        if MODE == "row":
            row_scale = tl.load(scales + first_scale, mask=row_mask, other=0.0).to(tl.float32)
        weights = tile, row_mask, scales, first_scale, zeros, scale_columns, row_bytes
        activations = column, pair_mask, source, x_scales, x_groups
        total = sum_of_products(
            weights, activations, 0, k, x.dtype.element_ty, PACKED, E4M3, NATIVE, MODE, COLUMNS, GROUP, FP8, ASM,
            BLOCK_M, BLOCK_N, BLOCK_K, SUB, EVEN,
        )  # fmt: skip
        if MODE == "row":
            total *= row_scale[:, None]
        total *= factor[None, :]
        address = out + tl.where(pair_mask, pairs, 0)[None, :] * n + row[:, None]
        tl.store(address, total.to(out.dtype.element_ty), mask=column_mask & row_mask[:, None])
