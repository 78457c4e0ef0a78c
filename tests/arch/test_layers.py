"""The import contracts in pyproject hold, and each catches the import that it's there for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "import sys; from importlinter.cli import lint_imports_command as lint; sys.exit(lint(['--no-cache']))"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    packages = [
        root / "core",
        root / "kernels",
        root / "tools",
        *(path for path in (root / "backends").iterdir() if path.is_dir()),
    ]
    return subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages)), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def tree(tmp_path):
    for name in ("core", "backends", "kernels", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "bundled"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("core/outrider/device/memory.py", "import outrider.registry", "Imports point downward only BROKEN"),
        ("core/outrider/registry/plugins.py", "import outrider.cli.terminal.report", "Imports point downward only BROKEN"),
        (
            "core/outrider/cli/terminal/files.py",
            "import outrider.cli.options.models",
            "Inside the command line imports point downward BROKEN",
        ),
        ("core/outrider/serve/command.py", "import outrider.cli.commands.table", "terminal, not commands BROKEN"),
        ("core/outrider/model/layers/cache.py", "import outrider.engine.engine", "Imports point downward only BROKEN"),
        ("core/outrider/speculative/proposer.py", "import outrider.registry", "Imports point downward only BROKEN"),
        ("core/outrider/speculative/proposer.py", "from outrider import get_backend", "Imports point downward only BROKEN"),
        (
            "core/outrider/registry/plugins.py",
            "import outrider.model.layers.cache",
            "knows the backend interface alone BROKEN",
        ),
        (
            "tools/outrider_sanitizer/__init__.py",
            "import outrider.speculative.proposer",
            "knows the backend interface alone BROKEN",
        ),
        ("tools/outrider_trace/timeline.py", "import outrider.engine.step", "knows the backend interface alone BROKEN"),
        ("tools/outrider_sanitizer/scripts.py", "import outrider_trace.timeline", "Tools stand on top BROKEN"),
        ("tools/outrider_sanitizer/report.py", "import outrider_sanitizer.detector.actors", "the sanitizer imports"),
        ("core/outrider/engine/step.py", "import outrider_sanitizer", "no vendor package and no tool BROKEN"),
        ("backends/cuda/outrider_cuda/backend.py", "import outrider_cpu.backend", "don't know each other BROKEN"),
        ("kernels/outrider_triton/tiles/facts.py", "import outrider_cuda.backend", "belong to no backend BROKEN"),
        ("kernels/outrider_triton/tiles/facts.py", "import outrider.registry", "outrider.device and nothing else BROKEN"),
        (
            "kernels/outrider_triton/tiles/derive/products.py",
            "import outrider_triton.tiles.store.table",
            "stored, or else derived from facts BROKEN",
        ),
        ("core/outrider/stray.py", "", "must be declared as a layer"),
        ("core/outrider/registry/plugins.py", "import triton", "imports no vendor package and no tool BROKEN"),
        ("core/outrider/registry/plugins.py", "import outrider_cpu.backend", "imports no vendor package and no tool BROKEN"),
        ("backends/cpu/outrider_cpu/plugin.py", "import outrider.registry", "outrider.device and nothing else BROKEN"),
        ("backends/cpu/outrider_cpu/plugin.py", "import outrider.new.part", "outrider.device and nothing else BROKEN"),
        ("backends/cpu/outrider_cpu/plugin.py", "from outrider import Engine", "outrider.device and nothing else BROKEN"),
    ],
)
def test_catches(tree, file, line, contract):
    path = tree / file
    if "outrider.new" in line:
        (tree / "core/outrider/new").mkdir()
        (tree / "core/outrider/new/__init__.py").touch()
        (tree / "core/outrider/new/part.py").touch()
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    result = lint(tree)
    assert result.returncode != 0
    assert contract in result.stdout + result.stderr


ROOMS = {
    "engine": "async_engine",
    "session": "engine",
    "loop": "assembly",
    "ranked": "loop",
    "step": "ranked",
    "graphs": "step",
    "prefill": "step",
    "state.rows": "stages",
    "recovery": "state.rows",
    "requests.pages": "ranks.records",
    "fences": "setup.checks",
    "config": "recovery",
}
"""Rooms of the engine, and one that each must not know: the next one above, or one beside it."""


def test_catches_every_step_upward_inside_the_engine(tree):
    for room, other in ROOMS.items():
        path = tree / f"core/outrider/engine/{room.replace('.', '/')}.py"
        path.write_text(f"{path.read_text()}\nimport outrider.engine.{other}\n")
    result = lint(tree)
    assert "Inside the engine imports point downward BROKEN" in result.stdout
    missed = {
        room: other for room, other in ROOMS.items() if f"engine.{room} -> outrider.engine.{other}" not in result.stdout
    }
    assert not missed, result.stdout
