"""Attention over prompts against the reference: from pages and from the copy without pages."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from outrider.device import AttentionMetadata, KernelSet
from outrider_triton import prompt_ops, prompts
from outrider_triton.facts import DeviceFacts

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
        keys, values, kv_start = copy(keys, values, lens, table, rows, metadata.max_kv, padded, q.dtype, pdl)
    made = torch.ops.outrider.prompt_attention.triton(
        *(q, keys, values, starts, lens, table, kv_start, 8, 0.3, window, [16, 32, 4, 2], pdl)
    )
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=1e-4, atol=1e-5)


def device_of(**other):
    sizes = {"processors": 4, "shared_bytes": 100 << 10, "processor_shared": 100 << 10, "l2_bytes": 1 << 20}
    return DeviceFacts(**{"architecture": "gfx942", "early_starts": False, **sizes, **other})


def operands(new=(300,), context=(0,), dtype=torch.float16, size=16, host=True):
    q, k_cache, v_cache, metadata = batch(4, 2, size, new=new, context=context, padding=0)
    starts = tuple(metadata.query_start.tolist()) if host else None
    return prompts.Prompts(
        *(x.to(dtype) for x in (q, k_cache, v_cache)), replace(metadata, host_query_start=starts), scale=0.3, window=0
    )


def test_the_fastest_of_those_that_are_right_is_chosen(monkeypatch):
    """By lengths, each prompt has that of the nearest. What is wrong or fails isn't used, and it says so."""
    attention = prompts.PromptAttention(device_of(copy_engine=True))

    def broken(given):
        raise ValueError("no such symbol\nand more")

    def wrong(given):
        return attention._by_pages(given) * 3

    own = {"pages": attention._by_pages, "slow": attention._by_pages, "wrong": wrong, "broken": broken}
    monkeypatch.setattr(attention, "_candidates", lambda _: tuple(prompts.Candidate(*each) for each in own.items()))
    monkeypatch.setattr(prompts.torch, "get_device_module", lambda _: SimpleNamespace(Event=object))
    times = iter([3.0, 2.0, 1.0, 2.0])
    monkeypatch.setattr(prompts, "_milliseconds", lambda *_: next(times))
    given = operands()
    attention.measure(given)
    assert attention._choice(given).name == "pages"
    assert attention._choice(operands(new=(70,))).name == "slow"
    said = attention.said
    assert said["attention over 128 new tokens"] == "slow (us: slow 2000, pages 3000)"
    assert said["attention by broken"] == "not used: ValueError: no such symbol"
    assert said["attention by wrong"].startswith("not used: off by ")
    attention.measure(given)  # known: nothing is timed


def test_what_a_graph_replays_isnt_copied():
    """How much there is to copy isn't known then."""
    attention = prompts.PromptAttention(device_of(architecture="sm_90"))
    assert {each.name for each in attention._candidates(operands())} >= {"pages", "copy"}
    assert [each.name for each in attention._candidates(operands(host=False))] == ["pages"]


def test_prompts_are_many_causal_tokens_in_16_bits(kernels):
    attention = prompts.PromptAttention(device_of())
    assert attention.serves(operands().q, operands().metadata)
    assert not attention.serves(operands(dtype=torch.float32).q, operands().metadata)
    few, tree = operands(new=(3,)), replace(operands().metadata, tree_mask=torch.ones(300, 300, dtype=torch.bool))
    assert not attention.serves(few.q, few.metadata)
    assert not attention.serves(operands().q, tree)
    busy = prompts.PromptAttention(device_of(processors=200))  # one block, a long context: shared out among more programs
    long = operands(new=(64,), context=(900,))
    assert not busy.serves(long.q, long.metadata)
    given = operands()
    made = kernels.paged_attention(given.q, given.k_cache, given.v_cache, given.metadata, scale=0.3)
    wide = (x.double() for x in (given.q, given.k_cache, given.v_cache))
    torch.testing.assert_close(
        made.double(), REFERENCE.paged_attention(*wide, given.metadata, scale=0.3), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_blocks_fit(size, shared):
    rows, cached, warps, stages = prompts.config(size, shared)
    width = 1 << (size - 1).bit_length()
    assert 2 * width * (rows + 2 * cached * stages) <= shared
    assert rows * width <= warps * 32 * 128  # registers for what is made
