"""Where the tree is, and its modules."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``core_file`` and ``source_file`` run a check once for each module, so that a failure names it."""
    core = sorted((ROOT / "core").rglob("*.py"))
    trees = {
        "core_file": core,
        "source_file": sorted(
            file
            for folder in ("core", "backends", "kernels", "tools", "training", "examples", "tests")
            for file in (ROOT / folder).rglob("*.py")
        ),
    }
    for name, files in trees.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, files, ids=[str(file.relative_to(ROOT)) for file in files])
