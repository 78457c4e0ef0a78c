"""Models that know nothing of the device: transformers' Llama and Qwen2-VL, equal to the host."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from outrider.model import load_through_transformers
from outrider_sim.strategies import make_strategy
from tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(1, 128, (2, 9))
    return LlamaForCausalLM(config).eval(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@pytest.fixture(scope="module")
def qwen():
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
        },
        image_token_id=290, video_token_id=291, vision_start_token_id=292, vision_end_token_id=293,
    )  # fmt: skip
    text = torch.randint(0, 280, (1, 6))
    tokens = torch.cat([text, torch.tensor([[292] + [290] * 16 + [293]]), text], 1)
    return Qwen2VLForConditionalGeneration(config).eval(), {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(64, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
        "mm_token_type_ids": (tokens == 290).int(),
    }


@pytest.mark.sample(1, per="name,strategy")
@pytest.mark.parametrize("name", ["llama", "qwen"])
@pytest.mark.parametrize("strategy", ["program", "lazy", "random", "pct"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_logits_agree_with_the_host(sim, request, name, strategy, mode):
    model, inputs = request.getfixturevalue(name)
    backend = sim(strategy=strategy, seed="7")
    with mode():
        expected = model(**inputs).logits
        moved = copy.deepcopy(model).to(backend.device)
        got = moved(**{k: v.to(backend.device) for k, v in inputs.items()}).logits
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=1e-5)


def test_generation_gives_the_same_tokens(sim, llama):
    model, inputs = llama
    backend = sim()
    moved = copy.deepcopy(model).to(backend.device)
    assert moved.lm_head.weight is moved.model.embed_tokens.weight
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    on_device = {k: v.to(backend.device) for k, v in inputs.items()}
    for seed in range(3):
        backend.control.reset(make_strategy("random", seed))
        assert moved.generate(**on_device, max_new_tokens=6, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_of_experts_through_transformers(sim, tmp_path, family):
    write_checkpoint(tmp_path, family)
    # Loading runs the model, with and without pages, and compares.
    decoder = load_through_transformers(tmp_path, backend=sim(strategy="lazy"), dtype=torch.float32)
    assert decoder.config.family == family
