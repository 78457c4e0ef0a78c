"""Where the tree is, and its modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from arch.parsing import nodes, parsed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


def _texts(*trees: str) -> dict[str, str]:
    files = [file for tree in trees for file in sorted((ROOT / tree).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


@pytest.fixture(scope="session")
def core_files() -> dict[str, str]:
    """Modules of the core by their paths. A check goes over all of them and tells what it finds by file."""
    return _texts("core")


@pytest.fixture(scope="session")
def source_files(core_files: dict[str, str]) -> dict[str, str]:
    """All of the project's modules."""
    return core_files | _texts("backends", "kernels", "tools", "training", "examples", "tests")


@pytest.fixture(scope="package", autouse=True)
def forget_parsed_modules() -> Iterator[None]:
    """Give up the parsed modules after the last rule: millions of objects slow each collection of garbage."""
    gc.disable()
    yield
    nodes.cache_clear()
    parsed.cache_clear()
    gc.enable()
