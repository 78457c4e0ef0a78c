"""Matrix products with their neighbours as operators (:mod:`outrider_triton.jit.fused`)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.device.kernels.checks import expect
from outrider_triton import streamed
from outrider_triton.define import define
from outrider_triton.jit import fused
from outrider_triton.launch import launch, power_of_two
from outrider_triton.ops import expect_blocks, flat_product
from outrider_triton.planes_ops import digits_of
from outrider_triton.rotary import expect_laid_out
from outrider_triton.table import STREAMED, MatmulConfig


def _shares(weight: Tensor, config: list[int]) -> int:
    """Among how many programs the rows of a weight are shared out."""
    return -(-weight.shape[0] // (config[8] or config[1]))


def _add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor | None, config: list[int], pdl: bool
) -> tuple[Tensor, Tensor]:
    block_m, block_n, block_k, split, warps, stages, ahead, descriptor, each = config
    expect(split == 1, lambda: "a product that is added to a residual isn't split")
    flat = flat_product(x, weight)
    (m, k), n = flat.shape, weight.shape[0]
    expect(
        residual.is_contiguous() and residual.shape == (m, n),
        lambda: f"adding a product [{m}, {n}] to a residual of {tuple(residual.shape)}; expected equal, contiguous rows",
    )
    shares = _shares(weight, config)
    scaled, squares = residual, residual
    if norm is not None:
        scaled, squares = _made(residual, weight, config)
    if descriptor == STREAMED:
        streamed.add(flat, weight, bias, residual, norm, (scaled, squares), MatmulConfig(*config), pdl)
        return scaled, squares
    expect_blocks(config)
    launch(
        fused.linear_add,
        (shares, triton.cdiv(m, block_m)),
        *(flat, weight, TensorDescriptor.from_tensor(weight, [block_n, block_k]) if descriptor else None, bias),
        *(residual, norm, scaled, squares, m, n, k, flat.stride(0), each or block_n, ahead if k % 8 == 0 else 0),
        HAS_BIAS=bias is not None,
        NORM=norm is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=k % block_k == 0,
        DESCRIPTOR=bool(descriptor),
        num_stages=stages,
        pdl=pdl,
        warps=warps,
    )
    return scaled, squares


def _made(residual: Tensor, weight: Tensor, config: list[int]) -> tuple[Tensor, Tensor]:
    squares = torch.empty((_shares(weight, config), residual.shape[0]), dtype=torch.float32, device=residual.device)
    return torch.empty_like(residual), squares


def _linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, config: list[int], pdl: bool) -> None:
    _add(x, weight, bias, residual, None, config, pdl)


define(
    "linear_add.triton(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) residual, int[] config, bool pdl) -> ()",
    _linear_add,
    lambda *operands: None,
)
define(
    "linear_add_scaled.triton(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) residual, Tensor norm, int[] config, "
    "bool pdl) -> (Tensor, Tensor)",
    _add,
    lambda x, weight, bias, residual, norm, config, pdl: _made(residual, weight, config),
)


def _scaled_silu_mul(
    x: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, config: list[int], pdl: bool
) -> Tensor:
    """``x`` and ``squares`` are what ``linear_add_scaled`` left."""
    block_m, block_n, block_k, _, warps, stages, ahead, descriptor, each = config
    flat = flat_product(x, weight)
    (m, k), n = flat.shape, weight.shape[0] // 2
    out = x.new_empty((*x.shape[:-1], n))
    if descriptor == STREAMED:
        streamed.silu_mul(flat, squares, weight, bias, out, eps, MatmulConfig(*config), pdl)
        return out
    expect_blocks(config)
    launch(
        fused.scaled_silu_mul,
        (triton.cdiv(n, each or block_n), triton.cdiv(m, block_m)),
        *(flat, squares, weight, bias, out, eps, m, n, k, flat.stride(0), squares.shape[0], each or block_n),
        ahead if k % 8 == 0 else 0,
        HAS_BIAS=bias is not None,
        SHARES=power_of_two(squares.shape[0]),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=k % block_k == 0,
        num_stages=stages,
        pdl=pdl,
        warps=warps,
    )
    return out


define(
    "scaled_silu_mul.triton(Tensor x, Tensor squares, Tensor weight, Tensor? bias, float eps, int[] config, bool pdl) "
    "-> Tensor",
    _scaled_silu_mul,
    lambda x, squares, weight, *rest: x.new_empty((*x.shape[:-1], weight.shape[0] // 2)),
)


def _queries(x: Tensor, weight: Tensor, k_cache: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    kv_heads, size = k_cache.shape[2:]
    return x.new_empty((x.shape[0], weight.shape[0] // size - 2 * kv_heads, size), dtype=dtype)


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
) -> Tensor:
    block_m, block_n, block_k, _, warps, stages, ahead, descriptor, each = config  # a block has both rows of its pairs
    flat = flat_product(x, weight)
    expect_laid_out(cos, sin, k_cache, v_cache)
    expect(cos.stride(1) == 1, lambda: "rope_write_cache: numbers of cos and sin must lie side by side")
    (m, k), (kv_heads, size) = flat.shape, k_cache.shape[2:]
    q = _queries(flat, weight, k_cache)
    if descriptor == STREAMED:
        rotary = cos, sin, k_cache, v_cache, slots
        streamed.rope_write_cache(flat, squares, weight, bias, eps, rotary, q, MatmulConfig(*config), pdl)
        return q
    expect_blocks(config)
    expect(2 * each <= block_n, lambda: f"{each} pairs of rows don't fit into a block of {block_n}")
    shares = 1 if squares is None else squares.shape[0]
    launch(
        fused.linear_rope_write_cache,
        (triton.cdiv(weight.shape[0] // 2, each or block_n // 2), triton.cdiv(m, block_m)),
        *(flat, squares, weight, bias, cos, sin, q, k_cache, v_cache, slots, eps, m, k, flat.stride(0), shares),
        *(q.shape[1], kv_heads, cos.stride(0), k_cache.stride(1), k_cache.stride(2)),
        *(each or block_n // 2, ahead if k % 8 == 0 else 0),
        HAS_BIAS=bias is not None,
        SCALED=squares is not None,
        SHARES=power_of_two(shares),
        HALF=size // 2,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=k % block_k == 0,
        num_stages=stages,
        pdl=pdl,
        warps=warps,
    )
    return q


# An overload of the operator whose rows it touches, so that they are known.
define(
    "rope_write_cache.triton_linear(Tensor x, Tensor? squares, Tensor weight, Tensor? bias, float eps, Tensor cos, "
    "Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, int[] config, bool pdl) -> Tensor",
    _linear_rope_write_cache,
    lambda x, squares, weight, bias, eps, cos, sin, k_cache, *rest: _queries(x, weight, k_cache),
)


def _linear_quantized_rope_write_cache(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    rows: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    config: list[int],
    pdl: bool,
) -> Tensor:
    """Of operands in e4m3; ``rows`` of the weight have one of ``scales``. Queries are of ``dtype``."""
    rotary = cos, sin, k_cache, v_cache, slots
    q = _queries(x, weight, k_cache, dtype)
    streamed.rope_write_cache(
        x, None, weight, bias, 0.0, rotary, q, MatmulConfig(*config), pdl, quantized=(x_scales, scales, rows)
    )
    return q


define(
    "rope_write_cache.triton_linear_quantized(Tensor x, Tensor x_scales, Tensor weight, Tensor scales, int rows, "
    "Tensor? bias, ScalarType dtype, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    "int[] config, bool pdl) -> Tensor",
    _linear_quantized_rope_write_cache,
    lambda x, x_scales, weight, scales, rows, bias, dtype, cos, sin, k_cache, *rest: _queries(x, weight, k_cache, dtype),
)


def _linear_planes_rope_write_cache(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    config: list[int],
    pdl: bool,
) -> Tensor:
    """Of rows in digits and four bits in groups of 128, without zero points. Queries are of ``dtype``."""
    rotary = cos, sin, k_cache, v_cache, slots
    q = _queries(x, data, k_cache, dtype)
    rows, grains = digits_of(x, 2 * data.shape[1])
    streamed.rope_write_cache_planes(rows, grains, data, scales, bias, rotary, q, MatmulConfig(*config), pdl)
    return q


define(
    "rope_write_cache.triton_linear_planes(Tensor x, Tensor data, Tensor scales, Tensor? bias, ScalarType dtype, Tensor cos, "
    "Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, int[] config, bool pdl) -> Tensor",
    _linear_planes_rope_write_cache,
    lambda x, data, scales, bias, dtype, cos, sin, k_cache, *rest: _queries(x, data, k_cache, dtype),
)
