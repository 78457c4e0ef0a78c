"""Code that a checkpoint brings is never run, unless somebody asked for it by name."""

import io
import json
import re
import shutil
import sys

import pytest
import torch

from outrider import Engine, EngineConfig
from outrider.cli.options.models import Speculation
from outrider.device import ConfigError
from outrider.errors import CheckpointError
from outrider.model import (
    MediaProcessor,
    Tokenizer,
    load_decoder,
    load_eagle,
    load_eagle3,
    load_through_transformers,
    load_vision,
    open_head,
)
from outrider.model.config.checkpoint_config import read_model_config
from outrider_proof.checkpoints import write_eagle
from tiny_checkpoints import byte_level_tokenizer, write_checkpoint, write_eagle3
from tiny_vision_checkpoints import write_vision_checkpoint

EVIL = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
class EvilTool:
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        return cls()
"""
AUTO = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModel": "evil.EvilModel",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoTokenizer": ["evil.EvilTool", "evil.EvilTool"],
    "AutoProcessor": "evil.EvilTool",
    "AutoImageProcessor": "evil.EvilTool",
    "AutoVideoProcessor": "evil.EvilTool",
}
WAYS = {
    "config": lambda path, target, backend: read_model_config(path),
    "decoder": lambda path, target, backend: load_decoder(path, backend=backend, dtype=torch.float32),
    "tokenizer": lambda path, target, backend: Tokenizer.from_checkpoint(path),
    "vision": lambda path, target, backend: load_vision(path, backend=backend, dtype=torch.float32),
    "images": lambda path, target, backend: MediaProcessor.from_checkpoint(path),
    "door": lambda path, target, backend: load_through_transformers(path, backend=backend, dtype=torch.float32),
    "eagle": lambda path, target, backend: load_eagle(open_head(path, target=target, backend=backend, dtype=torch.float32)),
    "eagle3": lambda path, target, backend: load_eagle3(open_head(path, target=target, backend=backend, dtype=torch.float32)),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("evil")
    write_checkpoint(root / "llama", "llama")
    write_vision_checkpoint(root / "vision", "qwen2_vl")
    write_eagle(root / "eagle")
    write_eagle3(root / "eagle3", layers=(0, 1, 2))
    for name in ("llama", "vision"):
        byte_level_tokenizer(280).save(str(root / name / "tokenizer.json"))
    return root


@pytest.fixture(scope="module")
def target(checkpoints, backend):
    return load_decoder(checkpoints / "llama", backend=backend, dtype=torch.float32)


def spoil(directory, to, **changes):
    """A copy of the checkpoint whose every config names a class of ``evil.py``, which leaves a marker."""
    shutil.copytree(directory, to)
    marker = to.parent / "marker"
    (to / "evil.py").write_text(EVIL.format(marker=str(marker)))
    own = {
        "tokenizer_config.json": {"tokenizer_class": "EvilTool"},
        "processor_config.json": {"processor_class": "EvilTool"},
        "preprocessor_config.json": {"image_processor_type": "EvilTool"} if changes else {},
        "video_preprocessor_config.json": {"video_processor_type": "EvilTool"},
        "config.json": changes,
    }
    for name, more in own.items():
        path = to / name
        value = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(value | {"auto_map": AUTO} | more))
    return marker


@pytest.mark.parametrize("answer", ["", "y\n" * 20], ids=["silence", "yes"])
@pytest.mark.parametrize("model_type", [None, "evil"])
@pytest.mark.parametrize("way", WAYS)
def test_no_code_runs(tmp_path, checkpoints, target, backend, monkeypatch, way, model_type, answer):
    source = {"vision": "vision", "images": "vision", "eagle": "eagle", "eagle3": "eagle3"}.get(way, "llama")
    marker = spoil(checkpoints / source, tmp_path / "model", **({} if model_type is None else {"model_type": model_type}))
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    if model_type is None:  # a known family doesn't need the code
        WAYS[way](tmp_path / "model", target, backend)
    elif way != "tokenizer":
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "model"))):
            WAYS[way](tmp_path / "model", target, backend)
    assert not marker.exists()
    assert sys.stdin.read() == answer, "nobody was asked"


def test_the_option_runs_it(tmp_path, checkpoints, backend, monkeypatch):
    """So the marker does show that code ran."""
    marker = spoil(checkpoints / "llama", tmp_path / "model", model_type="evil")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="--trust-remote-code runs the code"):
        load_through_transformers(tmp_path / "model", backend=backend, dtype=torch.float32)
    assert not marker.exists()
    load_through_transformers(tmp_path / "model", backend=backend, dtype=torch.float32, trust_remote_code=True)
    assert marker.exists()


def test_the_code_of_a_repository_of_the_hub_comes_with_the_option_alone(
    repository, tmp_path, checkpoints, backend, monkeypatch
):
    marker = spoil(checkpoints / "llama", tmp_path / "model", model_type="evil")
    shutil.copytree(tmp_path / "model", repository, dirs_exist_ok=True)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    config, sizes = EngineConfig(max_context=32, dtype="float32"), {"draft": None, "draft_tokens": 1}
    found = Speculation.with_defaults("none", model="owner/online", through_transformers=True, **sizes).model
    assert not list(found.glob("*.py"))
    with pytest.raises(CheckpointError, match=r"transformers can't load it"):
        Engine.from_checkpoint("owner/online", backend, config=config, through_transformers=True)
    assert not list(found.glob("*.py"))
    options = {"through_transformers": True, "trust_remote_code": True}
    assert (Speculation.with_defaults("none", model="owner/online", **sizes, **options).model / "evil.py").exists()
    (found / "evil.py").unlink()
    assert not marker.exists()
    Engine.from_checkpoint("owner/online", backend, config=config, **options)
    assert marker.exists()


def test_the_option_belongs_to_the_door(checkpoints, backend):
    with pytest.raises(
        ConfigError, match="trust_remote_code runs code of the checkpoint, which only through_transformers runs"
    ):
        Engine.from_checkpoint(checkpoints / "llama", backend, config=EngineConfig(), trust_remote_code=True)
