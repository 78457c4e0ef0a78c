"""Quantised mixtures of experts: logits of transformers with what the weights stand for, and what is refused."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from model.harness import Driver
from model.quantized_checkpoints import compressed_config, compressor, group_of, rewrite, write_compressed, write_fp8
from model.test_quantized import DEQUANTIZE, KERNELS, PROMPT, TOLERANCE, ours
from outrider.device import ConfigError, KernelSet, QuantizedWeight
from outrider.device.kernels.weights import quantized_products
from outrider.errors import CheckpointError
from outrider.model import Decoder, ModelRanks, Shard, Shards, load_decoder
from tiny_checkpoints import write_checkpoint

SHAPE = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
FORMATS = {
    "fp8 per channel": lambda source, out: write_compressed(source, out, "fp8-channel-dynamic"),
    "fp8 blocks": lambda source, out: write_compressed(source, out, "fp8-block"),
    "hugging face's fp8": write_fp8,
    "int8": lambda source, out: write_compressed(source, out, "int8-w8a8"),
    "int4": lambda source, out: write_compressed(source, out, "int4-g128"),
    "int4 with zeros": lambda source, out: write_compressed(source, out, "int4-g32-asymmetric"),
}
LEFT_OUT = ("lm_head", "gate", "e_score_correction_bias")
WRITERS = FORMATS | {"MiniMax's fp8": lambda source, out: write_fp8(source, out, skip=LEFT_OUT)}


@pytest.fixture(scope="module")
def mixture(request, tmp_path_factory):
    family = getattr(request, "param", "qwen3_moe")
    directory = tmp_path_factory.mktemp(family)
    more = {"shared_expert_intermediate_size": 128} if family == "qwen2_moe" else {}
    count = {} if family == "mixtral" else {"num_experts": 6}
    write_checkpoint(directory, family, **SHAPE, **more, **count)
    return SimpleNamespace(directory=directory, family=family)


def wanted(mixture, state, tmp_path):
    """Transformers' logits with these weights."""
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_bytes((mixture.directory / "config.json").read_bytes())
    save_file(
        {key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


CASES = [*(("qwen3_moe", name) for name in FORMATS), ("qwen2_moe", "fp8 per channel"), ("qwen2_moe", "int4")]
CASES += [("glm4_moe", "fp8 blocks"), ("glm4_moe", "hugging face's fp8"), ("minimax_m2", "MiniMax's fp8")]
CASES += [("minimax_m2", "fp8 blocks"), ("hy_v3", "fp8 blocks"), ("hy_v3", "int4")]
CASES += [("ernie4_5_moe", name) for name in FORMATS]  # which reads the rows of queries and keys in another order


@pytest.mark.sample(4)
@pytest.mark.parametrize(("mixture", "name"), CASES, indirect=["mixture"])
def test_logits(tmp_path, backend, mixture, name):
    """Activations aren't quantised for this: a router that is a hair's breadth from another choice takes it then."""
    state = WRITERS[name](mixture.directory, tmp_path)
    right = wanted(mixture, state, tmp_path)
    _, made = ours(tmp_path, backend, DEQUANTIZE)
    assert (made - right).abs().max() < TOLERANCE
    model = load_decoder(tmp_path, backend=backend, dtype=torch.float32, quantized=KERNELS)
    layer = model.weights.layers[-1]
    assert isinstance(layer.gate_up, QuantizedWeight)
    assert isinstance(layer.down, QuantizedWeight)
    assert isinstance(layer.router, torch.Tensor)
    active = sum("activations" in label for label in quantized_products(layer))
    assert bool(active) is not name.startswith("int4")
    weights = replace(model.weights, layers=tuple(plainly(layer) for layer in model.weights.layers))
    driver = Driver(Decoder(model.config, weights, model.kernels))
    assert (driver.logits([(driver.sequence(), PROMPT)]) - right).abs().max() < TOLERANCE


def plainly(layer):
    """The layer with activations as they are."""
    found = {each.name: getattr(layer, each.name) for each in fields(layer)}
    quantized = {name: value for name, value in found.items() if isinstance(value, QuantizedWeight)}
    return replace(
        layer, **{n: replace(v, activations=None, activation_group=0, input_scale=None) for n, v in quantized.items()}
    )


def test_experts_are_multiplied_with_their_own_weights():
    """Each expert of a stack by itself, as products of its own."""
    dice = torch.Generator().manual_seed(1)
    count, inner, hidden = 5, 16, 32
    data = [
        torch.randint(-100, 100, shape, dtype=torch.int8, generator=dice)
        for shape in ((count * 2 * inner, hidden), (count * hidden, inner))
    ]
    first, second = (
        QuantizedWeight(
            format="int8",
            data=each,
            scales=(torch.rand(each.shape[0] // 8, -(-each.shape[1] // 16), generator=dice) + 0.5) / 300,
            block=(8, 16),
            shape=tuple(each.shape),
            activations="int8",
        )
        for each in data
    )
    kernels, x = KernelSet(), torch.randn(7, hidden, generator=dice)
    weights, chosen = kernels.route(torch.randn(7, count, generator=dice), 2, renormalize=True)
    made = kernels.experts_quantized(x, weights, chosen, first, second)
    for token in range(7):
        total = torch.zeros(hidden)
        for share, name in zip(weights[token], chosen[token].tolist(), strict=True):
            own = [part(first, name, 2 * inner), part(second, name, hidden)]
            total += (
                share
                * kernels.linear_quantized(kernels.silu_mul(kernels.linear_quantized(x[token : token + 1], own[0])), own[1])[
                    0
                ]
            )
        torch.testing.assert_close(made[token], total, rtol=1e-5, atol=1e-5)


def part(weight, name, rows):
    """The rows of one expert."""
    own, grid = slice(name * rows, (name + 1) * rows), slice(name * rows // 8, (name + 1) * rows // 8)
    return replace(weight, data=weight.data[own], scales=weight.scales[grid], shape=(rows, weight.shape[1]))


def test_ranks_have_parts_of_every_expert(tmp_path, backend, mixture):
    write_compressed(mixture.directory, tmp_path, "int4-g32-asymmetric")
    whole = load_decoder(tmp_path, backend=backend, dtype=torch.float32, quantized=KERNELS).weights.layers[0]
    for rank in range(2):
        shards = Shards(attention=Shard(rank, 2), mlp=Shard(rank, 2), vocabulary=Shard(rank, 2))
        layer = load_decoder(
            tmp_path, backend=backend, dtype=torch.float32, quantized=KERNELS, ranks=ModelRanks(shards)
        ).weights.layers[0]
        assert layer.gate_up.shape == (whole.gate_up.shape[0] // 2, whole.gate_up.shape[1])
        assert layer.down.shape == (whole.down.shape[0], whole.down.shape[1] // 2)
        divided = ModelRanks(Shards(mlp=Shard(rank, 2), divides_experts=True))
        layer = load_decoder(tmp_path, backend=backend, dtype=torch.float32, quantized=KERNELS, ranks=divided).weights.layers[
            0
        ]
        for stored, all_stored in ((layer.gate_up, whole.gate_up), (layer.down, whole.down)):
            assert (2 * stored.shape[0], stored.shape[1]) == all_stored.shape
            assert torch.equal(stored.data, all_stored.data.chunk(2)[rank])
            assert torch.equal(stored.scales, all_stored.scales.chunk(2)[rank])


def write_two_formats(source, out):
    """Down projections in 8 bits, the other products in 4 bits."""
    by_format = {"int8-w8a16": ["re:.*down_proj"], "int4-g128": ["Linear"]}
    groups = {name: group_of(name, targets) for name, targets in by_format.items()}

    def convert(module, weight):
        return compressor("int8-w8a16" if "down_proj" in module else "int4-g128")(module, weight)

    rewrite(source, out, convert, compressed_config(groups))


@pytest.mark.parametrize(
    ("write", "stored"),
    [
        (
            lambda source, out: write_compressed(source, out, "fp8-channel-dynamic", ignore=("lm_head", "experts.1.")),
            ".*plain.*",
        ),
        (write_two_formats, r"int4 per channel \(gate and up\) and int8 per channel \(down\).*"),
    ],
    ids=["some experts plain", "two formats"],
)
def test_experts_stored_in_several_ways_are_refused(tmp_path, backend, mixture, write, stored):
    write(mixture.directory, tmp_path)
    message = rf"model\.safetensors: layer 0: its experts are stored as {stored}--quantized dequantize"
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32, quantized=KERNELS)
    ours(tmp_path, backend, DEQUANTIZE)


def test_blocks_that_two_experts_share_are_refused():
    weight = QuantizedWeight(
        format="int8", data=torch.zeros(64, 32, dtype=torch.int8), scales=torch.ones(2, 1), block=(48, 32), shape=(64, 32)
    )
    down = replace(weight, data=weight.data[:, :16].contiguous(), shape=(64, 16), block=(32, 16))
    x, chosen = torch.zeros(1, 32), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"blocks that end with an expert's rows"):
        KernelSet().experts_quantized(x, torch.ones(1, 1), chosen, weight, down)
