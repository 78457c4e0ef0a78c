"""Benches of mixtures of experts: shapes, their configs, and the bytes of an iteration."""

import json
from dataclasses import replace

import pytest
import torch

from bench.test_bench_peers import HYBRID
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, QuantizedWeight
from outrider.model import EagleHead
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.model_config import LatentConfig
from outrider.model.config.shapes import SHAPES, shape_config
from outrider_bench.limits import iteration_bytes, iteration_cost
from outrider_bench.random_checkpoint import checkpoint_config
from outrider_bench.random_weights import RandomQuantization, random_decoder, random_eagle, random_mtp
from outrider_proof import tiny
from outrider_proof.tiny import plain_config
from tiny_checkpoints import write_checkpoint as write_model


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_a_config_says_what_the_shape_has(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(checkpoint_config(SHAPES[name], dtype="bfloat16")))
    read = read_model_config(tmp_path)
    shape = SHAPES[name]
    assert replace(read, bos_token_id=None, eos_token_ids=(), rope=shape.rope) == shape


def test_random_weights_have_experts_and_their_head_has_none():
    small = replace(SHAPES["tiny"], experts=replace(SHAPES["mixtral-8x7b"].experts, intermediate_size=8))
    model = random_decoder(small, backend=tiny.BACKEND, dtype=torch.float32)
    assert all([block.name for block in layer.blocks] == ["attention_block", "experts_block"] for layer in model._layers)
    assert model.weights.layers[0].gate_up.shape == (8, 16, 64)
    head = random_eagle(model, backend=tiny.BACKEND)
    assert isinstance(head, EagleHead)
    assert head.config.experts is None


def test_random_weights_of_latent_attention_are_counted_and_quantised():
    latent = LatentConfig(query_rank=12, rank=20, rotated_size=8, unrotated_size=16, value_size=16, interleaved=True)
    shape = SHAPES["tiny"]
    small = replace(shape, latent=latent, num_layers=1, windows=(0,), num_kv_heads=4, head_size=24)
    model = random_decoder(small, backend=tiny.BACKEND, dtype=torch.float32)
    engine = Engine(model, tiny.BACKEND, config=plain_config(max_context=32))
    hidden, inner, vocabulary = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    down, up = (12 + 20 + 8) * hidden, 4 * 24 * 12 + 4 * (16 + 16) * 20
    weights = down + up + 4 * 16 * hidden + 3 * inner * hidden + vocabulary * hidden + 12 + 20 + 3 * hidden
    assert iteration_bytes(engine, batch=2, context=10) == 4 * (weights + 2 * 10 * (8 + 20))
    products = down + up + 4 * 16 * hidden + 3 * inner * hidden + vocabulary * hidden
    assert iteration_cost(engine, batch=2, context=10).operations == 2 * (2 * products + 2 * 4 * (8 + 2 * 20) * 10)
    assert random_mtp(model, backend=tiny.BACKEND).config.latent == latent
    assert random_eagle(model, backend=tiny.BACKEND).config.latent is None
    quantization = RandomQuantization(name="int8", head=False)
    layer = random_decoder(small, backend=tiny.BACKEND, dtype=torch.float32, quantization=quantization).weights.layers[0]
    assert all(isinstance(each, QuantizedWeight) for each in (layer.qkv, layer.output, layer.latent.q_up))
    assert isinstance(layer.latent.kv_up, torch.Tensor)


def test_random_biases_are_zeros():
    """Others would make all tokens alike, which then choose the same experts."""
    biased = replace(SHAPES["tiny"], attention_bias=True, output_bias=True, mlp_bias=True)
    for layer in random_decoder(biased, backend=tiny.BACKEND, dtype=torch.float32).weights.layers:
        biases = (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias)
        assert not any(bias.any() for bias in biases)
        assert (layer.attention_norm == 1).all()
        assert layer.gate_up.any()


@pytest.mark.parametrize("head", [False, True])
def test_random_weights_of_gpt_oss_are_quantised_as_published(head):
    """The experts are, with 4.25 bits a number; the other products aren't, and the output head only if asked for."""
    shape = SHAPES["gpt-oss-20b"]
    small = replace(
        shape,
        vocab_size=64,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        windows=shape.windows[:2],
        experts=replace(shape.experts, count=4, intermediate_size=96),
    )
    quantization = RandomQuantization(name="mxfp4", head=head)
    model = random_decoder(small, backend=tiny.BACKEND, dtype=torch.float32, quantization=quantization)
    for layer in model.weights.layers:
        assert isinstance(layer.gate_up, QuantizedWeight)
        assert layer.gate_up.nbytes + layer.down.nbytes == 4 * 3 * 64 * 96 * 17 // 32
        assert isinstance(layer.qkv, torch.Tensor)
    assert isinstance(model.weights.head, QuantizedWeight) is head
    draft = random_eagle(model, backend=tiny.BACKEND)
    assert not draft.config.attention_sinks
    engine = Engine(model, tiny.BACKEND, config=plain_config(max_context=32))
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_no_config_is_written_of_a_shape_with_sinks_or_norms_of_results(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint of a gpt_oss shape can be written"):
        checkpoint_config(SHAPES["gpt-oss-20b"], dtype="bfloat16")
    write_model(tmp_path, "gemma4_text")
    with pytest.raises(ConfigError, match="no checkpoint of a gemma4_text shape can be written"):
        checkpoint_config(read_model_config(tmp_path), dtype="bfloat16")


@pytest.mark.parametrize("quantization", [None, RandomQuantization(name="int8", head=False)], ids=["", "int8"])
def test_random_weights_of_gemmas_experts(tmp_path, quantization):
    """A token reads two of five experts, and the MLP next to them."""
    write_model(tmp_path, "gemma4_text-experts")
    shape = shape_config(str(tmp_path / "config.json"))
    model = random_decoder(shape, backend=tiny.BACKEND, dtype=torch.float32, quantization=quantization)
    assert all(isinstance(layer.gate_up, QuantizedWeight) is (quantization is not None) for layer in model.weights.layers)
    engine = Engine(model, tiny.BACKEND, config=plain_config(max_context=32, dtype="float32"))
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    stacks = sum(layer.gate_up.nbytes + layer.down.nbytes for layer in model.weights.layers)
    mlps = sum(layer.shared_gate_up.nbytes + layer.shared_down.nbytes for layer in model.weights.layers)
    assert mlps == 3 * 4 * 3 * 48 * 32
    one, every = (iteration_bytes(engine, batch=batch, context=0) for batch in (1, 10**6))
    assert one == pytest.approx(every - stacks * 3 / 5)
    assert every > stacks + mlps


def test_a_random_head_of_a_hybrid_target_has_attention_without_a_gate():
    head = random_eagle(random_decoder(HYBRID, backend=tiny.BACKEND, dtype=torch.float32), backend=tiny.BACKEND)
    assert (head.config.recurrent, head.config.attention_gate, head.config.norm_offset) == (None, False, 0.0)


def test_bytes_of_the_experts_in_use_counted_by_hand():
    engine = Engine(tiny.mixture(), tiny.BACKEND, config=plain_config(max_context=32, dtype="float64"))
    weights = engine.model.weights
    experts = sum(each.gate_up.nbytes + each.down.nbytes for each in weights.layers if each.router is not None)
    slots = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    own = {id(each): each for each in slots if each is not None}  # norms of a layer are one tensor here
    others = sum(each.nbytes for each in own.values()) - experts + weights.norm.nbytes + weights.head.nbytes
    assert iteration_bytes(engine, batch=1, context=0) == pytest.approx(others + experts * 2 / 8)
    assert iteration_bytes(engine, batch=2, context=0) == pytest.approx(others + experts * (1 - 0.75**2))
