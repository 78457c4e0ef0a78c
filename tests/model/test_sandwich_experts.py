"""Experts next to an MLP (Gemma 4 26B-A4B): layouts, quantised weights, kernels without GELU, broken checkpoints, memory."""

import json
import re
from dataclasses import replace

import pytest
import torch

from model.test_decoder import PROMPT, Driver, agree
from model.test_mixtures import edited, expect_refusal, reshaped, without
from model.wrong_configs import WRONG_CONFIGS
from outrider.device import ConfigError, KernelSet, QuantizedWeight
from outrider.device.kernels.weights import quantized_products
from outrider.errors import CheckpointError
from outrider.model import load_decoder, plan_decoder
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.quantization.writing import quantize_checkpoint
from tiny_checkpoints import write_checkpoint

STEM = "model.layers.1"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    return path, write_checkpoint(path, "gemma4_text-experts")


def unstacked(tensors):
    """A tensor for each product of each expert, as quantised checkpoints have."""
    made = {}
    for name, value in tensors.items():
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for index, both in enumerate(value):
                halves = zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
                made |= {f"{stem}.{index}.{each}.weight": half.clone() for each, half in halves}
        elif part == "down_proj":
            made |= {f"{stem}.{index}.down_proj.weight": each.clone() for index, each in enumerate(value)}
        else:
            made[name] = value
    return made


def test_a_checkpoint_with_a_tensor_for_each_expert(tmp_path, backend, mixture):
    agree(edited(mixture[0], tmp_path, unstacked), backend, mixture[1])


@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_quantised_experts_have_the_same_activation(tmp_path, backend, mixture, format):
    """Products with quantised weights give the logits of dequantized ones, with activations as they are."""
    edited(mixture[0], tmp_path / "plain", unstacked)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "made", format=format, group=8 if format == "int4" else None)
    logits = []
    for mode in ("dequantize", "kernels"):
        model = load_decoder(tmp_path / "made", backend=backend, dtype=torch.float32, quantized=mode)
        layers = tuple(map(unquantized_activations, model.weights.layers))
        driver = Driver(type(model)(model.config, replace(model.weights, layers=layers), model.kernels))
        logits.append(driver.logits([(driver.sequence(), PROMPT)]))
        assert sum(quantized_products(layers).values()) == (6 * 3 if mode == "kernels" else 0)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def unquantized_activations(layer):
    weights = {name: getattr(layer, name) for name in ("qkv", "output", "gate_up", "down", "shared_gate_up", "shared_down")}
    quantized = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}
    return replace(
        layer, **{name: replace(weight, activations=None, activation_group=0) for name, weight in quantized.items()}
    )


def test_stacks_are_refused_by_name_when_quantised(tmp_path, mixture):
    with pytest.raises(CheckpointError, match=r"experts.*_proj' holds all experts of a layer; such a checkpoint can't be"):
        quantize_checkpoint(mixture[0], tmp_path / "made", format="fp8")


def test_the_routers_vectors_are_wide(tmp_path, backend):
    """A choice among experts that are nearly equal needs more bits than the model's dtype may have."""
    reference = write_checkpoint(tmp_path, "gemma4_text-experts")
    layer = load_decoder(tmp_path, backend=backend, dtype=torch.bfloat16).weights.layers[1]
    router = reference.model.layers[1].router
    assert torch.equal(layer.sandwich_experts.router_norm, router.scale)
    assert torch.equal(layer.sandwich_experts.factors, router.per_expert_scale)
    assert layer.sandwich_experts.input_norm.dtype is torch.bfloat16


def test_memory_of_experts_is_predicted_from_the_headers(tmp_path, backend, mixture):
    write_checkpoint(tmp_path, "gemma4_text")
    mixed, dense = (plan_decoder(path, backend=backend, dtype=torch.float32) for path in (mixture[0], tmp_path))
    assert mixed.weight_bytes - dense.weight_bytes == 4 * 3 * (5 * 3 * 24 * 32 + 5 * 32 + 4 * 32 + 5)
    assert (mixed.config.inner_width, dense.config.inner_width) == (2 * 24 + 48, 48)
    assert [[block.name for block in layer.blocks] for layer in mixed.load()._layers] == [
        ["attention_block", "experts_block"]
    ] * 3


@pytest.mark.parametrize("kernel", ["experts", "experts_quantized"])
def test_kernels_that_compute_swiglu_alone_are_refused(backend, mixture, kernel):
    kernels = type("Mixes", (KernelSet,), {"name": "mixes", kernel: getattr(KernelSet, kernel)})()
    told = "a gemma4_text model needs expert_gelu, which the kernels 'mixes' don't take"
    with pytest.raises(ConfigError, match=told):
        plan_decoder(mixture[0], backend=backend, dtype=torch.float32, kernels=kernels)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(f"{STEM}.router.scale"), f"missing: '{STEM}.router.scale' [32]"),
        (reshaped(f"{STEM}.router.per_expert_scale", 4), f"'{STEM}.router.per_expert_scale' has shape [4], expected [5]"),
        (
            without(f"{STEM}.post_feedforward_layernorm_1.weight"),
            f"missing: '{STEM}.post_feedforward_layernorm_1.weight' [32]",
        ),
        (without(f"{STEM}.mlp.up_proj.weight"), f"missing: '{STEM}.mlp.up_proj.weight' [48, 32]"),
        (without(f"{STEM}.experts.gate_up_proj"), f"missing: '{STEM}.experts.gate_up_proj' [5, 48, 32]"),
        (reshaped(f"{STEM}.experts.down_proj", 5, 24, 32), "has shape [5, 24, 32], expected [5, 32, 24]"),
        (
            lambda tensors: tensors | {f"{STEM}.shared_gate.weight": torch.zeros(1, 32)},
            f"not expected: '{STEM}.shared_gate.weight' [1, 32]",
        ),
    ],
)
def test_a_broken_checkpoint_names_the_tensor(tmp_path, backend, mixture, change, told):
    expect_refusal(mixture[0], tmp_path, backend, re.escape(told), change)


@pytest.mark.parametrize(("config", "told"), WRONG_CONFIGS["gemma4-experts"], ids=lambda value: next(iter(value)))
def test_a_config_that_cannot_be(tmp_path, backend, mixture, config, told):
    expect_refusal(mixture[0], tmp_path, backend, told, **config)


def test_a_published_config(tmp_path):
    """As of Gemma 4 26B-A4B."""
    text = {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "top_k_experts": 8,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    config = read_model_config(tmp_path)
    experts = config.experts
    assert (experts.count, experts.per_token, experts.intermediate_size, experts.shared_size) == (128, 8, 704, 2112)
    assert (experts.activation, experts.renormalize) == ("gelu_tanh", True)
    assert all(config.has_experts(layer) for layer in range(30))
