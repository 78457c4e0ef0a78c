"""The launch of products in shares of units (:mod:`outrider_triton.quantized.jit.scaled_blocks`)."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device.kernels.operators import expect
from outrider_triton.jit.tma_pipeline import PIECE_COLUMNS
from outrider_triton.launch import launch
from outrider_triton.products.streamed import descriptor, token_descriptor
from outrider_triton.quantized.jit import scaled_blocks
from outrider_triton.tiles.configs import MatmulConfig

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
