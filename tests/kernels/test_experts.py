"""Mixtures of experts by the interpreter: every way in which a program finds its expert, against the reference in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from conformance.small_problems import small
from drawing import some_and_many
from kernels.devices import DEVICES
from outrider.device import ExpertsBlock, KernelSet
from outrider.device.kernels.formats import FP8, INT4, INT8
from outrider.device.kernels.weight_formats import WeightFormat
from outrider.model.quantization.loading import to_device
from outrider_conformance.random_kernels.kernels import check_kernels
from outrider_triton.blocks import DeferredExperts
from outrider_triton.experts.operators import gathered_pairs, laid_out_pairs, placed_pairs, sorted_pairs, sum_expert_rows
from outrider_triton.experts.router import MAX_ROUTED_TOKENS
from outrider_triton.kernelset import TritonKernels
from outrider_triton.tiles.configs import LARGE_M

REFERENCE = KernelSet()
# Tokens, experts, experts of a token, hidden and inner size: compared pairs, all experts, sorted blocks of several sizes.
SIZES = [
    (1, 8, 2, 40, 24),
    (3, 128, 8, 64, 32),
    (9, 16, 4, 64, 40),
    (40, 8, 4, 72, 48),
    (70, 8, 2, 64, 48),
    (150, 6, 4, 64, 40),
]


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sample(1, per="alike")
@pytest.mark.parametrize(
    ("size", "alike"),
    [
        pytest.param(size, alike, marks=pytest.mark.slow if size[0] > 9 and (alike or size[0] != 70) else ())
        for size in SIZES
        for alike in (False, True)
    ],
)
def test_experts(size, alike, kernels, device):
    tokens, count, chosen, hidden, inner = size
    logits = normal(1 if alike else tokens, count, seed=1).expand(tokens, count).contiguous()
    x = normal(tokens, hidden, seed=2).half()
    gate_up, down = (
        normal(*shape, seed=3).mul(shape[-1] ** -0.5).half() for shape in ((count, 2 * inner, hidden), (count, hidden, inner))
    )
    weights, names = REFERENCE.route(logits, chosen, renormalize=True)
    made = kernels.experts(*(t.to(device) for t in (x, weights, names, gate_up, down)))
    right = REFERENCE.experts(x.double(), weights.double(), names, gate_up.double(), down.double())
    assert made.dtype is torch.float16
    assert bool(((made.cpu().double() - right).abs() <= 4e-3 * (1 + right.abs())).all())


@pytest.mark.parametrize("flag", [0, 1], ids=["scores", "normalized"])
@pytest.mark.parametrize("scoring", [0, 1, 2])
def test_the_kits_problems_of_corrected_routers(scoring, flag, kernels, device):
    shape = {"experts": 60, "chosen": 4, "flag": flag, "scoring": scoring}
    check_kernels(kernels, small("route, corrected_routing", torch.float16, **shape), device)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernel", ["head_norm_rope_write_cache", "attention_block"])
@pytest.mark.parametrize("changes", [{}, {"partial": 1}, {"wide_norm": 1, "heads": 3, "head_scales": 1}])
def test_the_kits_problems_of_norms_of_all_heads(kernel, changes, kernels, device):
    check_kernels(kernels, small(f"{kernel}, joint_head_norms", torch.float16, **changes), device)


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "prefetched"),
    [(31, 128, 2048, 0), (32, 128, 2048, 10), (40, 8, 2048, 8), (64, 8, 2044, 0)],
)
def test_weights_of_likely_experts_are_prefetched(tokens, experts, hidden, prefetched, instead_of_launching):
    """Of most experts at least, half a cache, and no more experts than there are; rows of other than 16 bytes aren't."""
    asked = {}
    instead_of_launching(lambda kernel, grid, *operands, **settings: asked.setdefault(kernel.fn.__name__, operands))
    x, stack = (
        torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in ((tokens, hidden), (experts, 1536, hidden))
    )
    chosen = torch.empty(tokens, 8, dtype=torch.int64, device="meta")
    TritonKernels(DEVICES["H200"]).experts(x, chosen.float(), chosen, stack, stack.new_empty(experts, hidden, 768))
    assert asked["expert_gates"][-1] == prefetched


@pytest.mark.parametrize(("tokens", "count", "chosen"), [(3, 8, 2), (40, 5, 2)])
def test_pairs_without_an_expert_add_nothing(tokens, count, chosen, kernels, device, monkeypatch):
    """Another rank computes them: few tokens find their experts themselves, many are sorted. No row of them is read."""
    weights, names = REFERENCE.route(normal(tokens, count, seed=1), chosen, renormalize=True, held=(1, 3))
    x = normal(tokens, 16, seed=2).half()
    gate_up, down = normal(2, 16, 16, seed=3).div(4).half(), normal(2, 16, 8, seed=4).div(3).half()
    right = REFERENCE.experts(x.double(), weights.double(), names, gate_up.double(), down.double())
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(99))
    made = kernels.experts(*(t.to(device) for t in (x, weights, names, gate_up, down)))
    assert bool(((made.cpu().double() - right).abs() <= 4e-3 * (1 + right.abs())).all())


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (7, 72)])
def test_a_shared_expert_is_added_by_its_gate(tokens, hidden, kernels, device):
    value, part, x = (normal(tokens, hidden, seed=seed).half() for seed in (1, 2, 3))
    gate = normal(1, hidden, seed=4).mul(hidden**-0.5).half()
    right = value.double() + torch.sigmoid(x.double() @ gate.double().T) * part.double()
    made = value.clone().to(device)
    torch.ops.outrider.add_gated.triton(made, part.to(device), x.to(device), gate.to(device), False)
    assert bool(((made.cpu().double() - right).abs() <= 2e-3 * (1 + right.abs())).all())


@pytest.mark.parametrize("tokens", [1, 5, MAX_ROUTED_TOKENS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_a_router_in_float32(tokens, bias, kernels, device, monkeypatch):
    """Few tokens aren't copied in float32; more are, for the library's product. The number of experts is odd."""
    drawn = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    x = torch.randn(tokens, 2 * 72, dtype=torch.float16, **drawn)[:, 72:]  # columns of wider rows
    router, row = torch.randn(13, 72, **drawn), torch.randn(13, **drawn) if bias else None
    weights = torch.empty(0, device=device)
    block = ExpertsBlock(
        norm=weights, eps=0.0, router=router, router_bias=row, per_token=2, renormalize=True, gate_up=weights, down=weights
    )
    if tokens <= MAX_ROUTED_TOKENS:
        monkeypatch.setattr(TritonKernels, "linear", None)
    logits = kernels._router_logits(x, block)
    torch.testing.assert_close(logits, F.linear(x.float(), router, row), rtol=0, atol=2e-5)


def test_pairs_in_blocks():
    """Each pair once, in a block of its own expert, and no block more than is said."""
    names = torch.randint(0, 7, (33, 3), generator=torch.Generator().manual_seed(9))
    for size in (1, 4, 16):
        laid, expert_of = sorted_pairs(names, 7, size)
        assert laid.shape[0] == size * expert_of.shape[0]
        kept = laid[laid >= 0]
        assert sorted(kept.tolist()) == list(range(99))
        blocks = torch.arange(laid.shape[0])[laid >= 0] // size
        assert torch.equal(names.flatten()[kept], expert_of[blocks])


def test_pairs_without_an_expert_have_no_place():
    names = torch.randint(-1, 7, (33, 3), generator=torch.Generator().manual_seed(9))
    laid, expert_of = sorted_pairs(names, 7, 4)
    kept = laid[laid >= 0]
    assert sorted(kept.tolist()) == (names.flatten() >= 0).nonzero().flatten().tolist()
    assert torch.equal(names.flatten()[kept], expert_of[torch.arange(laid.shape[0])[laid >= 0] // 4])


def laid_out_alike(tokens, count, experts, size, used, absent, seed, device, pdl):
    """The kernel's blocks are those of torch's sort, also where few of the experts are ``used``, or one alone."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(experts, generator=generator)[:used]
    names = some[torch.randint(0, some.shape[0], (tokens, count), generator=generator)]
    names = torch.where(torch.rand(names.shape, generator=generator) < absent, -1, names).to(device)
    for made, right in zip(laid_out_pairs(names, experts, size, pdl), sorted_pairs(names, experts, size), strict=True):
        assert made.dtype is torch.int64
        assert torch.equal(made, right)


@pytest.mark.parametrize(
    ("tokens", "count", "experts", "size", "used", "absent", "chunk"),
    [
        (33, 3, 7, 4, 7, 0.0, 32),
        (40, 4, 12, 16, 12, 0.2, 64),
        (9, 2, 5, 8, 1, 0.0, 64),
        (5, 4, 8, 128, 8, 1.0, 32),
        (60, 4, 3, 32, 3, 0.1, 64),
    ],
)
def test_pairs_have_the_places_that_sorting_gives_them(tokens, count, experts, size, used, absent, chunk, device, pdl):
    """Places, experts of blocks and their number are those of torch's sort. Rows are gathered and added by places."""
    generator = torch.Generator().manual_seed(3)
    some = torch.randperm(experts, generator=generator)[:used]
    names = some[torch.randint(0, some.shape[0], (tokens, count), generator=generator)]
    names = torch.where(torch.rand(names.shape, generator=generator) < absent, -1, names).to(device)
    places, expert_of, blocks_used = placed_pairs(names, experts, size, pdl, chunk=chunk)
    order, right = sorted_pairs(names, experts, size)
    assert expert_of.shape == right.shape
    counts = torch.bincount(names.flatten().cpu() + 1, minlength=experts + 1)[1:]
    assert int(blocks_used) == int(((counts + size - 1) // size).sum())
    assert torch.equal(expert_of[: int(blocks_used)], right[: int(blocks_used)])
    held = names.flatten() >= 0
    assert torch.equal(order[places.flatten()[held]], held.nonzero().flatten())
    x, weights = (
        torch.randn(tokens, 40, generator=generator).to(device),
        torch.rand(names.shape, generator=generator).to(device),
    )
    rows = gathered_pairs(x, names, places, expert_of.shape[0] * size, pdl)
    assert torch.equal(rows[places.flatten()[held]], x.repeat_interleave(count, 0)[held])
    summed = sum_expert_rows(rows, names, x, pdl, (weights, places))
    torch.testing.assert_close(summed, x * (weights * (names >= 0)).sum(1, keepdim=True))


@pytest.mark.parametrize(("tokens", "shape"), [(1100, (8, 2, 256, 128)), (700, (12, 4, 200, 72)), (9000, (4, 2, 128, 64))])
def test_experts_of_many_tokens(tokens, shape, hopper):
    """Tiles for large M, rows and columns that fill no tile, and pairs of other ranks' experts."""
    experts, count, hidden, inner = shape
    kernels = TritonKernels(DEVICES["H200"])
    x, gate_up, down = (
        normal(*size, seed=5).to(torch.bfloat16).to(hopper)
        for size in ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    weights, chosen = REFERENCE.route(normal(tokens, experts, seed=6).to(hopper), count, renormalize=True)
    chosen[::7, 0] = -1
    weights = torch.where(chosen < 0, 0, weights)
    assert kernels.mixtures.experts_config(tokens, count, gate_up)[1].descriptor == LARGE_M
    gate_up, down = gate_up / hidden**0.5, down / inner**0.5
    made = kernels.experts(x, weights, chosen, gate_up, down)
    wanted = REFERENCE.experts(*(each.double() for each in (x, weights)), chosen, gate_up.double(), down.double())
    assert (made - wanted).norm() < 6e-3 * wanted.norm()


PAIRS = given(
    tokens=st.one_of(st.integers(1, 140), st.integers(1, 512)),
    count=st.sampled_from((1, 4, 8)),
    experts=st.sampled_from((2, 8, 60, 128, 256)),
    size=st.sampled_from((8, 16, 32, 64, 128)),
    used=st.one_of(st.just(1), st.integers(1, 256)),
    absent=st.sampled_from((0.0, 0.5, 1.0)),
    seed=st.integers(0, 99),
)
test_some_pairs_are_laid_out_alike, test_many_pairs_are_laid_out_alike = some_and_many(
    laid_out_alike, PAIRS, some=2, many=100
)


QUANTIZED = {
    "fp8": WeightFormat(elements=FP8, activations=FP8),
    "fp8 blocks": WeightFormat(elements=FP8, rows=32, columns=128, activations=FP8, activation_group=128),
    "int8": WeightFormat(elements=INT8, activations=INT8),
    "int4": WeightFormat(elements=INT4, columns=128),
    "int4 groups of 32, zeros": WeightFormat(elements=INT4, columns=32, zeros=True),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        pytest.param(name, tokens, marks=() if tokens == 5 or (tokens, name) == (70, "int4") else pytest.mark.slow)
        for name in QUANTIZED
        for tokens in (1, 5, 70)
    ],
)
def test_quantised_experts(name, tokens, kernels, device):
    count, chosen, hidden, inner = 8, 2, 128, 160
    cpu, dice = torch.device("cpu"), torch.Generator().manual_seed(4)
    way = QUANTIZED[name]
    gate_up = way.random_weight(count * 2 * inner, hidden, device=cpu, generator=dice)
    down = way.random_weight(count * hidden, inner, device=cpu, generator=dice)
    weights, names = REFERENCE.route(normal(tokens, count, seed=1), chosen, renormalize=True)
    x = normal(tokens, hidden, seed=2).half()
    first, second = (to_device(each, device) for each in (gate_up, down))
    made = kernels.experts_quantized(x.to(device), weights.to(device), names.to(device), first, second).cpu()
    right = REFERENCE.experts_quantized(x.double(), weights.double(), names, gate_up, down)
    own = REFERENCE.experts_quantized(x, weights, names, gate_up, down)
    error, expected = ((each.double() - right).norm() / right.norm() for each in (made, own))
    assert float(error) < max(2e-3, 1.5 * float(expected))


@pytest.mark.parametrize(("tokens", "count", "hidden"), [(3, 8, 64), (2, 3, 200), (1, 1, 32)])
def test_the_next_norm_adds_what_the_experts_left(tokens, count, hidden, device, pdl):
    """The bits of the sums and of the norm are those of two kernels: one adds a token's results, the other the residual."""
    dtype = torch.float16
    results = normal(tokens, count, hidden, seed=7).to(dtype).to(device)
    residual, norm = (normal(*size, seed=8).to(dtype).to(device) for size in ((tokens, hidden), (hidden,)))
    chosen = torch.zeros(tokens, count, dtype=torch.int64, device=device)
    summed, added = sum_expert_rows(results.view(-1, hidden), chosen, residual, pdl), residual.clone()
    right = torch.ops.outrider.add_rms_norm.triton(summed, None, added, norm, 1e-5, pdl)
    deferred, rows = DeferredExperts(results, pdl), residual.clone()
    assert torch.equal(deferred.add_rms_norm(rows, norm, 1e-5), right)
    assert torch.equal(rows, added)
    assert torch.equal(deferred.add(residual), added)


def test_tiles_of_gates_are_tall_and_blocks_small_while_weights_decide():
    """On an H200, gates with twice as many pairs of rows as tokens take 1 to 9 % less time, and blocks of 64 up to 14 %."""
    mixtures, gate_up = TritonKernels(DEVICES["H200"]).mixtures, torch.empty(128, 2 * 768, 2048, device="meta")
    for tokens, block, pairs, columns in ((128, 32, 64, 64), (512, 64, 128, 64), (900, 64, 128, 64), (64, 16, 64, 128)):
        size, gates, outputs = mixtures.experts_config(tokens, 8, gate_up)
        assert (size, gates.block_n, gates.block_k, outputs.block_m) == (block, pairs, columns, block)
    assert mixtures.experts_config(1024, 8, gate_up)[1].descriptor == LARGE_M
