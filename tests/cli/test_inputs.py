"""Absurd sizes and files are refused before anything is loaded or allocated."""

import os
from pathlib import Path

import pytest

from outrider.cli.terminal import files
from outrider.device import ConfigError, OutOfDeviceMemory
from outrider.engine.config import SIZES, EngineConfig
from outrider.errors import RequestError


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("/dev/zero", "", "has more than 16 MiB"),
        ("place", "directory", "is a directory"),
        ("pipe", "pipe", "is a pipe, and nothing was written to it within 0.05 s"),
    ],
)
def test_files_that_hold_no_prompt(outrider, tmp_path, monkeypatch, name, kind, says):
    monkeypatch.setattr(files, "_PIPE_S", 0.05)
    path = tmp_path / name
    if kind:
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    result = outrider("generate", "--prompt-file", str(path), "--json")
    assert (result.code, result.json["error"]["type"]) == (2, "UsageError")
    assert says in result.json["error"]["message"]


def test_a_pipe_that_is_written_to_is_read():
    read, write = os.pipe()
    os.write(write, b"def")
    os.close(write)
    try:
        assert files.read_bounded(Path(f"/dev/fd/{read}")) == b"def"
    finally:
        os.close(read)


@pytest.mark.parametrize("option", ["--prompt", "--stop"])
def test_text_that_is_not_utf_8(outrider, option):
    rest = () if option == "--prompt" else ("--prompt", "a")
    result = outrider("generate", option, "a\udcff", *rest, "--json")
    assert result.json["error"] == {
        "type": "UsageError",
        "message": f"{option}: not UTF-8 text at character 1; use the encoding UTF-8",
    }
    with pytest.raises(RequestError):
        files.check_utf8(option, "\ud800")


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_a_most(name):
    _, most = SIZES[name]
    if name != "draft_topk":
        assert getattr(EngineConfig(**{name: most}), name) == most
    with pytest.raises(ConfigError, match=f"{name} is {most + 1}; expected a whole number of at most {most}"):
        EngineConfig(**{name: most + 1})


def test_a_tree_has_a_most():
    with pytest.raises(ConfigError, match="a tree of 5000 nodes; expected at most 4096"):
        EngineConfig(draft_tokens=50, draft_topk=100)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_made():
    from outrider.bundled import bundled
    from outrider.engine.engine import Engine
    from outrider.registry import get_backend

    def engine(spec, **sizes):
        return Engine.from_checkpoint(bundled("target"), get_backend(spec), config=EngineConfig(**sizes))

    with pytest.raises(ConfigError, match="slots; expected at most 2147483647"):
        engine("cpu", num_pages=2**30)
    with pytest.raises(OutOfDeviceMemory, match="the KV cache would have 10000000 pages of"):
        engine("sim:memory=1000000000", num_pages=10_000_000)
