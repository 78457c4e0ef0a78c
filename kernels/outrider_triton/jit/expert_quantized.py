"""Products of experts with quantised weights: an expert is found as plain ones are, its weight multiplied as any other."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin
from outrider_triton.jit.experts import own_pairs
from outrider_triton.jit.quantized import sum_of_products


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
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ACTIVE: tl.constexpr,
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
    """``out [pairs, n]``: x times an expert's ``weight [experts * n, k]``. BY_PAIR: a row of ``x`` is a pair's, and what
    comes is multiplied by its share; else a token's. The rest as in :func:`outrider_triton.jit.quantized.linear_quantized`.
    """
    begin(PDL)
    expert, pairs = own_pairs(chosen, order, expert_of, m, count, SORTED, PAIRS, COUNT, BLOCK_M)
    if expert >= 0:
        WIDE: tl.constexpr = 2 if FORMAT == "int4" else 1
        hit = pairs >= 0
        known = hit[None, :]
        source = tl.where(hit, pairs if BY_PAIR else pairs // count, 0)
        row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        mine = row < n
        rows = expert * n + tl.minimum(row, n - 1)
        held = k // WIDE
        lane = tl.arange(0, SUB // WIDE)
        tile = weight + rows.to(tl.int64)[:, None] * held + lane[None, :]
        if WIDE == 2:
            column = x.to(tl.pointer_type(tl.int32)) + source.to(tl.int64)[None, :] * (x_stride // 2) + lane[:, None]
        else:
            column = x + source.to(tl.int64)[None, :] * x_stride + lane[:, None]
        first_scale = (rows // ROWS) * scale_columns
        # Loaded ahead of the loop: behind it, one release of the compiler loses where they are.
        factor = tl.where(hit, 1.0, 0.0)
        if ACTIVE and not GROUP:
            factor *= tl.load(x_scales + source, mask=hit, other=0.0)
        if BY_PAIR:
            factor *= tl.load(shares + source, mask=hit, other=0.0)
        if MODE == "row":
            of_row = tl.load(scales + first_scale, mask=mine, other=0.0).to(tl.float32)
        total = sum_of_products(
            tile,
            column,
            mine,
            hit,
            source,
            scales,
            first_scale,
            zeros,
            x_scales,
            x_groups,
            scale_columns,
            0,
            k,
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
            total *= of_row[:, None]
        total *= factor[None, :]
        there = out + tl.where(hit, pairs, 0)[None, :] * n + row[:, None]
        tl.store(there, total.to(out.dtype.element_ty), mask=known & mine[:, None])
