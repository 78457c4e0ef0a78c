"""Attention over prompts against the reference: from pages and from the copy without pages."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from outrider.device import AttentionMetadata, KernelSet
from outrider.engine.requests.scheduler import MAX_PREFILL_SEQUENCES
from outrider_triton.attention import operators
from outrider_triton.attention import prefill as prefill_attention
from outrider_triton.launch import compile_only
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.choices import PromptStore, libraries

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


@pytest.mark.sample(2)
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
        rows = operators.copied_rows(int(lens.sum()), lens.shape[0])
        copy = torch.ops.outrider.copy_context.triton
        keys, values, kv_start = copy(keys, values, lens, table, rows, metadata.max_kv, padded, q.dtype, pdl)
    made = torch.ops.outrider.prompt_attention.triton(
        *(q, keys, values, starts, lens, table, kv_start, 8, 0.3, window, [16, 32, 4, 2], pdl)
    )
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=1e-4, atol=1e-5)


def device_of(**other):
    sizes = {"processors": 4, "shared_bytes": 100 << 10, "processor_shared": 100 << 10, "l2_bytes": 1 << 20}
    return DeviceFacts(**{"architecture": "gfx942", "early_starts": False, **sizes, **other})


def operands(new=(300,), context=(0,), dtype=torch.float16, size=16, host=True, device="cpu"):
    q, k_cache, v_cache, metadata = batch(4, 2, size, new=new, context=context, padding=0)
    starts = tuple(metadata.query_start.tolist()) if host else None
    placed = {name: getattr(metadata, name).to(device) for name in ("query_start", "seq_lens", "block_table")}
    metadata = replace(metadata, host_query_start=starts, host_context=tuple(context) if host else None, **placed)
    return prefill_attention.PrefillOperands(
        *(x.to(device, dtype) for x in (q, k_cache, v_cache)), metadata, scale=0.3, window=0
    )


def test_the_fastest_of_those_that_are_right_is_chosen(monkeypatch, device):
    """By lengths, each prompt has that of the nearest. What is wrong or fails isn't used, and it says so."""
    attention = prefill_attention.PromptAttention(device_of(copy_engine=True))

    def broken(given):
        raise ValueError("no such symbol\nand more")

    def wrong(given):
        return attention._by_pages(given) * 3

    own = {"pages": attention._by_pages, "slow": attention._by_pages, "wrong": wrong, "broken": broken}
    monkeypatch.setattr(attention, "_candidates", lambda _: own)
    monkeypatch.setattr(prefill_attention.torch, "get_device_module", lambda _: SimpleNamespace(Event=object))
    times = iter([3.0, 2.0, 1.0, 2.0])
    monkeypatch.setattr(prefill_attention, "_milliseconds", lambda *_: next(times))
    given = operands(device=device)
    attention.measure(given)
    assert attention._choice(given) == "pages"
    assert attention._choice(operands(new=(70,))) == "slow"
    said = attention.reports
    assert said["attention over 128 new tokens"] == "slow (us: slow 2000, pages 3000)"
    assert said["attention by broken"] == "not used: ValueError: no such symbol"
    assert said["attention by wrong"].startswith("not used: off by ")
    attention.measure(given)  # known: nothing is timed


def test_context_of_a_graph_isnt_copied():
    """How much there is to copy isn't known then."""
    attention = prefill_attention.PromptAttention(device_of(architecture="sm_90"))
    assert attention._candidates(operands()).keys() >= {"pages", "copy"}
    assert list(attention._candidates(operands(host=False))) == ["pages"]


def test_chunks_of_a_graph_are_copied_if_they_have_no_context(monkeypatch, device):
    """By the bounds of the graph, also for FlashAttention 3. Padding gets zeros, which the library leaves unwritten."""
    q, *caches, metadata = batch(4, 2, 64, new=(3, 40, 0, 1), context=(0, 0, 0, 0))
    tokens = int(metadata.query_start[-1])

    def flash3(q, keys, values, *, out, cu_seqlens_q, cu_seqlens_k, seqused_k, **bounds):
        assert (bounds["max_seqlen_q"], bounds["max_seqlen_k"], len(q), q.is_contiguous()) == (65, 65, 65, True)
        for start, end, first, length in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, seqused_k, strict=False):
            own = slice(first, first + length)
            out[start:end] = attention_of_a_library(q[start:end], keys[own], values[own], bounds["softmax_scale"])[0]
        return out, None

    monkeypatch.setattr(prefill_attention, "_has_flash3", lambda: True)
    monkeypatch.setattr(prefill_attention, "_flash3", lambda: flash3)
    attention = prefill_attention.PromptAttention(device_of(architecture="sm_90"))
    placed = {name: getattr(metadata, name).to(device) for name in ("query_start", "seq_lens", "block_table")}
    bounds = replace(metadata, **placed, max_query=65, max_kv=65, host_context=(0,) * 4)
    wanted = REFERENCE.paged_attention(*(x.double() for x in (q, *caches)), metadata, scale=0.3)[:tokens]
    # Triton's interpreter computes in float16 alone, and the library in bfloat16.
    for dtype, names in ((torch.float16, ["pages", "copy"]), (torch.bfloat16, ["fa3-fwd"])):
        call = prefill_attention.PrefillOperands(*(x.to(device, dtype) for x in (q, *caches)), bounds, 0.3, 0)
        assert call.copied_rows == operators.copied_rows(65, 4)
        found = {name: attend for name, attend in attention._candidates(call).items() if name in names}
        assert list(found) == names
        for attend in found.values():
            attended = attend(call).double().cpu()
            assert not attended[tokens:].any()
            torch.testing.assert_close(attended[:tokens], wanted, rtol=0.03, atol=0.03)


def test_the_hosts_time_to_launch_is_not_measured():
    """What keeps the device busy is enqueued ahead of the first event."""
    order = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing
            self.elapsed_time = lambda end: 2.0
            self.synchronize = lambda: None

        def record(self):
            order.append("event")

    work = (lambda: order.append("call")), (lambda: order.append("busy"))
    assert prefill_attention._milliseconds(SimpleNamespace(Event=Event), *work, repeats=2) == 2.0
    assert order == ["call", *["busy", "event", "call", "event"] * 2]


def attention_of_a_library(q, keys, values, scale, *, causal=True, sums=False):
    """Attention [T, Hq, D], and if asked for logarithms of sums of exponentials [T, Hq] with the heads outside."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1).float() for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], device=q.device).triu(1) > 0, -torch.inf)
    made = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype), scores.logsumexp(-1).T
    return made[: 1 + sums]


def test_long_prompts_are_a_library_call_each(monkeypatch, device):
    """With context, another one, whose result is merged; not if one is short."""
    attention = prefill_attention.PromptAttention(device_of(architecture="sm_90"))
    monkeypatch.setattr(prefill_attention, "_MIN_CALL_QUERY", 70)
    monkeypatch.setattr(prefill_attention, "_cudnn_attention", attention_of_a_library)
    attention._merged.add(prefill_attention._key(operands()))
    for new, context, serves in (
        ((70, 150, 128), (0, 0, 0), True),
        ((70, 69), (0, 0), False),
        ((69,), (0,), True),
        ((69,), (1,), False),
        ((90, 70), (300, 0), True),
    ):
        given = operands(new=new, context=context, device=device)
        assert ("torch's cuDNN" in attention._candidates(given)) is serves
        if serves:
            made = attention._by_cudnn(given)
            wide = (x.double() for x in (given.q, given.k_cache, given.v_cache))
            wanted = REFERENCE.paged_attention(*wide, given.metadata, scale=0.3)
            torch.testing.assert_close(made.double(), wanted, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("base", [math.e, 2.0])
def test_what_a_library_says_of_its_sums_is_checked(monkeypatch, base, device):
    """Context isn't merged where the logarithm isn't the natural one."""
    attention = prefill_attention.PromptAttention(device_of(architecture="sm_90"))
    monkeypatch.setattr(prefill_attention, "_MIN_CALL_QUERY", 70)

    def attend(*given, **asked):
        out, *sums = attention_of_a_library(*given, **asked)
        return out, *(each / math.log(base) for each in sums)

    monkeypatch.setattr(prefill_attention, "_cudnn_attention", attend)
    monkeypatch.setattr(prefill_attention.torch, "get_device_module", lambda _: SimpleNamespace(Event=object))
    monkeypatch.setattr(prefill_attention, "_milliseconds", lambda *_: 1.0)
    monkeypatch.setattr(prefill_attention.operators, "SEQUENCE_BOUNDS", (1, 16, 256))
    attention.measure(operands(new=(100,), context=(0,), device=device))
    later = operands(new=(90,), context=(150,))
    assert ("torch's cuDNN" in attention._candidates(later)) is (base == math.e)
    assert ("attention by torch's cuDNN over context" in attention.reports) is (base != math.e)


def test_kernels_are_compiled_for_as_many_prompts_as_share_an_iteration():
    assert operators.SEQUENCE_BOUNDS[-1] == MAX_PREFILL_SEQUENCES


def test_kernels_are_compiled_ahead_for_one_of_alike_layers(monkeypatch):
    attention, compiled = prefill_attention.PromptAttention(device_of()), []
    monkeypatch.setattr(attention, "_call_own_candidates", compiled.append)
    layers = [operands(), operands(new=(200,)), operands(size=32), operands()]
    with compile_only():
        for layer in layers:
            attention.measure(layer)
    assert compiled == [layers[0], layers[2]]


def test_prompts_are_many_causal_tokens_in_16_bits(kernels, device):
    attention = prefill_attention.PromptAttention(device_of())
    assert attention.serves(operands().q, operands().metadata)
    assert not attention.serves(operands(dtype=torch.float32).q, operands().metadata)
    few, tree = operands(new=(3,)), replace(operands().metadata, tree_mask=torch.ones(300, 300, dtype=torch.bool))
    assert not attention.serves(few.q, few.metadata)
    assert not attention.serves(operands().q, tree)
    busy = prefill_attention.PromptAttention(
        device_of(processors=200)
    )  # one block, a long context: shared out among more programs
    long = operands(new=(64,), context=(900,))
    assert not busy.serves(long.q, long.metadata)
    given = operands(device=device)
    made = kernels.paged_attention(given.q, given.k_cache, given.v_cache, given.metadata, scale=0.3)
    wide = (x.double() for x in (given.q, given.k_cache, given.v_cache))
    torch.testing.assert_close(
        made.double(), REFERENCE.paged_attention(*wide, given.metadata, scale=0.3), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_blocks_fit(size, shared):
    rows, cached, warps, stages = prefill_attention.prefill_config(size, shared)
    width = 1 << (size - 1).bit_length()
    assert 2 * width * (rows + 2 * cached * stages) <= shared
    assert rows * width <= warps * 32 * 128  # registers for what is made


# -- what is kept for the next start --------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Start anew, with made-up candidates and times; returns what was chosen, what was said, and what ran."""
    monkeypatch.setattr(prefill_attention.torch, "get_device_module", lambda _: SimpleNamespace(Event=object))

    def start(times, *, broken=(), alone=(), new=300):
        attention, ran = prefill_attention.PromptAttention(device_of(copy_engine=True)), []

        def candidate(name):
            def attend(given):
                ran.append(name)
                return torch.full_like(given.q, 3.0 if name in broken else 1.0)

            return attend

        monkeypatch.setattr(prefill_attention, "_PARTIAL_CANDIDATES", frozenset(alone))
        monkeypatch.setattr(attention, "_by_pages", lambda given: torch.ones_like(given.q))
        monkeypatch.setattr(attention, "_candidates", lambda _: {name: candidate(name) for name in times})
        monkeypatch.setattr(prefill_attention, "_milliseconds", lambda module, call, busy: call() is None or times[ran[-1]])
        attention.use_store(PromptStore(tmp_path))
        attention.measure(operands(new=(new,)))
        return SimpleNamespace(name=attention._choice(operands(new=(new,))), said=attention.reports, ran=ran)

    return start


def test_the_next_start_measures_nothing_again(started):
    first = started({"slow": 3.0, "fast": 1.0})
    assert (first.name, set(first.ran)) == ("fast", {"slow", "fast"})
    again = started({"slow": 1.0, "fast": 3.0})
    assert (again.name, set(again.ran)) == ("fast", {"fast"})
    assert again.said["attention over 128 new tokens"] == "fast (measured before)"
    assert len(again.ran) == 2, "once for each number of tokens"


def test_who_attends_where_the_fastest_cannot_runs_as_well(started):
    times = {"slow": 3.0, "one prompt": 1.0, "next": 2.0}
    started(times, alone=("one prompt",))
    assert set(started(times, alone=("one prompt",)).ran) == {"one prompt", "next"}


def test_what_was_kept_is_measured_again_where_it_no_longer_holds(started, monkeypatch):
    times = {"slow": 3.0, "fast": 1.0}
    started(times)
    wrong = started(times, broken=("fast",))
    assert wrong.name == "slow"
    assert wrong.said["attention by fast"].startswith("not used: off by")
    assert started(times).name == "slow", "which was kept in its place"
    assert started({"fast": 1.0}).name == "fast", "the other one isn't there any more"
    assert set(started({"slow": 3.0, "fast": 1.0}, new=600).ran) == {"slow", "fast"}, "other numbers of tokens"
    monkeypatch.setattr("outrider_triton.tiles.store.choices.libraries", lambda: {"fa3-fwd": "another"})
    assert set(started({"slow": 3.0, "fast": 1.0}, new=600).ran) == {"slow", "fast"}


@pytest.mark.parametrize("text", ["", "[]", "{}", 1, [], ["nobody"]], ids=str)
def test_a_file_that_cannot_be_used_is_a_miss(started, tmp_path, text):
    """Nor one that ranks nobody, or somebody who isn't there."""
    started({"slow": 3.0, "fast": 1.0})
    (file,) = tmp_path.iterdir()
    row = {"libraries": libraries(), "ranked": {"128": text, "300": text}}
    file.write_text(text if isinstance(text, str) else json.dumps(row))
    assert set(started({"slow": 3.0, "fast": 1.0}).ran) == {"slow", "fast"}


def test_what_cannot_be_kept_is_said(started, tmp_path, monkeypatch):
    monkeypatch.setattr(PromptStore, "write", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    found = started({"slow": 3.0, "fast": 1.0})
    assert found.said["attention over prompts, for the next start"] == "not kept: read-only"
    assert not list(tmp_path.iterdir())


def test_kernels_keep_it_beside_what_was_tuned(tmp_path):
    """For this device and software; not where nothing is to be taken over."""
    from kernels.devices import SMALL
    from outrider_triton.kernelset import TritonKernels
    from outrider_triton.tiles.store.choices import TunedStore

    made, alone = TritonKernels(SMALL), TritonKernels(SMALL, takes_over=False)
    assert (made.use_tuned(tmp_path), alone.use_tuned(tmp_path)) == (0, 0)
    made.attention.prompts._store.write(["key", torch.bfloat16], {128: ("pages",)})
    assert alone.attention.prompts._store is None
    assert (TunedStore(tmp_path, SMALL).home / "prompts" / "key-bfloat16.json").is_file()
    assert TritonKernels(SMALL).use_tuned(tmp_path) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_mixed_batch(dtype, kernels, device, monkeypatch):
    """A kernel for each part: of prompts their own, if they have one of this dtype. The same result as for the whole."""
    q, k_cache, v_cache, whole = batch(4, 2, 16, new=(4, 4, 70, 9), context=(150, 9, 0, 17), padding=3)
    starts, lens, table = (x.to(device) for x in (whole.query_start, whole.seq_lens, whole.block_table))
    drafts = replace(whole, query_start=starts[:3], seq_lens=lens[:2], block_table=table[:2], max_query=4, uniform=True)
    prompts = replace(whole, query_start=starts[2:] - 8, seq_lens=lens[2:], block_table=table[2:])
    mixed = AttentionMetadata.concatenated((8, drafts), (q.shape[0] - 8, prompts))
    assert mixed.query_start.tolist() == whole.query_start.tolist()
    assert (mixed.max_query, mixed.max_kv) == (whole.max_query, whole.max_kv)
    operands = [x.to(device, dtype) for x in (q, k_cache, v_cache)]
    wide = [x.double().cpu() for x in operands]
    wanted = REFERENCE.paged_attention(*wide, whole, scale=0.3)[:87]
    found, attend = [], kernels.attention.prompts.attend
    monkeypatch.setattr(kernels.attention.prompts, "attend", lambda call: found.append(call) or attend(call))
    made = kernels.paged_attention(*operands, mixed.after_layer(), scale=0.3)
    assert [call.q.shape[0] for call in found] == ([82] if dtype is torch.float16 else [])
    assert all(call.metadata.settled for call in found)
    torch.testing.assert_close(made[:87].double().cpu(), wanted, rtol=2e-3, atol=2e-3)
