"""Operators of kernels that compute row by row, and the rules of all operators of this package.

The operators are overloads ``triton`` of the backend interface's operators, and a few new ones.

An overload takes its operator's operands under the same names, and so accesses the same rows (``ROW_ACCESS``). Integers that
configure the launch follow them. The shape of its result depends on its operands only.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.device import RotaryArgs
from outrider.device.kernels.operators import check_copy, expect
from outrider_triton.jit import rows as jit
from outrider_triton.launch import define, launch, power_of_two
from outrider_triton.quantized.nibble_planes import allocate_rows, row_stride


def rotates(rotary: RotaryArgs, x: Tensor, *, partly: bool = False) -> bool:
    """Return True if a Triton kernel can rotate and write keys and values that a product computes in the dtype of ``x``.

    ``partly``: the kernel can rotate only the first dimensions of a head, too.
    """
    cos, sin, k_cache, v_cache, slots = rotary
    contiguous = cos.stride(1) == 1 and slots.is_contiguous() and _laid_out(cos, sin, k_cache, v_cache)
    rotated, size = cos.shape[1], k_cache.shape[3]
    return contiguous and k_cache.dtype in (x.dtype, torch.float8_e4m3fn) and size % 2 == 0 and (partly or rotated == size)


def expect_laid_out(cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, *, partly: bool = False) -> None:
    """Raise RuntimeError for angles or caches whose strides the rotating kernels don't support, and, unless ``partly``, for
    angles that rotate only a part of each head.
    """
    expect(
        _laid_out(cos, sin, k_cache, v_cache),
        lambda: "rope_write_cache: caches must be contiguous, and cos and sin laid out alike",
    )
    expect(
        cos.shape[1] == k_cache.shape[3] or partly,
        lambda: f"rope_write_cache: cos of {cos.shape[1]} for heads of {k_cache.shape[3]}; expected all of a head rotated",
    )


def _laid_out(cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    return k_cache.is_contiguous() and v_cache.is_contiguous() and cos.stride() == sin.stride()


_MAX_MOVES = 256
"""Maximum number of rows that a program of ``move_cache`` holds at once."""

_HEADS_PER_PROGRAM = 8
"""Heads of a token that a program of ``add_parts_rope_write_cache`` has: with one each, thousands of tokens are limited by
the start of programs.
"""


def _check_norm(x: Tensor, weight: Tensor) -> None:
    expect(x.shape[-1:] == weight.shape, lambda: f"norm of {tuple(x.shape)} with a weight of {tuple(weight.shape)}")


def _rms_norm(x: Tensor, weight: Tensor, eps: float, pdl: bool) -> Tensor:
    _check_norm(x, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    if x.dim() == 3 and x.stride(-1) == 1:
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    elif x.dim() == 2 and x.stride(-1) == 1:  # for example columns of a wider tensor
        inner, outer_stride, inner_stride = 1, x.stride(0), size
    else:
        x = x.contiguous()
        inner, outer_stride, inner_stride = 1, size, size
    block = power_of_two(size)
    launch(
        jit.rms_norm,
        (out.numel() // size if size else 0,),
        *(x, weight, out, eps, size, inner, outer_stride, inner_stride),
        BLOCK=block,
        pdl=pdl,
    )
    return out


define("rms_norm.triton", _rms_norm)


def _add_parts(
    x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float, pdl: bool, planes: int = 0
) -> Tensor:
    """Add ``x`` and the bias to the residual in place and return the norm.

    ``x`` is [T, H], or [parts, T, H] of a split product or of experts. ``planes`` is the layout of the result
    (:func:`outrider_triton.quantized.nibble_planes.allocate_rows`).
    """
    parts = 1 if x.dim() == residual.dim() else x.shape[0]
    expect(
        x.shape[-residual.dim() :] == residual.shape and residual.is_contiguous(),
        lambda: f"adding {tuple(x.shape)} to a residual of {tuple(residual.shape)}; expected equal, contiguous rows",
    )
    _check_norm(residual, weight)
    out, grains = allocate_rows(residual, residual.shape, planes)
    size = residual.shape[-1]
    block = power_of_two(size)
    x = x if residual.dim() == 2 and x.stride(-1) == 1 else x.contiguous()
    strides = x.stride(0) if parts > 1 else 0, x.stride(-2) if x.dim() > 1 else size
    launch(
        jit.add_rms_norm,
        (residual.numel() // size,),
        *(x, bias, residual, weight, out, grains, eps, size, *strides, row_stride(out, grains)),
        PARTS=parts,
        PLANES=planes > 0,
        BLOCK=block,
        pdl=pdl,
    )
    return out


define("add_rms_norm.triton", _add_parts, writes=("residual",))


def _add_gated(value: Tensor, part: Tensor, x: Tensor, weight: Tensor, pdl: bool) -> None:
    """Add ``part`` [T, H], times the sigmoid of the product of ``x`` [T, H] and ``weight`` [1, H], to ``value`` [T, H]."""
    expect(
        value.shape == part.shape == x.shape and weight.shape == (1, x.shape[1]) and value.is_contiguous(),
        lambda: (
            f"adding {tuple(part.shape)} with a gate of {tuple(weight.shape)} to {tuple(value.shape)}; expected equal rows"
        ),
    )
    rows, size = x.shape
    launch(jit.add_gated, (rows,), value, part.contiguous(), x.contiguous(), weight, size, BLOCK=power_of_two(size), pdl=pdl)


define("add_gated.triton", _add_gated, writes=("value",))


def _silu_mul(gate_up: Tensor, pdl: bool, planes: int = 0) -> Tensor:
    size = gate_up.shape[-1] // 2
    out, grains = allocate_rows(gate_up, (*gate_up.shape[:-1], size), planes)
    block = min(power_of_two(size), 1024)
    grid = (gate_up.numel() // (2 * size), triton.cdiv(size, block))
    constants = {"PLANES": planes > 0, "BLOCK": block}
    operands = gate_up.contiguous(), out, grains, size, row_stride(out, grains)
    launch(jit.silu_mul, grid, *operands, **constants, pdl=pdl)
    return out


define("silu_mul.triton", _silu_mul)


def _rope_write_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    pdl: bool,
) -> None:
    expect_laid_out(cos, sin, k_cache, v_cache, partly=True)
    tokens, heads, size = q.shape
    kv_heads, rotated = k.shape[1], cos.shape[1]
    block_q, block_half = power_of_two(heads), power_of_two(size // 2)
    launch(
        jit.rope_write_cache,
        (tokens,),
        *(q, k, v, cos, sin, k_cache, v_cache, slots, heads, kv_heads, size // 2, rotated // 2),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos.stride(0)),
        *(k_cache.stride(1), k_cache.stride(2)),
        PARTLY=rotated != size,
        BLOCK_Q=block_q,
        BLOCK_KV=power_of_two(kv_heads),
        BLOCK_HALF=block_half,
        pdl=pdl,
        warps=min(max(block_q * block_half // 256, 1), 8),
    )


define("rope_write_cache.triton", _rope_write_cache, writes=("q", "k", "k_cache", "v_cache"))


def _add_parts_rope_write_cache(
    parts: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    dtype: torch.dtype,
    pdl: bool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Add parts, rotate and write the cache; return queries [T, Hq, D].

    ``parts`` is [T, (Hq + 2 Hkv) D], or [parts, T, ...] of a split product.
    """
    expect_laid_out(cos, sin, k_cache, v_cache, partly=True)
    expect(
        parts.is_contiguous() if parts.dim() == 3 else parts.stride(1) == 1,
        lambda: "rope_write_cache: parts must be contiguous, or their rows if there is one part",
    )
    tokens, (kv_heads, size) = parts.shape[-2], k_cache.shape[2:]
    heads = parts.shape[-1] // size - 2 * kv_heads
    q = torch.empty((tokens, heads, size), dtype=dtype, device=parts.device)
    launch(
        jit.add_parts_rope_write_cache,
        (tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS_PER_PROGRAM)),
        *(parts, bias, q_norm, k_norm, eps, cos, sin, q, k_cache, v_cache, slots, heads, kv_heads, size // 2),
        *(cos.shape[1] // 2, parts.stride(-2), tokens * parts.shape[-1]),
        *(cos.stride(0), k_cache.stride(1), k_cache.stride(2)),
        PARTS=1 if parts.dim() == 2 else parts.shape[0],
        HEADS=_HEADS_PER_PROGRAM,
        BLOCK_HALF=power_of_two(size // 2),
        pdl=pdl,
        warps=2,
    )
    return q


# An overload of the operator that writes the same cache rows, so that row access is known.
define("rope_write_cache.triton_parts", _add_parts_rope_write_cache, writes=("k_cache", "v_cache"))


def _move_cache(k_cache: Tensor, v_cache: Tensor, sources: Tensor, destinations: Tensor, pdl: bool) -> None:
    moves = sources.shape[0]
    expect(moves <= _MAX_MOVES, lambda: f"move_cache: {moves} rows at once, expected at most {_MAX_MOVES}")
    sizes = k_cache.stride(1), v_cache.stride(1)
    block = 64
    launch(
        jit.move_cache,
        (triton.cdiv(max(sizes), block) if moves else 0,),
        *(k_cache, v_cache, sources, destinations, moves, *sizes),
        MOVES=power_of_two(moves),
        BLOCK=block,
        pdl=pdl,
        warps=min(max(power_of_two(moves) * block // 512, 1), 8),
    )


define("move_cache.triton", _move_cache, writes=("k_cache", "v_cache"))


def _rows_grid(state: Tensor, count: int) -> tuple[tuple[int, int], int, int]:
    size = state[0].numel()
    block = min(power_of_two(size), 1024)
    return (count, triton.cdiv(size, block)), size, block


def _gather_rows(state: Tensor, rows: Tensor, pdl: bool) -> Tensor:
    out = state.new_empty((rows.shape[0], *state.shape[1:]))
    grid, size, block = _rows_grid(state, rows.shape[0])
    launch(jit.gather_rows, grid, state, rows, out, size, state.stride(0), BLOCK=block, pdl=pdl)
    return out


define("gather_rows.triton", _gather_rows)


def _scatter_rows(state: Tensor, rows: Tensor, values: Tensor, pdl: bool) -> None:
    grid, size, block = _rows_grid(state, rows.shape[0])
    values = values.contiguous()
    launch(jit.scatter_rows, grid, state, rows, values, size, BLOCK=block, pdl=pdl)


define("scatter_rows.triton", _scatter_rows, writes=("state",))


def _copy_rows(source: Tensor, out: Tensor, pdl: bool) -> None:
    check_copy(source, out)
    expect(source.stride(1) == out.stride(1) == 1, lambda: "copy_rows: the columns of a row must be contiguous")
    count, size = source.shape
    block = min(power_of_two(size), 1024)
    launch(
        jit.copy_rows,
        (count, triton.cdiv(size, block)),
        *(source, out, size, source.stride(0), out.stride(0)),
        BLOCK=block,
        pdl=pdl,
    )


define("copy_rows.triton", _copy_rows, writes=("out",))
