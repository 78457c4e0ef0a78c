"""Latent attention (GLM-4.7-Flash, DeepSeek-V2-Lite and V3, Kimi-K2): logits and tokens of transformers, engines, formats."""

import json
import re
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from model.cached_checkpoints import write_cached
from model.harness import Driver
from model.quantized_checkpoints import write_fp8
from model.test_corrected_routers import drafts_as_in_transformers, with_head
from model.test_decoder import PROMPT, TOLERANCE, agree, engines_agree, expect
from model.test_mixtures import edited, expect_refusal, reshaped, without
from model.wrong_configs import WRONG_CONFIGS
from outrider import Engine, SamplingParams
from outrider.device import QuantizedWeight
from outrider.errors import CheckpointError
from outrider.model import Decoder, ForwardInput, KVCache, RopeConfig, load_decoder
from outrider.model.layers import latent
from outrider.model.layers.latent import LatentAttention
from outrider.model.quantization.writing import quantize_checkpoint
from outrider.registry import get_backend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import LATENT, rewrite, write_checkpoint

NEW_TOKENS = 20
ATTENTION = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    path = tmp_path_factory.mktemp("glm")
    return path, write_checkpoint(path, "glm4_moe_lite")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    path = tmp_path_factory.mktemp("deepseek")
    return path, write_checkpoint(path, "deepseek_v3")


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", LATENT)
def test_tokens_and_logits_of_transformers(tmp_path, backend, name, chunk):
    agree(tmp_path, backend, write_checkpoint(tmp_path, name), chunk=chunk)


@pytest.mark.parametrize("device", ["cpu", "sim", "sim:kernels=host-plans"])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite-q"])
def test_expanded_prompts_give_the_tokens_of_transformers(tmp_path, monkeypatch, name, device):
    expand, calls = LatentAttention._attend_expanded, []
    monkeypatch.setattr(latent, "MIN_EXPANDED_QUERY", 5)
    monkeypatch.setattr(LatentAttention, "_attend_expanded", lambda self, *args: calls.append(args) or expand(self, *args))
    engines_agree(tmp_path, write_checkpoint(tmp_path, name), device, "ngram")
    assert calls


@pytest.mark.parametrize("starts", [(0, 9), None], ids=["on the host", "in a graph"])
def test_a_prompt_next_to_decoding_requests_is_expanded_alone(backend, deepseek, monkeypatch, starts):
    model = load_decoder(deepseek[0], backend=backend, dtype=torch.float32)
    expand, calls = LatentAttention._attend_expanded, []
    monkeypatch.setattr(latent, "MIN_EXPANDED_QUERY", 5)
    monkeypatch.setattr(LatentAttention, "_attend_expanded", lambda self, *args: calls.append(args) or expand(self, *args))
    made = []
    for together in (False, True):
        driver = Driver(model)
        decoding, prompt = driver.sequence(), driver.sequence()
        driver.hidden([(decoding, PROMPT[:9])])
        batches = [driver.inputs([(decoding, [7])]), driver.inputs([(prompt, PROMPT[:9])])]
        whole = replace(batches[1].attention, host_query_start=starts, host_context=(0,))
        batches[1] = replace(batches[1], attention=whole)
        if together:
            batches = [ForwardInput.concatenated(*batches)]
        with torch.no_grad():
            made.append(torch.cat([model.forward(batch, driver.cache) for batch in batches]))
    assert len(calls) == 2 * model.config.num_layers
    torch.testing.assert_close(*made, rtol=0, atol=1e-5)


def test_kimi_k2_is_a_deepseek_v3(tmp_path, backend, deepseek):
    agree(edited(deepseek[0], tmp_path, model_type="kimi_k2"), backend, deepseek[1])


VISION = {"patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2, "num_hidden_layers": 1}


def write_kimi(path, deepseek):
    """A Kimi-K2.5 with the text model of ``deepseek``, its tensors named as published; return that text model."""
    text = json.loads((deepseek[0] / "config.json").read_text()) | {"model_type": "kimi_k2"}
    vision = VISION | {"hidden_size": 16, "intermediate_size": 16}
    config = Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=False)
    tower = {f"vision_tower.{name}": value for name, value in Kimi_K25VisionModel(config.vision_config).state_dict().items()}
    named = {f"language_model.{name}": value for name, value in load_file(deepseek[0] / "model.safetensors").items()}
    path.mkdir()
    save_file({**named, **tower, "mm_projector.pre_norm.weight": torch.ones(16)}, path / "model.safetensors")
    written = config.to_dict() | {"text_config": text}
    (path / "config.json").write_text(json.dumps(written))
    return deepseek[1]


def test_kimi_k2_5_is_a_kimi_k2_with_a_vision_tower(tmp_path, backend, deepseek):
    """Its text model runs alone; what of it transformers reads differs in names alone."""
    reference = write_kimi(tmp_path / "kimi", deepseek)
    agree(tmp_path / "kimi", backend, reference)
    engines_agree(tmp_path / "kimi", reference, "sim", "ngram")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text_config": None}, "text_config is None, expected the config of the text model"),
        ({"text_config": {"hidden_size": "wide"}}, "hidden_size is 'wide'"),
    ],
)
def test_a_kimi_k2_5_without_a_text_model_is_refused(tmp_path, backend, deepseek, change, told):
    write_kimi(tmp_path / "kimi", deepseek)
    rewrite(tmp_path / "kimi", **change)
    with pytest.raises(CheckpointError, match=told):
        load_decoder(tmp_path / "kimi", backend=backend, dtype=torch.float32)


def test_a_quantised_kimi_k2_5_runs(tmp_path, backend, deepseek):
    """The quantisation is described in the config of the text model, as published."""
    write_kimi(tmp_path / "kimi", deepseek)
    quantize_checkpoint(tmp_path / "kimi", tmp_path / "copy", format="int4", group=8)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    model = load_decoder(tmp_path / "copy", backend=backend, dtype=torch.float32)
    assert isinstance(model.weights.layers[1].gate_up, QuantizedWeight)
    plain = load_decoder(tmp_path / "copy", backend=backend, dtype=torch.float32, quantized="dequantize")
    driver = Driver(plain)
    wanted = driver.logits([(driver.sequence(), PROMPT)])
    assert (logits_of_weights(model) - wanted).abs().max() < TOLERANCE


@pytest.mark.sample(1, per="device")
@pytest.mark.parametrize("speculate", ["none", "ngram", "suffix", "draft-model"])
@pytest.mark.parametrize("device", ["cpu", "sim", "sim:like=npu", "sim:kernels=host-plans"])
def test_engines_give_the_tokens_of_transformers(deepseek, device, speculate):
    engines_agree(*deepseek, device, speculate)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["glm4_moe_lite-q", "deepseek_v2"])
def test_engines_of_other_families(tmp_path, name):
    engines_agree(tmp_path, write_checkpoint(tmp_path, name), "sim", "ngram")


@pytest.mark.parametrize("changes", [{"mode": "fused"}, {"batch_invariant": True}])
def test_other_settings_give_the_tokens_of_transformers(glm, changes):
    path, reference = glm
    reference.generation_config.eos_token_id = None
    expected = tuple(expect(reference, PROMPT, NEW_TOKENS)[0])
    config = plain_config(**{"max_context": 96, "page_size": 4, "max_requests": 2} | changes)
    engine = Engine.from_checkpoint(
        path, get_backend("sim" if "mode" in changes else "cpu"), speculate="ngram", config=config
    )
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert completion.token_ids == expected


@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_the_head_in_the_checkpoint_drafts_as_in_transformers(tmp_path, backend, request, family):
    path, reference = request.getfixturevalue(family)
    drafts_as_in_transformers(path, tmp_path, backend, reference)


@pytest.mark.sample(1)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_engines_with_the_head_give_the_tokens_of_transformers(tmp_path, glm, device):
    with_head(glm[0], tmp_path, glm[1])
    engines_agree(tmp_path, glm[1], device, "mtp")


def test_pages_in_fp8_give_the_tokens_of_rounded_latent_vectors(tmp_path, backend, monkeypatch):
    """A number on the border of two may be rounded to either."""
    expand = DeepseekV3Attention.expand_kv

    def expand_rounded(self, *vectors):
        return expand(self, *(each.to(torch.float8_e4m3fn).to(each.dtype) for each in vectors))

    reference = write_checkpoint(tmp_path, "deepseek_v3-dense")
    reference.generation_config.eos_token_id = None
    unrounded = expect(reference, PROMPT, NEW_TOKENS)[1]
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", expand_rounded)
    expected, logits = expect(reference, PROMPT, NEW_TOKENS)
    assert (logits[0] - unrounded[0]).abs().max() > 0.2
    tokens, ours = Driver(load_decoder(tmp_path, backend=backend, dtype=torch.float32, kv_dtype="fp8")).greedy(
        PROMPT, NEW_TOKENS
    )
    assert tokens == expected
    assert torch.allclose(ours, logits, rtol=0, atol=1e-3)


def test_pages_have_latent_vectors(backend, deepseek):
    config = load_decoder(deepseek[0], backend=backend, dtype=torch.float32).config
    cache = KVCache.allocate(config, pages=3, page_size=4, dtype=torch.float32, device=backend.device)
    assert [[tuple(each.shape) for each in layer] for layer in cache.layers] == [[(3, 4, 1, 8), (3, 4, 1, 40)]] * 3
    assert KVCache.page_bytes(config, page_size=4, dtype=torch.float32) == 3 * 4 * (8 + 40) * 4
    temperature = 1 + 0.1 * 1.3 * torch.tensor(4.0).log().item()
    assert config.attention_scale == pytest.approx(24**-0.5 * temperature**2)


def test_stored_scales_of_the_cache_are_refused(tmp_path, backend):
    write_cached(tmp_path, "deepseek_v3-dense")
    with pytest.raises(CheckpointError, match="stored scales .* latent vectors .* --kv-dtype plain"):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)
    load_decoder(tmp_path, backend=backend, dtype=torch.float32, kv_dtype="plain")


def test_a_share_of_two_sizes_rotates_as_many_dimensions():
    """The quotient of two sizes times one of them may be less than the other."""
    sizes = [(rotated, size) for size in range(4, 258, 2) for rotated in range(2, size + 1, 2)]
    assert any(int(size * (rotated / size)) < rotated for rotated, size in sizes)
    assert all(RopeConfig(rotated_share=rotated / size).rotated_size(size) == rotated for rotated, size in sizes)


def plainly(record):
    """The weights with activations that aren't quantised."""
    changed = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, QuantizedWeight):
            changed[each.name] = replace(value, activations=None, activation_group=0, input_scale=None)
    return replace(record, **changed)


def logits_of_weights(model):
    """The logits without quantised activations, which decide between nearly equal experts."""
    layers = tuple(replace(plainly(layer), latent=plainly(layer.latent)) for layer in model.weights.layers)
    driver = Driver(Decoder(model.config, replace(model.weights, layers=layers), model.kernels))
    return driver.logits([(driver.sequence(), PROMPT)])


def test_blocks_in_fp8_as_deepseek_v3_is_published(tmp_path, backend, deepseek):
    """Heads end within a block, and so does the latent vector of queries, which the product shares with that of keys."""
    path, out = deepseek[0], tmp_path / "quantised"
    state = write_fp8(path, out, block=(32, 32))
    edited(path, tmp_path / "plain", lambda tensors: state)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    model = load_decoder(out, backend=backend, dtype=torch.float32, quantized="reference")
    layer = model.weights.layers[1]
    quantized = layer.qkv, layer.output, layer.latent.q_up, layer.latent.kv_up
    assert all(isinstance(each, QuantizedWeight) and each.activations == "fp8" for each in quantized)
    with torch.no_grad():
        wanted = reference(torch.tensor([PROMPT])).logits[0]
    assert (logits_of_weights(model) - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_a_quantised_copy_runs(tmp_path, backend, deepseek, format):
    quantize_checkpoint(deepseek[0], tmp_path / "copy", format=format, group=8 if format == "int4" else None)
    model = load_decoder(tmp_path / "copy", backend=backend, dtype=torch.float32)
    layer = model.weights.layers[1]
    quantized = layer.qkv, layer.output, layer.latent.q_up
    assert all(isinstance(each, QuantizedWeight) for each in quantized)
    assert isinstance(layer.latent.kv_up, torch.Tensor)
    plain = load_decoder(tmp_path / "copy", backend=backend, dtype=torch.float32, quantized="dequantize")
    driver = Driver(plain)
    wanted = driver.logits([(driver.sequence(), PROMPT)])
    assert (logits_of_weights(model) - wanted).abs().max() < TOLERANCE
    config = plain_config(max_context=64, dtype="float32", draft_tokens=3)
    engine = Engine.from_checkpoint(tmp_path / "copy", backend, speculate="ngram", config=config)
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert list(completion.token_ids) == Driver(model).greedy(PROMPT, NEW_TOKENS)[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(f"{ATTENTION}.kv_a_layernorm.weight"), f"missing: '{ATTENTION}.kv_a_layernorm.weight' [40]"),
        (
            reshaped(f"{ATTENTION}.kv_b_proj.weight", 128, 24),
            f"tensor '{ATTENTION}.kv_b_proj.weight' has shape [128, 24], expected [128, 40]",
        ),
        (
            reshaped(f"{ATTENTION}.o_proj.weight", 32, 96),
            f"tensor '{ATTENTION}.o_proj.weight' has shape [32, 96], expected [32, 64]",
        ),
        (
            lambda tensors: tensors | {f"{ATTENTION}.q_proj.weight": torch.zeros(96, 32)},
            f"not expected: '{ATTENTION}.q_proj.weight' [96, 32]",
        ),
    ],
)
def test_a_broken_checkpoint_names_the_tensor(tmp_path, backend, deepseek, change, told):
    expect_refusal(deepseek[0], tmp_path, backend, re.escape(told), change)


@pytest.mark.parametrize(
    ("family", "config", "told"),
    WRONG_CONFIGS["latent"],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be(tmp_path, backend, family, config, told):
    write_checkpoint(tmp_path, family)
    rewrite(tmp_path, **config)
    with pytest.raises(CheckpointError, match=told):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)
