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
        ("sys.exit(5)", 5, "ends.py:11: exit code 5"),
        ("sys.exit()", 0, None),
        ("sys.exit('no')", 1, "ends.py:11: no"),
        ("raise ValueError('odd')", 1, "ends.py:11: ValueError: odd"),
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
        (("--picture", "t.png"), "--picture is 't.png'; expected a file that ends in .svg or .html"),
        (("--out", "t.html"), "the picture next to --out is 't.html', another file of this command"),
        (("--out", "x/t.svg", "--picture", "t.svg"), "--picture is 't.svg', another file of this command"),
        (("--out", "runs.py"), "--out is 'runs.py', another file of this command"),
        (("--out", "./runs.py"), "--out is 'runs.py', another file of this command"),
    ],
)
def test_trace_looks_at_its_files_before_the_script_runs(outrider, script, given, said, tmp_path):
    name = script(f"open({str(tmp_path / 'ran')!r}, 'w')", "runs")
    (tmp_path / "x").symlink_to(tmp_path)
    result = outrider("trace", "--backend", "sim", *given, "--", f"{name}.py")
    assert result.code == 2
    assert said in result.err
    assert (tmp_path / f"{name}.py").read_text().startswith("\nimport os")
    assert not (tmp_path / "ran").exists()


def test_trace_looks_at_its_default_file_too(outrider, script, tmp_path):
    (tmp_path / "trace.json").mkdir()
    name = script(f"open({str(tmp_path / 'ran')!r}, 'w')", "runs")
    result = outrider("trace", "--backend", "sim", "--", f"{name}.py")
    assert result.code == 2
    assert "--out is 'trace.json'" in result.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--from", "1e9"), "no operation ran between --from and --to"),
        (("--from", "5", "--to", "5"), "the picture ends after it starts"),
    ],
)
def test_trace_draws_no_picture_without_operations(outrider, script, given, said, tmp_path):
    result = outrider("trace", *given, "--", f"{script('pass', 'runs')}.py")
    assert result.code == (2 if "--to" in given else 1)
    assert said in result.out + result.err
    assert not (tmp_path / "trace.html").exists()


def test_a_script_without_operations_is_not_clean_and_has_no_picture(outrider, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idle.py").write_text("print('no device')")
    traced = outrider("trace", "--", "idle.py")
    assert traced.code == 1
    assert "no picture: no operation ran on backend 'sim' (sim:0)" in traced.out
    assert [path.name for path in tmp_path.iterdir()] == ["idle.py"]
    watched = outrider("sanitize", "--", "idle.py")
    assert watched.code == 1
    assert "nothing was watched: 0 operations" in watched.out
    assert "clean" not in watched.out


FAILS = """
import torch

def fail():
    raise ValueError("odd")

x = torch.ones(4, device="cuda", requires_grad=False) + 1
{end}
"""
ENDS = [
    ("fail()", "fails.py:5: ValueError: odd"),
    ("x.nothing", "fails.py:8: AttributeError: "),
    ("import sys; sys.exit(3)", "fails.py:8: exit code 3"),
    ("if x", "fails.py:8: SyntaxError: "),
]


@pytest.mark.parametrize(("end", "said"), ENDS, ids=["raises", "torch", "exits", "syntax"])
def test_a_script_that_fails_shows_its_line_and_is_never_clean(outrider, end, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text(FAILS.format(end=end))
    for command in ("sanitize", "trace"):
        result = outrider(command, "--", "fails.py")
        assert result.code != 0
        assert said in result.out
        assert "clean" not in result.out
        assert "Traceback" not in result.err
    shown = outrider("sanitize", "--debug", "--json", "--", "fails.py")
    assert (shown.json["clean"], said in shown.json["script_error"]) == (False, True)
    first = shown.err.split("Traceback (most recent call last):\n")
    assert len(first) == (1 if "exit" in end or end == "if x" else 2)
    assert all('  File "fails.py", line 8, in <module>' in each.splitlines()[0] for each in first[1:])


ENGINE = """
from outrider import Engine, EngineConfig, SamplingParams, get_backend
from outrider.bundled import bundled

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


@pytest.mark.parametrize(("name", "said"), [(".", "script '.' isn't a file"), ("none.py", "script 'none.py' doesn't exist")])
@pytest.mark.parametrize("command", ["sanitize", "trace"])
def test_a_script_that_cannot_run_is_named(outrider, tmp_path, monkeypatch, command, name, said):
    monkeypatch.chdir(tmp_path)
    result = outrider(command, "--", name)
    assert result.code == 2
    assert said in result.err
