"""A checkpoint that isn't right gives an error that names the file and what is wrong, before any of it is used."""

import json

import pytest
import torch

from model.wrong_configs import WRONG_CONFIGS
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


def test_stored_rotary_frequencies_are_ignored(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load(tmp_path, backend)


def tensors(change):
    return lambda directory: rewrite(directory, change)


def content(change, name="model.safetensors"):
    """Change the bytes of a file; of a shard by its number."""

    def changed(directory):
        path = directory / name if isinstance(name, str) else sorted(directory.glob("model-*.safetensors"))[name]
        path.write_bytes(change(path.read_bytes()))

    return changed


def places(change):
    """Change where the index places tensors."""

    def changed(directory):
        path = directory / "model.safetensors.index.json"
        value = json.loads(path.read_text())
        change(value["weight_map"])
        path.write_text(json.dumps(value))

    return changed


def index_of(text):
    return content(lambda _: text.encode(), "model.safetensors.index.json")


CUT = r"model\.safetensors: can't be read as safetensors"
OUTSIDE = "expected a tensor file next to the index"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 137000000\n"
POINTED = r"is a pointer of Git LFS, not .*; run 'git lfs pull' there"
BROKEN = {
    "another tensor": (1, tensors(lambda state: state.update(surprise=torch.zeros(2))), r"not expected: 'surprise' \[2\]"),
    "an integer": (
        1,
        tensors(lambda state: state.update({KEY: state[KEY].to(torch.int8)})),
        rf"tensor '{KEY}' is torch.int8, expected float16",
    ),
    **{f"{keep} bytes": (1, content(lambda data, keep=keep: data[:keep]), CUT) for keep in (0, 4, 100, -1)},
    "header": (1, content(lambda data: data[:8] + b"\xff" * 32 + data[40:]), CUT),
    "a pointer": (1, content(lambda data: POINTER), rf"model\.safetensors: {POINTED}"),
    "no files": (
        1,
        lambda directory: (directory / "model.safetensors").unlink(),
        r"no tensor files; expected model\.safetensors",
    ),
    "no shard": (
        3,
        lambda directory: sorted(directory.glob("model-*"))[1].unlink(),
        r"shard 'model-00002\S*' is missing .it should hold 'model",
    ),
    "cut shard": (3, content(lambda data: data[:-7], 1), r"model-00002\S*: can't be read"),
    "another shard": (
        3,
        places(lambda where: where.update({KEY: next(name for name in where.values() if name != where[KEY])})),
        rf"index\.json: says that '{KEY}' is in 'model-.*doesn't hold it",
    ),
    "a ghost": (3, places(lambda where: where.update(ghost=where[KEY])), "says that 'ghost' is in"),
    "a forgotten tensor": (
        3,
        places(lambda where: where.pop(KEY)),
        f"holds '{KEY}', which model.safetensors.index.json doesn't place there",
    ),
    "outside": (3, places(lambda where: where.update({KEY: "../elsewhere.safetensors"})), OUTSIDE),
    "no tensor file": (3, places(lambda where: where.update({KEY: "config.json"})), OUTSIDE),
    **{
        text: (3, index_of(text), r"index\.json: ")
        for text in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[1]", "{")
    },
}


@pytest.mark.parametrize(("shards", "change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files(tmp_path, backend, shards, change, message):
    write_checkpoint(tmp_path, "llama", shards=shards)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, backend)


def test_bias_that_the_config_denies(tmp_path, backend):
    write_checkpoint(tmp_path, "llama-biases")
    rewrite(tmp_path, attention_bias=False)
    with pytest.raises(CheckpointError, match=r"not expected: 'model\.layers\.0\.self_attn\.k_proj\.bias' \[16\].* more"):
        load(tmp_path, backend)


@pytest.mark.parametrize(("changes", "message"), WRONG_CONFIGS["decoder, read"], ids=str)
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
