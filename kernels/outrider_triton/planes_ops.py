"""Products with weights of four bits in planes, as operators (:mod:`outrider_triton.jit.planes`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.device.kernels.checks import expect
from outrider_triton import streamed
from outrider_triton.define import define
from outrider_triton.jit import planes, planes_gated
from outrider_triton.launch import launch
from outrider_triton.table import STREAMED, MatmulConfig

PLAIN, DIGITS = 1, 2
"""Rows in planes as :mod:`outrider_triton.jit.planes` multiplies them; in two digits, as
:mod:`outrider_triton.jit.planes_ring` does.
"""


def laying(config: MatmulConfig) -> int:
    """How the rows lie that a product takes."""
    return DIGITS if config.descriptor == STREAMED else PLAIN


def activates(config: MatmulConfig, m: int) -> bool:
    """Whether a product of ``m`` tokens so cut takes gate and up, and computes SwiGLU itself: with one token that is faster
    than a kernel between, with more it isn't (docs/evidence/README.md#2026-11-27-pieces).
    """
    columns, groups = planes_gated.COLUMNS.value, config.warps // 4
    few = config.block_k <= groups * planes_gated.STEPS_AT_MOST.value * columns
    return m == 1 and laying(config) == DIGITS and config.ahead == columns and few


def _width(k: int, how: int) -> int:
    """Numbers of a row: of two digits each has room behind it for a float32 for each unit, and both begin at multiples of 16
    bytes.
    """
    return 2 * (k + 16 * triton.cdiv(k, 4 * planes.UNIT.value)) if how == DIGITS else k


def room(like: Tensor, shape: Sequence[int], how: int) -> tuple[Tensor, Tensor | None]:
    """Where rows of ``shape`` go that are laid out so, on the device of ``like``; 0: that aren't. DIGITS: int8, both digits
    of a row behind each other, and, in float32, the place for the grains of its units.
    """
    k, width = shape[-1], _width(shape[-1], how)
    out = like.new_empty((*shape[:-1], width), dtype=torch.int8 if how == DIGITS else like.dtype)
    return out, out[..., k : width // 2].view(torch.float32) if how == DIGITS else None


def stride_of(out: Tensor, grains: Tensor | None) -> int:
    """Of what :func:`room` made the numbers between two rows, or digits."""
    return out.shape[-1] if grains is None else out.shape[-1] // 2


def digits_of(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of contiguous rows [m, ...] in DIGITS: both digits, int8 [2 m, k], and the grains, float32 [m, units]."""
    digits = rows.view(2 * rows.shape[0], -1)
    return digits[:, :k], digits[::2, k:].view(torch.float32)


def in_planes(x: Tensor, pdl: bool, how: int = PLAIN) -> Tensor:
    """Rows of ``x`` [m, k] laid out in planes."""
    m, k = x.shape
    out, grains = room(x, x.shape, how)
    launch(
        planes.lay_in_planes,
        (m, triton.cdiv(k, 1024)),
        *(x, out, grains, k, x.stride(0), stride_of(out, grains)),
        BLOCK=1024,
        pdl=pdl,
        warps=4,
    )
    return out


define("lay_in_planes.triton(Tensor x, bool pdl, int how) -> Tensor", in_planes, lambda x, pdl, how: room(x, x.shape, how)[0])


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
    """``laid``: of the product, where the rows of ``x`` are in planes, as :func:`laying` says. What a split leaves, float32
    [split, T, N] without the bias, is left so.
    """
    block_m, block_n, block_k, split, warps, stages, ahead, descriptor, each = config
    expect(descriptor in (0, STREAMED), lambda: f"a product with a quantised weight can't be cut up as {config}")
    flat, n = x.reshape(-1, x.shape[-1]), data.shape[0]
    m, k, how, each = flat.shape[0], 2 * data.shape[1], laying(MatmulConfig(*config)), each or block_n
    expect(
        flat.shape[1] == (_width(k, how) if laid is not None else k) and k % planes.UNIT.value == 0,
        lambda: (
            f"product of {tuple(x.shape)}{'' if laid is None else ' in planes'} with a weight of {n} x {k}: expected rows of "
            f"{_width(k, how) if laid is not None else k} and units of 128 columns"
        ),
    )
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    if laid is None:
        flat = in_planes(flat, pdl, how)
    made = torch.empty((split, m, n), dtype=torch.float32 if split > 1 else laid or x.dtype, device=x.device)
    if descriptor == STREAMED:
        expect(
            zero_points is None and (mode, columns, block[0]) == ("block", planes.UNIT.value, 1) and asm,
            lambda: (
                f"a product through a ring with scales of {tuple(block)}: expected rows of groups of 128, without zero points"
            ),
        )
        rows, grains = digits_of(flat.contiguous(), k)
        own = rows, grains, data, scales, bias if split == 1 else None
        streamed.multiply_planes(*own, made, MatmulConfig(*config), pdl)
        return made if split > 1 else made.view(*x.shape[:-1], n)
    launch(
        planes.linear_planes,
        (triton.cdiv(n, each), triton.cdiv(m, block_m), split),
        *(flat, data.view(torch.int16), scales, zero_points, bias if split == 1 else None, made, m, n, k),
        *(flat.stride(0), scales.shape[1], each, ahead),
        MODE=mode,
        ROWS=block[0],
        COLUMNS=columns,
        ZEROS=zero_points is not None,
        HAS_BIAS=bias is not None and split == 1,
        ASM=asm,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SUB=min(at_once, block_k) if at_once else block_k,
        SPLIT=split,
        EVEN=k % (split * block_k) == 0,
        num_stages=stages,
        pdl=pdl,
        warps=warps,
    )
    return made if split > 1 else made.view(*x.shape[:-1], n)


def _gated_planes(
    both: Tensor,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    config: list[int],
    pdl: bool,
) -> Tensor:
    """SwiGLU of one token, ``both`` [1, 2 K], multiplied. What a split leaves, float32 [split, 1, N], is left so."""
    split, cut = config[3], MatmulConfig(*config)
    made = _gated_empty(both, data, scales, bias, config, pdl)
    streamed.multiply_gated_planes(both.contiguous(), data, scales, bias if split == 1 else None, made, cut, pdl)
    return made


def _gated_empty(both: Tensor, data: Tensor, *rest: Any) -> Tensor:
    split, n = rest[-2][3], data.shape[0]
    return both.new_empty((split, 1, n), dtype=torch.float32) if split > 1 else both.new_empty((1, n))


define(
    "linear_quantized.triton_gated_planes(Tensor both, Tensor data, Tensor scales, Tensor? bias, int[] config, bool pdl) "
    "-> Tensor",
    _gated_planes,
    _gated_empty,
)


def _empty(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    split, n = rest[-2][3], data.shape[0]
    if split > 1:
        return torch.empty((split, x.numel() // x.shape[-1], n), dtype=torch.float32, device=x.device)
    return x.new_empty((*x.shape[:-1], n), dtype=rest[-7] or x.dtype)


define(
    "linear_quantized.triton_planes(Tensor x, Tensor data, Tensor scales, Tensor? zero_points, Tensor? bias, int[] block, "
    "ScalarType? laid, str mode, int columns, int at_once, bool asm, int[] config, bool pdl) -> Tensor",
    _linear_planes,
    _empty,
)
