"""config.json as published checkpoints spell it, older spellings included."""

import json

import pytest

from outrider.errors import CheckpointError
from outrider.model import RopeConfig
from outrider.model.config.checkpoint_config import read_model_config
from tiny_checkpoints import tiny_config

COMMON = {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}

LLAMA_2 = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
VICUNA_16K = LLAMA_2 | {"rope_scaling": {"factor": 4.0, "type": "linear"}}
LLAMA_31 = LLAMA_2 | {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
MISTRAL = COMMON | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN_25_YARN = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_2_VL = COMMON | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def read(tmp_path, published):
    (tmp_path / "config.json").write_text(json.dumps(published))
    return read_model_config(tmp_path)


def test_llama_2(tmp_path):
    config = read(tmp_path, LLAMA_2)
    assert (config.num_layers, config.num_kv_heads, config.head_size, config.max_context) == (32, 32, 128, 4096)
    assert config.rope == RopeConfig(original_context=4096)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_linear_by_its_old_name(tmp_path):
    config = read(tmp_path, VICUNA_16K)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 4.0, 10000.0)


def test_llama_31(tmp_path):
    config = read(tmp_path, LLAMA_31)
    assert config.rope == RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_context=8192)
    assert config.max_context == 131072
    assert config.eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize(("window", "expected"), [(4096, 4096), (None, 0)])
def test_mistral(tmp_path, window, expected):
    config = read(tmp_path, MISTRAL | {"sliding_window": window})
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


def test_qwen_25_yarn(tmp_path):
    config = read(tmp_path, QWEN_25_YARN)
    assert (config.rope.kind, config.rope.factor, config.rope.original_context) == ("yarn", 4.0, 32768)
    assert config.max_context == 131072
    assert set(config.windows) == {0}
    assert config.attention_bias
    assert not config.output_bias


def test_qwen_2_vl_flat(tmp_path):
    config = read(tmp_path, QWEN_2_VL)
    assert config.rope.sections == (16, 24, 24)
    assert (config.rope.kind, config.rope.theta) == ("default", 1000000.0)
    assert config.tie_embeddings
    assert (config.vision.image_token, config.vision.video_token, config.vision.merge) == (151655, 151656, 2)
    assert config.vision.tokens_per_second == 0


QWEN_3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
HYBRID_TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}


def test_qwen_3_vl(tmp_path):
    config = read(tmp_path, QWEN_3_VL)
    assert (config.rope.sections, config.rope.interleaved, config.rope.theta) == ((24, 20, 20), True, 5000000.0)
    assert (config.num_layers, config.tie_embeddings, config.qk_norm) == (28, True, True)
    vision = config.vision
    assert (vision.image_token, vision.video_token, vision.frame_marks) == (151655, 151656, (151652, 151653))
    assert (vision.merge, vision.deepstack, config.feature_size) == (2, 3, 4 * 2048)


def test_qwen_35(tmp_path):
    """Its tower has no deepstack. Without one, and as a config of text alone, positions have one axis."""
    tower = QWEN_3_VL["vision_config"] | {"model_type": "qwen3_5", "deepstack_visual_indexes": [], "out_hidden_size": 1024}
    tokens = {"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053}
    published = {"model_type": "qwen3_5", "text_config": HYBRID_TEXT, **tokens, "vision_end_token_id": 248054}
    config = read(tmp_path, published | {"vision_config": tower})
    assert (config.rope.sections, config.rope.interleaved, config.rope.axes) == ((11, 11, 10), True, 3)
    assert (config.vision.image_token, config.vision.frame_marks, config.vision.deepstack) == (248056, (248053, 248054), 0)
    assert config.feature_size == config.hidden_size
    for text in (published, HYBRID_TEXT):
        config = read(tmp_path, text)
        assert (config.vision, config.rope.sections, config.rope.axes) == (None, (), 1)


MINISTRAL = MISTRAL | {"num_hidden_layers": 4, "layer_types": ["full_attention", *["sliding_attention"] * 3]}


def test_ministral_as_a_mistral_with_layer_types(tmp_path):
    """transformers' Auto classes take it for a ministral model, in which only some layers have the window."""
    assert read(tmp_path, MINISTRAL).windows == (0, 4096, 4096, 4096)
    assert read(tmp_path, MINISTRAL | {"layer_types": None}).windows == (4096,) * 4
    with pytest.raises(CheckpointError, match="layer_types has 'sliding_attention', but there's no window"):
        read(tmp_path, MINISTRAL | {"sliding_window": None})


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_layer_types_of_a_family_without_them(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 2, "sliding_window": None}
    assert read(tmp_path, raw | {"layer_types": ["full_attention"] * 2}).windows == (0, 0)
    with pytest.raises(CheckpointError, match=r"layer_types has \['sliding_attention'\], and the layers of this family"):
        read(tmp_path, raw | {"layer_types": ["full_attention", "sliding_attention"]})
