"""Attention over prompts against the reference: from pages and from the copy without pages."""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from outrider.device import AttentionMetadata, KernelSet
from outrider_triton import prompt_ops

REFERENCE = KernelSet()


def batch(heads, kv_heads, size, *, new=(3, 40, 0, 1), context=(150, 9, 0, 17), padding=21, page=16):
    """Operands and metadata; whatever belongs to nobody is NaN."""
    generator = torch.Generator().manual_seed(5)
    tokens = sum(new) + padding
    lens = [n + c for n, c in zip(new, context, strict=True)]
    width = -(-max(lens) // page) + 1
    q = torch.randn(tokens, heads, size, generator=generator)
    caches = [torch.full((len(new) * width + 1, page, kv_heads, size), torch.nan) for _ in range(2)]
    table = (torch.randperm(len(new) * width, generator=generator) + 1).view(len(new), width).to(torch.int32)
    for cache in caches:
        for pages, length in zip(table.tolist(), lens, strict=True):
            for position in range(length):
                cache[pages[position // page], position % page] = torch.randn(kv_heads, size, generator=generator)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        max_query=max(new),
        max_kv=max(lens),
    )
    return q, *caches, metadata


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window"), [(4, 2, 16, 0), (3, 1, 24, 0), (2, 2, 32, 11), (2, 1, 16, 200)]
)
@pytest.mark.parametrize("copied", [False, True], ids=["pages", "copy"])
def test_prompts(heads, kv_heads, size, window, copied, device, pdl):
    """Sequences of many and few new tokens, behind a context or none, one without any, and padding behind the last."""
    q, k_cache, v_cache, metadata = batch(heads, kv_heads, size)
    wanted = REFERENCE.paged_attention(q.double(), k_cache.double(), v_cache.double(), metadata, scale=0.3, window=window)
    q, keys, values, starts, lens, table = (
        x.to(device) for x in (q, k_cache, v_cache, metadata.query_start, metadata.seq_lens, metadata.block_table)
    )
    kv_start = None
    if copied:
        padded = max(16, 1 << (size - 1).bit_length())
        rows = prompt_ops.copied_rows(int(lens.sum()), lens.shape[0])
        copy = torch.ops.outrider.copy_context.triton
        keys, values, kv_start = copy(keys, values, lens, table, rows, metadata.max_kv, padded, pdl)
    made = torch.ops.outrider.prompt_attention.triton(
        *(q, keys, values, starts, lens, table, kv_start, 8, 0.3, window, [16, 32, 4, 2], pdl)
    )
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=1e-4, atol=1e-5)
