"""Attention with sinks, and experts with biases and their activation, by the interpreter against the references."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from conformance.small_problems import small
from kernels.devices import DEVICES
from kernels.test_prompt_attention import batch, device_of, operands
from kernels.test_quantized_layers import attention
from outrider.device import AttentionMetadata, ClampedActivation, ExpertBiases, KernelSet
from outrider_conformance.random_kernels.kernels import KERNELS, check_kernels
from outrider_conformance.random_kernels.problem import RandomValues
from outrider_triton.attention import operators
from outrider_triton.attention import prefill as prefill_attention
from outrider_triton.kernelset import TritonKernels
from outrider_triton.quantized import nibble_planes
from outrider_triton.tiles.configs import LARGE_M

REFERENCE = KernelSet()
SINKS = torch.tensor([2.5, -1.0, 0.3, 4.0])


def normal(*shape, seed, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.sample(1, per="change")
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize(
    "change",
    [{}, {"new": 3, "tree": 1}, {"window": 9, "context": 90}, {"context": 300, "new": 1, "batch": 1, "padding": 0}],
    ids=["chain", "tree", "window", "split"],
)
def test_the_kits_problems_of_sinks(kernels, invariant, change, device):
    kernels = kernels.batch_invariant() if invariant else kernels
    for name in ("paged_attention, attention_sinks", "attention_block, attention_sinks"):
        check_kernels(kernels, small(name, torch.float16, **change), device)


@pytest.mark.sample(1)
@pytest.mark.parametrize("corner", [0, 2])
def test_sinks_before_a_quantised_product(kernels, corner, device):
    """Attention is deferred with the product, and may write its rows in the product's layout."""
    drawn = KERNELS["attention_block, int4"]
    check_kernels(kernels, drawn.make(drawn.corners[corner], torch.float16, RandomValues(corner), has_sinks=True), device)


def test_rows_in_the_layout_of_the_next_product_have_sinks(kernels, device):
    with device:
        *given, metadata = attention(1, 2)
    sinks = torch.linspace(-2.0, 3.0, given[0].shape[1], device=given[0].device)
    layout = nibble_planes.NIBBLE_PLANES
    call = prefill_attention.PrefillOperands(*given, metadata, 0.1, 0, sinks)
    made = kernels.attention._joined(call, layout, {layout})
    plain = kernels.paged_attention(*given, metadata, scale=0.1, sinks=sinks)
    assert made.in_planes
    assert torch.equal(made.x, nibble_planes.permute_rows(plain.flatten(1), kernels.pdl, layout))


@pytest.mark.sample(1, per="change")
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("change", [{}, {"tokens": 1}, {"tokens": 40, "held": 2}], ids=["few", "one", "sorted"])
def test_the_kits_problems_of_biases(kernels, invariant, change, device):
    kernels = kernels.batch_invariant() if invariant else kernels
    check_kernels(kernels, small("experts, expert_biases", torch.float16, **change), device)
    check_kernels(kernels, small("experts_block, expert_biases", torch.float16, **change | {"held": 0}), device)


@pytest.mark.sample(1, per="split")
@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize("settled", [False, True])
def test_the_first_split_begins_with_the_sinks(split, settled, device, pdl):
    """Whatever the number of splits, also of those that have no block."""
    q, k_cache, v_cache, metadata = batch(4, 2, 16, new=(1, 2, 1), context=(150, 9, 0), padding=3)
    wanted = REFERENCE.paged_attention(
        q.double(), k_cache.double(), v_cache.double(), metadata, scale=0.3, sinks=SINKS.double()
    )
    q, keys, values, *held = (
        x.to(device) for x in (q, k_cache, v_cache, metadata.query_start, metadata.seq_lens, metadata.block_table)
    )
    made = torch.ops.outrider.paged_attention.triton(
        *(q, keys, values, *held, None, 2, 151, 0.3, 0, settled, [16, 16, split, 4, 1, 0], pdl), sinks=SINKS.to(device)
    )
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("copied", [False, True], ids=["pages", "copy"])
def test_prompts(copied, window, device, pdl):
    q, k_cache, v_cache, metadata = batch(4, 2, 16)
    exact = (x.double() for x in (q, k_cache, v_cache))
    wanted = REFERENCE.paged_attention(*exact, metadata, scale=0.3, window=window, sinks=SINKS.double())
    q, keys, values, starts, lens, table = (
        x.to(device) for x in (q, k_cache, v_cache, metadata.query_start, metadata.seq_lens, metadata.block_table)
    )
    kv_start = None
    if copied:
        rows = operators.copied_rows(int(lens.sum()), lens.shape[0])
        copy = torch.ops.outrider.copy_context.triton
        keys, values, kv_start = copy(keys, values, lens, table, rows, metadata.max_kv, 16, q.dtype, pdl)
    made = torch.ops.outrider.prompt_attention.triton(
        *(q, keys, values, starts, lens, table, kv_start, 8, 0.3, window, [16, 32, 4, 2], pdl, SINKS.to(device))
    )
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=1e-4, atol=1e-5)


def test_prompts_and_decoding_requests_in_one_batch(kernels, device):
    """Prompts are computed by a kernel of their own, which gets the sinks too."""
    given = operands(new=(70, 1), context=(0, 30), device=device)
    operand, sinks = (given.q, given.k_cache, given.v_cache), SINKS.to(device)
    made = kernels.paged_attention(*operand, given.metadata, scale=0.3, sinks=sinks)
    exact = [each.double() for each in operand]
    wanted = REFERENCE.paged_attention(*exact, given.metadata, scale=0.3, sinks=sinks.double())
    whole, starts = given.metadata, torch.tensor([0, 70, 0, 1], dtype=torch.int32, device=device).view(2, 2)
    parts = [
        (tokens, AttentionMetadata(start, lens, table, tokens, whole.max_kv))
        for tokens, start, lens, table in zip(
            (70, 1), starts, whole.seq_lens.split(1), whole.block_table.split(1), strict=True
        )
    ]
    divided = kernels.paged_attention(*operand, AttentionMetadata.concatenated(*parts), scale=0.3, sinks=sinks)
    torch.testing.assert_close(divided.double(), wanted, rtol=4e-3, atol=4e-3)
    assert kernels.attention.prompts.serves(given.q, given.metadata)
    torch.testing.assert_close(made.double(), wanted, rtol=4e-3, atol=4e-3)


def test_no_kernel_of_a_library_computes_sinks(monkeypatch):
    """Those that are there for the same prompt without sinks."""
    monkeypatch.setattr(prefill_attention, "_has_flash3", lambda: True)
    attention = prefill_attention.PromptAttention(device_of(architecture="sm_90", copy_engine=True))
    given = operands(new=(300,), dtype=torch.bfloat16, size=64)
    own, others = {"pages", "copy"}, {"fa3-fwd", "torch's FlashAttention 2", "torch's cuDNN"}
    assert set(attention._candidates(given)) == own | others
    assert set(attention._candidates(replace(given, sinks=SINKS))) == own
    assert prefill_attention._key(given) != prefill_attention._key(replace(given, sinks=SINKS))


@pytest.mark.parametrize("tokens", [3, 40])
def test_experts(tokens, kernels, device):
    """Biases and the activation, of few tokens and of sorted ones."""
    logits, x = normal(tokens, 6, seed=1), normal(tokens, 40, seed=2).half()
    gate_up, down = (normal(*shape, seed=3, scale=shape[-1] ** -0.5).half() for shape in ((6, 48, 40), (6, 40, 24)))
    activation = ClampedActivation(0.8, 1.702)
    biases = [normal(6, 48, seed=4).half(), normal(6, 40, seed=5).half()]
    shares, names = REFERENCE.route(logits, 2, renormalize=True)
    own = ExpertBiases(*(each.to(device) for each in biases), activation)
    made = kernels.experts(*(each.to(device) for each in (x, shares, names, gate_up, down)), biases=own)
    exact = ExpertBiases(*(each.double() for each in biases), activation)
    right = REFERENCE.experts(x.double(), shares.double(), names, gate_up.double(), down.double(), biases=exact)
    torch.testing.assert_close(made.cpu().double(), right, rtol=4e-3, atol=4e-3)


def test_tiles_for_large_m_take_no_biases(instead_of_launching):
    asked = []
    instead_of_launching(lambda kernel, *operands, **settings: asked.append(kernel.fn.__name__))
    kernels, half = TritonKernels(DEVICES["H200"]), {"dtype": torch.bfloat16, "device": "meta"}
    x, chosen = torch.empty(4096, 512, **half), torch.empty(4096, 2, dtype=torch.int64, device="meta")
    stacks = torch.empty(8, 1024, 512, **half), torch.empty(8, 512, 512, **half)
    assert kernels.mixtures.experts_config(4096, 2, stacks[0])[1].descriptor == LARGE_M
    kernels.experts(x, chosen.float(), chosen, *stacks)
    assert "tall_experts" in asked
    asked.clear()
    biases = ExpertBiases(torch.empty(8, 1024, **half), torch.empty(8, 512, **half), ClampedActivation(7.0, 1.702))
    kernels.experts(x, chosen.float(), chosen, *stacks, biases=biases)
    assert "tall_experts" not in asked
    assert {"expert_gates", "expert_outputs"} <= set(asked)
