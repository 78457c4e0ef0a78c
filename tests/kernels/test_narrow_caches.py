"""Kernels over caches in e4m3: what they write is the reference's, to the byte, and what they read is what's there."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES, SMALL
from kernels.unfused import UnfusedProducts
from outrider.device import AttentionMetadata, RotaryArgs
from outrider_triton.attention import operators
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products.operands import Product
from outrider_triton.tiles.configs import MatmulConfig

REFERENCE = UnfusedProducts()
E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, SIZE = 4, 2, 16
ROWS = (HEADS + 2 * KV_HEADS) * SIZE


@pytest.fixture
def narrow(pdl):
    """Kernels of a device that has e4m3."""
    return TritonKernels(replace(SMALL, architecture="sm_89", early_starts=pdl))


def rotary(tokens, device):
    dice = torch.Generator().manual_seed(1)
    angle = (torch.rand(tokens, SIZE // 2, generator=dice) * 6).repeat(1, 2).half()
    caches = (torch.zeros(tokens + 1, 4, KV_HEADS, SIZE, dtype=E4M3) for _ in range(2))
    slots = torch.randperm(4 * tokens, generator=dice)[:tokens] + 4
    return RotaryArgs(*(each.to(device) for each in (angle.cos(), angle.sin(), *caches, slots)))


def numbers(*shape, seed=2, device="cpu"):
    """Some of them beyond the range of e4m3, and some below its smallest."""
    dice = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=dice) * torch.exp2(torch.randint(-9, 10, shape, generator=dice))).half().to(device)


def same(mine, its):
    """To the byte, but for the sign of a zero, and for neighbours where a compiler turned by other sums."""
    mine, its = (each.cpu().view(torch.uint8).int() for each in (mine, its))
    mine, its = (torch.where(each == 128, 0, each) for each in (mine, its))
    apart = (mine - its).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.01


def test_declared_where_the_device_has_the_numbers():
    found = {name: set(TritonKernels(facts).cache_formats) for name, facts in DEVICES.items()}
    assert found.pop("A100") == found.pop("RTX 3090") == found.pop("MI300X") == set()
    assert all(formats == {"fp8"} for formats in found.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("split", [1, 3])
def test_parts_are_added_up_rounded_and_written(split, narrow, device):
    parts = numbers(split, 5, ROWS, device=device).float()
    whole = parts.sum(0).half()
    own, right = rotary(5, device), rotary(5, device)
    torch.ops.outrider.rope_write_cache.triton_parts(
        parts if split > 1 else parts[0].half(), None, *own, torch.float16, narrow.pdl
    )
    narrow.rope_write_cache(*whole.view(5, -1, SIZE).split((HEADS, KV_HEADS, KV_HEADS), 1), *right)
    same(own.k_cache, right.k_cache)
    same(own.v_cache, right.v_cache)


def test_a_product_ends_in_the_cache(narrow, device, monkeypatch):
    x, weight = numbers(5, 96, device=device) / 64, numbers(ROWS, 96, seed=3, device=device) / 64
    monkeypatch.setattr(narrow.dense, "matmul_config", lambda *given, **more: MatmulConfig(16, 16, 32, 1, 4, 2, 0, 0, 0))
    own, right = rotary(5, device), rotary(5, "cpu")
    narrow.dense.linear_rope_write_cache(Product(x, weight, None), own)
    REFERENCE.linear_rope_write_cache(Product(x.cpu(), weight.cpu(), None), right)
    same(own.k_cache, right.k_cache)
    same(own.v_cache, right.v_cache)
    assert own.k_cache.float().any()


def batch(*, page=16):
    """Sequences behind a context and without one; what belongs to nobody is NaN."""
    new, context = (3, 40, 0, 1), (150, 9, 0, 17)
    dice = torch.Generator().manual_seed(5)
    lens = [n + c for n, c in zip(new, context, strict=True)]
    width = -(-max(lens) // page) + 1
    q = torch.randn(sum(new) + 5, HEADS, SIZE, generator=dice).half()
    caches = [torch.full((len(new) * width + 1, page, KV_HEADS, SIZE), torch.nan) for _ in range(2)]
    table = (torch.randperm(len(new) * width, generator=dice) + 1).view(len(new), width).to(torch.int32)
    for cache in caches:
        for pages, length in zip(table.tolist(), lens, strict=True):
            for position in range(length):
                cache[pages[position // page], position % page] = torch.randn(KV_HEADS, SIZE, generator=dice)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        max_query=max(new),
        max_kv=max(lens),
    )
    return q, *(cache.to(E4M3) for cache in caches), metadata


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["split, settled", "whole", "prompts", "prompts, copied"])
def test_attention_reads_what_is_there(way, device, pdl):
    q, k_cache, v_cache, metadata = batch()
    wanted = REFERENCE.paged_attention(q.double(), k_cache.double(), v_cache.double(), metadata, scale=0.3)
    q, keys, values, starts, lens, table = (
        x.to(device) for x in (q, k_cache, v_cache, metadata.query_start, metadata.seq_lens, metadata.block_table)
    )
    ops = torch.ops.outrider
    if way.startswith("prompts"):
        kv_start = None
        if "copied" in way:
            rows = operators.copied_rows(int(lens.sum()), lens.shape[0])
            copied = ops.copy_context.triton(keys, values, lens, table, rows, metadata.max_kv, 16, q.dtype, pdl)
            keys, values, kv_start = copied
            assert keys.dtype is values.dtype is torch.float16
        given = (q, keys, values, starts, lens, table, kv_start, 8, 0.3, 0, [16, 32, 4, 2], pdl)
        made = ops.prompt_attention.triton(*given)
    else:
        split = 4 if "split" in way else 1
        sizes = metadata.max_query, metadata.max_kv
        given = (q, keys, values, starts, lens, table, None, *sizes, 0.3, 0, split > 1, [16, 32, split, 4, 2, 0], pdl)
        made = ops.paged_attention.triton(*given)
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=4e-3, atol=4e-3)
