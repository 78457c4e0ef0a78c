"""Operators of products with unquantized weights, alone and fused with the kernels around them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.device.kernels.operators import expect
from outrider_triton.jit.tma_pipeline import PAIRS
from outrider_triton.launch import define, launch, power_of_two
from outrider_triton.products import streamed
from outrider_triton.products.jit import fused, matmul
from outrider_triton.products.jit import streamed as jit_streamed
from outrider_triton.rows import expect_laid_out
from outrider_triton.tiles.configs import LARGE_M, PREFILL_GATES, STREAMED, MatmulConfig


def _flat_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` [..., K] as rows [T, K] for a product with ``weight`` [N, K]. Raises RuntimeError if the
    operands don't match.
    """
    expect(
        x.shape[-1] == weight.shape[-1] and weight.is_contiguous() and x.dtype is weight.dtype,
        lambda: f"a product of {tuple(x.shape)} {x.dtype} with a weight of {tuple(weight.shape)} {weight.dtype}",
    )
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _expect_blocks(config: list[int]) -> None:
    """Raise RuntimeError unless each program's rows fit its block and the configuration is unstreamed: else the
    kernel would leave rows out.
    """
    expect(
        config[8] <= config[1] and config[7] in (0, 1),
        lambda: (
            f"a product can't be tiled as {config}: expected no more rows of a program than a block has, "
            "and an unstreamed descriptor"
        ),
    )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: list[int], pdl: bool) -> None:
    tiling = MatmulConfig(*config)
    flat = _flat_product(x, weight)
    if tiling.descriptor == STREAMED:
        streamed.multiply(flat, weight, bias, out, tiling, pdl)
        return
    _expect_blocks(config)
    (m, k), n = flat.shape, weight.shape[0]
    rows_per_program = tiling.rows_per_program or tiling.block_n
    grid = triton.cdiv(n, rows_per_program), tiling.split, triton.cdiv(m, tiling.block_m)
    tiles = TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k]) if tiling.descriptor else None
    launch(
        matmul.linear,
        grid,
        *(flat, weight, tiles, bias, out),
        *(m, n, k, flat.stride(0), rows_per_program, tiling.prefetch_columns if k % 8 == 0 else 0),
        SPLIT=tiling.split,
        **tiling.launch_constants(k),
        pdl=pdl,
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: list[int], pdl: bool) -> Tensor:
    expect(config[3] == 1, lambda: "a product that is split leaves parts: use linear_parts")
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    _multiply(x, weight, bias, out, config, pdl)
    return out


def _linear_parts(x: Tensor, weight: Tensor, config: list[int], pdl: bool) -> Tensor:
    """Return the parts of ``x @ weight.T``: float32 [split, T, N], or without a split the product [T, N] in the operands'
    dtype.
    """
    split, shape = config[3], (*x.shape[:-1], weight.shape[0])
    out = x.new_empty((split, *shape), dtype=torch.float32) if split > 1 else x.new_empty(shape)
    _multiply(x, weight, None, out, config, pdl)
    return out


define("linear.triton", _linear)
define("linear_parts.triton", _linear_parts)


def _linear_silu_mul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: list[int],
    pdl: bool,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return SwiGLU of ``x`` with the gate and up rows of ``weight``. With ``squares``, ``x`` and ``squares`` are the results
    of ``linear_add_scaled``.
    """
    tiling = MatmulConfig(*config)
    expect(tiling.split == 1, lambda: "a gated product isn't split: the activation needs the whole sum")
    flat = _flat_product(x, weight)
    (m, k), n = flat.shape, weight.shape[0] // 2
    out = x.new_empty((*x.shape[:-1], n))
    if tiling.descriptor == STREAMED:
        streamed.silu_mul(flat, squares, weight, bias, out, eps, tiling, pdl)
        return out
    if tiling.descriptor == LARGE_M and squares is None:
        streamed.silu_mul_large_m(flat, weight, bias, out, tiling, pdl)
        return out
    if tiling.descriptor == PREFILL_GATES and squares is None:
        expect(bias is None, lambda: "gates of prefill are tiled without a bias: use another configuration")
        streamed.silu_mul_prefill(flat, weight, out, tiling, pdl)
        return out
    _expect_blocks(config)
    rows_per_program = tiling.rows_per_program or tiling.block_n
    shares = 1 if squares is None else squares.shape[0]
    launch(
        matmul.linear_silu_mul,
        (triton.cdiv(n, rows_per_program), triton.cdiv(m, tiling.block_m)),
        *(flat, squares, weight, bias, out, eps, m, n, k, flat.stride(0), shares, rows_per_program),
        tiling.prefetch_columns if k % 8 == 0 else 0,
        SHARES=power_of_two(shares),
        **tiling.launch_constants(k),
        pdl=pdl,
    )
    return out


define("linear_silu_mul.triton", _linear_silu_mul)


def _program_count(weight: Tensor, config: list[int]) -> int:
    """Return the number of programs that share the rows of ``weight`` in this configuration."""
    return -(-weight.shape[0] // (config[8] or config[1]))


def _add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor | None, config: list[int], pdl: bool
) -> tuple[Tensor, Tensor]:
    tiling = MatmulConfig(*config)
    expect(tiling.split == 1, lambda: "a product that is added to a residual isn't split")
    flat = _flat_product(x, weight)
    (m, k), n = flat.shape, weight.shape[0]
    expect(
        residual.is_contiguous() and residual.shape == (m, n),
        lambda: f"adding a product [{m}, {n}] to a residual of {tuple(residual.shape)}; expected equal, contiguous rows",
    )
    programs = _program_count(weight, config)
    scaled, squares = residual, residual
    if norm is not None:
        scaled, squares = torch.empty_like(residual), residual.new_empty((programs, m), dtype=torch.float32)
    if tiling.descriptor == STREAMED:
        expect(
            tiling.rows_per_program <= PAIRS.value,
            lambda: f"{tiling.rows_per_program} rows: a product that is added has {PAIRS.value} at most",
        )
        operands = bias, residual, norm, scaled, squares, m, n, tiling.rows_per_program
        kernel, half = jit_streamed.streamed_linear_add, PAIRS.value
        streamed.launch_streamed(kernel, flat, weight, tiling, operands, pairs=n, half=half, pdl=pdl, fold=True)
        return scaled, squares
    _expect_blocks(config)
    launch(
        fused.linear_add,
        (programs, triton.cdiv(m, tiling.block_m)),
        *(flat, weight, bias, residual, norm, scaled, squares, m, n, k, flat.stride(0)),
        *(tiling.rows_per_program or tiling.block_n, tiling.prefetch_columns if k % 8 == 0 else 0),
        **tiling.launch_constants(k),
        pdl=pdl,
    )
    return scaled, squares


def _linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, config: list[int], pdl: bool) -> None:
    _add(x, weight, bias, residual, None, config, pdl)


define("linear_add.triton", _linear_add, writes=("residual",))
define("linear_add_scaled.triton", _add, writes=("residual",))


def _linear_rope_write_cache(
    x: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    config: list[int],
    pdl: bool,
    x_scales: Tensor | None = None,
    scales: Tensor | None = None,
    rows: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply ``x`` into queries, keys and values, rotate them and write the cache; return queries [T, Hq, D].

    With ``x_scales`` and ``scales``, the operands are in e4m3, ``rows`` weight rows share a scale, and queries are in
    ``dtype``.
    """
    # A block holds both rows of its pairs.
    tiling = MatmulConfig(*config)
    flat = _flat_product(x, weight)
    expect_laid_out(cos, sin, k_cache, v_cache)
    expect(cos.stride(1) == 1, lambda: "rope_write_cache: numbers of cos and sin must lie side by side")
    (m, k), (kv_heads, size) = flat.shape, k_cache.shape[2:]
    q = flat.new_empty((m, weight.shape[0] // size - 2 * kv_heads, size), dtype=dtype)
    shares, heads = 1 if squares is None else squares.shape[0], (q.shape[1], kv_heads)
    strides = cos.stride(0), k_cache.stride(1), k_cache.stride(2)
    if tiling.descriptor == STREAMED:
        rotary = squares, bias, cos, sin, q, k_cache, v_cache, slots, eps, m, k, shares, *heads, *strides
        streamed.launch_streamed(
            jit_streamed.streamed_rope_write_cache,
            *(flat, weight, tiling, (*rotary, tiling.rows_per_program, x_scales, scales)),
            pairs=weight.shape[0] // 2,
            half=size // 2,
            pdl=pdl,
            SHARES=power_of_two(shares),
            HALF=size // 2,
            ROWS=rows,
        )
        return q
    expect(x_scales is None, lambda: f"only streamed kernels rotate quantised products; this one is tiled as {config}")
    _expect_blocks(config)
    block_n = tiling.block_n
    expect(
        2 * tiling.rows_per_program <= block_n,
        lambda: f"{tiling.rows_per_program} pairs of rows don't fit into a block of {block_n}",
    )
    launch(
        fused.linear_rope_write_cache,
        (triton.cdiv(weight.shape[0] // 2, tiling.rows_per_program or block_n // 2), triton.cdiv(m, tiling.block_m)),
        *(flat, squares, weight, bias, cos, sin, q, k_cache, v_cache, slots, eps, m, k, flat.stride(0), shares),
        *(*heads, *strides, tiling.rows_per_program or block_n // 2, tiling.prefetch_columns if k % 8 == 0 else 0),
        SHARES=power_of_two(shares),
        HALF=size // 2,
        **tiling.launch_constants(k),
        pdl=pdl,
    )
    return q


# An overload of the operator that writes the same cache rows, so that row access is known.
define("rope_write_cache.triton_linear", _linear_rope_write_cache, writes=("k_cache", "v_cache"))
