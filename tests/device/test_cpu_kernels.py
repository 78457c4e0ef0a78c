"""The host's kernels against the references, and what they don't do."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from outrider.device import AttentionMetadata, CapabilityError, KernelSet, QuantizedWeight, RotaryArgs
from outrider.registry import get_backend
from outrider_cpu import backend, operators
from outrider_cpu import kernels as cpu_kernels
from outrider_cpu.kernels import CpuKernels

OURS, REFERENCE = CpuKernels(), KernelSet()
HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 8, 4


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_rotation_and_cache_are_those_of_the_reference(draw):
    """Halves of the angles differ here: nothing relies on their being alike."""
    qkv = draw(3, (HEADS + 2 * KV_HEADS) * SIZE)
    cos, sin, slots = draw(3, SIZE), draw(3, SIZE), torch.tensor([5, 0, 7])
    made = []
    for kernels in (OURS, REFERENCE):
        k, v = torch.zeros(2, 2, PAGE, KV_HEADS, SIZE, dtype=qkv.dtype)
        q = kernels.head_norm_rope_write_cache(qkv.clone(), None, RotaryArgs(cos, sin, k, v, slots))
        made.append((q, k, v))
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("temperature", [(0.0, 0.0), (0.0, 0.7)])
@pytest.mark.parametrize("drafted", [0, 3])
@pytest.mark.parametrize("vocabulary", [11, 384])
def test_tokens_are_those_of_the_reference(draw, temperature, drafted, vocabulary):
    hot, seeds, positions = torch.tensor(temperature), torch.tensor([3, 4]), torch.tensor([9, 2])
    logits = draw(2, drafted + 1, vocabulary).round(decimals=1).float()  # with equal elements
    logits[:, :, -3:] = logits.max()
    tokens = logits.argmax(-1)[:, :drafted]
    tokens[1, 1:] = 4
    for probs in (None, torch.softmax(draw(2, drafted, vocabulary).float(), dim=-1)):
        if probs is None and any(temperature):
            continue  # a row that samples has a distribution
        operands = (logits, tokens, probs, hot, seeds, positions)
        for ours, theirs in zip(OURS.verify_chain(*operands), REFERENCE.verify_chain(*operands), strict=True):
            assert torch.equal(ours, theirs)
    rows = (logits[:, 0], hot, seeds, positions)
    for lane in (True, False):
        assert torch.equal(OURS.sample(*rows, draft=lane), REFERENCE.sample(*rows, draft=lane))


@pytest.mark.parametrize("invalid", [None, (0, 2), (1, 0), (2, 1)])
@pytest.mark.parametrize("rows", [None, torch.tensor([2, 0, 2])])
@pytest.mark.parametrize(("dtype", "bounds", "values"), [(torch.float32, None, (torch.nan,)), (torch.int64, (0, 9), (9, -1))])
def test_gathered_rows_and_findings_are_those_of_the_reference(draw, invalid, rows, dtype, bounds, values):
    for value in values:
        source = draw(3, 4).abs().clamp(max=8).to(dtype)
        if invalid is not None:
            source[invalid] = value
        made = []
        for kernels in (OURS, REFERENCE):
            out, found = torch.full((3, 4), 7, dtype=dtype), torch.zeros(3, 2, dtype=torch.int64)
            kernels.gather_checked(source, rows, out, found, bounds=bounds)
            made.append((out, found))
        for ours, theirs in zip(*made, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


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
    monkeypatch.setattr(operators, "_TOGETHER", (max(lens) if few else min(lens) - 1) * KV_HEADS * SIZE)
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


@pytest.mark.parametrize(("window", "nobodys"), [(0, 3.0), (0, torch.nan), (6, torch.inf)])
@pytest.mark.parametrize(("count", "tree", "beyond"), [(1, False, 0), (1, False, 3), (4, False, 2), (4, True, 0)])
def test_requests_share_a_call_with_those_of_similar_lengths(draw, monkeypatch, count, tree, beyond, window, nobodys):
    lens = (33, 8, 31, 5, 12, 9, 32, 7)
    monkeypatch.setattr(operators, "_PADDING", 10 * KV_HEADS * SIZE)
    groups = operators._groups(lens, KV_HEADS * SIZE)
    assert groups == [[0, 6, 2], [4, 5, 1], [7, 3]]
    operands = mixed(draw, (count,) * len(lens), lens, tree=tree, beyond=beyond, nobodys=nobodys)
    expected = REFERENCE.paged_attention(*operands, scale=0.3, window=window)
    called, original = [], operators._attend_together
    monkeypatch.setattr(operators, "_attend_together", lambda *given: called.append(1) or original(*given))
    torch.testing.assert_close(OURS.paged_attention(*operands, scale=0.3, window=window), expected)
    assert len(called) == len(groups)


@given(st.lists(st.integers(1, 3000), max_size=40), st.sampled_from([16, 128, 1024]))
def test_who_shares_a_call_copies_little_for_nothing(lens, numbers):
    groups = operators._groups(lens, numbers)
    assert sorted(index for group in groups for index in group) == list(range(len(lens)))
    for group in groups:
        most = max(lens[index] for index in group)
        assert len(group) == 1 or most * numbers <= operators._TOGETHER
        assert sum(most - lens[index] for index in group) * numbers <= operators._PADDING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_with_a_large_weight_is_the_references(draw, monkeypatch, dtype, bias):
    """By either way, and with as many tokens as lie on both sides of where it changes."""
    monkeypatch.setattr(cpu_kernels, "_MIN_UNCACHED_WEIGHT_ELEMENTS", 24 * 16)
    ways = []
    for name in ("mm", "addmm"):
        way = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *given, way=way: ways.append(1) or way(*given))
    for shape in ((0, 16), (1, 16), (2, 16), (5, 16), (6, 16), (3, 2, 16), (16, 2, 16), (48, 16), (49, 16)):
        x, weight = draw(*shape).to(dtype), draw(24, 16).to(dtype)
        added = draw(24).to(dtype) if bias else None
        ways.clear()
        made, expected = OURS.linear(x, weight, added), REFERENCE.linear(x, weight, added)
        exact = {"rtol": 0.01, "atol": 0.02} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(made, expected, **exact)
        assert made.is_contiguous()
        assert bool(ways) == (x.numel() // 16 in cpu_kernels._WEIGHT_FIRST_TOKENS.get(dtype, ()))
    monkeypatch.setattr(cpu_kernels, "_MIN_UNCACHED_WEIGHT_ELEMENTS", 24 * 16 + 1)
    ways.clear()
    OURS.linear(draw(8, 16).to(dtype), draw(24, 16).to(dtype))
    assert not ways


@pytest.mark.parametrize("tokens", [1, 4, 63, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("set_", [OURS, REFERENCE], ids=["ours", "reference"])
def test_what_lies_behind_a_strided_row_is_nobodys(draw, monkeypatch, set_, dtype, tokens):
    """In bfloat16, on processors with AMX, torch 2.13 reads past the end of a row, and a NaN there comes out."""
    monkeypatch.setattr(cpu_kernels, "_MIN_UNCACHED_WEIGHT_ELEMENTS", 1)
    wide = torch.full((tokens, 528), torch.nan, dtype=dtype)
    x, weight = wide[:, :520], draw(64, 520).to(dtype)
    x.copy_(draw(tokens, 520))
    scales, zeros = torch.ones(64, 1), torch.zeros(64, 520, dtype=torch.int8)
    quantized = QuantizedWeight(format="int8", data=zeros + 1, scales=scales, block=(1, 520), shape=(64, 520))
    for made, expected in (
        (set_.linear(x, weight), x.double() @ weight.double().T),
        (set_.linear_quantized(x, quantized), x.double().sum(1, keepdim=True).expand(-1, 64)),
    ):
        torch.testing.assert_close(made.double(), expected, rtol=0.02, atol=0.6 if dtype.itemsize == 2 else 1e-3)


@pytest.mark.slow
def test_freed_memory_stays_with_the_process():
    """Eight blocks of 1 MiB, over and over: given back to the system they cost 2,048 page faults.

    By itself glibc raises the size from which it gives a block back, and then it hangs on what lies behind one: so it's set.
    """
    if not backend.retain_freed_memory():
        pytest.skip("not run: the C library of this system has no mallopt, which the option sets")
    program = """
import resource, sys, torch
from outrider.registry import get_backend
get_backend(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(64):
    held = [torch.ones(1 << 18) for _ in range(8)]
    del held
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 64)
"""
    where = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}
    how = {"capture_output": True, "text": True, "check": True, "env": where}
    faults = {
        name: int(subprocess.run([sys.executable, "-c", program, name], **how).stdout)
        for name in ("cpu", "cpu:freed=kept", "cpu:freed=returned")
    }
    assert max(faults["cpu"], faults["cpu:freed=kept"]) < 200 < 2000 < faults["cpu:freed=returned"]


def test_a_c_library_without_the_setting(monkeypatch):
    monkeypatch.setattr(backend.ctypes, "CDLL", lambda name: object())
    assert not backend.retain_freed_memory()
    assert get_backend("cpu").name == "cpu"
    with pytest.raises(CapabilityError, match="no setting for freed=kept"):
        get_backend("cpu:freed=kept")


@pytest.mark.parametrize(
    ("supported", "level", "first"),
    [
        (True, "AVX512", torch.bfloat16),
        (False, "AVX512", torch.float32),
        (True, "AVX2", torch.float32),
        (False, "DEFAULT", torch.float32),
    ],
)
def test_bfloat16_is_preferred_if_torch_uses_the_processors_product(monkeypatch, supported, level, first):
    """``ATEN_CPU_CAPABILITY=avx2`` emulates a processor without bfloat16: the probes of torch do not see it."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: supported, raising=False)
    assert backend.CpuBackend().capabilities.preferred_dtypes[0] == first
