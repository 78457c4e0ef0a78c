"""Configs that are read without transformers mean what they mean to transformers."""

import json

import pytest

from model.test_published_configs import PUBLISHED
from outrider.device.errors import OutriderError
from outrider.model.config import checkpoint_config
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.config_fields import config_fields, parse_config
from outrider.model.config.shapes import SHAPES, shape_config
from outrider_bench.random_checkpoint import checkpoint_config as written

LLAMA = PUBLISHED["llama-2-7b"] | {"rope_theta": 10000.0}
LLAMA_31_ROPE = PUBLISHED["llama-3.1-8b"]["rope_scaling"]
QWEN_25 = PUBLISHED["qwen2.5-7b-yarn"] | {"rope_scaling": None}
QWEN_3 = QWEN_25 | {"model_type": "qwen3", "head_dim": 128, "attention_bias": False}
PLAIN = {
    "llama": LLAMA,
    "llama 3.1": PUBLISHED["llama-3.1-8b"],
    "mistral": PUBLISHED["mistral-7b"],
    "qwen 2.5": QWEN_25,
    "qwen 3": QWEN_3,
}

CHANGES = [
    *(
        {name: value}
        for name in ("hidden_act", "bos_token_id", "eos_token_id")
        for value in (None, "gelu" if name == "hidden_act" else 7)
    ),
    *({name: value} for name in ("attention_bias", "mlp_bias", "tie_word_embeddings") for value in (True, False, None)),
    *({"head_dim": value} for value in (None, 64, 128)),
    *({"num_key_value_heads": value} for value in (None, 2, 3)),
    *({"hidden_size": value} for value in (4095, 5120)),
    *({"rms_norm_eps": value} for value in (0, 1e-5)),
    *({"rope_theta": value} for value in (10000, 5e5)),
    *({"sliding_window": value} for value in (None, 0, 512)),
    *({"use_sliding_window": value} for value in (None, True, False)),
    {"use_sliding_window": True, "max_window_layers": 3},
    *({"layer_types": value} for value in (None, [], ["full_attention"] * 28, ["sliding_attention"] * 32)),
    *({"layer_types": ["full_attention"] * 32, "sliding_window": value} for value in (None, 512)),
    {"eos_token_id": [3, 4]},
    {"partial_rotary_factor": 0.5},
    {"original_max_position_embeddings": 1024},
    {"rope_scaling": LLAMA_31_ROPE, "original_max_position_embeddings": 1024},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": None},
    {"rope_parameters": {}, "rope_scaling": {}},
    {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "default"}},
    {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    *({"rope_scaling": LLAMA_31_ROPE | {name: value}} for name, value in (("factor", 0.5), ("factor", 8))),
    {"rope_scaling": LLAMA_31_ROPE | {"original_max_position_embeddings": 1 << 20}},
    {"rope_scaling": LLAMA_31_ROPE | {"original_max_position_embeddings": None}},
    {"rope_scaling": LLAMA_31_ROPE | {"low_freq_factor": 4.0}},
    {"rope_scaling": LLAMA_31_ROPE | {"rope_theta": 7e5}},
    {"rope_scaling": LLAMA_31_ROPE | {"partial_rotary_factor": 1.0}},
]


def read(directory):
    try:
        return read_model_config(directory)
    except OutriderError as error:
        return str(error)


@pytest.mark.parametrize("name", PLAIN)
def test_as_transformers_reads_it(name, tmp_path, monkeypatch):
    """Each key changed or left out: the same config, or the same error."""
    published, plainly = PLAIN[name], 0
    variants = [published, *(published | change for change in CHANGES)]
    variants += [{key: value for key, value in published.items() if key != left} for left in published]
    for variant in variants:
        (tmp_path / "config.json").write_text(json.dumps(variant))
        found = read(tmp_path)
        with monkeypatch.context() as patch:
            asked = []
            patch.setattr(checkpoint_config, "parse_config", lambda *given, asked=asked: asked.append(given))
            assert found == read(tmp_path), variant
        plainly += any(parse_config(*given) is not None for given in asked)
    assert 20 <= plainly < len(variants)


@pytest.mark.parametrize(
    "published",
    [PUBLISHED["vicuna-7b-16k"], PUBLISHED["qwen2.5-7b-yarn"], PUBLISHED["llama-2-7b"]],
    ids=["linear", "yarn", "no theta"],
)
def test_what_is_left_to_transformers(published):
    assert parse_config(published["model_type"], config_fields(published["model_type"], published)) is None


DENSE = sorted(name for name in SHAPES if shape_config(name).experts is None and shape_config(name).recurrent is None)


@pytest.mark.parametrize("name", DENSE)
def test_each_shape_as_a_checkpoint_says_it(name):
    content = written(shape_config(name), dtype="bfloat16")
    fields = config_fields(str(content["model_type"]), content)
    assert parse_config(str(content["model_type"]), fields) is not None
