"""Operators of attention in which the sums of each row have one order (:mod:`outrider_triton.attention.jit.exact`)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.device.kernels.checks import expect
from outrider_triton.attention.jit import exact
from outrider_triton.launch import define, launch, power_of_two

FIRST_CHUNK = 256
"""Number of positions in each of the first chunks of attention."""


def _exact_attention(
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
    shared: bool,
    config: list[int],
    pdl: bool,
) -> Tensor:
    rows, block_kv, group = config
    (tokens, heads, size), batch = q.shape, seq_lens.shape[0]
    expect(
        k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(-1) == 1 and block_table.stride(-1) == 1,
        lambda: "paged_attention: caches must be contiguous, and the last dimension of q and of the block table",
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    parts = stats = counts = out
    chunks = _chunk_count(max_kv) if shared else 1
    if shared:
        parts = torch.empty((tokens, heads, chunks, size), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, chunks, 2), dtype=torch.float32, device=q.device)
        counts = torch.empty((tokens, heads), dtype=torch.int32, device=q.device)
    mask = out if tree_mask is None else tree_mask.view(torch.uint8)
    block_size = max(power_of_two(size), 16)
    launch(
        exact.exact_attention,
        (triton.cdiv(max_query, rows // group), batch * k_cache.shape[2], chunks),
        *(q, k_cache, v_cache, query_start, seq_lens, block_table, mask, out, parts, stats, counts),
        *(tokens, batch, heads, scale, size, chunks, q.stride(0), q.stride(1), block_table.stride(0), mask.stride(0)),
        *(k_cache.stride(1), k_cache.stride(2)),
        PAGE=k_cache.shape[1],
        GROUP=group,
        WINDOW=window,
        TREE=tree_mask is not None,
        SHARED=shared,
        CHUNK=FIRST_CHUNK,
        BLOCK_ROWS=rows,
        BLOCK_KV=block_kv,
        BLOCK_SIZE=block_size,
        num_stages=3 if q.dtype.itemsize == 2 else 2,
        pdl=pdl,
        warps=4,
    )
    if shared:
        operands = parts, stats, counts, query_start, out, batch, heads, chunks, size
        launch(exact.merge_chunks, (tokens, heads), *operands, BLOCK_SIZE=block_size, pdl=pdl, warps=1)
    return out


def _chunk_count(positions: int) -> int:
    """Return the number of chunks (``chunk_start``) that begin before ``positions``."""
    count = 0
    each: int = exact.CHUNKS_PER_DOUBLING.value
    length, start = FIRST_CHUNK, 0
    while start < positions:
        start += length
        count += 1
        if count >= 2 * each and count % each == 0:
            length *= 2
    return count


define("paged_attention.exact", _exact_attention)
