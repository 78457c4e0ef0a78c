"""Launching the products of :mod:`outrider_triton.jit.streamed`: the same work as their twins in Triton, by another route."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.device.kernels.checks import expect
from outrider_triton.derive import brings, whole_boxes
from outrider_triton.jit import planes_gated, planes_ring, streamed, tall
from outrider_triton.jit.ring import PAIRS, PIECE
from outrider_triton.launch import launch, power_of_two
from outrider_triton.table import MatmulConfig

_PAIRS: int = PAIRS.value
_LAYOUTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: MatmulConfig, pdl: bool) -> None:
    """``out [m, n]``, or its parts ``[split, m, n]``, from ``x [m, k]``."""
    m, n, fold = x.shape[0], weight.shape[0], config.split == 1
    expect(fold or bias is None, lambda: "parts of a product have no bias")
    own = bias, None, None, out, m, n, config.each
    flags = {"HAS_BIAS": bias is not None, "ROWS": 0, "FOLD": fold, "ADD": False}
    pairs = n if fold else -(-n // (2 * _PAIRS)) * _PAIRS
    _launch(streamed.streamed_linear, x, weight, config, own, pairs=pairs, half=_PAIRS, pdl=pdl, fold=fold, **flags)


def multiply_quantized(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    quantized: tuple[Tensor, Tensor, int],
    config: MatmulConfig,
    pdl: bool,
    *,
    add: bool = False,
) -> None:
    """``out [m, n]`` of ``x [m, k]`` and ``weight [n, k]`` in e4m3. ``quantized``: scales of x, float32 [m], scales of the
    weight, and the number of rows that have one. ``add``: it's added to what is there.
    """
    expect(config.split == 1, lambda: f"a product of quantised operands through a ring has no parts: {config}")
    x_scales, scales, rows = quantized
    own = bias, x_scales, scales, out, x.shape[0], weight.shape[0], config.each
    flags = {"HAS_BIAS": bias is not None, "ROWS": rows, "FOLD": True, "ADD": add}
    _launch(streamed.streamed_linear, x, weight, config, own, pairs=weight.shape[0], half=_PAIRS, pdl=pdl, fold=True, **flags)


def add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor | None,
    made: tuple[Tensor, Tensor],
    config: MatmulConfig,
    pdl: bool,
) -> None:
    """Adds to ``residual [m, n]``; with a norm, ``made`` is where the scaled row and its squares go."""
    expect(config.each <= _PAIRS, lambda: f"{config.each} rows: a product that is added has {_PAIRS} at most")
    own = bias, residual, norm, *made, x.shape[0], weight.shape[0], config.each
    flags = {"HAS_BIAS": bias is not None, "NORM": norm is not None}
    pairs = weight.shape[0]
    _launch(streamed.streamed_linear_add, x, weight, config, own, pairs=pairs, half=_PAIRS, pdl=pdl, fold=True, **flags)


def silu_mul(
    x: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    config: MatmulConfig,
    pdl: bool,
    *,
    quantized: tuple[Tensor, Tensor, int] | None = None,
    maxima: Tensor | None = None,
) -> None:
    """``out [m, n]`` of the gate's n rows and up's n rows; with ``squares``, of ``x`` divided by its root mean square.

    ``quantized``: as in :func:`multiply_quantized`, scales of x, of the weight, and the rows of one; ``maxima``, float32
    [programs, m], then gets the largest magnitudes of what each program makes of a row.
    """
    (m, k), n = x.shape, weight.shape[0] // 2
    shares, flags = _scaled(squares, bias)
    x_scales, scales, rows = quantized or (None, None, 0)
    own = squares, bias, out, eps, m, n, k, shares, config.each, x_scales, scales, maxima
    flags |= {"ROWS": rows}
    _launch(streamed.streamed_silu_mul, x, weight, config, own, pairs=n, half=n, pdl=pdl, **flags)


def silu_mul_tall(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: MatmulConfig, pdl: bool) -> None:
    """:func:`silu_mul` of rows that are normed, by :mod:`outrider_triton.jit.tall`."""
    (m, k), n, box, groups = x.shape, weight.shape[0] // 2, config.block_n, config.warps // 4
    expect(
        brings("linear_silu_mul", config, n=2 * n, k=k),
        lambda: (
            f"gates of {tuple(weight.shape)} can't be cut up as {config}: expected columns in multiples of {config.block_k}, "
            f"64 or more, boxes of {tall.UNIT.value} rows or more that divide {n}, {tall.GROUP.value} and {config.each}, "
            "8 to 128 tokens, 4 or 8 warps, no parts, and two stages or more of both operands"
        ),
    )
    launch(
        tall.tall_silu_mul,
        (-(-n // config.each), -(-m // config.block_m)),
        *(_of_tokens(x, config.block_m, config.block_k), descriptor(weight, box, config.block_k)),
        *(bias, out, m, n, config.each),
        HAS_BIAS=bias is not None,
        GROUPS=groups,
        STEPS=k // config.block_k,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        DEEP=config.ahead,
        maxnreg=112 if groups == 1 else 128,  # so few that the norm ahead fits in beside; what multiplies has more of them
        pdl=pdl,
        warps=4,
    )


def rope_write_cache(
    x: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rotary: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    q: Tensor,
    config: MatmulConfig,
    pdl: bool,
    *,
    quantized: tuple[Tensor, Tensor, int] | None = None,
) -> None:
    """Queries to ``q``, keys and values to the slots; ``rotary``: cos, sin, both caches, slots. ``quantized``: as in
    :func:`multiply_quantized`, scales of x, of the weight, and the rows of one.
    """
    cos, sin, k_cache, v_cache, slots = rotary
    (m, k), (kv_heads, size) = x.shape, k_cache.shape[2:]
    shares, flags = _scaled(squares, bias)
    own = squares, bias, cos, sin, q, k_cache, v_cache, slots, eps, m, k, shares, q.shape[1], kv_heads
    x_scales, scales, rows = quantized or (None, None, 0)
    strides = cos.stride(0), k_cache.stride(1), k_cache.stride(2), config.each, x_scales, scales
    pairs, half = weight.shape[0] // 2, size // 2
    flags |= {"HALF": half, "ROWS": rows}
    _launch(streamed.streamed_rope_write_cache, x, weight, config, own + strides, pairs=pairs, half=half, pdl=pdl, **flags)


def multiply_planes(
    x: Tensor,
    grains: Tensor,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: MatmulConfig,
    pdl: bool,
) -> None:
    """``out [m, n]``, or its parts ``[split, m, n]``, of ``x``, int8 [2 m, k], tokens in two digits, and four bits
    ``[n, k / 2]``.

    ``grains [m, k / 128]``: of the tokens, in float32 (:func:`outrider_triton.jit.planes.keep_in_planes`).
    """
    _launch_planes(x, grains, data, scales, bias, out, (None,) * 5 + (0,) * 5, config, pdl)


def multiply_gated_planes(
    both: Tensor, data: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, config: MatmulConfig, pdl: bool
) -> None:
    """:func:`multiply_planes` of SwiGLU of ``both`` [1, 2 k], gate and up of one token, which the product computes itself."""
    k, columns = 2 * data.shape[1], planes_gated.COLUMNS.value
    together = both.shape == (1, 2 * k) and both.is_contiguous() and both.data_ptr() % 16 == 0
    expect(
        together and config.ahead == columns,
        lambda: (
            f"gate and up {tuple(both.shape)} for a product with {tuple(data.shape)} bytes cut up as {config}: expected one "
            f"row of {2 * k} that begins at a multiple of 16 bytes, and tiles of {columns} columns"
        ),
    )
    _launch_planes(both, None, data, scales, bias, out, (None,) * 5 + (0,) * 5, config, pdl)


def rope_write_cache_planes(
    x: Tensor,
    grains: Tensor,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    rotary: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    q: Tensor,
    config: MatmulConfig,
    pdl: bool,
) -> None:
    """:func:`multiply_planes`, with what :func:`rope_write_cache` does of the product."""
    cos, _, k_cache, _, _ = rotary
    kv_heads, size = k_cache.shape[2:]
    expect(
        (size // 2 % planes_ring.PAIRED.value, config.block_n, config.split) == (0, planes_ring.PAIRED.value, 1),
        lambda: (
            f"queries and keys of heads of {size} in planes can't be cut up as {config}: expected boxes of "
            f"{planes_ring.PAIRED.value} rows that divide half a head, and no parts"
        ),
    )
    own = *rotary, q.shape[1], kv_heads, cos.stride(0), k_cache.stride(1), k_cache.stride(2)
    _launch_planes(x, grains, data, scales, bias, q, own, config, pdl, half=size // 2)


def _launch_planes(
    x: Tensor,
    grains: Tensor | None,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    rotary: tuple[Any, ...],
    config: MatmulConfig,
    pdl: bool,
    *,
    half: int = 0,
) -> None:
    (n, k), box = (data.shape[0], 2 * data.shape[1]), config.block_n
    height = planes_ring.ROWS.value // (2 if half else 1)  # of a tile, in what ``each`` counts
    columns, groups = config.ahead, config.warps // 4
    m, steps = 1 if grains is None else x.shape[0] // 2, config.block_k // max(columns, 1)
    expect(
        k == config.split * config.block_k
        and columns in (256, 512)
        and (config.block_k % columns, config.warps % 4, height % box, config.each % box) == (0, 0, 0, 0)
        and max(m, 4) <= config.block_m  # digits of four tokens are the least that the matrix unit takes
        and 0 < groups <= min(steps, 2)
        # Else a place would change hands between groups, and one of them would take its last filling for the next.
        and config.stages % groups == 0
        and (steps % groups == 0 or config.each <= height)
        and config.stages > 1,
        lambda: (
            f"a product of {m} tokens and a weight of {n} x {k} in planes can't be cut up as {config}: expected all columns, "
            f"in multiples of {columns}, boxes of rows that divide {height} and {config.each}, no more tokens, and stages ("
            f"and units of several tiles) in multiples of {groups}"
        ),
    )
    many = groups > 1 and columns > 256
    launch(
        planes_ring.streamed_planes,
        (-(-n // (config.each * (2 if half else 1))), config.split),
        *(
            x if grains is None else descriptor(x, 2 * config.block_m, columns),
            descriptor(data.view(torch.int8), box, columns // 2),
        ),
        *(
            grains,
            scales,
            bias,
            out,
            m,
            n,
            scales.shape[1],
            0 if grains is None else grains.stride(0),
            config.each,
            steps,
            *rotary,
        ),
        HAS_BIAS=bias is not None,
        GROUPS=groups,
        STEPS=steps,
        TILES=-(-config.each // height),
        HALF=half,
        GATED=grains is None,
        BLOCK_M=config.block_m,
        STAGES=config.stages,
        MOST=128 if many else 112,
        maxnreg=96 if many else 80,  # so few that others fit in beside; warps that multiply have more of them
        pdl=pdl,
        warps=4,
    )


def _scaled(squares: Tensor | None, bias: Tensor | None) -> tuple[int, dict[str, Any]]:
    shares = 1 if squares is None else squares.shape[0]
    return shares, {"HAS_BIAS": bias is not None, "SCALED": squares is not None, "SHARES": power_of_two(shares)}


def descriptor(rows: Tensor, count: int, columns: int) -> TensorDescriptor:
    """Of ``rows``, in boxes of ``count`` rows and ``columns``, laid out in shared memory as the matrix unit reads them."""
    made = gl.NVMMASharedLayout.get_default_for([count, columns], _LAYOUTS[rows.dtype])
    return TensorDescriptor.from_tensor(rows, [count, columns], getattr(made, "value", made))  # a constexpr in some releases


def _of_tokens(x: Tensor, count: int, columns: int) -> TensorDescriptor:
    """:func:`descriptor` of tokens: of a copy where rows don't lie apart or don't begin at multiples of 16 bytes, which the
    copy engine wants.
    """
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(0) >= x.shape[1]
    return descriptor(x if aligned else x.clone(memory_format=torch.contiguous_format), count, columns)


def registers(config: MatmulConfig, folded: int, pieces: int) -> int:
    """Of a thread: so few that programs of the next kernel, and of small ones between, fit in beside."""
    sums = config.block_m * folded // 2 * (5 if pieces > 1 else 1)  # of two units, and what they're added to
    return 64 if config.block_m <= 16 and sums <= 48 else 96 if config.block_m <= 32 and sums <= 96 else 128


def _launch(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    config: MatmulConfig,
    own: tuple[Any, ...],
    *,
    pairs: int,
    half: int,
    pdl: bool,
    fold: bool = False,
    **flags: Any,
) -> None:
    (m, k), box, span = x.shape, config.block_n, config.split * config.block_k * (2 if fold else 1)
    columns = config.block_k if x.element_size() > 1 else PIECE.value
    expect(
        whole_boxes(config, k=k, folded=2 if fold else 1, inside=half) and config.block_k in (columns, 2 * columns),
        lambda: (
            f"a streamed product of {tuple(weight.shape)} can't be cut up as {config}: expected columns in multiples of "
            f"{span}, boxes of rows that divide {half}, {_PAIRS} and {config.each}, two stages or more, and of 8 bits one or "
            f"two pieces of {PIECE.value} columns"
        ),
    )
    launch(
        kernel,
        (-(-pairs // config.each), config.split, -(-m // config.block_m)),
        *(_of_tokens(x, config.block_m, columns), descriptor(weight, box, columns), *own),
        **flags,
        STEPS=k // span,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        maxnreg=registers(config, 2 if fold else 1, config.block_k // columns),
        pdl=pdl,
        warps=config.warps,
    )
