"""Exact kernels: a row's bits don't depend on the other rows, the launch, the chunks of a prompt or padding.

The interpreter multiplies by a library whose order of sums depends on the shape of a tile. The fixture ``kernels_of``
replaces it by sums in the order of columns, as the matrix unit of a device adds.
"""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from drawing import some_and_many
from kernels.devices import DEVICES, SMALL
from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import bundled
from outrider.device import AttentionMetadata, KernelSet, RecurrentBatch
from outrider.registry import get_backend
from outrider_triton import exact
from outrider_triton.attention import operators as attention_operators
from outrider_triton.exact import ExactTiles, has_fixed_order, split_of
from outrider_triton.kernelset import TritonKernels
from outrider_triton.tiles.configs import BUCKETS
from outrider_triton.tiles.derive.products import rank_configs
from outrider_triton.tiles.facts import DeviceFacts, facts_of


class Unstreamed(DeviceFacts):
    """Facts of a Hopper device without the kernels that no interpreter runs."""

    streams_products = property(lambda self: False)


HOPPER = Unstreamed(**{name: getattr(DEVICES["H100"], name) for name in DeviceFacts.__dataclass_fields__})


@pytest.fixture
def kernels_of(device, pdl, monkeypatch):
    """A function that makes exact kernels: on a device with its own facts, in the interpreter with the given ones."""
    if device.type == "cpu":
        from triton.runtime import interpreter

        def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
            total = d.data.copy()
            for column in range(a.data.shape[1]):
                total += a.data[:, column : column + 1].astype(np.float32) * b.data[column : column + 1].astype(np.float32)
            return interpreter.TensorHandle(total, d.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)

    monkeypatch.setattr(attention_operators, "FIRST_CHUNK", 64)  # several chunks in a short context

    def make(facts):
        own = facts if device.type == "cpu" else facts_of(torch.cuda.get_device_properties(device))
        return TritonKernels(replace(own, early_starts=pdl)).batch_invariant()

    return make


def normal(device, *shape, seed=0, scale=1.0):
    made = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=made) * scale).to(device, torch.float16)


def same(left, right):
    return torch.equal(left.cpu().view(torch.int16), right.cpu().view(torch.int16))


# -- products and experts ------------------------------------------------------------------------------------------


def some_products(kernels, x, seed):
    """Each kind of product of rows ``x``, the norm after one, and the residual that the norm completes."""
    k = x.shape[1]
    weight, bias = normal(x.device, 96, k, seed=seed, scale=k**-0.5), normal(x.device, 96, seed=seed)
    residual, norm = x[:, :96].clone(), normal(x.device, 96, seed=seed + 1)
    added = residual.clone()
    normed = kernels.dense.linear_add_rms_norm(x, weight, bias, residual, norm, 1e-5)
    kernels.dense.linear_add(x, weight, bias, added)
    assert same(added, residual)
    return kernels.linear(x, weight, bias), kernels.dense.linear_silu_mul(x, weight), normed, residual


def rows_are_alike(kernels_of, device, facts, k, rows, first, count, seed):
    kernels = kernels_of(facts)
    x = normal(device, rows, k, seed=seed)
    part = slice(min(first, rows - 1), min(first, rows - 1) + count)
    for together, own in zip(some_products(kernels, x, seed), some_products(kernels, x[part], seed), strict=True):
        assert same(together[part], own)


ROWS = given(
    k=st.sampled_from([96, 1024, 2048]),
    rows=st.sampled_from([1, 7, 17, 32, 40, 130, 200]),
    first=st.integers(0, 31),
    count=st.integers(1, 20),
    seed=st.integers(0, 99),
)
FACTS = pytest.mark.parametrize("facts", [pytest.param(SMALL, id="small"), pytest.param(HOPPER, id="hopper")])
_, test_rows_of_many_products_are_alike = some_and_many(rows_are_alike, ROWS, FACTS, some=1, many=4)


def test_rows_of_products_are_alike(kernels_of, device):
    rows_are_alike(kernels_of, device, HOPPER, 1024, 17, 3, 1, 0)


@pytest.mark.slow
def test_a_tile_chosen_by_the_batch_shows(kernels_of, device, monkeypatch):
    """The net catches: parts whose number depends on the number of rows."""
    choose = ExactTiles.choose_config

    def by_rows(self, operator, m, n, k, split=1, **options):
        return choose(self, operator, m, n, k, split if m <= 16 else 1, **options)

    monkeypatch.setattr(ExactTiles, "choose_config", by_rows)
    with pytest.raises(AssertionError):
        rows_are_alike(kernels_of, device, HOPPER, 1024, 40, 3, 1, 0)


def routed(kernels, x, seed):
    count, hidden, inner = 8, x.shape[1], 40
    router = normal(x.device, count, hidden, seed=seed)
    gate_up, down = (
        normal(x.device, count, 2 * inner, hidden, seed=seed, scale=0.1),
        normal(x.device, count, hidden, inner, seed=seed, scale=0.1),
    )
    weights, chosen = kernels.route(kernels.linear(x, router), 2, renormalize=True)
    return kernels.experts(x, weights, chosen, gate_up, down)


@pytest.mark.slow
@FACTS
@pytest.mark.parametrize(("rows", "part"), [(15, slice(3, 4)), (40, slice(20, 31)), (150, slice(120, 150))])
def test_rows_of_experts_are_alike(kernels_of, device, facts, rows, part):
    kernels, x = kernels_of(facts), normal(device, rows, 72)
    assert same(routed(kernels, x, 0)[part], routed(kernels, x[part], 0))


# -- attention and recurrent layers --------------------------------------------------------------------------------


def attend(kernels, q, caches, table, lens, counts, *, window=0, padding=0):
    """Attention, or that to latent vectors if the caches differ in size."""
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    metadata = AttentionMetadata(
        query_start=starts.to(q.device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=q.device),
        block_table=table,
        max_query=max(counts),
        max_kv=table.shape[1] * 16,
    )
    q = torch.cat((q, q[:1].expand(padding, -1, -1)))
    keys, values = (cache.shape[3] for cache in caches)
    if keys == values:
        made = kernels.paged_attention(q, *caches, metadata, scale=0.25, window=window)
    else:
        made = kernels.latent_attention(*q.split((values, keys), dim=2), *caches, metadata, scale=0.25)
    assert not made[q.shape[0] - padding :].any()
    return made[: q.shape[0] - padding]


def attention_is_alike(kernels_of, device, length, chunks, window, padding, seed, *, latent=False):
    """The last tokens of a prompt: in one call, in others' company, in chunks, and one by one."""
    kernels, tokens = kernels_of(SMALL), sum(chunks)
    length += tokens
    heads, sizes = (1, (16, 32)) if latent else (2, (16, 16))
    caches = [normal(device, 80, 16, heads, size, seed=seed + size) for size in sizes]
    table = torch.arange(1, 79, dtype=torch.int32, device=device).view(3, 26)
    width = sum(sizes) if latent else 16
    q = normal(device, tokens, 6, width, seed=seed)
    whole = attend(kernels, q, caches, table[:1], [length], [tokens], window=window)
    company = torch.cat((normal(device, 2, 6, width, seed=seed), q, normal(device, 5, 6, width, seed=seed)))
    own = attend(kernels, company, caches, table.roll(1, 0), [9, length, 100], [2, tokens, 5], window=window, padding=padding)
    assert same(own[2 : 2 + tokens], whole)
    done = 0
    for count in chunks:
        end = length - tokens + done + count
        part = attend(kernels, q[done : done + count], caches, table[:1], [end], [count], window=window)
        assert same(part, whole[done : done + count])
        done += count


CONTEXTS = given(
    length=st.integers(0, 300),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    window=st.sampled_from([0, 0, 5, 100]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
_, test_attention_is_alike_in_many_contexts = some_and_many(attention_is_alike, CONTEXTS, some=1, many=6)


@pytest.mark.slow
def test_attention_is_alike(kernels_of, device):
    attention_is_alike(kernels_of, device, 62, [1, 2], 0, 1, 0)


@pytest.mark.parametrize("case", [(62, [1, 2], 1), pytest.param((290, [4, 9, 1], 0), marks=pytest.mark.slow)])
def test_attention_to_latent_vectors_is_alike(kernels_of, device, case):
    length, chunks, padding = case
    attention_is_alike(kernels_of, device, length, chunks, 0, padding, 0, latent=True)


@pytest.mark.slow
def test_attention_is_right(kernels_of, device):
    kernels, caches = kernels_of(SMALL), [normal(device, 30, 16, 2, 16, seed=each) for each in range(2)]
    table, q = torch.arange(1, 27, dtype=torch.int32, device=device).view(1, 26), normal(device, 4, 6, 16)
    made = attend(kernels, q, caches, table, [400], [4])
    right = attend(KernelSet(), q.double(), [each.double() for each in caches], table, [400], [4])
    torch.testing.assert_close(made.double(), right, atol=4e-3, rtol=4e-3)


@pytest.mark.slow
def test_a_recurrent_prompt_is_alike_in_any_chunks(kernels_of, device):
    kernels, tokens = kernels_of(SMALL), 7
    mixed, gates = normal(device, tokens, 2 * 2 * 16 + 4 * 16), normal(device, tokens, 8)
    rule = normal(device, 4).float(), normal(device, 4, seed=1).float()

    def compute(*chunks):
        state, made, done = torch.zeros(2, 4, 16, 16, device=device), [], 0
        for count in chunks:
            part = slice(done, done + count)
            done += count
            starts, lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, count], [done]))
            batch = RecurrentBatch(torch.ones(1, dtype=torch.int64, device=device), starts, lens, count)
            made.append(kernels.chunk_gated_delta_rule(mixed[part], gates[part], *rule, state, batch))
        return torch.cat(made), state

    (whole, state), (parts, own) = compute(tokens), compute(1, 4, 2)
    assert same(whole, parts)
    assert torch.equal(state, own)


# -- choices, and the device ---------------------------------------------------------------------------------------

WEIGHTS = [("linear", 5120, 2048), ("linear_parts", 4096, 4096), ("linear_parts", 768, 2048), ("linear_silu_mul", 4096, 1024)]


def test_every_configuration_of_a_weight_is_compiled_beforehand():
    kernels = TritonKernels(DEVICES["H200"]).batch_invariant()
    for operator, n, k in WEIGHTS:
        every = {kernels.tiles.product(operator, "bfloat16", m=m, n=n, k=k) for m in kernels.tiles.token_counts()}
        counts = (1, 4, 9, 33, 100, 128, 129, 5000)
        assert {kernels.tiles.product(operator, "bfloat16", m=m, n=n, k=k) for m in counts} <= every
        assert len({config.split for config in every}) == 1
    assert len({kernels.tiles.product("linear", "bfloat16", m=m, n=5120, k=2048).block_m for m in BUCKETS}) > 1
    elsewhere = TritonKernels(DEVICES["A100"]).batch_invariant()
    assert {elsewhere.tiles.product("linear", "bfloat16", m=m, n=5120, k=2048).block_m for m in (1, 128, 5000)} == {16}


def test_what_isnt_exact_by_triton_is_delegated_to_the_wrapper():
    kernels = TritonKernels(DEVICES["H200"]).batch_invariant()
    assert kernels.batch_invariant() is kernels
    assert kernels.row_invariant
    assert not kernels.tunes
    x, weight = torch.randn(5, 24, dtype=torch.float64), torch.randn(3, 24, dtype=torch.float64)
    assert torch.equal(kernels.linear(x, weight)[1:2], kernels.linear(x[1:2], weight))


@pytest.mark.parametrize(("operator", "n", "k"), WEIGHTS)
def test_every_tile_computes_the_same_bits_on_the_device(operator, n, k, hopper):
    """The best candidates with a fixed order, and the tiles of prefill; the first rows of 1, 4, 16, 100 and 300."""
    facts, op = facts_of(torch.cuda.get_device_properties(hopper)), getattr(torch.ops.outrider, operator).triton
    x = normal(hopper, 300, k).bfloat16()
    weight = normal(hopper, n, k, scale=k**-0.5).bfloat16()
    bias = () if operator == "linear_parts" else (None,)
    split = split_of(facts, n, k) if operator == "linear_parts" else 1
    right = op(x, weight, *bias, replace(exact._PREFILL[operator], split=split).as_list(), True)
    for m in BUCKETS:
        ranked = rank_configs(facts, operator, m=m, n=n, k=k)
        for config in [each for each in ranked if has_fixed_order(operator, each, split)][:4]:
            for rows in (1, 4, 16, 100, 300):
                made = op(x[:rows], weight, *bias, config.as_list(), True)
                wanted = right[:, :rows] if operator == "linear_parts" else right[:rows]
                assert torch.equal(made, wanted), (config, rows)


def outputs(backend, dtype, speculate, prompts, **config):
    """Tokens and log-probabilities of the bundled model, with a small cache in which requests are preempted."""
    engine = Engine.from_checkpoint(
        bundled("target"),
        get_backend(backend),
        draft_dir=bundled("eagle") if speculate == "eagle" else None,
        speculate=speculate,
        config=EngineConfig(max_context=256, dtype=dtype, batch_invariant=True, draft_tokens=3, **config),
    )
    with closing(engine):
        made = engine.generate(prompts, SamplingParams(max_tokens=32, logprobs=1, ignore_eos=True))
    return [(each.token_ids, each.logprobs) for each in made]


@pytest.mark.usefixtures("hopper")
def test_speculation_leaves_every_bit_on_the_device():
    """EAGLE and n-gram lookup, in several batches, chunks and with prefix hits, against decoding one request at a time."""
    random = torch.Generator().manual_seed(0)
    stem = torch.randint(5, 2000, (40,), generator=random).tolist()
    prompts = [stem[: 8 * (n % 5)] + torch.randint(5, 2000, (n + 3,), generator=random).tolist() for n in range(48)]
    plain = outputs("cuda", "bfloat16", "none", prompts, max_requests=1, prefix_cache=False)
    for speculate in ("eagle", "ngram"):
        for batch, more in ((1, {}), (7, {"num_pages": 40, "page_size": 16}), (32, {"prefill_chunk": 48})):
            assert outputs("cuda", "bfloat16", speculate, prompts, max_requests=batch, **more) == plain
