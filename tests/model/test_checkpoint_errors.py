"""A checkpoint that isn't right gives an error that names the file and what is wrong, before any of it is used."""

import json

import pytest
import torch

from outrider.device import CapabilityError
from outrider.errors import CheckpointError
from outrider.model import load_decoder
from outrider.model.config.checkpoint_config import read_model_config
from tiny_checkpoints import FAMILIES, rewrite, write_checkpoint


def load(directory, backend, dtype=torch.float32):
    return load_decoder(directory, backend=backend, dtype=dtype)


KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("name", FAMILIES)
def test_renamed_missing_and_wrong_shape(tmp_path, backend, name):
    write_checkpoint(tmp_path, name)
    original = (tmp_path / "model.safetensors").read_bytes()
    rewrite(tmp_path, lambda state: state.update({KEY + "s": state.pop(KEY)}))
    with pytest.raises(CheckpointError, match=rf"missing: '{KEY}' \[.*; not expected: '{KEY}s' \["):
        load(tmp_path, backend)
    (tmp_path / "model.safetensors").write_bytes(original)
    rewrite(tmp_path, lambda state: state.pop(KEY))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*missing: '{KEY}'"):
        load(tmp_path, backend)
    (tmp_path / "model.safetensors").write_bytes(original)
    rewrite(tmp_path, lambda state: state.update({KEY: torch.zeros(3, 5)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{KEY}' has shape \[3, 5\], expected \["):
        load(tmp_path, backend)


def test_extra_tensor(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda state: state.update({"model.surprise": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"not expected: 'model\.surprise' \[2\]"):
        load(tmp_path, backend)


def test_stored_rotary_frequencies_are_ignored(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load(tmp_path, backend)


def test_bias_that_the_config_denies(tmp_path, backend):
    write_checkpoint(tmp_path, "llama-biases")
    rewrite(tmp_path, attention_bias=False)
    with pytest.raises(CheckpointError, match=r"not expected: 'model\.layers\.0\.self_attn\.k_proj\.bias' \[16\].* more"):
        load(tmp_path, backend)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated(tmp_path, backend, keep):
    write_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: can't be read as safetensors"):
        load(tmp_path, backend)


def test_corrupt_header(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: can't be read as safetensors"):
        load(tmp_path, backend)


def test_shard_missing(tmp_path, backend):
    write_checkpoint(tmp_path, "llama", shards=3)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"shard '{shard.name}' is missing .it should hold 'model"):
        load(tmp_path, backend)


def test_shard_truncated(tmp_path, backend):
    write_checkpoint(tmp_path, "llama", shards=3)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=f"{shard.name}: can't be read"):
        load(tmp_path, backend)


def edit_map(directory, change):
    path = directory / "model.safetensors.index.json"
    value = json.loads(path.read_text())
    change(value["weight_map"])
    path.write_text(json.dumps(value))
    return value["weight_map"]


def test_index_places_a_tensor_wrongly(tmp_path, backend):
    write_checkpoint(tmp_path, "llama", shards=3)
    names = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    edit_map(tmp_path, lambda where: where.update({KEY: next(name for name in names if name != where[KEY])}))
    with pytest.raises(CheckpointError, match=rf"index\.json: says that '{KEY}' is in 'model-.*doesn't hold it"):
        load(tmp_path, backend)


def test_index_promises_a_tensor_that_is_nowhere(tmp_path, backend):
    write_checkpoint(tmp_path, "llama", shards=3)
    edit_map(tmp_path, lambda where: where.update({"model.ghost": where[KEY]}))
    with pytest.raises(CheckpointError, match=r"says that 'model\.ghost' is in"):
        load(tmp_path, backend)


def test_index_forgets_a_tensor(tmp_path, backend):
    write_checkpoint(tmp_path, "llama", shards=3)
    edit_map(tmp_path, lambda where: where.pop(KEY))
    with pytest.raises(CheckpointError, match=f"holds '{KEY}', which model.safetensors.index.json doesn't place there"):
        load(tmp_path, backend)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "config.json"])
def test_index_points_outside(tmp_path, backend, name):
    write_checkpoint(tmp_path, "llama", shards=3)
    edit_map(tmp_path, lambda where: where.update({KEY: name}))
    with pytest.raises(CheckpointError, match="expected a tensor file next to the index"):
        load(tmp_path, backend)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[1]", "{"])
def test_index_is_no_index(tmp_path, backend, content):
    write_checkpoint(tmp_path, "llama", shards=3)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        load(tmp_path, backend)


def test_no_tensors_at_all(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no tensor files; expected model\.safetensors"):
        load(tmp_path, backend)


def test_quantised_tensor(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda state: state.update({KEY: state[KEY].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"tensor '{KEY}' is torch.int8, expected float16"):
        load(tmp_path, backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type is 'gpt2' .*supported are llama, mimo, .*mistral, mixtral"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu' \\(also called 'swish'\\) is supported"),
        ({"hidden_size": "many"}, "hidden_size is 'many', expected a whole number from 1 to"),
        ({"num_key_value_heads": 3}, "num_heads 4 isn't a multiple of num_kv_heads 3"),
        ({"intermediate_size": 0}, "intermediate_size is 0, expected a whole number from 1 to"),
        ({"head_dim": 7}, "head_size is 7, expected an even number|even rotary dimension"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope|longrope"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7.0}}},
            r"rope_parameters is \{'full_attention': .*angles of its own for each kind of layer aren't supported",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": None, "rope_theta": 7.0}},
            r"rope_parameters\.factor is None, expected a number, by which a rope of kind 'linear' stretches",
        ),
        (
            {"rope_parameters": {"rope_type": None, "factor": 2.0, "rope_theta": 7.0}},
            "rope_type of the rope is None, expected one of default, dynamic, linear, llama3, longrope, yarn",
        ),
        ({"is_causal": False}, "is_causal is False, expected true: a token here sees none that come after it"),
        ({"eos_token_id": 5000}, "special token 5000 isn't a token id below the vocabulary size"),
    ],
    ids=str,
)
def test_config(tmp_path, changes, message):
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").unlink()
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_no_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{nonsense")
    with pytest.raises(CheckpointError, match=r"config\.json: isn't valid JSON"):
        read_model_config(tmp_path)


def test_generation_config_decides_the_end(tmp_path):
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [7, 9]}))
    config = read_model_config(tmp_path)
    assert config.eos_token_ids == (7, 9)
    assert config.bos_token_id == 1


def test_dtype(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(CapabilityError, match=r"can't run a model in torch\.int8; it declares bfloat16, float16"):
        load(tmp_path, backend, torch.int8)


def test_progress(tmp_path, backend):
    write_checkpoint(tmp_path, "llama", shards=2)
    seen = []
    load_decoder(tmp_path, backend=backend, dtype=torch.float32, progress=lambda *each: seen.append(each))
    names, done, totals = zip(*seen, strict=True)
    assert KEY in names
    assert list(done) == sorted(done)
    assert len(seen) == 3 * 9 + 3
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert set(totals) == {done[-1]}
    assert 0.9 * sum(sizes) < done[-1] < sum(sizes)  # all bytes but the headers
