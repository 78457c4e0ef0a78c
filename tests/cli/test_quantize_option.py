"""``--quantize``: the copy in the cache, what the note says of it, and what is refused."""

import json
import re

import pytest
import torch

from model.gguf_files import write_gguf
from outrider.bundled import bundled
from outrider.cli.options.models import find_quantized_copy
from outrider.model import find_checkpoint, load_decoder
from outrider.model.checkpoint.files import GGUF_LIST
from outrider.model.quantization import writing
from outrider.registry import get_backend
from tiny_checkpoints import write_checkpoint

COMMON = ("generate", "--max-tokens", "6", "--dtype", "float32", "--backend", "cpu", "--json")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


def copies(tmp_path):
    return sorted((tmp_path / "assets" / "outrider" / "quantized" / "default").iterdir())


def test_a_model_is_quantised_once_and_the_note_says_what_that_costs(outrider, tmp_path):
    asked = (*COMMON, "--prompt", "def read(", "--quantize", "int8", "--speculate", "none")
    first, second = outrider(*asked), outrider(*asked)
    assert first.json["token_ids"] == second.json["token_ids"]
    (copy,) = copies(tmp_path)
    note = " ".join(first.err.split())
    found = re.search(
        r"weights in int8, rounded without calibration, so answers differ a little: (\d+) MiB instead of (\d+)", note
    )
    assert int(found[1]) < int(found[2])
    assert "".join(first.err.split()).endswith(f"{copy}isusedagain")
    assert "".join(second.err.split()).endswith(f"outrider:weightsinint8:thecopyin{copy}")
    assert (
        outrider(*COMMON, "--prompt", "def read(", "--model", str(copy), "--speculate", "none").json["token_ids"]
        == (first.json["token_ids"])
    )


def test_a_gguf_file_becomes_a_format_with_kernels(tmp_path, capsys):
    """Groups of 128 columns don't divide these weights, so smaller ones are chosen and named."""
    reference = write_checkpoint(tmp_path / "source", "llama", hidden_size=96, intermediate_size=96, head_dim=16)
    write_gguf(tmp_path / "m.gguf", reference, kind="Q8_0")
    source = find_checkpoint(tmp_path / "m.gguf")
    copy = find_quantized_copy(source, "int4")
    assert not (copy / GGUF_LIST).exists()
    described = json.loads((copy / "config.json").read_text())["quantization_config"]
    assert described["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert "int4 with a scale for 32 columns" in " ".join(capsys.readouterr().err.split())
    assert load_decoder(copy, backend=get_backend("cpu"), dtype=torch.float32).config.num_layers > 0
    assert find_quantized_copy(source, "int4") == copy
    (tmp_path / "m.gguf").touch()
    assert find_quantized_copy(find_checkpoint(tmp_path / "m.gguf"), "int4") != copy, "the file has changed"


def test_a_copy_that_another_process_finishes_first_is_used(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "source", "llama")
    write, copied = writing._write_tensors, []

    def write_both(*arguments):
        if not copied:
            copied.append(None)
            copied.append(find_quantized_copy(tmp_path / "source", "int8"))
        return write(*arguments)

    monkeypatch.setattr(writing, "_write_tensors", write_both)
    assert find_quantized_copy(tmp_path / "source", "int8") == copied[1]
    assert copies(tmp_path) == [copied[1]]
    assert capsys.readouterr().err.count("rounded without calibration") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--quantize", "int3"), "int3"),
        (("--quantize", "int8", "--through-transformers"), "--quantize has no effect on the code of transformers"),
    ],
)
def test_what_is_refused(outrider, given, said):
    result = outrider(*COMMON, "--prompt", "a", *given)
    assert result.code == 2
    assert said in result.out


def test_a_quantised_checkpoint_is_refused(outrider, tmp_path):
    copy = find_quantized_copy(bundled("target"), "int8")
    result = outrider(*COMMON, "--prompt", "a", "--model", str(copy), "--quantize", "int8")
    assert result.code == 1
    assert "is quantised already" in result.out
