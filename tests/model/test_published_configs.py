"""config.json as published checkpoints spell it, older spellings included."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.errors import CheckpointError
from outrider.model import KVCache, RopeConfig
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.model_config import CorrectedRouterConfig
from outrider.model.config.shapes import SHAPES
from tiny_checkpoints import tiny_config

PUBLISHED = json.loads((Path(__file__).resolve().parents[1] / "data/published_configs.json").read_text())
"""config.json of each model."""


def read(tmp_path, published):
    (tmp_path / "config.json").write_text(json.dumps(published))
    return read_model_config(tmp_path)


def test_llama_2(tmp_path):
    config = read(tmp_path, PUBLISHED["llama-2-7b"])
    assert (config.num_layers, config.num_kv_heads, config.head_size, config.max_context) == (32, 32, 128, 4096)
    assert config.rope == RopeConfig(original_context=4096)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_linear_by_its_old_name(tmp_path):
    config = read(tmp_path, PUBLISHED["vicuna-7b-16k"])
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 4.0, 10000.0)


def test_llama_31(tmp_path):
    config = read(tmp_path, PUBLISHED["llama-3.1-8b"])
    assert config.rope == RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_context=8192)
    assert config.max_context == 131072
    assert config.eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize(("window", "expected"), [(4096, 4096), (None, 0)])
def test_mistral(tmp_path, window, expected):
    config = read(tmp_path, PUBLISHED["mistral-7b"] | {"sliding_window": window})
    assert set(config.windows) == {expected}
    assert not config.attention_bias


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3"])
@pytest.mark.parametrize("said", [{"sliding_window": None}, {"sliding_window": 0}, {"use_sliding_window": False}])
def test_a_sliding_layer_needs_a_window(tmp_path, family, said):
    """Where there's none, transformers fails, or lets a token see nothing at all."""
    tiny_config(family).save_pretrained(tmp_path)
    sliding = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2}
    raw = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 4} | sliding
    assert read(tmp_path, raw).windows == (0, 5, 0, 5)
    with pytest.raises(CheckpointError, match=r"config\.json: layer_types has 'sliding_attention', but there's no window"):
        read(tmp_path, raw | said)


def test_gpt_oss(tmp_path):
    config = read(tmp_path, PUBLISHED["gpt-oss-20b"])
    assert config.windows == (128, 0) * 12
    assert (config.max_context, config.head_size, config.attention_bias, config.output_bias) == (131072, 64, True, True)
    assert config.attention_sinks
    assert (config.experts.count, config.experts.per_token, config.experts.intermediate_size) == (32, 4, 2880)
    assert config.experts.biases == (7.0, 1.702)
    assert (config.rope.kind, config.rope.factor, config.rope.theta, config.rope.truncate) == ("yarn", 32.0, 150000.0, False)
    assert replace(config, eos_token_ids=(), bos_token_id=None) == SHAPES["gpt-oss-20b"]


def test_minimax_m2(tmp_path):
    config = read(tmp_path, PUBLISHED["minimax-m2"])
    assert (config.qk_norm, config.joint_qk_norm, config.rope.rotated_size(config.head_size)) == (True, True, 64)
    assert config.rope.theta == 5000000.0
    experts = config.experts
    assert (experts.count, experts.per_token, experts.intermediate_size, experts.shared_size) == (256, 8, 1536, 0)
    assert experts.dense_layers == ()
    assert experts.routing == CorrectedRouterConfig(epsilon=0.0)


def test_hunyuan_3(tmp_path):
    config = read(tmp_path, PUBLISHED["hy3-preview"])
    assert (config.num_layers, config.qk_norm, config.joint_qk_norm, config.rope.theta) == (80, True, False, 11158840.0)
    experts = config.experts
    assert (experts.count, experts.per_token, experts.intermediate_size, experts.shared_size) == (192, 8, 1536, 1536)
    assert experts.dense_layers == (0,)
    assert experts.routing == CorrectedRouterConfig(factor=2.826)


def test_ernie_45(tmp_path):
    config = read(tmp_path, PUBLISHED["ernie-4.5-21b-a3b"])
    assert (config.head_size, config.tie_embeddings, config.attention_bias, config.rope.theta) == (128, True, False, 500000.0)
    experts = config.experts
    assert (experts.count, experts.per_token, experts.intermediate_size, experts.shared_size) == (64, 6, 1536, 3072)
    assert experts.dense_layers == (0,)
    assert experts.routing == CorrectedRouterConfig(epsilon=0.0, minimum=1e-12, softmax=True)


@pytest.mark.parametrize(
    ("name", "sizes", "scale", "page"),
    [
        ("glm-4.7-flash", (20, 256, 768, 512, 64, 192, 256), 256**-0.5, 54_144),
        ("deepseek-v2-lite", (16, 192, 0, 512, 64, 128, 128), 192**-0.5 * (1 + 0.0707 * math.log(40)) ** 2, 31_104),
        ("deepseek-v3", (128, 192, 1536, 512, 64, 128, 128), 192**-0.5 * (1 + 0.1 * math.log(40)) ** 2, 70_272),
    ],
)
def test_latent_attention(tmp_path, name, sizes, scale, page):
    """``page`` are the bytes of a token's expanded keys and values in bfloat16."""
    config = read(tmp_path, PUBLISHED[name])
    latent = config.latent
    found = latent.query_rank, latent.rank, latent.rotated_size, latent.unrotated_size, latent.value_size
    assert (config.num_kv_heads, config.head_size, *found) == sizes
    assert latent.interleaved
    assert config.rope.rotated_size(config.head_size) == 64
    assert (config.attention_scale, config.rope.amplitude) == (pytest.approx(scale), 1.0)
    assert KVCache.page_bytes(config, page_size=1, dtype=torch.bfloat16) == page
    assert config.experts.dense_layers == ((0, 1, 2) if name == "deepseek-v3" else (0,))
    assert config.experts.routing == {
        "glm-4.7-flash": CorrectedRouterConfig(factor=1.8),
        "deepseek-v2-lite": None,
        "deepseek-v3": CorrectedRouterConfig(groups=8, chosen_groups=4, factor=2.5),
    }.get(name)
    kimi = PUBLISHED["deepseek-v3"] | {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64}
    assert read(tmp_path, kimi).family == "deepseek_v3"


def test_qwen_25_yarn(tmp_path):
    config = read(tmp_path, PUBLISHED["qwen2.5-7b-yarn"])
    assert (config.rope.kind, config.rope.factor, config.rope.original_context) == ("yarn", 4.0, 32768)
    assert config.max_context == 131072
    assert set(config.windows) == {0}
    assert config.attention_bias
    assert not config.output_bias


def test_qwen_2_vl_flat(tmp_path):
    config = read(tmp_path, PUBLISHED["qwen2-vl-2b"])
    assert config.rope.sections == (16, 24, 24)
    assert (config.rope.kind, config.rope.theta) == ("default", 1000000.0)
    assert config.tie_embeddings
    assert (config.vision.image_token, config.vision.video_token, config.vision.merge) == (151655, 151656, 2)
    assert config.vision.tokens_per_second == 0


def test_qwen_3_vl(tmp_path):
    config = read(tmp_path, PUBLISHED["qwen3-vl-2b"])
    assert (config.rope.sections, config.rope.interleaved, config.rope.theta) == ((24, 20, 20), True, 5000000.0)
    assert (config.num_layers, config.tie_embeddings, config.qk_norm) == (28, True, True)
    vision = config.vision
    assert (vision.image_token, vision.video_token, vision.frame_marks) == (151655, 151656, (151652, 151653))
    assert (vision.merge, vision.deepstack, config.feature_size) == (2, 3, 4 * 2048)


def test_qwen_35(tmp_path):
    """Its tower has no deepstack. Without one, and as a config of text alone, positions have one axis."""
    tower = PUBLISHED["qwen3-vl-2b"]["vision_config"] | {
        "model_type": "qwen3_5",
        "deepstack_visual_indexes": [],
        "out_hidden_size": 1024,
    }
    tokens = {"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053}
    published = {"model_type": "qwen3_5", "text_config": PUBLISHED["qwen3.5 text"], **tokens, "vision_end_token_id": 248054}
    config = read(tmp_path, published | {"vision_config": tower})
    assert (config.rope.sections, config.rope.interleaved, config.rope.axes) == ((11, 11, 10), True, 3)
    assert (config.vision.image_token, config.vision.frame_marks, config.vision.deepstack) == (248056, (248053, 248054), 0)
    assert config.feature_size == config.hidden_size
    for text in (published, PUBLISHED["qwen3.5 text"]):
        config = read(tmp_path, text)
        assert (config.vision, config.rope.sections, config.rope.axes) == (None, (), 1)


def test_ministral_as_a_mistral_with_layer_types(tmp_path):
    """transformers' Auto classes take it for a ministral model, in which only some layers have the window."""
    ministral = PUBLISHED["mistral-7b"] | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    }
    assert read(tmp_path, ministral).windows == (0, 4096, 4096, 4096)
    assert read(tmp_path, ministral | {"layer_types": None}).windows == (4096,) * 4
    with pytest.raises(CheckpointError, match="layer_types has 'sliding_attention', but there's no window"):
        read(tmp_path, ministral | {"sliding_window": None})


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_layer_types_of_a_family_without_them(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 2, "sliding_window": None}
    assert read(tmp_path, raw | {"layer_types": ["full_attention"] * 2}).windows == (0, 0)
    with pytest.raises(CheckpointError, match=r"layer_types has \['sliding_attention'\], and the layers of this family"):
        read(tmp_path, raw | {"layer_types": ["full_attention", "sliding_attention"]})
