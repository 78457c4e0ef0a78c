"""Operators of attention over the paged cache (:mod:`outrider_triton.attention.jit.paged` and
:mod:`outrider_triton.attention.jit.paged_streamed`), of prefill attention (:mod:`outrider_triton.attention.jit.prefill`), and
of attention in which the sums of each row have one order (:mod:`outrider_triton.attention.jit.exact`).

Some kernels of prefill read a contiguous copy of the cached tokens, which an operator makes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.device.kernels.operators import expect
from outrider_triton.attention.jit import exact, prefill
from outrider_triton.attention.jit import paged as attention
from outrider_triton.attention.jit import paged_streamed as attention_streamed
from outrider_triton.launch import define, launch, power_of_two
from outrider_triton.products.streamed import descriptor
from outrider_triton.quantized.nibble_planes import allocate_rows, row_stride

FIRST_CHUNK = 256
"""Number of positions in each of the first chunks of exact attention."""


def join_splits(
    q: Tensor, parts: Tensor, stats: Tensor, query_start: Tensor, out: Tensor, batch: int, planes: int, pdl: bool
) -> Tensor:
    """Return the joined parts of split attention [T, Hq, D] in ``out``, or as rows in ``planes``; see
    :func:`_paged_attention`.
    """
    tokens, heads, split, size = parts.shape
    joined, grains = allocate_rows(q, (tokens, heads * size), planes) if planes else (out, None)
    block_size = max(power_of_two(size), 16)
    launch(
        attention.join_splits,
        (tokens, heads),
        *(parts, stats, query_start, out, joined, grains, batch, heads, size, row_stride(joined, grains)),
        SPLITS=split,
        BLOCK_SIZE=block_size,
        PLANES=planes > 0,
        pdl=pdl,
        warps=min(max(split * block_size // 1024, 1), 4),
    )
    return joined


def _paged_attention(
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
    planes: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [T, Hq, D]. ``planes``: the layout (:func:`outrider_triton.quantized.nibble_planes.allocate_rows`) in
    which rows [T, Hq D] of split attention are returned instead.
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
    expect(split > 1 or not planes, lambda: "attention that isn't split leaves no rows in planes")
    out = q if planes else torch.empty_like(q, memory_format=torch.contiguous_format)
    parts = stats = out
    if split > 1:
        parts = torch.empty((tokens, heads, split, size), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, split, 2), dtype=torch.float32, device=q.device)
    mask = out if tree_mask is None else tree_mask.view(torch.uint8)
    grid = triton.cdiv(max_query, block_rows // group), batch * kv_heads, split
    addressing = query_start, seq_lens, block_table, mask, out, parts, stats, sinks
    sizes = 0 if planes else tokens, batch, heads, scale, size  # padding tokens up to the first get zeros
    strides = q.stride(0), q.stride(1), block_table.stride(0), mask.stride(0)
    constants = {"PAGE": page, "GROUP": group, "WINDOW": window, "TREE": tree_mask is not None, "SETTLED": settled}
    constants |= {"SPLITS": split, "BLOCK_ROWS": block_rows, "BLOCK_KV": block_kv}
    block_size = max(power_of_two(size), 16)
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
    else:
        launch(
            attention.paged_attention,
            grid,
            *(q, k_cache, v_cache, *addressing, *sizes, *strides, k_cache.stride(1), k_cache.stride(2)),
            **constants,
            BLOCK_SIZE=block_size,
            num_stages=stages,
            pdl=pdl,
            warps=warps,
        )
    return out if split == 1 else join_splits(q, parts, stats, query_start, out, batch, planes, pdl)


define("paged_attention.triton", _paged_attention)


ROW_ALIGNMENT: int = prefill.SPACE.value
SEQUENCE_BOUNDS = (16, 256)
"""Upper bounds of the number of sequences for which kernels are compiled."""


def copied_rows(cached: int, sequences: int) -> int:
    """Return the maximum number of rows in a copy of ``cached`` tokens of ``sequences`` sequences."""
    return cached + 2 * ROW_ALIGNMENT * sequences


def rows_of_copy(cached: int) -> int:
    """Return the number of rows from the first row of a sequence of ``cached`` tokens to that of the next one in a copy."""
    return -(-cached // ROW_ALIGNMENT) * ROW_ALIGNMENT + ROW_ALIGNMENT


def _bound(sequences: int) -> int:
    expect(sequences <= SEQUENCE_BOUNDS[-1], lambda: f"{sequences} sequences of prompts; at most {SEQUENCE_BOUNDS[-1]}")
    return next(most for most in SEQUENCE_BOUNDS if most >= sequences)


def _copy_context(
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    rows: int,
    most: int,
    padded: int,
    dtype: torch.dtype,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    page, kv_heads, size = k_cache.shape[1:]
    batch, columns = seq_lens.shape[0], kv_heads * padded
    expect(k_cache.is_contiguous() and v_cache.is_contiguous(), lambda: "copy_context: caches must be contiguous")
    keys, values = (torch.empty((rows, kv_heads, padded), dtype=dtype, device=k_cache.device) for _ in range(2))
    kv_start = torch.empty(batch + 1, dtype=torch.int32, device=k_cache.device)
    block_columns = min(power_of_two(columns), 1024)
    block_rows = max(1, 4096 // block_columns)
    max_rows = triton.cdiv(most, ROW_ALIGNMENT) * ROW_ALIGNMENT + ROW_ALIGNMENT
    launch(
        prefill.copy_context,
        (triton.cdiv(max_rows, block_rows), triton.cdiv(columns, block_columns), batch),
        *(k_cache, v_cache, seq_lens, block_table, keys, values, kv_start),
        *(batch, size, block_table.stride(0), k_cache.stride(1), k_cache.stride(2), columns),
        PAGE=page,
        PADDED=padded,
        BATCH=_bound(batch),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        pdl=pdl,
        warps=4,
    )
    return keys, values, kv_start


define("copy_context.triton", _copy_context)


def _prompt_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    kv_start: Tensor | None,
    blocks: int,
    scale: float,
    window: int,
    config: list[int],
    pdl: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    block_rows, block_kv, warps, stages = config
    tokens, heads, size = q.shape
    copied = kv_start is not None
    kv_heads, batch = keys.shape[1 if copied else 2], seq_lens.shape[0]
    block_size = max(power_of_two(size), 16)
    expect(
        keys.is_contiguous() and values.is_contiguous() and q.stride(-1) == 1 and block_table.stride(-1) == 1,
        lambda: "prompt_attention: keys and values must be contiguous, and the last dimension of q and of the block table",
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sources = [keys, values]
    if copied:
        expect(keys.shape[2] == block_size, lambda: f"prompt_attention: heads of a copy must be {block_size} wide")
        flat = (tensor.view(tensor.shape[0], kv_heads * block_size) for tensor in sources)
        sources = [TensorDescriptor.from_tensor(each, [block_kv, block_size]) for each in flat]
    launch(
        prefill.prompt_attention,
        (blocks * (heads // kv_heads), kv_heads),
        *(q, *sources, query_start, seq_lens, block_table, query_start if kv_start is None else kv_start, out, sinks),
        *(tokens, batch, heads, scale, size, q.stride(0), q.stride(1), block_table.stride(0)),
        *((0, 0) if copied else (keys.stride(1), keys.stride(2))),
        PAGE=1 if copied else keys.shape[1],
        GROUP=heads // kv_heads,
        WINDOW=window,
        DESCRIPTOR=copied,
        BLOCK_ROWS=block_rows,
        BLOCK_KV=block_kv,
        BLOCK_SIZE=block_size,
        EVEN=size == block_size,
        BATCH=_bound(batch),
        num_stages=stages,
        pdl=pdl,
        warps=warps,
    )
    return out


define("prompt_attention.triton", _prompt_attention)


def _merge_context(own: Tensor, own_lse: Tensor, context: Tensor, context_lse: Tensor, out: Tensor, pdl: bool) -> None:
    """Write the merge of two attentions [T, Hq, D], whose log-sums of exponentials are float32 [T, Hq], to ``out``."""
    tokens, heads, size = out.shape
    expect(
        own.shape == context.shape == out.shape
        and own_lse.stride() == context_lse.stride()
        and own.stride(-1) == context.stride(-1) == 1
        and out.is_contiguous(),
        lambda: f"merging attentions {tuple(own.shape)} and {tuple(context.shape)} into {tuple(out.shape)}",
    )
    launch(
        prefill.merge_context,
        (tokens,),
        *(own, own_lse, context, context_lse, out, heads, size),
        *(own.stride(0), own.stride(1), context.stride(0), context.stride(1), *own_lse.stride()),
        BLOCK_HEADS=power_of_two(heads),
        BLOCK_SIZE=power_of_two(size),
        pdl=pdl,
        warps=4,
    )


define("merge_context.triton", _merge_context, writes=("out",))


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
    sinks: Tensor | None = None,
) -> Tensor:
    rows, block_kv, group = config
    (tokens, heads, size), batch = q.shape, seq_lens.shape[0]
    expect(
        k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(-1) == 1 and block_table.stride(-1) == 1,
        lambda: "paged_attention: caches must be contiguous, and the last dimension of q and of the block table",
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    parts = stats = counts = out
    chunks = chunk_count(max_kv) if shared else 1
    if shared:
        parts = torch.empty((tokens, heads, chunks, size), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, chunks, 2), dtype=torch.float32, device=q.device)
        counts = torch.empty((tokens, heads), dtype=torch.int32, device=q.device)
    mask = out if tree_mask is None else tree_mask.view(torch.uint8)
    block_size = max(power_of_two(size), 16)
    launch(
        exact.exact_attention,
        (triton.cdiv(max_query, rows // group), batch * k_cache.shape[2], chunks),
        *(q, k_cache, v_cache, query_start, seq_lens, block_table, mask, out, parts, stats, counts, sinks),
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
        operands = parts, stats, counts, query_start, out, sinks, batch, heads, chunks, size
        launch(exact.merge_chunks, (tokens, heads), *operands, BLOCK_SIZE=block_size, pdl=pdl, warps=1)
    return out


def chunk_count(positions: int) -> int:
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
