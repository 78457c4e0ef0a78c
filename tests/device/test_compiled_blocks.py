"""Products and halves of layers with block-quantized weights: values, bits of a row, and what stays composed."""

import gc
import platform
import re
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider import Engine
from outrider.bundled import bundled
from outrider.device import (
    AttentionBlock,
    AttentionMetadata,
    AttentionTokens,
    DecoderShape,
    KernelSet,
    LayerRows,
    MlpBlock,
    ResidualStream,
    RotaryArgs,
    SeparateInput,
)
from outrider.device.kernels.weights import prepare
from outrider_cpu import code_writer, compiled_blocks
from outrider_cpu.kernels import CpuKernels
from outrider_cpu.packed_weights import pack_blocks

pytestmark = pytest.mark.skipif(find_spec("llvmlite") is None, reason="not run: llvmlite isn't installed")
HIDDEN, INNER, HEADS, KV_HEADS, SIZE, PAGE = 192, 320, 6, 2, 32, 4


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(low, high, rows, columns):
    values = torch.randint(low, high + 1, (rows, columns), generator=torch.Generator().manual_seed(rows + columns)).float()
    values[:, 0::32], values[:, 1::32] = low, high
    return values


def steps(rows, columns, factor):
    scales = ((drawn(rows, columns // 32) + 4) * factor).half().float()
    scales[::7, 0] = 0
    return scales.repeat_interleave(32, 1)


def blocks(kind, rows, columns):
    """A weight with the values of a GGUF type."""
    match kind:
        case "Q4_1":
            return integers(0, 15, rows, columns) * steps(rows, columns, 0.003) + steps(rows, columns, -0.02)
        case "Q4_0":
            return integers(-8, 7, rows, columns) * steps(rows, columns, 0.003 if columns % 64 else -0.003)
        case "Q8_0":
            return integers(-127, 127, rows, columns) * steps(rows, columns, 0.0002)


@pytest.fixture(scope="module")
def compiled():
    return compiled_blocks.CompiledBlocks()


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.sample(1, per="kind,threads")
@pytest.mark.parametrize("kind", ["Q4_1", "Q4_0", "Q8_0"])
@pytest.mark.parametrize(("rows", "columns"), [(320, 576), (2048, 96)])
def test_a_product_is_that_of_the_weight_and_its_rows_keep_their_bits(compiled, threads, kind, rows, columns):
    weight, x, bias = blocks(kind, rows, columns), drawn(13, columns), drawn(rows)
    whole = compiled.linear(x, weight, None)
    expected = x.double() @ weight.double().T
    error = (whole.double() - expected).norm() / expected.norm()
    assert error < 3e-5, "x is rounded to 16 bits"
    for count in (1, 2, 3, 4, 5, 6, 8, 11):
        assert torch.equal(compiled.linear(x[:count], weight, None), whole[:count])
    assert torch.equal(compiled.linear(x[:3].view(1, 3, -1), weight, bias), (whole[:3] + bias).view(1, 3, -1))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_groups_of_x_have_scales_of_their_own(compiled, kind):
    weight, x = blocks(kind, 1024, 128), drawn(6, 128)
    x[0] *= 1e-20
    x[1, :32], x[1, 32:64] = 0, x[1, 32:64] * 1e4
    x[2] = 0
    x[3, 70], x[4, 70] = torch.nan, torch.inf
    x[5, :] = 1e-37
    made, expected = compiled.linear(x, weight, None).double(), x.double() @ weight.double().T
    assert ((made - expected).norm(dim=1) <= 3e-5 * expected.norm(dim=1))[[0, 1, 2]].all()
    assert not made[3:5].isfinite().any()
    assert (made[5] - expected[5]).abs().max() < 1e-33


@pytest.mark.parametrize(
    ("absent", "instruction"),
    [
        ("none", r"vpdpwssd.*zmm"),
        pytest.param("avx512vnni", r"vpmaddwd.*zmm", marks=pytest.mark.slow),
        ("avx512", r"vpmaddwd.*ymm"),
        ("all", r"pmaddwd.*xmm"),
    ],
)
def test_other_processors_compute_the_same_bits(compiled, monkeypatch, absent, instruction):
    """The host's features choose vectors and instructions; of the oldest processor LLVM composes vectors, fused sums and
    float16.
    """
    if platform.machine() != "x86_64":
        pytest.skip("not run: the processors that are tried are x86 ones")
    binding, assembly = code_writer.binding, []
    features, link = binding.get_host_cpu_features(), binding.create_mcjit_compiler
    expects = absent == "all" or all(features.get(name) for name in INSTRUCTIONS[absent])
    left_out = ("avx512", "avxvnni") if absent == "avx512" else absent  # the latter has vpdpwssd on 256 bits
    for name in features if absent != "all" else ():
        features[name] &= not name.startswith(left_out)
    if absent == "all":
        monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "x86-64")
        features = OldFeatures(f16c=False)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(
        binding,
        "create_mcjit_compiler",
        lambda module, machine: assembly.append(machine.emit_assembly(module)) or link(module, machine),
    )
    other = compiled_blocks.CompiledBlocks()
    other._functions = compiled_blocks._Functions()
    for kind in ("Q4_1", "Q8_0"):
        weight, x = blocks(kind, 1024, 128), drawn(7, 128)
        for rows in (1, 2, 7):
            assert torch.equal(other.linear(x[:rows], weight, None), compiled.linear(x[:rows], weight, None))
    if not expects:
        pytest.skip(f"not run: the check of instructions, since this processor lacks one of {INSTRUCTIONS[absent]}")
    used = set(re.findall(r"v?(?:pmaddwd|pdpwssd).*([xyz]mm)", assembly[0]))
    assert re.search(instruction, assembly[0])
    assert used == {instruction[-3:]}
    assert ("vpmaddwd" in assembly[0]) == instruction.startswith("vpmaddwd")


INSTRUCTIONS = {"none": ("avx512bw", "avx512vnni"), "avx512vnni": ("avx512bw",), "avx512": ("avx2",)}


class OldFeatures(dict):
    def flatten(self):
        return ""


def test_a_weight_in_bfloat16_of_8_bits_with_powers_of_two_is_packed(compiled):
    """As ``training`` rounds draft heads. No group needs to have the largest integer."""
    powers = torch.randint(-9, 2, (1024, 4), generator=torch.Generator().manual_seed(3)).float().exp2()
    weight = integers(-100, 90, 1024, 128) * powers.repeat_interleave(32, 1)
    assert torch.equal(weight.bfloat16().float(), weight)
    packed = pack_blocks(weight)
    assert packed is not None
    assert packed.bits == 8
    x = drawn(3, 128)
    made, expected = compiled.linear(x, weight, None).double(), x.double() @ weight.double().T
    assert (made - expected).norm() < 3e-5 * expected.norm()


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_0", "Q8_0"])
def test_only_exact_blocks_are_packed(compiled, kind):
    weight = blocks(kind, 1024, 128)
    packed = pack_blocks(weight)
    assert packed is not None
    assert packed.bits == (8 if kind == "Q8_0" else 4)
    for changed in (weight.half().float(), weight.double(), weight[:1000], weight[:, :100].contiguous()):
        assert changed.equal(weight) or pack_blocks(changed) is None
    for place in ((0, 0), (700, 100)):
        other = weight.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0))
        assert pack_blocks(other) is None, "one value in the last bit"
        other[place] = torch.nan
        assert pack_blocks(other) is None
        assert compiled.linear(drawn(1, 128), other, None) is None


def test_a_changed_weight_is_packed_again_and_freed_with_its_tensor(compiled, collects_little):
    weight, x = blocks("Q4_1", 1024, 128), drawn(2, 128)
    first = compiled.linear(x, weight, None)
    weight.mul_(2)
    assert torch.equal(compiled.linear(x, weight, None), first * 2)
    weight.add_(drawn(1024, 128))
    assert compiled.linear(x, weight, None) is None
    key = id(weight)
    assert key in compiled._entries
    del weight
    gc.collect()
    assert key not in compiled._entries


def test_weights_are_packed_and_attention_is_compiled_at_load(kernels):
    weight, batch = blocks("Q8_0", 1024, 128), Batch()
    prepare(kernels, weight, None)
    assert kernels._compiled_blocks._entries[id(weight)].blocks is not None
    shape = DecoderShape(hidden=HIDDEN, heads=6, kv_heads=2, head_size=96, inner=INNER, vocabulary=1024)
    kernels.for_shape(shape).is_native("attention_block", batch.attention)
    assert any(name.startswith("attention96x") for name in kernels._compiled_blocks._compiled()._calls)


def test_a_model_and_its_head_ask_about_products_outside_of_layers(monkeypatch):
    asked, is_native = [], CpuKernels.is_native
    note = lambda self, name, block=None: asked.append(block) or is_native(self, name, block)  # noqa: E731
    monkeypatch.setattr(CpuKernels, "is_native", note)
    checkpoint = bundled("target")
    with closing(Engine.from_checkpoint(checkpoint, "cpu", draft_dir=bundled("eagle"), speculate="eagle")) as engine:
        for weight in (engine.model.weights.head, engine.proposer.head.weights.fusion):
            assert any(each is weight for each in asked)


class Batch:
    """Requests with tokens in the cache and new ones, and both halves of a layer."""

    def __init__(self, lens=(9, 22), new=2, padding=0, window=0, heads=HEADS):
        rows, pages, generator = len(lens) * new + padding, 33, torch.Generator().manual_seed(5)
        table = torch.randperm(pages - 1, generator=generator)[: len(lens) * 8].view(len(lens), 8).int() + 1
        positions = [length - new + index for length in lens for index in range(new)]
        slots = [int(table[i // new, p // PAGE]) * PAGE + p % PAGE for i, p in enumerate(positions)] + [0] * padding
        angles = drawn(rows, 2 * SIZE)
        self.caches = tuple(drawn(pages, PAGE, KV_HEADS, SIZE) * (1 + each) for each in range(2))
        self.rows = drawn(rows, HIDDEN)
        starts = torch.arange(0, len(lens) + 1, dtype=torch.int32) * new
        batch = AttentionMetadata(
            query_start=starts, seq_lens=torch.tensor(lens).int(), block_table=table, max_query=new, max_kv=32
        )
        rotary = RotaryArgs(angles[:, :SIZE], angles[:, SIZE:], *self.caches, torch.tensor(slots))
        self.tokens = AttentionTokens(batch, rotary, LayerRows())
        self.attention = AttentionBlock(
            norm=drawn(HIDDEN),
            eps=1e-5,
            qkv=blocks("Q4_1", (heads + 2 * KV_HEADS) * SIZE, HIDDEN),
            output=blocks("Q4_1", HIDDEN, heads * SIZE),
            scale=0.2,
            window=window,
        )
        self.mlp = MlpBlock(
            norm=drawn(HIDDEN), eps=1e-5, gate_up=blocks("Q4_1", 2 * INNER, HIDDEN), down=blocks("Q8_0", HIDDEN, INNER)
        )

    def layer(self, kernels, tokens=None, rows=None, halves=("attention_block", "mlp_block"), pending=None):
        """Return the rows after the layer, and the caches; the batch itself stays as it is."""
        caches = [each.clone() for each in self.caches]
        tokens = self.tokens if tokens is None else tokens
        tokens = tokens._replace(rotary=tokens.rotary._replace(k_cache=caches[0], v_cache=caches[1]))
        x = ResidualStream(kernels, (self.rows if rows is None else rows).clone(), pending)
        x = kernels.resolve_block(halves[0], self.attention)(x, self.attention, tokens)
        return kernels.resolve_block(halves[1], self.mlp)(x, self.mlp).add(), *caches


@pytest.fixture(scope="module")
def kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_blocks, "_MIN_ELEMENTS", 1)
        yield CpuKernels()


@pytest.fixture
def compositions(monkeypatch):
    """Note the halves that are composed."""
    composed = []
    for name in ("attention_block", "mlp_block"):
        method = getattr(KernelSet, name)
        note = lambda *given, name=name, method=method, **more: composed.append(name) or method(*given, **more)  # noqa: E731
        monkeypatch.setattr(KernelSet, name, note)
    return composed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lens": (7,), "new": 1},
        {"window": 5},
        {"lens": (3, 1, 14), "new": 1, "padding": 2},
        {"lens": (30,), "new": 11},
        {"heads": 2},
        {"heads": 8},
    ],
)
def test_a_layer_is_that_of_the_reference(kernels, compositions, options):
    batch = Batch(**options)
    made = batch.layer(kernels)
    assert not compositions
    real = len(batch.rows) - options.get("padding", 0)
    expected = batch.layer(KernelSet())
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours[:real], theirs[:real], rtol=1e-4, atol=1e-3)
    assert made[0].isfinite().all()


def test_a_row_keeps_its_bits_among_others(kernels, threads):
    """Plain and speculative decoding decide from the same bits."""
    batch = Batch(lens=(9, 22), new=3)
    together, *caches = batch.layer(kernels)
    attention, rotary = batch.tokens.attention, batch.tokens.rotary
    for row in (0, 2, 5):
        which, later = divmod(row, 3)
        single = replace(
            attention,
            query_start=torch.tensor([0, 1]).int(),
            seq_lens=attention.seq_lens[which : which + 1] - 2 + later,
            block_table=attention.block_table[which : which + 1],
            max_query=1,
        )
        angles = RotaryArgs(rotary.cos[row : row + 1], rotary.sin[row : row + 1], *caches, rotary.slots[row : row + 1])
        batch.caches = tuple(caches)
        alone, *_ = batch.layer(kernels, AttentionTokens(single, angles, LayerRows()), batch.rows[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_pending_and_captured_rows(kernels):
    batch, out = Batch(), torch.empty(4, HIDDEN)
    tokens = batch.tokens._replace(rows=LayerRows(captured=(out,)))
    made, *_ = batch.layer(kernels, tokens)
    assert torch.equal(out, batch.rows)
    assert torch.equal(made, batch.layer(kernels)[0])


def test_a_layer_of_a_draft_head_reads_a_wide_input_and_keeps_rows(kernels, compositions, threads):
    """As EAGLE-3's: the input has the embedding and the hidden state, and only accepted tokens continue."""
    batch, kept = Batch(lens=(9, 22), new=3), torch.tensor([1, 5])
    batch.attention = replace(batch.attention, qkv=blocks("Q8_0", (HEADS + 2 * KV_HEADS) * SIZE, 2 * HIDDEN))
    pending = SeparateInput(drawn(6, 2 * HIDDEN))
    last = replace(
        batch.tokens.attention,
        query_start=torch.tensor([0, 1, 2]).int(),
        seq_lens=batch.tokens.attention.seq_lens - torch.tensor([1, 0]).int(),
        max_query=1,
    )
    for tokens in (batch.tokens, batch.tokens._replace(attention=last, rows=LayerRows(kept=kept))):
        made = batch.layer(kernels, tokens, pending=pending)
        assert not compositions
        for ours, theirs in zip(made, batch.layer(KernelSet(), tokens, pending=pending), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
        compositions.clear()
    batch.layer(kernels)
    assert compositions == ["attention_block"], "the residual stream is narrower than the product's input"


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_other_calls_are_composed(kernels, compositions):
    batch = Batch()
    tokens, attention = batch.tokens, batch.tokens.attention
    mask = torch.ones(4, 2, dtype=torch.bool)
    for other in (
        tokens._replace(attention=replace(attention, tree_mask=mask)),
        tokens._replace(query_scales=torch.ones(4, 1, 1)),
        tokens._replace(attention=replace(attention, max_query=65)),
    ):
        batch.layer(kernels, other)
        assert compositions == ["attention_block"]
        compositions.clear()
    with Watch():
        batch.layer(kernels)
    assert compositions == ["attention_block", "mlp_block"]


def test_other_layers_are_composed(kernels, monkeypatch):
    batch = Batch()
    assert not kernels.is_native("attention_block", replace(batch.attention, qkv_bias=drawn(10 * SIZE)))
    assert not kernels.is_native("attention_block", replace(batch.attention, sinks=drawn(6)))
    assert not kernels.is_native("mlp_block", replace(batch.mlp, down=drawn(HIDDEN, INNER)))
    wider = blocks("Q8_0", 2 * HIDDEN, INNER)
    assert not kernels.is_native("mlp_block", replace(batch.mlp, down=wider)), "its product is added to the input"
    assert kernels.implementation("mlp_block", batch.mlp) == "native"
    monkeypatch.setattr(compiled_blocks, "find_spec", lambda name: None)
    assert not CpuKernels().is_native("mlp_block", batch.mlp), "llvmlite is an extra"
