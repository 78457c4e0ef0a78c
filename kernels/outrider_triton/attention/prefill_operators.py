"""Operators of prefill attention, and of the contiguous copy of the cached tokens that some kernels read."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.device.kernels.checks import expect
from outrider_triton.attention.jit import prefill as jit
from outrider_triton.launch import define, launch, power_of_two

ROW_ALIGNMENT: int = jit.SPACE.value
SEQUENCE_BOUNDS = (16, 256, 4096)
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
        jit.copy_context,
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
        jit.prompt_attention,
        (blocks * (heads // kv_heads), kv_heads),
        *(q, *sources, query_start, seq_lens, block_table, query_start if kv_start is None else kv_start, out),
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
        jit.merge_context,
        (tokens,),
        *(own, own_lse, context, context_lse, out, heads, size),
        *(own.stride(0), own.stride(1), context.stride(0), context.stride(1), *own_lse.stride()),
        BLOCK_HEADS=power_of_two(heads),
        BLOCK_SIZE=power_of_two(size),
        pdl=pdl,
        warps=4,
    )


define("merge_context.triton", _merge_context, writes=("out",))
