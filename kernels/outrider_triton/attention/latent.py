"""Operators of latent attention (:mod:`outrider_triton.attention.jit.latent`), and their launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from outrider.device import AttentionMetadata, RotaryArgs
from outrider.device.kernels.operators import expect
from outrider_triton.attention import operators
from outrider_triton.attention.jit import exact
from outrider_triton.attention.jit import latent as jit
from outrider_triton.launch import define, has_kernel, launch, power_of_two
from outrider_triton.tiles.derive.attention import (
    AttentionHeads,
    AttentionLaunch,
    derive_latent_launch,
    exact_latent_launch,
    fits_latents,
)
from outrider_triton.tiles.facts import DeviceFacts

HEAD_LINEAR_ROWS = (16, 32, 64, 128)
"""Numbers of tokens in a tile of the product of heads."""
_MAX_LATENT = 512
"""Maximum size of a latent vector, of which a program holds one for each row."""


def _head_linear(x: Tensor, weight: Tensor, rows: int, pdl: bool) -> Tensor:
    (tokens, heads, inner), outer = x.shape, weight.shape[1]
    expect(
        weight.shape == (heads, outer, inner) and x.stride(2) == 1,
        lambda: f"heads {tuple(x.shape)} times {tuple(weight.shape)}; expected equal heads and columns, contiguous in x",
    )
    out = torch.empty((tokens, heads, outer), dtype=x.dtype, device=x.device)
    columns = min(64 if rows < 128 else 128, max(power_of_two(outer), 16))
    launch(
        jit.head_linear,
        (triton.cdiv(outer, columns), heads, triton.cdiv(tokens, rows)),
        *(x, weight, out, tokens, outer, inner, x.stride(0), x.stride(1), *weight.stride()),
        BLOCK_TOKENS=rows,
        BLOCK_OUTER=columns,
        BLOCK_INNER=64,
        num_stages=3,
        pdl=pdl,
        warps=4 if rows < 128 else 8,
    )
    return out


define("head_linear.triton", _head_linear)


def head_linear_rows(tokens: int) -> int:
    """Return the number of tokens in a tile of the product of heads with ``tokens`` tokens."""
    return next((rows for rows in HEAD_LINEAR_ROWS if rows >= tokens), HEAD_LINEAR_ROWS[-1])


def _norm_rope_write_cache(
    latent: Tensor,
    norm: Tensor,
    eps: float,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    pdl: bool,
) -> None:
    (tokens, size), heads = latent.shape, q.shape[1]
    launch(
        jit.norm_rope_write_cache,
        (tokens,),
        *(latent, norm, eps, q, k, cos, sin, k_cache, v_cache, slots, heads, size, k.shape[1] // 2),
        *(latent.stride(0), q.stride(0), q.stride(1), k.stride(0), cos.stride(0)),
        BLOCK_HEADS=power_of_two(heads),
        BLOCK_SIZE=power_of_two(size),
        BLOCK_HALF=power_of_two(k.shape[1] // 2),
        pdl=pdl,
        warps=4,
    )


define("rope_write_cache.triton_latent", _norm_rope_write_cache, writes=("q", "k", "k_cache", "v_cache"))


def writes_latents(latent: Tensor, norm: Tensor, q: Tensor, k: Tensor, rotary: RotaryArgs) -> bool:
    """Return True if the kernel takes these operands: contiguous rows and caches, whose keys are rotated as a whole."""
    rows = (latent, q, k, rotary.cos, rotary.sin)
    return (
        has_kernel(latent, norm)
        and all(each.stride(-1) == 1 for each in rows)
        and rotary.cos.shape[1] == k.shape[1]
        and rotary.cos.stride() == rotary.sin.stride()
        and rotary.k_cache.is_contiguous()
        and rotary.v_cache.is_contiguous()
    )


def _latent_attention(
    q: Tensor,
    q_rotated: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tree_mask: Tensor | None,
    max_query: int,
    max_kv: int,
    scale: float,
    is_exact: bool,
    config: Sequence[int],
    pdl: bool,
) -> Tensor:
    """Return attention [T, Hq, R]. ``is_exact``: the order of a row's sums is fixed; ``config`` then splits if its number of
    splits is above 1, into as many parts as there are chunks.
    """
    rows, block_kv, split, warps, stages = config
    (tokens, heads, size), batch, rotated = q.shape, seq_lens.shape[0], q_rotated.shape[2]
    expect(
        k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and q.stride(2) == q_rotated.stride(2) == block_table.stride(1) == 1,
        lambda: "latent_attention: caches must be contiguous, and the last dimension of queries and of the block table",
    )
    shares = operators.chunk_count(max_kv) if is_exact and split > 1 else split
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    parts = stats = counts = out
    if split > 1:
        parts = torch.empty((tokens, heads, shares, size), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, shares, 2), dtype=torch.float32, device=q.device)
        counts = torch.empty((tokens, heads), dtype=torch.int32, device=q.device)
    mask = out if tree_mask is None else tree_mask.view(torch.uint8)
    block_size = max(power_of_two(size), 16)
    launch(
        jit.latent_attention,
        (triton.cdiv(max_query * heads, rows), batch, shares),
        *(q, q_rotated, k_cache, v_cache, query_start, seq_lens, block_table, mask, out, parts, stats, counts),
        *(tokens, batch, scale, size, rotated, shares, q.stride(0), q.stride(1), q_rotated.stride(0), q_rotated.stride(1)),
        *(block_table.stride(0), mask.stride(0)),
        HEADS=heads,
        PAGE=k_cache.shape[1],
        TREE=tree_mask is not None,
        SHARED=split > 1,
        CHUNK=operators.FIRST_CHUNK if is_exact else 0,
        BLOCK_ROWS=rows,
        BLOCK_KV=block_kv,
        BLOCK_SIZE=block_size,
        BLOCK_ROTATED=max(power_of_two(rotated), 16),
        num_stages=stages,
        pdl=pdl,
        warps=warps,
    )
    if split == 1:
        return out
    if is_exact:
        operands = parts, stats, counts, query_start, out, None, batch, heads, shares, size
        launch(exact.merge_chunks, (tokens, heads), *operands, BLOCK_SIZE=block_size, pdl=pdl, warps=1)
        return out
    return operators.join_splits(q, parts, stats, query_start, out, batch, 0, pdl)


define("latent_attention.triton", _latent_attention)


def attends_to_latents(facts: DeviceFacts, q: Tensor, q_rotated: Tensor) -> bool:
    """Return True if the kernel takes queries ``q`` [T, Hq, R] of this dtype and size."""
    return has_kernel(q) and q.shape[2] <= _MAX_LATENT and fits_latents(facts, _heads(q), q_rotated.shape[2])


def latent_launch(facts: DeviceFacts, q: Tensor, q_rotated: Tensor, metadata: AttentionMetadata) -> AttentionLaunch:
    """Return the launch for this batch."""
    sizes = {"batch": metadata.seq_lens.shape[0], "max_query": metadata.max_query, "max_kv": metadata.max_kv}
    return derive_latent_launch(facts, _heads(q), q_rotated.shape[2], **sizes)


def exact_launch(facts: DeviceFacts, q: Tensor, q_rotated: Tensor, metadata: AttentionMetadata) -> AttentionLaunch:
    """Return the launch for this batch, whose tiles are those of any other; 2 splits if programs share the chunks."""
    launch = exact_latent_launch(facts, _heads(q), q_rotated.shape[2])
    groups = -(-metadata.max_query * q.shape[1] // launch.block_rows) * metadata.seq_lens.shape[0]
    shares_chunks = metadata.max_kv > operators.FIRST_CHUNK and groups < 2 * facts.processors
    return launch._replace(split=1 + shares_chunks)


def _heads(q: Tensor) -> AttentionHeads:
    return AttentionHeads(group=q.shape[1], kv_heads=1, size=q.shape[2], bytes=q.dtype.itemsize)
