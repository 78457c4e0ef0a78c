"""Launches of streamed products. Each computes the same as the unstreamed product of the same name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.device.kernels.operators import expect
from outrider_triton.jit.tma_pipeline import PAIRS, PIECE_COLUMNS
from outrider_triton.launch import launch, power_of_two
from outrider_triton.products.jit import large_m_gates, streamed
from outrider_triton.quantized.jit import nibble_planes_gated, nibble_planes_streamed, scaled_blocks
from outrider_triton.tiles.configs import MatmulConfig
from outrider_triton.tiles.derive.products import MAX_FOLDED_TOKENS, can_stream, has_whole_boxes

_PAIRS: int = PAIRS.value
_TOKENS_PER_SUM = 16
"""Tokens per program that adds the parts of shared tiles."""
_LAYOUTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: MatmulConfig,
    pdl: bool,
    *,
    quantized: tuple[Tensor, Tensor, int] | None = None,
    add: bool = False,
) -> None:
    """Multiply ``x [m, k]`` into ``out [m, n]``, or into the parts ``[split, m, n]``. ``add``: add to ``out``.

    ``quantized`` is (scales of x, float32 [m, groups], scales of the weight, [.., groups], number of weight rows per scale).
    There is one group of columns, or one for each piece of columns. Both operands are then in e4m3.
    """
    m, n, is_whole = x.shape[0], weight.shape[0], config.split == 1
    fold = is_whole and (quantized is None or config.block_m <= MAX_FOLDED_TOKENS)
    expect(is_whole or bias is None, lambda: "parts of a product have no bias")
    x_scales, scales, rows = quantized or (None, None, 0)
    groups = 1 if scales is None else scales.shape[1]
    expect(
        groups in (1, x.shape[1] // PIECE_COLUMNS.value) and (x_scales is None or x_scales.numel() == m * groups),
        lambda: (
            f"a streamed product of {x.shape[1]} columns has scales for one group of them, or for {PIECE_COLUMNS.value} each"
        ),
    )
    operands = bias, x_scales, groups, scales, groups, out, m, n, config.rows_per_program
    flags = {"ROWS": rows, "BLOCKS": groups > 1, "FOLD": fold, "ADD": add}
    pairs = n if fold else -(-n // (2 * _PAIRS)) * _PAIRS
    _launch(streamed.streamed_linear, x, weight, config, operands, pairs=pairs, half=_PAIRS, pdl=pdl, fold=fold, **flags)


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
        *(_of_tokens(x, block_m, piece), descriptor(weight, rows, piece), x_scales, *x_scales.stride(), scales),
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
    """Multiply ``x [m, k]`` by ``weight [n, k]`` and add the result to ``residual [m, n]``.

    With a norm, also store the scaled row and its partial sums of squares to the two tensors of ``made``.
    """
    expect(
        config.rows_per_program <= _PAIRS,
        lambda: f"{config.rows_per_program} rows: a product that is added has {_PAIRS} at most",
    )
    operands = bias, residual, norm, *made, x.shape[0], weight.shape[0], config.rows_per_program
    pairs = weight.shape[0]
    _launch(streamed.streamed_linear_add, x, weight, config, operands, pairs=pairs, half=_PAIRS, pdl=pdl, fold=True)


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
    """Multiply ``x [m, k]`` by gate rows and up rows, and store SwiGLU to ``out [m, n]``.

    With ``squares``, ``x`` is first divided by its root mean square. ``quantized``: as in :func:`multiply`; ``maxima``,
    float32 [programs, m], then receives the largest magnitude that each program stores of each row.
    """
    (m, k), n = x.shape, weight.shape[0] // 2
    shares = _share_count(squares)
    x_scales, scales, rows = quantized or (None, None, 0)
    operands = squares, bias, out, eps, m, n, k, shares, config.rows_per_program, x_scales, scales, maxima
    flags: dict[str, Any] = {"SHARES": power_of_two(shares), "ROWS": rows}
    _launch(streamed.streamed_silu_mul, x, weight, config, operands, pairs=n, half=n, pdl=pdl, **flags)


def silu_mul_large_m(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: MatmulConfig, pdl: bool) -> None:
    """Compute :func:`silu_mul` of normalised rows with tiles for large M
    (:mod:`outrider_triton.products.jit.large_m_gates`).
    """
    (m, k), n, box, groups = x.shape, weight.shape[0] // 2, config.block_n, config.warps // 4
    expect(
        can_stream("linear_silu_mul", config, n=2 * n, k=k),
        lambda: (
            f"gates of {tuple(weight.shape)} can't be tiled as {config}: expected columns in multiples of {config.block_k}, "
            f"64 or more, boxes of {large_m_gates.UNIT.value} rows or more that divide {n}, {large_m_gates.GROUP.value} and "
            f"{config.rows_per_program}, "
            "8 to 128 tokens, 4 or 8 warps, no parts, and two stages or more of both operands"
        ),
    )
    launch(
        large_m_gates.tall_silu_mul,
        (-(-n // config.rows_per_program), -(-m // config.block_m)),
        *(_of_tokens(x, config.block_m, config.block_k), descriptor(weight, box, config.block_k)),
        *(bias, out, m, n, config.rows_per_program),
        GROUPS=groups,
        STEPS=k // config.block_k,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        TOKEN_STAGES=config.prefetch_columns,
        # so few that the preceding norm fits on the multiprocessor; the multiplying warps are allocated more
        maxnreg=112 if groups == 1 else 128,
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
    """Multiply ``x [m, k]`` into queries, keys and values, rotate them, and store queries to ``q`` and keys and values to
    their slots.

    ``rotary`` is (cos, sin, k_cache, v_cache, slots). ``quantized``: as in :func:`multiply`.
    """
    cos, sin, k_cache, v_cache, slots = rotary
    (m, k), (kv_heads, size) = x.shape, k_cache.shape[2:]
    shares = _share_count(squares)
    operands = squares, bias, cos, sin, q, k_cache, v_cache, slots, eps, m, k, shares, q.shape[1], kv_heads
    x_scales, scales, rows = quantized or (None, None, 0)
    strides = cos.stride(0), k_cache.stride(1), k_cache.stride(2), config.rows_per_program, x_scales, scales
    pairs, half = weight.shape[0] // 2, size // 2
    flags: dict[str, Any] = {"SHARES": power_of_two(shares), "HALF": half, "ROWS": rows}
    _launch(
        streamed.streamed_rope_write_cache, x, weight, config, operands + strides, pairs=pairs, half=half, pdl=pdl, **flags
    )


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
    """Multiply int8 components ``x`` [2 m, k] by nibbles ``data [n, k / 2]`` into ``out [m, n]`` or parts ``[split, m, n]``.

    ``grains [m, k / 128]`` are the tokens' scales in float32
    (:func:`outrider_triton.quantized.jit.nibble_planes.store_in_planes`).
    """
    _launch_planes(x, grains, data, scales, bias, out, (None,) * 5 + (0,) * 5, config, pdl)


def multiply_gated_planes(
    both: Tensor, data: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, config: MatmulConfig, pdl: bool
) -> None:
    """Apply SwiGLU to one token's gate and up, ``both`` [1, 2 k], inside the product of :func:`multiply_planes`."""
    k, columns = 2 * data.shape[1], nibble_planes_gated.COLUMNS.value
    contiguous = both.shape == (1, 2 * k) and both.is_contiguous() and both.data_ptr() % 16 == 0
    expect(
        contiguous and config.prefetch_columns == columns,
        lambda: (
            f"gate and up {tuple(both.shape)} for a product with {tuple(data.shape)} bytes tiled as {config}: expected one "
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
    """Multiply as :func:`multiply_planes` does, rotate, and store as :func:`rope_write_cache` does."""
    cos, _, k_cache, _, _ = rotary
    (kv_heads, size), paired = k_cache.shape[2:], nibble_planes_streamed.PAIRED.value
    expect(
        (size // 2 % paired, config.block_n, config.split) == (0, paired, 1),
        lambda: (
            f"queries and keys of heads of {size} in planes can't be tiled as {config}: expected boxes of "
            f"{paired} rows that divide half a head, and no parts"
        ),
    )
    arguments = *rotary, q.shape[1], kv_heads, cos.stride(0), k_cache.stride(1), k_cache.stride(2)
    _launch_planes(x, grains, data, scales, bias, q, arguments, config, pdl, half=size // 2)


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
    height = nibble_planes_streamed.ROWS.value // (2 if half else 1)  # height of a tile in the unit of ``rows_per_program``
    columns, groups = config.prefetch_columns, config.warps // 4
    m, steps = 1 if grains is None else x.shape[0] // 2, config.block_k // max(columns, 1)
    expect(
        k == config.split * config.block_k
        and columns in (256, 512)
        and (config.block_k % columns, config.warps % 4, height % box, config.rows_per_program % box) == (0, 0, 0, 0)
        and max(m, 4) <= config.block_m  # components of four tokens are the matrix unit's minimum
        and 0 < groups <= min(steps, 2)
        # Otherwise a pipeline stage would alternate between warpgroups, and one would take its last contents for the next.
        and config.stages % groups == 0
        and (steps % groups == 0 or config.rows_per_program <= height)
        and config.stages > 1,
        lambda: (
            f"a product of {m} tokens and a weight of {n} x {k} in planes can't be tiled as {config}: expected all columns, "
            f"in multiples of {columns}, boxes of rows that divide {height} and {config.rows_per_program}, no "
            f"more tokens, and stages ("
            f"and units of several tiles) in multiples of {groups}"
        ),
    )
    wide = groups > 1 and columns > 256
    launch(
        nibble_planes_streamed.streamed_planes,
        (-(-n // (config.rows_per_program * (2 if half else 1))), config.split),
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
            config.rows_per_program,
            steps,
            *rotary,
        ),
        GROUPS=groups,
        STEPS=steps,
        TILES=-(-config.rows_per_program // height),
        HALF=half,
        GATED=grains is None,
        BLOCK_M=config.block_m,
        STAGES=config.stages,
        MAX_REGISTERS=128 if wide else 112,
        # so few that other programs fit on the multiprocessor; the multiplying warps are allocated more
        maxnreg=96 if wide else 80,
        pdl=pdl,
        warps=4,
    )


def _share_count(squares: Tensor | None) -> int:
    return 1 if squares is None else squares.shape[0]


def descriptor(rows: Tensor, count: int, columns: int) -> TensorDescriptor:
    """Return the copy engine's descriptor of ``rows`` in boxes of ``count`` rows and ``columns``, in the matrix unit's
    layout.
    """
    layout = gl.NVMMASharedLayout.get_default_for([count, columns], _LAYOUTS[rows.dtype])
    return TensorDescriptor.from_tensor(
        rows, [count, columns], getattr(layout, "value", layout)
    )  # a constexpr in some releases


def _of_tokens(x: Tensor, count: int, columns: int) -> TensorDescriptor:
    """Return the :func:`descriptor` of the token rows ``x``.

    It describes a copy if rows overlap or don't begin at multiples of 16 bytes, as the copy engine requires.
    """
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(0) >= x.shape[1]
    return descriptor(x if aligned else x.clone(memory_format=torch.contiguous_format), count, columns)


def registers(config: MatmulConfig, folded: int, pieces: int, *, blocks: bool = False) -> int:
    """Return the registers per thread of a streamed program: few enough that programs of the next kernels fit on the
    multiprocessor. ``blocks``: pieces have scales of their own.
    """
    sums = config.block_m * folded // 2 * (5 if pieces > 1 else 1)  # sums of two units, and their total
    if config.block_m <= 16 and sums <= 48 and not blocks:
        return 64
    return 96 if config.block_m <= 32 and sums <= 96 else 128


def _launch(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    config: MatmulConfig,
    operands: tuple[Any, ...],
    *,
    pairs: int,
    half: int,
    pdl: bool,
    fold: bool = False,
    **flags: Any,
) -> None:
    (m, k), box, span = x.shape, config.block_n, config.split * config.block_k * (2 if fold else 1)
    columns = config.block_k if x.element_size() > 1 else PIECE_COLUMNS.value
    expect(
        has_whole_boxes(config, k=k, folded=2 if fold else 1, inside=half) and config.block_k in (columns, 2 * columns),
        lambda: (
            f"a streamed product of {tuple(weight.shape)} can't be tiled as {config}: expected columns in multiples of "
            f"{span}, boxes of rows that divide {half}, {_PAIRS} and {config.rows_per_program}, two stages or "
            f"more, and of 8 bits one or "
            f"two pieces of {PIECE_COLUMNS.value} columns"
        ),
    )
    launch(
        kernel,
        (-(-pairs // config.rows_per_program), config.split, -(-m // config.block_m)),
        *(_of_tokens(x, config.block_m, columns), descriptor(weight, box, columns), *operands),
        **flags,
        STEPS=k // span,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        maxnreg=registers(config, 2 if fold else 1, config.block_k // columns, blocks=bool(flags.get("BLOCKS"))),
        pdl=pdl,
        warps=config.warps,
    )
