"""Scripts that end themselves, under the commands that run them."""

import pytest

SCRIPT = """
import os, sys
import torch
from outrider import get_backend

def program(backend):
    stream = backend.create_stream("a")
    with backend.on(stream):
        torch.ones(4, device=backend.device) + 1
    backend.synchronize()
    {end}

if __name__ == "__main__":
    program(get_backend("sim"))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(end, name):
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(end=end))
        return name

    return write


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("sys.exit(5)", 5, None),
        ("sys.exit()", 0, None),
        ("sys.exit('no')", 1, "no"),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
    ],
)
def test_trace_gives_what_was_recorded_and_the_scripts_exit_code(outrider, script, end, code, error):
    name = script(end, "ends")
    result = outrider("trace", "--backend", "sim", "--json", "--", f"{name}.py")
    assert result.code == code
    assert (result.json["script_exit_code"], result.json["script_error"]) == (code, error)
    assert result.json["operations"] > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--out", "/proc/x/t.json"), "--out is '/proc/x/t.json'; nothing can be written in '/proc/x'"),
        (("--picture", "/proc/x/t.svg"), "--picture is '/proc/x/t.svg'; nothing can be written in '/proc/x'"),
        (("--out", "t.html"), "t.html would get the timeline and the picture"),
    ],
)
def test_trace_looks_at_its_files_before_the_script_runs(outrider, script, given, said, tmp_path):
    name = script(f"open({str(tmp_path / 'ran')!r}, 'w')", "runs")
    result = outrider("trace", "--backend", "sim", *given, "--", f"{name}.py")
    assert result.code == 2
    assert said in result.err
    assert not (tmp_path / "ran").exists()


ENGINE = """
from outrider import Engine, EngineConfig, SamplingParams, get_backend
from outrider.cli.models import bundled

for name in ({backends}):
    config = EngineConfig(max_requests=1, max_context=64)
    engine = Engine.from_checkpoint(bundled("target"), get_backend(name), config=config)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("backends", ["'cpu',", "'sim', 'cpu', 'sim'"])
def test_sanitize_watches_engines_that_read_a_checkpoint(child, tmp_path, backends):
    """Files are read into memory of the host past torch, and a watch of one device meets tensors of another one."""
    (tmp_path / "engines.py").write_text(ENGINE.format(backends=backends))
    result = child("sanitize", "--backend", backends.split("'")[1], "--no-advice", "--", str(tmp_path / "engines.py"))
    assert result.code == 0, result.out + result.err
    assert "finding" not in result.out


def test_explore_takes_an_exit_for_the_programs_end(outrider, script):
    failed = outrider("explore", f"{script('sys.exit(5)', 'exits_five')}:program", "--iterations", "2", "--json")
    assert (failed.code, failed.json["error"]["type"], failed.json["runs"]) == (5, "ProgramExit", 1)
    passed = outrider("explore", f"{script('sys.exit(0)', 'exits_zero')}:program", "--iterations", "2", "--json")
    assert (passed.code, passed.json["failed"]) == (0, False)


def test_explore_says_that_the_module_ended(outrider, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends_at_import.py").write_text("import sys; sys.exit(3)")
    result = outrider("explore", "ends_at_import:program", "--json")
    assert (result.code, result.json["error"]["type"]) == (1, "ConfigError")
    assert "importing 'ends_at_import' failed: SystemExit: 3" in result.json["error"]["message"]
