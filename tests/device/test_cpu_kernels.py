"""The host's kernels against the references, and what they don't do."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from outrider.device import AttentionMetadata, KernelSet, Product, RotaryArgs
from outrider_cpu import backend, operators
from outrider_cpu.kernels import CpuKernels

OURS, REFERENCE = CpuKernels(), KernelSet()
HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 8, 4


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_rotation_and_cache_are_those_of_the_reference(draw):
    """Halves of the angles differ here: nothing relies on their being alike."""
    x, weight, bias = draw(3, 16), draw((HEADS + 2 * KV_HEADS) * SIZE, 16), draw((HEADS + 2 * KV_HEADS) * SIZE)
    cos, sin, slots = draw(3, SIZE), draw(3, SIZE), torch.tensor([5, 0, 7])
    made = []
    for kernels in (OURS, REFERENCE):
        k, v = torch.zeros(2, 2, PAGE, KV_HEADS, SIZE, dtype=x.dtype)
        q = kernels.linear_rope_write_cache(Product(x, weight, bias), RotaryArgs(cos, sin, k, v, slots))
        made.append((q, k, v))
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_and_gate_are_those_of_the_reference(draw, dtype):
    x, weight = draw(3, 16).to(dtype), draw(16).to(dtype)
    residual = draw(3, 16).to(dtype)
    grown = [residual.clone(), residual.clone()]
    ours, theirs = (
        kernels.add_rms_norm(x, each, weight, 1e-5) for kernels, each in zip((OURS, REFERENCE), grown, strict=True)
    )
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(*grown)
    torch.testing.assert_close(OURS.silu_mul(x), REFERENCE.silu_mul(x))


@pytest.mark.parametrize("temperature", [(0.0, 0.0), (0.0, 0.7)])
@pytest.mark.parametrize("drafted", [0, 3])
def test_tokens_are_those_of_the_reference(draw, temperature, drafted):
    hot, seeds, positions = torch.tensor(temperature), torch.tensor([3, 4]), torch.tensor([9, 2])
    logits = draw(2, drafted + 1, 11).float()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])[:, :drafted]
    for probs in (None, torch.softmax(draw(2, drafted, 11).float(), dim=-1)):
        if probs is None and any(temperature):
            continue  # a row that samples has a distribution
        operands = (logits, tokens, probs, hot, seeds, positions)
        for ours, theirs in zip(OURS.verify_chain(*operands), REFERENCE.verify_chain(*operands), strict=True):
            assert torch.equal(ours, theirs)
    rows = (logits[:, 0], hot, seeds, positions)
    for lane in (True, False):
        assert torch.equal(OURS.sample(*rows, draft=lane), REFERENCE.sample(*rows, draft=lane))


def batch(draw, requests, capacity):
    """One new token of each request behind 4 cached ones, in a table with room for ``capacity`` tokens."""
    table = torch.zeros(requests, capacity // PAGE, dtype=torch.int32)
    table[:, :2] = torch.arange(1, 2 * requests + 1).view(requests, 2)
    cache = draw(2, 2 * requests + 1, PAGE, KV_HEADS, SIZE)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    lens = torch.full((requests,), 5, dtype=torch.int32)
    told = AttentionMetadata(starts, lens, table, max_query=1, max_kv=capacity, uniform=True)
    return draw(requests, HEADS, SIZE), *cache, told


@pytest.mark.parametrize("requests", [1, 3, 17])
def test_attention_works_on_what_is_cached_and_not_on_the_capacity(draw, monkeypatch, requests):
    operands = batch(draw, requests, capacity=4096)
    seen = []
    original = F.scaled_dot_product_attention

    def noted(q, keys, *rest, **options):
        seen.append(keys.shape[2])
        return original(q, keys, *rest, **options)

    expected = REFERENCE.paged_attention(*operands, scale=0.3)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    torch.testing.assert_close(OURS.paged_attention(*operands, scale=0.3), expected)
    assert max(seen) <= 8, f"attention over {max(seen)} keys for 5 cached tokens"
    q, k, v, told = operands
    padded = replace(told, seq_lens=told.seq_lens * 0)  # padding of a bucket: a row that has no token of its own
    assert torch.isfinite(OURS.paged_attention(q, k, v, padded, scale=0.3)).all()


def mixed(draw, counts, lens, *, nobodys, tree=False, beyond=0):
    """Requests with so many new tokens each, of so many in all; ``nobodys``: what the rest holds. ``beyond``: padding."""
    width = -(-max(lens) // PAGE) + 1
    order = torch.randperm(len(lens) * width, generator=torch.Generator().manual_seed(5)) + 1
    table = order.view(len(lens), width).to(torch.int32)
    caches = torch.full((2, len(lens) * width + 1, PAGE, KV_HEADS, SIZE), nobodys, dtype=torch.float64)
    for cache in caches:
        for pages, length in zip(table.tolist(), lens, strict=True):
            for position in range(length):
                cache[pages[position // PAGE], position % PAGE] = draw(KV_HEADS, SIZE)
    told = AttentionMetadata(
        torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        table,
        max_query=max(counts),
        max_kv=width * PAGE,
    )
    if tree:
        node = torch.arange(max(counts) + 2)  # a mask may be wider than what is new
        own = torch.cat([torch.arange(count) for count in (*counts, beyond)]).unsqueeze(1)
        seen = torch.rand(len(own), len(node), generator=torch.Generator().manual_seed(6)) < 0.5
        told = replace(told, tree_mask=seen & (node < own) | (node == own))
    return draw(sum(counts) + beyond, HEADS, SIZE), *caches, told


LENS = (5, 19, 8, 33, 12)


@pytest.mark.parametrize(("window", "nobodys"), [(0, 3.0), (0, torch.nan), (0, torch.inf), (6, 3.0), (6, torch.nan)])
@pytest.mark.parametrize(
    ("counts", "lens", "tree", "beyond", "few", "calls"),
    [
        ((1,) * 5, LENS, False, 0, True, 1),  # decoding: together
        ((4,) * 5, LENS, False, 3, True, 1),
        ((4,) * 5, LENS, True, 2, True, 1),
        ((1,) * 5, (8,) * 5, False, 0, True, 1),  # nothing lies behind anybody's tokens
        ((1,) * 18, LENS * 3 + LENS[:3], False, 0, True, 1),
        ((1,) * 5, LENS, False, 1, False, 5),  # many keys: a call each
        ((4,) * 18, LENS * 3 + LENS[:3], True, 1, False, 18),
        ((1, 4, 2, 7, 1), LENS, False, 2, True, 5),  # ragged
        ((1, 4, 2, 7, 1) * 4, LENS * 4, False, 2, True, 1),  # ragged, and many: the reference
        ((1, 4, 2, 7, 1) * 4, LENS * 4, True, 0, False, 20),
    ],
)
def test_requests_attend_together_where_their_keys_are_few(
    draw, monkeypatch, counts, lens, tree, beyond, few, calls, window, nobodys
):
    monkeypatch.setattr(operators, "_TOGETHER", (max(lens) if few else max(lens) - 1) * KV_HEADS * SIZE)
    operands = mixed(draw, counts, lens, tree=tree, beyond=beyond, nobodys=nobodys)
    expected = REFERENCE.paged_attention(*operands, scale=0.3, window=window)
    called = []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *given, **more: called.append(1) or original(*given, **more)
    )
    made = OURS.paged_attention(*operands, scale=0.3, window=window)
    torch.testing.assert_close(made, expected)
    assert made.isfinite().all()
    together = few and len(set(counts)) == 1
    spoilt = nobodys != 3.0 and any(length % PAGE or length < max(lens) for length in lens)
    assert len(called) == calls + (together and spoilt)


@pytest.mark.parametrize(("supported", "first"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_is_preferred_where_the_processor_has_it(monkeypatch, supported, first):
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: supported, raising=False)
    assert backend.CpuBackend().capabilities.preferred_dtypes[0] == first
