"""The host's kernels against the references, and what they don't do."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from outrider.device import AttentionMetadata, KernelSet, Product, RotaryArgs
from outrider_cpu import backend
from outrider_cpu.kernels import CpuKernels
from outrider_cpu.operators import _ALONE

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


@pytest.mark.parametrize("requests", [1, 3, _ALONE + 1])
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


@pytest.mark.parametrize(("supported", "first"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_is_preferred_where_the_processor_has_it(monkeypatch, supported, first):
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: supported, raising=False)
    assert backend.CpuBackend().capabilities.preferred_dtypes[0] == first
