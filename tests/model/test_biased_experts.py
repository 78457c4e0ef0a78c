"""Attention with sinks and experts with biases (gpt-oss): both layouts of a checkpoint, ranks, engines, refusals."""

import re
import shutil

import pytest
import torch

from model.test_decoder import PROMPT, agree, engines_agree, expect
from model.test_mixtures import edited, expect_refusal, nbytes, reshaped, without
from outrider import Engine, SamplingParams
from outrider.device import Capabilities, ConfigError, KernelSet, QuantizedWeight, WrappedKernels
from outrider.device.kernels.reference.model import dequantize
from outrider.model import ModelRanks, Shard, Shards, load_decoder, plan_decoder
from outrider.model.checkpoint.loading import header_bytes
from outrider.registry import get_backend
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import rewrite, store_mxfp4, write_checkpoint, write_eagle3

STEM = "model.layers.1.mlp.experts"
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    return path, write_checkpoint(path, "gpt_oss")


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    path = tmp_path_factory.mktemp("mxfp4")
    model = write_checkpoint(path, "gpt_oss", seed=1)
    store_mxfp4(path, model)
    return path, model


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("layout", ["plain", "mxfp4"])
def test_tokens_and_logits_of_transformers(backend, request, layout, chunk):
    agree(request.getfixturevalue(layout)[0], backend, request.getfixturevalue(layout)[1], chunk=chunk)


def test_published_names_of_the_rope(tmp_path, backend, plain):
    """``rope_scaling`` and ``rope_theta``, as published, and no ``swiglu_alpha``."""
    path, reference = plain
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    rope = dict(reference.config.rope_parameters)
    rewrite(tmp_path, rope_parameters=None, rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    assert (
        plan_decoder(tmp_path, backend=backend, dtype=torch.float32).config
        == load_decoder(path, backend=backend, dtype=torch.float32).config
    )


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_sinks_in_a_wider_dtype_than_the_model(tmp_path, plain, device):
    """They aren't read together with the tensors in the model's dtype."""
    path, reference = plain
    edited(path, tmp_path, lambda tensors: {key: t if "sinks" in key else t.bfloat16() for key, t in tensors.items()})
    sinks = load_decoder(tmp_path, backend=get_backend(device), dtype=torch.bfloat16).weights.layers[1].sinks
    assert torch.equal(sinks.cpu(), reference.model.layers[1].self_attn.sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_dequantized_exactly(backend, mxfp4, dtype):
    path, reference = mxfp4
    loaded = load_decoder(path, backend=backend, dtype=dtype, quantized="dequantize")
    for own, theirs in zip(loaded.weights.layers, reference.model.layers, strict=True):
        rows = theirs.mlp.experts.gate_up_proj.mT
        assert torch.equal(own.gate_up, torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1).to(dtype))
        assert torch.equal(own.down, theirs.mlp.experts.down_proj.mT.to(dtype))
        assert torch.equal(own.sinks, theirs.self_attn.sinks)
        assert own.sinks.dtype is torch.float32


def values(weight, dtype=torch.float32):
    """The dequantized values of a weight."""
    if isinstance(weight, torch.Tensor):
        return weight
    return dequantize(weight.data, weight.scales, None, weight.format, weight.block, weight.shape, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_mxfp4_stays_packed(mxfp4, device, dtype):
    """4.25 bits of a value, which is that of transformers; the biases are tensors."""
    path, reference = mxfp4
    loaded = load_decoder(path, backend=get_backend(device), dtype=dtype)
    for own, theirs in zip(loaded.weights.layers, reference.model.layers, strict=True):
        rows = theirs.mlp.experts.gate_up_proj.mT
        wanted = torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1), theirs.mlp.experts.down_proj.mT
        for weight, right in zip((own.gate_up, own.down), wanted, strict=True):
            assert weight.scales.dtype is torch.float8_e8m0fnu
            assert weight.nbytes == right.numel() * 17 // 32
            assert torch.equal(values(weight, dtype).cpu().view(right.shape), right.to(dtype))
        assert torch.equal(own.down_bias.cpu(), theirs.mlp.experts.down_proj_bias.to(dtype))


class WithoutFloats(CpuBackend):
    """A backend whose kernels don't multiply 4-bit floats."""

    capabilities = Capabilities(host_writes_memory=True, quantized_formats=frozenset({"fp8"}))


def test_a_backend_without_kernels_for_mxfp4(mxfp4, expected):
    """The experts are dequantized while they are loaded, and the engine says so; in mode ``reference`` they stay packed."""
    config = plain_config(max_requests=3, max_context=96, page_size=4, prefill_chunk=16)
    for mode, is_packed, told in (
        (
            "kernels",
            False,
            "quantized dequantize (the experts are mxfp4, for which there are no kernels: they are plain now)",
        ),
        ("reference", True, "quantized fp4 per channel in 6 weights (the checkpoint's; multiplied by the torch reference"),
    ):
        plan = plan_decoder(mxfp4[0], backend=WithoutFloats(), dtype=torch.float32, quantized=mode)
        assert isinstance(plan.load().weights.layers[0].down, QuantizedWeight) is is_packed
        engine = Engine.from_checkpoint(mxfp4[0], WithoutFloats(), speculate="ngram", config=config, quantized=mode)
        assert told in next(str(choice) for choice in engine.chosen if choice.name == "quantized")
        assert engines_tokens(engine, expected[0]) == expected[1]


@pytest.mark.parametrize("scale", [0, 252])
@pytest.mark.parametrize("mode", ["kernels", "dequantize"])
def test_the_smallest_and_the_largest_scale(tmp_path, backend, mxfp4, mode, scale):
    edited(mxfp4[0], tmp_path, lambda tensors: tensors | {f"{STEM}.down_proj_scales": scales_of(tensors, scale)})
    down = load_decoder(tmp_path, backend=backend, dtype=torch.bfloat16, quantized=mode).weights.layers[1].down
    sizes = values(down, torch.bfloat16).double().abs()
    assert (sizes[sizes != 0].min(), sizes.max()) == (0.5 * 2.0 ** (scale - 127), 6 * 2.0 ** (scale - 127))


def scales_of(tensors, value):
    return torch.full_like(tensors[f"{STEM}.down_proj_scales"], value)


def stacked(weight, experts=4):
    """The dequantized values of a stack, as a tensor [experts, rows, columns]."""
    found = values(weight)
    return found.view(experts, -1, found.shape[-1])


@pytest.mark.parametrize("divides", [False, True], ids=["slices", "divided"])
@pytest.mark.parametrize("layout", ["plain", "mxfp4"])
def test_ranks_hold_their_parts(backend, request, layout, divides):
    path = request.getfixturevalue(layout)[0]
    whole = load_decoder(path, backend=backend, dtype=torch.float32).weights.layers[1]
    whole_gate_up, whole_down = stacked(whole.gate_up), stacked(whole.down)
    parts = []
    for rank in range(2):
        own = Shard(rank, 2)
        shards = Shards(mlp=own, divides_experts=True) if divides else Shards(attention=own, mlp=own, vocabulary=own)
        plan = plan_decoder(path, backend=backend, dtype=torch.float32, ranks=ModelRanks(shards))
        loaded = plan.load()
        held = sum(map(nbytes, (loaded.weights, *loaded.weights.layers)))
        # Half of a group of 32 columns has a scale of its own, and the second rank has zeros as bias of down.
        more = 3 * 4 * 32 // 2 + rank * 3 * 4 * 32 * 4 if layout == "mxfp4" and not divides else 0
        assert plan.weight_bytes == held - more
        parts.append(loaded._layers[1].blocks[1].weights)
        heads = loaded._layers[1].blocks[0].weights.sinks
        assert torch.equal(heads, whole.sinks if divides else whole.sinks.chunk(2)[rank])
    if divides:
        joined = [torch.cat([getattr(part.biases, name) for part in parts]) for name in ("gate_up", "down")]
        assert torch.equal(torch.cat([stacked(part.gate_up, 2) for part in parts]), whole_gate_up)
        assert torch.equal(torch.cat([stacked(part.down, 2) for part in parts]), whole_down)
    else:
        joined = [gates_first([part.biases.gate_up for part in parts]), sum(part.biases.down for part in parts)]
        assert torch.equal(gates_first([stacked(part.gate_up) for part in parts]), whole_gate_up)
        assert torch.equal(torch.cat([stacked(part.down) for part in parts], dim=2), whole_down)
        assert not parts[1].biases.down.any()  # the sum over the ranks has it once
    assert torch.equal(joined[0], whole.gate_up_bias)
    assert torch.equal(joined[1], whole.down_bias)


def gates_first(slices):
    """The rows of all ranks' slices, those of the gates before those of up."""
    return torch.cat([each.chunk(2, dim=1)[half] for half in range(2) for each in slices], dim=1)


@pytest.mark.parametrize("mode", ["kernels", "dequantize"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_that_headers_predict(backend, mxfp4, dtype, mode):
    plan = plan_decoder(mxfp4[0], backend=backend, dtype=dtype, quantized=mode)
    loaded = plan.load()
    assert plan.weight_bytes == sum(map(nbytes, (loaded.weights, *loaded.weights.layers)))
    drafted = plan_decoder(mxfp4[0].parent / mxfp4[0].name, backend=backend, dtype=dtype, quantized=mode)
    assert header_bytes(drafted, copy_of(mxfp4[0])) == plan.weight_bytes - sinks_bytes(loaded, dtype)


def copy_of(path):
    """Another directory with the same checkpoint."""
    target = path.with_name(f"{path.name}-copy")
    return shutil.copytree(path, target, dirs_exist_ok=True)


def sinks_bytes(decoder, dtype):
    """Bytes by which sinks in float32 exceed those in ``dtype``."""
    return sum(layer.sinks.numel() * (4 - dtype.itemsize) for layer in decoder.weights.layers)


@pytest.fixture(scope="module")
def expected(mxfp4):
    """Greedy tokens of transformers for prompts that are longer than the window and share a prefix."""
    mxfp4[1].generation_config.eos_token_id = None
    prompts = [PROMPT * 2, [*PROMPT, 4, 4], [9, 2, 9, 2, 9, 2, 9, 2, 9]]
    return prompts, [tuple(expect(mxfp4[1], prompt, NEW_TOKENS)[0]) for prompt in prompts]


def engines_tokens(engine, prompts):
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return [result.token_ids for result in engine.generate(prompts, params)]


@pytest.mark.sample(1, per="speculate")
@pytest.mark.parametrize("speculate", ["none", "ngram", "suffix", "draft-model", "eagle3"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_engines_give_the_tokens_of_transformers(tmp_path, mxfp4, device, speculate):
    if speculate == "eagle3":
        write_eagle3(tmp_path)
    engine = engines_agree(*mxfp4, device, speculate, draft=tmp_path if speculate == "eagle3" else None)
    if speculate == "draft-model":
        assert engine.stats.acceptance_length > 3  # it drafts for itself, three tokens at a time


@pytest.mark.parametrize("device", ["cpu", "sim:kernels=host-plans", "sim:like=npu"])
def test_other_kernels_give_the_tokens_of_transformers(mxfp4, expected, device):
    config = plain_config(max_requests=3, max_context=96, page_size=4, prefill_chunk=16, batch_invariant=device == "cpu")
    engine = Engine.from_checkpoint(mxfp4[0], get_backend(device), speculate="ngram", config=config)
    assert engines_tokens(engine, expected[0]) == expected[1]


SCALES, BLOCKS = f"{STEM}.gate_up_proj_scales", f"{STEM}.gate_up_proj_blocks"


@pytest.mark.parametrize(
    ("layout", "change", "told"),
    [
        ("mxfp4", without(SCALES), f"has '{BLOCKS}' and no '{SCALES}'; expected both"),
        ("mxfp4", without(BLOCKS), f"has '{SCALES}' and no '{BLOCKS}'; expected both"),
        ("mxfp4", reshaped(SCALES, 4, 64, 1), "are uint8 [4, 64, 1, 16] and float32 [4, 64, 1]; expected uint8"),
        (
            "mxfp4",
            lambda tensors: tensors | {SCALES: tensors[SCALES][:3].clone()},
            "are uint8 [4, 64, 1, 16] and uint8 [3, 64, 1]; expected uint8",
        ),
        (
            "mxfp4",
            lambda tensors: tensors | {SCALES: torch.full_like(tensors[SCALES], 255)},
            f"tensor '{SCALES}' has a scale that is no number",
        ),
        ("plain", without(f"{STEM}.down_proj"), f"missing: '{STEM}.down_proj' [4, 32, 32]"),
        ("plain", reshaped(f"{STEM}.gate_up_proj", 4, 32, 60), "has shape [4, 60, 32], expected [4, 64, 32]"),
        ("plain", reshaped(f"{STEM}.gate_up_proj_bias", 4, 60), "has shape [4, 60, 1], expected [4, 64, 1]"),
        ("plain", without("model.layers.0.self_attn.sinks"), "missing: 'model.layers.0.self_attn.sinks' [4]"),
        ("plain", without("model.layers.0.mlp.router.bias"), "missing: 'model.layers.0.mlp.router.bias' [4]"),
    ],
)
def test_a_broken_checkpoint_names_the_tensor(tmp_path, backend, request, layout, change, told):
    expect_refusal(request.getfixturevalue(layout)[0], tmp_path, backend, re.escape(told), change)


class Attends(KernelSet):
    name = "attends"

    def paged_attention(self, *operands, **named):
        return super().paged_attention(*operands, **named)


class MixesExperts(WrappedKernels):
    name = "mixes"

    def experts(self, *operands, **named):
        return super().experts(*operands, **named)


class MixesQuantizedExperts(WrappedKernels):
    name = "mixes quantised"

    def experts_quantized(self, *operands, **named):
        return super().experts_quantized(*operands, **named)


@pytest.mark.parametrize(
    ("kernels", "missing"),
    [
        (Attends(), "attention_sinks"),
        (MixesExperts(KernelSet()), "expert_biases"),
        (MixesQuantizedExperts(KernelSet()), "expert_biases"),
        (MixesExperts(Attends()), "attention_sinks and expert_biases"),
        (WrappedKernels(Attends()), "attention_sinks"),
        (MixesExperts(Attends()).batch_invariant(), "expert_biases"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kernels_that_lack_an_operand_are_refused(backend, plain, kernels, missing):
    told = rf"a gpt_oss model needs {missing}, which the kernels '{re.escape(kernels.name)}' don't take"
    with pytest.raises(ConfigError, match=told):
        plan_decoder(plain[0], backend=backend, dtype=torch.float32, kernels=kernels)
    loaded = load_decoder(plain[0], backend=backend, dtype=torch.float32)
    with pytest.raises(ConfigError, match=told):
        type(loaded)(loaded.config, loaded.weights, kernels)


def test_kernels_that_declare_an_operand_are_taken(backend, plain):
    class Declares(Attends):
        optional_operands = KernelSet.optional_operands

        def paged_attention(self, *operands, **named):
            return super().paged_attention(*operands, **named)

    for kernels in (KernelSet(), Declares(), WrappedKernels(Declares()), Attends().batch_invariant()):
        assert plan_decoder(plain[0], backend=backend, dtype=torch.float32, kernels=kernels).kernels is kernels
