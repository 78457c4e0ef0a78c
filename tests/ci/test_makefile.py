"""What the targets of the Makefile install: read from a dry run, which executes nothing."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("target", "development"), [("demo", False), ("lint", True)])
def test_only_development_installs_linters_and_type_checkers(tmp_path, target, development):
    command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", target]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--editable '.[models,gguf]'" in planned
    assert ("groups['dev']" in planned) is development
