"""Operators of products with quantised weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from outrider.device.kernels.operators import expect
from outrider_triton.jit.tma_pipeline import PIECE_COLUMNS
from outrider_triton.launch import define, launch
from outrider_triton.products.streamed import descriptor, multiply, silu_mul, token_descriptor
from outrider_triton.quantized.activations import activation_dtype, quantized_rows
from outrider_triton.quantized.jit import products as quantized
from outrider_triton.quantized.jit import scaled_blocks
from outrider_triton.quantized.plan import TRITON_FORMATS, kernel_scales
from outrider_triton.tiles.configs import SCALED_BLOCKS, STREAMED, MatmulConfig

_TOKENS_PER_SUM = 16
"""Tokens per program that adds the parts of shared tiles."""


def multiply_blocks(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, out: Tensor, config: MatmulConfig, pdl: bool
) -> None:
    """Multiply ``x [m, k]`` by ``weight [n, k]`` into ``out [m, n]``, in shares of units
    (:mod:`outrider_triton.quantized.jit.scaled_blocks`). Both operands are in e4m3. Each token has a scale for each piece of
    columns, and the weight one for each piece of a tile's rows.
    """
    (m, k), n, block_m, programs = x.shape, weight.shape[0], config.block_m, config.rows_per_program
    rows, group, piece = scaled_blocks.ROWS.value, scaled_blocks.GROUP.value, PIECE_COLUMNS.value
    (tiles, rest), steps = divmod(n, rows), k // config.block_k
    expect(
        m <= block_m
        and block_m in (group, 2 * group)
        and (config.block_n, config.block_k, config.split) == (rows, scaled_blocks.PIECES.value * piece, 1)
        and (rest, k % config.block_k) == (0, 0)
        and 0 < programs <= tiles * steps
        and x_scales.shape == (m, k // piece)
        and scales.shape == (tiles, k // piece)
        and scales.is_contiguous(),
        lambda: (
            f"a product of {m} tokens and a weight of {tuple(weight.shape)} with scales {tuple(scales.shape)} can't be tiled "
            f"as {config}: expected at most {2 * group} tokens, columns in multiples of {config.block_k}, a scale for each "
            f"{rows} rows and {piece} columns, and no more programs than units"
        ),
    )
    is_shared, width = programs != tiles, rows if block_m > group else rows // 2
    parts = torch.empty((programs if is_shared else 0, 2, block_m, rows), dtype=torch.float32, device=x.device)
    launch(
        scaled_blocks.multiply_scaled_blocks,
        (programs,),
        *(token_descriptor(x, block_m, piece), descriptor(weight, rows, piece), x_scales, *x_scales.stride(), scales),
        *(descriptor(out, group, width), parts, m, tiles * steps),
        STEPS=steps,
        STAGES=config.stages,
        maxnreg=128,  # on average: the multiplying warps are allocated more
        pdl=pdl,
        warps=4,
    )
    if is_shared:
        launch(
            scaled_blocks.add_shared_tiles,
            (tiles, block_m // _TOKENS_PER_SUM),
            *(parts, out, m, n, tiles * steps, programs),
            STEPS=steps,
            BLOCK_M=block_m,
            TOKENS=_TOKENS_PER_SUM,
            pdl=pdl,
            warps=4,
        )


def flat_rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` [..., K] as rows [m, K] with contiguous columns, for a product with a weight of ``shape`` [N, K]."""
    expect(x.shape[-1] == shape[1], lambda: f"product of {tuple(x.shape)} with a quantised weight of {tuple(shape)}")
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _linear_quantized(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    block: Sequence[int],
    shape: Sequence[int],
    activations: str,
    activation_group: int,
    x_scales: Tensor | None,
    dtype: torch.dtype,
    parts: bool,
    mode: str,
    columns: int,
    at_once: int,
    native: bool,
    fp8: bool,
    asm: bool,
    config: list[int],
    pdl: bool,
) -> Tensor:
    """Return the product of ``x`` and a quantised weight. With ``x_scales``, ``x`` is quantised already.

    ``parts``: return a split product in parts, float32 [split, T, N], without the bias.
    """
    tiling, registered = MatmulConfig(*config), TRITON_FORMATS[format]
    is_streamed = tiling.descriptor == STREAMED and native and registered.streams_rows and mode in ("row", "block")
    has_blocks = tiling.descriptor == SCALED_BLOCKS and native and mode == "block"
    supported = is_streamed or has_blocks or not tiling.descriptor
    expect(supported, lambda: f"a product with a quantised weight can't be tiled as {config}")
    flat = flat_rows(x, shape)
    (m, k), n = flat.shape, shape[0]
    # Without a split this is the whole product: programs always store to one tensor.
    product = torch.empty((tiling.split, m, n), dtype=torch.float32 if tiling.split > 1 else dtype, device=x.device)
    group, groups = 0, 1
    if activations:
        group = activation_group if activation_group < k else 0
        if x_scales is None:
            flat, x_scales = quantized_rows(flat, activations, group, input_scale, activation_dtype(data, native), pdl)
        groups = x_scales.shape[1]
    if is_streamed and x_scales is not None:
        out, whole_bias = (product, None) if tiling.split > 1 else (product[0], bias)
        multiply(flat, data, whole_bias, out, tiling, pdl, quantized=(x_scales, scales, block[0]))
        return _whole_or_parts(product, bias, x, dtype, parts, pdl)
    if has_blocks and x_scales is not None:
        multiply_blocks(flat, x_scales, data, scales, product[0], tiling, pdl)
        return _whole_or_parts(product if bias is None else product + bias, bias, x, dtype, parts, pdl)
    packed = registered.is_packed
    if packed and (flat.data_ptr() % 4 or flat.stride(0) % 2):
        flat = flat.clone(memory_format=torch.contiguous_format)
    row_bytes = k // 2 if packed else k
    rows_per_program = tiling.rows_per_program or tiling.block_n
    launch(
        quantized.linear_quantized,
        (triton.cdiv(n, rows_per_program), triton.cdiv(m, tiling.block_m), tiling.split),
        *(flat, x_scales, registered.kernel_data(data, native=native)),
        *(kernel_scales(scales), zero_points, bias if tiling.split == 1 else None, product, m, n, k, flat.stride(0), groups),
        *(scales.shape[1], rows_per_program, tiling.prefetch_columns if row_bytes % 16 == 0 else 0),
        **registered.launch_constants,
        NATIVE=native,
        MODE=mode,
        ROWS=block[0],
        COLUMNS=columns,
        GROUP=group,
        FP8=fp8,
        ASM=asm,
        SUB=min(at_once, tiling.block_k) if at_once else tiling.block_k,
        SPLIT=tiling.split,
        **tiling.launch_constants(k),
        pdl=pdl,
    )
    return _whole_or_parts(product, bias, x, dtype, parts, pdl)


define("linear_quantized.triton", _linear_quantized)


def _whole_or_parts(product: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype, parts: bool, pdl: bool) -> Tensor:
    """Return the only part of ``product``, or all ``parts``, or their sum and the bias."""
    if product.shape[0] == 1:
        return product.view(*x.shape[:-1], product.shape[2])
    return product if parts else sum_parts(product, bias, x, dtype, pdl)


def sum_parts(parts: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype, pdl: bool) -> Tensor:
    """Return the sum of ``parts`` [split, T, N] and ``bias`` in ``dtype``, shaped like a product of ``x``."""
    split, m, n = parts.shape
    out = torch.empty((*x.shape[:-1], n), dtype=dtype, device=x.device)
    block = 512
    launch(
        quantized.add_parts,
        (triton.cdiv(out.numel(), block),),
        *(parts, bias, out, m, n),
        PARTS=split,
        BLOCK=block,
        pdl=pdl,
        warps=2,
    )
    return out


def _linear_quantized_add(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    rows: int,
    activations: str,
    group: int,
    x_scales: Tensor | None,
    residual: Tensor,
    config: list[int],
    pdl: bool,
) -> None:
    """Add a streamed product to ``residual`` [T, N] in place. ``x_scales``: the scales of a quantised ``x``, else it is
    quantised in groups of ``group`` columns (0: all); ``rows`` weight rows share a scale.
    """
    n = data.shape[0]
    expect(
        residual.is_contiguous() and residual.shape == (*x.shape[:-1], n),
        lambda: (
            f"adding a product of {tuple(x.shape)} to a residual of {tuple(residual.shape)}; expected contiguous rows of {n}"
        ),
    )
    if x_scales is None:
        x, x_scales = quantized_rows(x, activations, group, input_scale, data.dtype, pdl)
    multiply(x, data, bias, residual, MatmulConfig(*config), pdl, quantized=(x_scales, scales, rows), add=True)


define("linear_quantized.triton_add", _linear_quantized_add, writes=("residual",))


def _silu_mul_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    rows: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: list[int],
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Multiply e4m3 rows ``x`` by gate and up rows in e4m3, and apply SwiGLU.

    Return the activation [T, I] in ``dtype`` and the largest magnitude per program and row, float32 [programs, T].
    """
    m, n, tiling = x.shape[0], weight.shape[0] // 2, MatmulConfig(*config)
    out = x.new_empty((m, n), dtype=dtype)
    maxima = x.new_empty((-(-n // tiling.rows_per_program), m), dtype=torch.float32)
    silu_mul(x, None, weight, bias, out, 0.0, tiling, pdl, quantized=(x_scales, scales, rows), maxima=maxima)
    return out, maxima


define("linear_silu_mul.triton_quantized", _silu_mul_linear)
