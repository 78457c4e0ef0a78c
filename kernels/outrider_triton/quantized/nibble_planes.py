"""Operators of products with nibble weights in nibble planes (:mod:`outrider_triton.quantized.jit.nibble_planes`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.device.kernels.operators import expect
from outrider_triton.launch import define, launch
from outrider_triton.products import streamed
from outrider_triton.quantized.jit import nibble_planes, nibble_planes_gated, nibble_planes_streamed
from outrider_triton.quantized.plan import can_stream_nibbles
from outrider_triton.tiles.configs import STREAMED, MatmulConfig

NIBBLE_PLANES, INT8_COMPONENTS = 1, 2
"""The layouts of token rows: 16-bit values in nibble planes for :mod:`outrider_triton.quantized.jit.nibble_planes`, or two
int8 components for :mod:`outrider_triton.quantized.jit.nibble_planes_streamed`.
"""


def row_layout(config: MatmulConfig) -> int:
    """Return the layout of the token rows that a product with this configuration reads."""
    return INT8_COMPONENTS if config.descriptor == STREAMED else NIBBLE_PLANES


def computes_swiglu(config: MatmulConfig, m: int) -> bool:
    """Return True if a product of ``m`` tokens takes gate and up and computes SwiGLU itself.

    With one token this is faster than a separate kernel, with more it is slower (docs/evidence/README.md#2026-11-27-pieces).
    """
    columns, groups = nibble_planes_gated.COLUMNS.value, config.warps // 4
    fits_registers = config.block_k <= groups * nibble_planes_gated.STEPS_AT_MOST.value * columns
    return m == 1 and row_layout(config) == INT8_COMPONENTS and config.prefetch_columns == columns and fits_registers


def _width(k: int, how: int) -> int:
    """Return the elements per row of layout ``how``. A component is followed by room for one float32 per unit; both begin at
    multiples of 16 bytes.
    """
    return 2 * (k + 16 * triton.cdiv(k, 4 * nibble_planes.UNIT_COLUMNS.value)) if how == INT8_COMPONENTS else k


def allocate_rows(like: Tensor, shape: Sequence[int], how: int) -> tuple[Tensor, Tensor | None]:
    """Allocate rows of ``shape`` in layout ``how`` (0: row-major) on the device of ``like``. Return them, and the view of
    their grains or None.

    INT8_COMPONENTS: int8, the low components of a row, then the high ones; float32 grains of its units follow the low ones.
    """
    k, width = shape[-1], _width(shape[-1], how)
    out = like.new_empty((*shape[:-1], width), dtype=torch.int8 if how == INT8_COMPONENTS else like.dtype)
    return out, out[..., k : width // 2].view(torch.float32) if how == INT8_COMPONENTS else None


def row_stride(out: Tensor, grains: Tensor | None) -> int:
    """Return the elements between two rows, or two components, of an allocation of :func:`allocate_rows`."""
    return out.shape[-1] if grains is None else out.shape[-1] // 2


def component_views(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return components int8 [2 m, k] and grains float32 [m, units] as views of contiguous rows [m, ...].

    The layout is INT8_COMPONENTS.
    """
    digits = rows.view(2 * rows.shape[0], -1)
    return digits[:, :k], digits[::2, k:].view(torch.float32)


def permute_rows(x: Tensor, pdl: bool, how: int = NIBBLE_PLANES) -> Tensor:
    """Return the rows of ``x`` [m, k] in nibble-plane layout ``how``."""
    m, k = x.shape
    out, grains = allocate_rows(x, x.shape, how)
    launch(
        nibble_planes.lay_in_planes,
        (m, triton.cdiv(k, 1024)),
        *(x, out, grains, k, x.stride(0), row_stride(out, grains)),
        BLOCK=1024,
        pdl=pdl,
        warps=4,
    )
    return out


define("lay_in_planes.triton", permute_rows)


def launch_planes(
    x: Tensor,
    grains: Tensor | None,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: MatmulConfig,
    pdl: bool,
    rotary: tuple[Any, ...] = (*(None,) * 5, *(0,) * 5),
    half: int = 0,
) -> None:
    """Multiply int8 components ``x`` [2 m, k] by nibbles ``data [n, k / 2]`` into ``out [m, n]`` or parts ``[split, m, n]``.

    ``grains [m, k / 128]`` are the tokens' scales in float32
    (:func:`outrider_triton.quantized.jit.nibble_planes.store_in_planes`). Without them, ``x`` is one token's gate and up,
    [1, 2 k]. ``half``: half the size of the heads that the product rotates with the operands ``rotary``; 0: it doesn't.
    """
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
            f"in multiples of {columns}, boxes of rows that divide {height} and {config.rows_per_program}, no more tokens, "
            f"and stages (and units of several tiles) in multiples of {groups}"
        ),
    )
    wide = groups > 1 and columns > 256
    launch(
        nibble_planes_streamed.streamed_planes,
        (-(-n // (config.rows_per_program * (2 if half else 1))), config.split),
        x if grains is None else streamed.descriptor(x, 2 * config.block_m, columns),
        *(streamed.descriptor(data.view(torch.int8), box, columns // 2), grains, scales, bias, out, m, n, scales.shape[1]),
        *(0 if grains is None else grains.stride(0), config.rows_per_program, steps, *rotary),
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


def _linear_planes(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    block: Sequence[int],
    laid: torch.dtype | None,
    mode: str,
    columns: int,
    at_once: int,
    asm: bool,
    config: list[int],
    pdl: bool,
) -> Tensor:
    """Return the product of the rows ``x`` and a nibble weight.

    ``laid`` is the product's dtype if the rows of ``x`` already have the layout of :func:`row_layout`, else None. A split
    product is returned in parts, float32 [split, T, N], without the bias.
    """
    tiling = MatmulConfig(*config)
    expect(tiling.descriptor in (0, STREAMED), lambda: f"a product with a quantised weight can't be tiled as {config}")
    flat, n = x.reshape(-1, x.shape[-1]), data.shape[0]
    m, k, how, rows_per_program = (
        flat.shape[0],
        2 * data.shape[1],
        row_layout(tiling),
        tiling.rows_per_program or tiling.block_n,
    )
    expect(
        flat.shape[1] == (_width(k, how) if laid is not None else k) and k % nibble_planes.UNIT_COLUMNS.value == 0,
        lambda: (
            f"product of {tuple(x.shape)}{'' if laid is None else ' in planes'} with a weight of {n} x {k}: expected rows of "
            f"{_width(k, how) if laid is not None else k} and units of 128 columns"
        ),
    )
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    if laid is None:
        flat = permute_rows(flat, pdl, how)
    product = torch.empty((tiling.split, m, n), dtype=torch.float32 if tiling.split > 1 else laid or x.dtype, device=x.device)
    if tiling.descriptor == STREAMED:
        expect(
            can_stream_nibbles(mode, block, zero_points),
            lambda: f"a streamed product with scales of {tuple(block)}: expected rows of groups of 128, without zero points",
        )
        components, grains = component_views(flat.contiguous(), k)
        operands = components, grains, data, scales, bias if tiling.split == 1 else None
        launch_planes(*operands, product, tiling, pdl)
        return product if tiling.split > 1 else product.view(*x.shape[:-1], n)
    launch(
        nibble_planes.linear_planes,
        (triton.cdiv(n, rows_per_program), triton.cdiv(m, tiling.block_m), tiling.split),
        *(flat, data.view(torch.int16), scales, zero_points, bias if tiling.split == 1 else None, product, m, n, k),
        *(flat.stride(0), scales.shape[1], rows_per_program, tiling.prefetch_columns),
        MODE=mode,
        ROWS=block[0],
        COLUMNS=columns,
        ASM=asm,
        SUB=min(at_once, tiling.block_k) if at_once else tiling.block_k,
        SPLIT=tiling.split,
        **tiling.launch_constants(k),
        pdl=pdl,
    )
    return product if tiling.split > 1 else product.view(*x.shape[:-1], n)


define("linear_quantized.triton_planes", _linear_planes)


def _gated_planes(
    both: Tensor,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    config: list[int],
    pdl: bool,
) -> Tensor:
    """Return the product of SwiGLU of one token's gate and up, ``both`` [1, 2 K], and a nibble weight.

    A split product is returned in parts, float32 [split, 1, N], without the bias.
    """
    tiling, n, k, columns = MatmulConfig(*config), data.shape[0], 2 * data.shape[1], nibble_planes_gated.COLUMNS.value
    both = both.contiguous()
    expect(
        both.shape == (1, 2 * k) and both.data_ptr() % 16 == 0 and tiling.prefetch_columns == columns,
        lambda: (
            f"gate and up {tuple(both.shape)} for a product with {tuple(data.shape)} bytes tiled as {config}: expected one "
            f"row of {2 * k} that begins at a multiple of 16 bytes, and tiles of {columns} columns"
        ),
    )
    is_split = tiling.split > 1
    product = both.new_empty((tiling.split, 1, n), dtype=torch.float32) if is_split else both.new_empty((1, n))
    launch_planes(both, None, data, scales, None if is_split else bias, product, tiling, pdl)
    return product


define("linear_quantized.triton_gated_planes", _gated_planes)


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
    """Multiply int8 component rows by nibbles in groups of 128 without zero points, rotate queries and keys, and write the
    cache.

    Returns queries [T, Hq, D] in ``dtype``.
    """
    tiling, (kv_heads, size), paired = MatmulConfig(*config), k_cache.shape[2:], nibble_planes_streamed.PAIRED.value
    expect(
        (size // 2 % paired, tiling.block_n, tiling.split) == (0, paired, 1),
        lambda: (
            f"queries and keys of heads of {size} in planes can't be tiled as {tiling}: expected boxes of "
            f"{paired} rows that divide half a head, and no parts"
        ),
    )
    q = x.new_empty((x.shape[0], data.shape[0] // size - 2 * kv_heads, size), dtype=dtype)
    strides = cos.stride(0), k_cache.stride(1), k_cache.stride(2)
    rotary = cos, sin, k_cache, v_cache, slots, q.shape[1], kv_heads, *strides
    operands = *component_views(x, 2 * data.shape[1]), data, scales, bias
    launch_planes(*operands, q, tiling, pdl, rotary, half=size // 2)
    return q


define("rope_write_cache.triton_linear_planes", _linear_planes_rope_write_cache, writes=("k_cache", "v_cache"))
