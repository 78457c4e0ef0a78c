"""MiniMax-M2, Hunyuan 3 and ERNIE 4.5: engines, published names, formats, ranks, and what is refused."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from model.harness import Driver
from model.test_decoder import PROMPT, TOLERANCE, agree, engines_agree, expect
from model.test_mixtures import edited, expect_refusal, reshaped, without
from model.test_quantized_mixtures import plainly
from model.wrong_configs import WRONG_CONFIGS
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, CorrectedRouting, KernelSet, QuantizedWeight
from outrider.errors import CheckpointError
from outrider.model import Decoder, ModelRanks, Shard, Shards, load_decoder, plan_decoder
from outrider.model.checkpoint.files import AdjacentPairs, Piece
from outrider.model.quantization.loading import in_model_order
from outrider.model.quantization.writing import quantize_checkpoint
from outrider.registry import get_backend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import write_checkpoint

FAMILIES = ("minimax_m2", "hy_v3", "ernie4_5_moe", "ernie4_5")
NEW_TOKENS = 20
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of each family, and transformers' model of it."""
    found = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        found[family] = path, write_checkpoint(path, family)
    return found


@pytest.mark.sample(1, per="family")
@pytest.mark.parametrize("chunk", [3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_a_prompt(backend, checkpoints, family, chunk):
    agree(checkpoints[family][0], backend, checkpoints[family][1], chunk=chunk)


@pytest.mark.sample(1, per="family")
@pytest.mark.parametrize("speculate", ["none", "ngram", "draft-model"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_give_the_tokens_of_transformers(checkpoints, family, device, speculate):
    engines_agree(*checkpoints[family], device, speculate)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_invariant_kernels_give_the_tokens_of_transformers(checkpoints, family):
    path, reference = checkpoints[family]
    expected = tuple(expect(reference, PROMPT, NEW_TOKENS)[0])
    config = plain_config(max_context=96, batch_invariant=True)
    engine = Engine.from_checkpoint(path, get_backend("cpu"), config=config)
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert completion.token_ids == expected


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("minimax_m2", ("gate.weight", "e_score_correction_bias", "experts.5.w1.weight", "experts.0.w2.weight")),
        ("hy_v3", ("router.gate.weight", "expert_bias", "shared_mlp.up_proj.weight", "experts.5.gate_proj.weight")),
        ("ernie4_5_moe", ("gate.weight", "moe_statics.e_score_correction_bias", "shared_experts.up_proj.weight")),
    ],
)
def test_the_tests_read_published_names(checkpoints, family, names):
    block = "block_sparse_moe" if family == "minimax_m2" else "mlp"
    with safe_open(checkpoints[family][0] / "model.safetensors", "pt") as file:
        assert {f"{LAYER}.{block}.{name}" for name in names} <= set(file.keys())


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_the_router_is_as_wide_as_its_correction(backend, checkpoints, family):
    path, model = checkpoints[family]
    layer = load_decoder(path, backend=backend, dtype=torch.bfloat16).weights.layers[1]
    mlp = model.model.layers[1].mlp
    assert torch.equal(layer.router, mlp.gate.weight)
    correction = mlp.gate.moe_statics if family == "ernie4_5_moe" else mlp
    assert torch.equal(layer.router_correction, correction.e_score_correction_bias)
    assert layer.gate_up.dtype is torch.bfloat16


@pytest.mark.sample(1, per="family")
@pytest.mark.parametrize("format", ["fp8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_copy_generates(tmp_path, backend, checkpoints, family, format):
    """With the logits of its numbers, where activations stay as they are."""
    quantize_checkpoint(checkpoints[family][0], tmp_path / "q", format=format, group=8 if format == "int4" else None)
    config = plain_config(max_context=64, dtype="float32")
    engine = Engine.from_checkpoint(tmp_path / "q", backend, quantized="reference", config=config)
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert len(completion.token_ids) == NEW_TOKENS
    layer = engine.model.weights.layers[1]
    assert isinstance(layer.qkv, QuantizedWeight)
    assert isinstance(layer.down, QuantizedWeight)
    assert isinstance(layer.router, torch.Tensor) is (family != "ernie4_5")
    weights = replace(engine.model.weights, layers=tuple(map(plainly, engine.model.weights.layers)))
    made = Driver(Decoder(engine.model.config, weights, engine.model.kernels))
    right = Driver(load_decoder(tmp_path / "q", backend=backend, dtype=torch.float32, quantized="dequantize"))
    logits, wanted = (each.logits([(each.sequence(), PROMPT)]) for each in (made, right))
    assert (logits - wanted).abs().max() < TOLERANCE


def test_rows_of_adjacent_pairs_are_read_in_the_order_of_the_model():
    """Two heads of four: the first row of each pair, then the second one of each; and two of six, whose last four rotate."""
    piece = Piece("q", (8, 1), paired=AdjacentPairs(4, 4))
    assert piece.in_model_order(torch.arange(8)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    piece = Piece("q", (12, 1), paired=AdjacentPairs(6, 4))
    assert piece.in_model_order(torch.arange(12)).tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    assert Piece("q", (8, 1)).in_model_order(torch.arange(8)).tolist() == list(range(8))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_quantized_rows_keep_their_scales(rows):
    """Whether a scale is that of one row, of a part of a head, of a head or of all."""
    data = torch.arange(1, 17, dtype=torch.int8).view(8, 2)
    weight = QuantizedWeight(
        format="int8", data=data, scales=torch.arange(1.0, 8 / rows + 1).view(-1, 1), block=(rows, 2), shape=(8, 2)
    )
    values = data * weight.scales.repeat_interleave(rows, 0)
    piece = Piece("q", (8, 2), paired=AdjacentPairs(4, 4))
    made = in_model_order(weight, piece)
    assert made.block[0] == (rows if rows % 4 == 0 else 1)
    assert torch.equal(made.data * made.scales.repeat_interleave(made.block[0], 0), piece.in_model_order(values))


def test_the_norms_of_all_heads_are_refused_on_ranks_that_divide_them(backend, checkpoints):
    path, ranks = checkpoints["minimax_m2"][0], ModelRanks(Shards(attention=Shard(0, 2), mlp=Shard(0, 2)))
    told = "a minimax_m2 model norms all heads of a token at once, and 2 tensor-parallel ranks would divide them"
    with pytest.raises(ConfigError, match=told):
        plan_decoder(path, backend=backend, dtype=torch.float32, ranks=ranks)
    divided = ModelRanks(Shards(mlp=Shard(1, 2), divides_experts=True))
    layer = plan_decoder(path, backend=backend, dtype=torch.float32, ranks=divided).load().weights.layers[0]
    assert layer.gate_up.shape == (3, 48, 32)
    assert (layer.q_norm.shape, layer.k_norm.shape) == ((64,), (32,))


def test_kernels_that_norm_each_head_alone_are_refused(backend, checkpoints):
    class Norms(KernelSet):
        name = "norms"

        def head_norm_rope_write_cache(self, *operands):
            return super().head_norm_rope_write_cache(*operands)

    told = "a minimax_m2 model needs joint_head_norms, which the kernels 'norms' don't take"
    with pytest.raises(ConfigError, match=told):
        plan_decoder(checkpoints["minimax_m2"][0], backend=backend, dtype=torch.float32, kernels=Norms())
    plan_decoder(checkpoints["hy_v3"][0], backend=backend, dtype=torch.float32, kernels=Norms())
    plan_decoder(
        checkpoints["minimax_m2"][0], backend=backend, dtype=torch.float32, kernels=Norms().batch_invariant()
    )  # which calls the norm of rows


ERNIE_HEAD = ("mtp_block.0.mlp.up_proj", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")


def test_ernies_draft_head_is_not_read(tmp_path, backend, checkpoints):
    path, model = checkpoints["ernie4_5_moe"]
    head = {f"model.{name}.weight": torch.randn(32) for name in ERNIE_HEAD}
    edited(path, tmp_path, lambda tensors: tensors | head, num_nextn_predict_layers=1)
    agree(tmp_path, backend, model)
    with pytest.raises((ConfigError, CheckpointError), match="multi-token prediction"):
        Engine.from_checkpoint(tmp_path, backend, speculate="mtp", config=plain_config(max_context=64))


MINIMAX, HUNYUAN, ERNIE = (f"{LAYER}.{block}" for block in ("block_sparse_moe", "mlp", "mlp"))


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("minimax_m2", without(f"{MINIMAX}.e_score_correction_bias"), f"missing: '{MINIMAX}.e_score_correction_bias' [6]"),
        ("minimax_m2", without(f"{MINIMAX}.experts.5.w3.weight"), f"missing: '{MINIMAX}.experts.5.w3.weight' [24, 32]"),
        ("minimax_m2", reshaped(f"{LAYER}.self_attn.q_norm.weight", 16), "has shape [16], expected [64]"),
        ("hy_v3", without(f"{HUNYUAN}.router.gate.weight"), f"missing: '{HUNYUAN}.router.gate.weight' [6, 32]"),
        ("hy_v3", without(f"{HUNYUAN}.expert_bias"), f"missing: '{HUNYUAN}.expert_bias' [6]"),
        ("hy_v3", without(f"{HUNYUAN}.shared_mlp.down_proj.weight"), f"missing: '{HUNYUAN}.shared_mlp.down_proj.weight'"),
        (
            "ernie4_5_moe",
            reshaped(f"{ERNIE}.moe_statics.e_score_correction_bias", 6),
            f"tensor '{ERNIE}.moe_statics.e_score_correction_bias' has shape [6], expected [1, 6]",
        ),
        ("ernie4_5", reshaped(f"{LAYER}.self_attn.q_proj.bias", 64), f"not expected: '{LAYER}.self_attn.q_proj.bias' [64]"),
    ],
)
def test_a_broken_checkpoint_names_the_tensor(tmp_path, backend, checkpoints, family, change, told):
    expect_refusal(checkpoints[family][0], tmp_path, backend, re.escape(told), change)


@pytest.mark.parametrize(
    ("family", "config", "told"),
    [(family, *case) for family in FAMILIES[:3] for case in WRONG_CONFIGS[family]],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be(tmp_path, backend, checkpoints, family, config, told):
    rope = {"rope_parameters": None, "rope_theta": 10000.0} if family == "minimax_m2" else {}  # as published
    expect_refusal(checkpoints[family][0], tmp_path, backend, told, **rope, **config)


def test_the_rotated_dimensions_by_their_published_name(tmp_path, backend, checkpoints):
    path, model = checkpoints["minimax_m2"]
    theta = model.config.rope_parameters["rope_theta"]
    edited(path, tmp_path, rope_parameters=None, rope_theta=theta, rotary_dim=8)
    assert load_decoder(tmp_path, backend=backend, dtype=torch.float32).config.rope.rotated_size(16) == 8
    agree(tmp_path, backend, model)


def test_layers_of_experts(tmp_path, backend):
    """Every second layer, from the third on; the last layer may be named."""
    path = tmp_path / "model"
    write_checkpoint(path, "ernie4_5_moe-steps")
    model = load_decoder(path, backend=backend, dtype=torch.float32)
    assert model.config.experts.dense_layers == (0, 1, 2, 4)
    config = json.loads((path / "config.json").read_text())
    assert config["moe_layer_end_index"] == 4
    kept = {name for name in load_file(path / "model.safetensors") if ".moe_statics." in name}
    assert kept == {"model.layers.3.mlp.moe_statics.e_score_correction_bias"}
    edited(path, tmp_path / "none", moe_layer_end_index=2)
    with pytest.raises(CheckpointError, match=r"missing: 'model\.layers\.3\.mlp\.gate_proj\.weight'"):
        load_decoder(tmp_path / "none", backend=backend, dtype=torch.float32)


def test_a_router_of_each_kind():
    """The correction chooses experts 0 and 1; the weights are their scores, divided by what the router says."""
    scores = torch.tensor([[0.125, 0.125, 0.25, 0.5]])
    routing = CorrectedRouting(torch.tensor([1.0, 1.0, 0.0, 0.0]), softmax=True, epsilon=0.0, minimum=0.5)
    weights, chosen = KernelSet().route(scores.log(), 2, renormalize=True, routing=routing)
    assert chosen.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.25]]))
    weights, _ = KernelSet().route(scores.log(), 2, renormalize=True, routing=routing._replace(minimum=0.1))
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5]]))
    few = torch.full((1, 4), -60.0)  # sigmoids of 1e-26, next to which 1e-20 is large
    plain = CorrectedRouting(torch.zeros(4), epsilon=0.0)
    torch.testing.assert_close(KernelSet().route(few, 2, renormalize=True, routing=plain)[0], torch.tensor([[0.5, 0.5]]))
    assert KernelSet().route(few, 2, renormalize=True, routing=CorrectedRouting(torch.zeros(4)))[0].max() < 1e-5
