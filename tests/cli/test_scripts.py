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
