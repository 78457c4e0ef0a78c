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
from outrider_triton.jit import planes
from outrider_triton.launch import launch
from outrider_triton.table import STREAMED, MatmulConfig


def in_planes(x: Tensor, pdl: bool) -> Tensor:
    """Rows of ``x`` [m, k] laid out in planes."""
    m, k = x.shape
    out = torch.empty((m, k), dtype=x.dtype, device=x.device)
    launch(
        planes.lay_in_planes,
        (m, triton.cdiv(k, 1024)),
        *(x, out, k, x.stride(0)),
        BLOCK=1024,
        pdl=pdl,
        warps=4,
    )
    return out


def _linear_planes(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    block: Sequence[int],
    laid: bool,
    mode: str,
    columns: int,
    at_once: int,
    asm: bool,
    config: list[int],
    pdl: bool,
) -> Tensor:
    """``laid``: the rows of ``x`` are in planes. What a split leaves, float32 [split, T, N] without the bias, is left so."""
    block_m, block_n, block_k, split, warps, stages, ahead, descriptor, each = config
    expect(descriptor in (0, STREAMED), lambda: f"a product with a quantised weight can't be cut up as {config}")
    flat, n = x.reshape(-1, x.shape[-1]), data.shape[0]
    (m, k), each = flat.shape, each or block_n
    expect(
        k == 2 * data.shape[1] and k % planes.UNIT.value == 0,
        lambda: f"product of {tuple(x.shape)} with a weight of {n} x {2 * data.shape[1]}: expected as many, in units of 128",
    )
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    if not laid:
        flat = in_planes(flat, pdl)
    made = torch.empty((split, m, n), dtype=torch.float32 if split > 1 else x.dtype, device=x.device)
    if descriptor == STREAMED:
        expect(
            zero_points is None and (mode, columns, block[0]) == ("block", planes.UNIT.value, 1) and asm,
            lambda: (
                f"a product through a ring with scales of {tuple(block)}: expected rows of groups of 128, without zero points"
            ),
        )
        streamed.multiply_planes(flat, data, scales, bias if split == 1 else None, made, MatmulConfig(*config), pdl)
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


def _empty(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    split, n = rest[-2][3], data.shape[0]
    if split > 1:
        return torch.empty((split, x.numel() // x.shape[-1], n), dtype=torch.float32, device=x.device)
    return x.new_empty((*x.shape[:-1], n))


define(
    "linear_quantized.triton_planes(Tensor x, Tensor data, Tensor scales, Tensor? zero_points, Tensor? bias, int[] block, "
    "bool laid, str mode, int columns, int at_once, bool asm, int[] config, bool pdl) -> Tensor",
    _linear_planes,
    _empty,
)
