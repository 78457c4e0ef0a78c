"""Attention whose keys and values come through a ring: how it's cut up and what is launched, anywhere; right on a device that
has one. Compiled in ``test_compile.py``.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from outrider.device import AttentionMetadata, KernelSet
from outrider_triton.attention import operators as attention_ops
from outrider_triton.attention.jit import paged_streamed as attention_streamed
from outrider_triton.tiles.configs import AttentionConfig
from outrider_triton.tiles.derive.attention import (
    AttentionHeads,
    can_stream_attention,
    derive_attention_launch,
)

H200 = DEVICES["H200"]
LLAMA = AttentionHeads(group=4, kv_heads=8, size=128, bytes=2, page=16)


@pytest.mark.parametrize(
    "other",
    [
        {"page": 0},  # keys and values aren't stored as queries are
        {"page": 4},
        {"page": 24},
        {"bytes": 4},
        {"size": 96},
        {"size": 32},
        {"group": 71},  # more rows than it was compared with
    ],
    ids=str,
)
def test_others_come_by_pointers(other):
    made = derive_attention_launch(
        H200, replace(LLAMA, **other), batch=1, max_query=1, max_kv=640, tuned=AttentionConfig(64, 8, 4, 3, True)
    )
    assert not made.streamed
    assert not derive_attention_launch(DEVICES["A100"], LLAMA, batch=1, max_query=1, max_kv=640, tuned=None).streamed


def test_what_was_measured_decides_between_them():
    assert derive_attention_launch(H200, LLAMA, batch=8, max_query=4, max_kv=640, tuned=None).streamed
    assert not derive_attention_launch(
        H200, LLAMA, batch=8, max_query=4, max_kv=640, tuned=AttentionConfig(64, 4, 8, 2)
    ).streamed
    assert can_stream_attention(H200, LLAMA, 32)
    assert not can_stream_attention(H200, LLAMA, 64)


def drawn(lengths, width, heads, kv_heads, size, page, *, device, dtype=torch.bfloat16, tree=False, extra=0):
    """A batch of requests of ``lengths``; slots behind the last position hold NaN, and ``extra`` tokens are padding."""
    dice, batch = torch.Generator().manual_seed(3), len(lengths)
    pages = -(-max(lengths) // page) + 1
    table = (torch.randperm(batch * pages, generator=dice) + 1).view(batch, pages).int()
    caches = [torch.randn(1 + batch * pages, page, kv_heads, size, generator=dice).to(dtype) for _ in range(2)]
    for row, length in zip(table.long(), lengths, strict=True):
        behind = torch.arange(length, pages * page)
        for cache in caches:
            cache[row[behind // page], behind % page] = float("nan")
    tokens = batch * width + extra
    mask = torch.rand(tokens, width, generator=dice) > 0.4
    mask |= torch.arange(tokens)[:, None] % width == torch.arange(width)
    q = torch.randn(tokens, heads, size, generator=dice).to(dtype)
    metadata = AttentionMetadata(
        query_start=torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        max_query=width,
        max_kv=pages * page,
        tree_mask=mask.to(device) if tree else None,
        settled=True,
    )
    return q.to(device), *(cache.to(device) for cache in caches), metadata


def operands(q, k_cache, v_cache, metadata, config, *, window=0, settled=True):
    held = metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
    return q, k_cache, v_cache, *held, metadata.max_query, metadata.max_kv, 0.1, window, settled, config, True


@pytest.mark.parametrize("split", [1, 4])
def test_each_operand_goes_where_the_kernel_has_it(split, monkeypatch):
    said = []

    def launched(kernel, grid, *arguments, pdl, warps, maxnreg=0, **settings):
        said.append((kernel, grid, dict(zip(kernel.arg_names, arguments, strict=False)) | settings | {"PDL": pdl}))

    monkeypatch.setattr(attention_ops, "launch", launched)
    batch = drawn((40, 9, 130), 2, 8, 2, 64, 16, device="cpu", extra=3)
    torch.ops.outrider.paged_attention.triton(*operands(*batch, [16, 64, split, 4, 3, 1]))
    kernel, grid, given = said[0]
    assert kernel is attention_streamed.paged_attention_ring
    assert [each.__name__ for each, *_ in said[1:]] == ["join_splits"] * (split > 1)
    assert set(given) == set(kernel.arg_names)
    assert grid == (1, 3 * 2, split)
    assert (given["tokens"], given["batch"], given["heads"], given["size"]) == (9, 3, 8, 64)
    assert given["k_cache"].block_shape == given["v_cache"].block_shape == [16, 64]
    assert list(given["k_cache"].shape) == [batch[1].shape[0] * 16, 2 * 64]
    assert given["k_cache"].base.data_ptr() == batch[1].data_ptr()
    assert given["v_cache"].base.data_ptr() == batch[2].data_ptr()
    assert given["seq_lens"] is batch[3].seq_lens


def test_a_cache_of_other_numbers_is_refused():
    q, keys, values, metadata = drawn((40,), 1, 4, 2, 64, 16, device="cpu")
    with pytest.raises(RuntimeError, match="expected queries'"):
        torch.ops.outrider.paged_attention.triton(*operands(q, keys.half(), values.half(), metadata, [16, 64, 1, 4, 3, 1]))


CASES = [  # new tokens, splits, a tree, a window, whether what is settled is read early
    (1, 1, False, 0, True),
    (5, 4, True, 0, True),
    (5, 1, False, 100, False),
    (1, 4, False, 0, False),
    (5, 1, True, 0, False),
    (1, 4, False, 100, True),
]


HEADS = [(32, 8, 128, 16), (8, 2, 64, 8), (28, 4, 128, 64), (4, 4, 256, 256), (6, 3, 64, 128)]
BLOCKS = [(64, 3, torch.bfloat16), (128, 2, torch.float16), (64, 1, torch.bfloat16)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page", "block", "stages", "dtype"),
    # Blocks of 128 queries in heads of 256 take more shared memory than a device has.
    [(*heads, *block) for heads in HEADS for block in BLOCKS if (heads[2], block[0]) != (256, 128)],
)
def test_attention(heads, kv_heads, size, page, block, stages, dtype, hopper):
    """Uneven requests, of which some leave a split with nothing, in several blocks of queries; padding behind them."""
    for width, split, tree, window, settled in CASES:
        q, keys, values, metadata = drawn(
            (640, 6, 129, 64, 1000, 63, 5), width, heads, kv_heads, size, page, device=hopper, dtype=dtype, tree=tree, extra=2
        )
        config = [32 if page == 64 else 16, block, split, 4, stages, 1]
        sinks = torch.linspace(-3.0, 3.0, heads, device=hopper) if window else None
        made = torch.ops.outrider.paged_attention.triton(
            *operands(q, keys, values, metadata, config, window=window, settled=settled), sinks=sinks
        )
        clean = (each.nan_to_num(0.0).double() for each in (keys, values))
        wanted = KernelSet().paged_attention(q.double(), *clean, metadata, scale=0.1, window=window, sinks=sinks)
        own = len(made) - 2
        torch.testing.assert_close(made[:own].double(), wanted[:own], rtol=2e-2, atol=2e-2)
        assert made[own:].eq(0).all(), "padding isn't zeros"
