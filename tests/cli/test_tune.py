"""``outrider tune``: for what, where it's kept, and who refuses. What is measured is in ``tests/kernels/test_tuner.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.cli.main import main
from outrider.device import CapabilityError, KernelSet, TuningResult
from outrider.model.config.shapes import decoder_shape, shape_config
from outrider.model.layers.tuning import prepare_kernels
from outrider.registry import get_backend

RESULT = TuningResult(measured=9, kept=3, complete=True, seconds=1.0, before_us=20.0, after_us=10.0)


class Tunes(KernelSet):
    """Kernels that tune by writing down what they were asked."""

    name = "tunes"
    tunes = True
    stops = False

    def tune(self, shapes, *, deadline_s, directory, progress=None):
        directory.mkdir(parents=True, exist_ok=True)
        for number, shape in enumerate(shapes):
            (directory / f"{shape.hidden}.json").write_text("{}")
            progress(number + 1, len(shapes), f"hidden {shape.hidden}, {deadline_s:g} s")
        if self.stops:
            raise KeyboardInterrupt
        return tuple(RESULT for _ in shapes)

    def use_tuned(self, directory: Path) -> int:
        return len(list(directory.glob("*.json"))) if directory.exists() else 0


@pytest.fixture
def tunes(monkeypatch, tmp_path):
    backend = get_backend("cpu")
    monkeypatch.setattr(type(backend), "kernels_in_use", Tunes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "tuned"


def asked(capsys, *arguments):
    code = main([*arguments, "--backend", "cpu", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_shapes_are_tuned_and_kept_in_the_users_cache(tunes, capsys):
    code, said = asked(capsys, "tune", "--shape", "llama-3.1-70b/2", "--shape", "tiny", "--deadline", "7")
    assert code == 0
    assert said["directory"] == str(tunes)
    assert [result["shape"] for result in said["results"]] == ["llama-3.1-70b/2", "tiny"]
    assert said["said"] == ["hidden 8192, 7 s", "hidden 64, 7 s"]
    assert (said["before"], said["results"][0]["kept"]) == (0, 3)
    assert sorted(path.name for path in tunes.iterdir()) == ["64.json", "8192.json"]


def test_another_directory_and_a_checkpoint(tunes, capsys, tmp_path):
    code, said = asked(capsys, "tune", "--cache", str(tmp_path / "here"))
    assert code == 0
    assert said["results"][0]["shape"].endswith("target")  # the bundled model
    assert (tmp_path / "here").is_dir()
    assert not tunes.exists()


def test_ctrl_c_says_what_there_is(tunes, capsys, monkeypatch):
    monkeypatch.setattr(Tunes, "stops", True)
    code, said = asked(capsys, "tune", "--shape", "tiny")
    assert code == 130
    assert (said["kept"], said["before"]) == (1, 0)
    assert str(tunes) in said["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "expected", "named"),
    [
        (("--shape", "gpt-9"), 2, "--shape is 'gpt-9'"),
        (("--shape", "tiny", "--model", "."), 2, "give one of them"),
        (("--shape", "tiny/3"), 1, "can't be shared out"),
    ],
)
def test_what_cannot_be_tuned_for_says_so(arguments, expected, named, tunes, capsys):
    code, said = asked(capsys, "tune", *arguments)
    assert code == expected
    assert named in said["error"]["message"]
    assert not tunes.exists()


def test_kernels_that_do_not_tune_refuse(capsys, tmp_path):
    code, said = asked(capsys, "tune", "--shape", "tiny", "--cache", str(tmp_path))
    assert code == 1
    assert said["error"]["type"] == "CapabilityError"
    assert "don't tune" in said["error"]["message"]


def test_a_start_takes_over_what_is_kept_and_tunes_where_it_is_asked(tunes):
    backend, config = get_backend("cpu"), shape_config("tiny")
    assert str(prepare_kernels(backend, config, directory=tunes)) == "kernels: nothing was tuned on this machine"
    told = []
    made = prepare_kernels(backend, config, directory=tunes, seconds=2.0, progress=lambda *line: told.append(line))
    assert made.result == RESULT
    assert told == [(1, 1, "hidden 64, 2 s")]
    assert prepare_kernels(backend, config, directory=tunes).num_loaded == 1
    assert "1 tuned choices" in str(prepare_kernels(backend, config, directory=tunes))
    with pytest.raises(CapabilityError, match="no directory"):
        prepare_kernels(backend, config, directory=None, seconds=1.0)


def test_a_start_that_asks_for_tuning_of_kernels_that_do_not(tmp_path):
    with pytest.raises(CapabilityError, match="don't tune"):
        prepare_kernels(get_backend("cpu"), shape_config("tiny"), directory=tmp_path, seconds=1.0)


def test_a_shape_says_all_that_kernels_depend_on():
    qwen = decoder_shape(shape_config("qwen3-8b"), torch.bfloat16)
    assert (qwen.qk_norm, qwen.bias, qwen.fused) == (True, False, 2 * 4096)
    assert decoder_shape(shape_config("qwen2.5-7b"), torch.bfloat16).bias
    assert replace(qwen, bias=True) != qwen
