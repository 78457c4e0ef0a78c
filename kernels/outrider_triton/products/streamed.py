"""Launches of streamed products. Each computes the same as the unstreamed product of the same name."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.device.kernels.operators import expect
from outrider_triton.jit.tma_pipeline import PAIRS, PIECE_COLUMNS
from outrider_triton.launch import launch, power_of_two
from outrider_triton.products.jit import large_m_gates, prefill_gates, streamed
from outrider_triton.tiles.configs import MatmulConfig
from outrider_triton.tiles.derive.fits import MAX_FOLDED_TOKENS, can_stream, has_whole_boxes

_PAIRS: int = PAIRS.value
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
    launch_streamed(
        streamed.streamed_linear, x, weight, config, operands, pairs=pairs, half=_PAIRS, pdl=pdl, fold=fold, **flags
    )


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
    shares = 1 if squares is None else squares.shape[0]
    x_scales, scales, rows = quantized or (None, None, 0)
    operands = squares, bias, out, eps, m, n, k, shares, config.rows_per_program, x_scales, scales, maxima
    flags: dict[str, Any] = {"SHARES": power_of_two(shares), "ROWS": rows}
    launch_streamed(streamed.streamed_silu_mul, x, weight, config, operands, pairs=n, half=n, pdl=pdl, **flags)


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
        *(token_descriptor(x, config.block_m, config.block_k), descriptor(weight, box, config.block_k)),
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


def silu_mul_prefill(x: Tensor, weight: Tensor, out: Tensor, config: MatmulConfig, pdl: bool) -> None:
    """Compute :func:`silu_mul` of many normalised rows without a bias (:mod:`outrider_triton.products.jit.prefill_gates`)."""
    (m, k), n, columns = x.shape, weight.shape[0] // 2, config.block_k
    tokens, pairs = prefill_gates.TOKENS.value, prefill_gates.PAIRS.value
    tiles, steps = (-(-m // (2 * tokens)), -(-n // pairs)), -(-k // columns)
    expect(
        (config.block_m, config.block_n, config.warps) == (2 * tokens, pairs, 8)
        and prefill_gates.LEAD.value < min(config.stages, steps)
        and config.stages <= prefill_gates.LEAD.value + steps
        and k % 8 == n % 8 == 0,
        lambda: (
            f"gates of {tuple(weight.shape)} can't be tiled as {config}: expected tiles of {2 * tokens} tokens and {pairs} "
            "pairs of rows, 8 warps, two blocks of columns or more, two stages or more and at most one more than blocks, and "
            "rows and columns in multiples of 8"
        ),
    )
    launch(
        prefill_gates.prefill_silu_mul,
        (min(config.rows_per_program, tiles[0] * tiles[1]),),
        *(token_descriptor(x, tokens, columns), descriptor(weight, pairs, columns), descriptor(out, tokens, pairs)),
        *(n, *tiles, steps),
        STAGES=config.stages,
        GROUP_M=config.prefetch_columns,
        maxnreg=168,  # of 12 warps; the multiplying warps are allocated more
        pdl=pdl,
        warps=4,
    )


def descriptor(rows: Tensor, count: int, columns: int) -> TensorDescriptor:
    """Return the copy engine's descriptor of ``rows`` in boxes of ``count`` rows and ``columns``, in the matrix unit's
    layout.
    """
    return TensorDescriptor.from_tensor(rows, [count, columns], _layout(count, columns, rows.dtype))


@cache
def _layout(count: int, columns: int, dtype: torch.dtype) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for([count, columns], _LAYOUTS[dtype])
    return getattr(layout, "value", layout)  # a constexpr in some releases


def token_descriptor(x: Tensor, count: int, columns: int) -> TensorDescriptor:
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


def launch_streamed(
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
    """Launch the streamed ``kernel`` of rows ``x`` [m, k] and a ``weight``, whose ``pairs`` of rows are ``half`` rows apart,
    with further ``operands`` and constant ``flags``.
    """
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
        *(token_descriptor(x, config.block_m, columns), descriptor(weight, box, columns), *operands),
        **flags,
        STEPS=k // span,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        maxnreg=registers(config, 2 if fold else 1, config.block_k // columns, blocks=bool(flags.get("BLOCKS"))),
        pdl=pdl,
        warps=config.warps,
    )
