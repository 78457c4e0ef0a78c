"""Published shapes by name, by file, and as one rank's shard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outrider.device import ConfigError
from outrider.errors import CheckpointError
from outrider.model.config.shapes import SHAPES, shape_config, shard_config


def parameters(name: str) -> int:
    """Numbers in the matrices of a shape."""
    shape = SHAPES[name]
    heads = (shape.num_heads * 2 + shape.num_kv_heads * 2) * shape.head_size * shape.hidden_size
    experts = shape.experts
    inner = shape.intermediate_size if experts is None else experts.count * experts.intermediate_size
    layer = heads + 3 * shape.hidden_size * inner
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"tiny", "phi-3-mini"}))
def test_a_shape_has_as_many_parameters_as_its_name_says(name: str) -> None:
    said = re.search(r"-(?:(\d)x)?([\d.]+)b(?:-a3b)?$", name)
    assert said is not None
    assert parameters(name) == pytest.approx(float(said[2]) * int(said[1] or 1) * 1e9, rel=0.25)


def test_a_shard_has_its_share_and_keeps_one_key_head_at_least() -> None:
    half = shape_config("llama-3.1-70b/2")
    assert (half.num_heads, half.num_kv_heads, half.intermediate_size, half.hidden_size) == (32, 4, 14336, 8192)
    assert shard_config(SHAPES["llama-3.1-8b"], 16).num_kv_heads == 1


@pytest.mark.parametrize("ranks", [0, 3, 7])
def test_a_shape_that_cannot_be_shared_out_says_so(ranks: int) -> None:
    with pytest.raises(ConfigError, match="can't be shared out"):
        shard_config(SHAPES["llama-3.1-8b"], ranks)


def test_a_file_says_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 96,
                "intermediate_size": 160,
                "num_hidden_layers": 3,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "vocab_size": 77,
            }
        )
    )
    shape = shape_config(str(path))
    assert (shape.hidden_size, shape.num_layers, shape.num_kv_heads, shape.head_size) == (96, 3, 2, 16)
    with pytest.raises(CheckpointError):
        shape_config(str(tmp_path / "none.json"))


@pytest.mark.parametrize("name", ["no-such", "no-such/2", "tiny/x"])
def test_an_unknown_shape_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no shape '{name}'; expected one of .*qwen3-8b"):
        shape_config(name)
