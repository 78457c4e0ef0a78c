"""Operators of attention over the paged cache (:mod:`outrider_triton.attention.jit.paged` and
:mod:`outrider_triton.attention.jit.paged_streamed`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from outrider.device.kernels.checks import expect
from outrider_triton.attention.jit import paged as attention
from outrider_triton.attention.jit import paged_streamed as attention_streamed
from outrider_triton.launch import launch, power_of_two, register
from outrider_triton.products.streamed import descriptor
from outrider_triton.quantized.nibble_planes import allocate_rows, row_stride

_ATTENTION = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_start, Tensor seq_lens, Tensor block_table, Tensor? tree_mask, "
    "int max_query, int max_kv, float scale, int window, bool settled, int[] config, bool pdl"
)
"""Schema of the operands that every attention operator takes."""


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tree_mask: Tensor | None,
    max_query: int,
    max_kv: int,
    scale: float,
    window: int,
    settled: bool,
    config: list[int],
    pdl: bool,
    *,
    padding: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch attention and return (out, parts, stats); without splits all three are ``out``.

    ``parts`` are the partial results of the splits, ``stats`` their maxima and sums. ``padding``: write zeros for padding
    tokens.
    """
    del max_kv  # the device reads the lengths itself
    block_rows, block_kv, split, warps, stages, is_streamed = config
    tokens, heads, size = q.shape
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group, batch = heads // kv_heads, seq_lens.shape[0]
    expect(
        k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(-1) == 1 and block_table.stride(-1) == 1,
        lambda: "paged_attention: caches must be contiguous, and the last dimension of q and of the block table",
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if padding or split == 1 else q
    parts = stats = out
    if split > 1:
        parts = torch.empty((tokens, heads, split, size), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, split, 2), dtype=torch.float32, device=q.device)
    mask = out if tree_mask is None else tree_mask.view(torch.uint8)
    grid = triton.cdiv(max_query, block_rows // group), batch * kv_heads, split
    addressing = query_start, seq_lens, block_table, mask, out, parts, stats
    sizes = tokens if padding else 0, batch, heads, scale, size
    strides = q.stride(0), q.stride(1), block_table.stride(0), mask.stride(0)
    constants = {"PAGE": page, "GROUP": group, "WINDOW": window, "TREE": tree_mask is not None, "SETTLED": settled}
    constants |= {"SPLITS": split, "BLOCK_ROWS": block_rows, "BLOCK_KV": block_kv}
    if is_streamed:
        expect(
            k_cache.dtype is q.dtype and v_cache.dtype is q.dtype and power_of_two(size) == size,
            lambda: f"streamed attention over a cache in {k_cache.dtype}, heads of {size}: expected queries' {q.dtype}",
        )
        descriptors = (descriptor(cache.view(-1, kv_heads * size), min(page, block_kv), size) for cache in (k_cache, v_cache))
        launch(
            attention_streamed.paged_attention_ring,
            grid,
            *(q, *descriptors, *addressing, *sizes, *strides),
            **constants,
            STAGES=stages,
            maxnreg=128,
            pdl=pdl,
            warps=warps,
        )
        return out, parts, stats
    launch(
        attention.paged_attention,
        grid,
        *(q, k_cache, v_cache, *addressing, *sizes, *strides, k_cache.stride(1), k_cache.stride(2)),
        **constants,
        BLOCK_SIZE=max(power_of_two(size), 16),
        num_stages=stages,
        pdl=pdl,
        warps=warps,
    )
    return out, parts, stats


def _join(
    parts: Tensor,
    stats: Tensor,
    query_start: Tensor,
    like: Tensor,
    out: Tensor,
    pdl: bool,
    *,
    grains: Tensor | None = None,
    planes: int = 0,
) -> Tensor:
    """Combine ``parts [T, Hq, split, D]`` into ``out`` and return it.

    ``out`` is [T, Hq, D], or rows in nibble-plane layout with their ``grains``. Values are rounded to the dtype of ``like``.
    """
    tokens, heads, split, size = parts.shape
    block_size = max(power_of_two(size), 16)
    launch(
        attention.join_splits,
        (tokens, heads),
        *(parts, stats, query_start, like, out, grains, query_start.shape[0] - 1, heads, size, row_stride(out, grains)),
        SPLITS=split,
        BLOCK_SIZE=block_size,
        PLANES=planes > 0,
        pdl=pdl,
        warps=min(max(split * block_size // 1024, 1), 4),
    )
    return out


def _paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, *rest: Any) -> Tensor:
    out, parts, stats = _attend(q, k_cache, v_cache, query_start, *rest)
    return _join(parts, stats, query_start, out, out, rest[-1]) if parts is not out else out


def _paged_attention_planes(q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, *rest: Any) -> Tensor:
    *operands, planes = rest
    _, parts, stats = _attend(q, k_cache, v_cache, query_start, *operands, padding=False)
    expect(parts is not q, lambda: "attention that isn't split leaves no rows in planes")
    out, grains = allocate_rows(q, (q.shape[0], q.shape[1] * q.shape[2]), planes)
    return _join(parts, stats, query_start, q, out, operands[-1], grains=grains, planes=planes)


register(f"paged_attention.triton({_ATTENTION}) -> Tensor", _paged_attention)
register(f"paged_attention.triton_planes({_ATTENTION}, int planes) -> Tensor", _paged_attention_planes)
