"""Temporary directories of commands, removed at the end of their scope even after an interruption."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from outrider.registry.children import interruptions_held


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Generator[Path]:
    """Create a temporary directory, in ``parent`` if set, and remove it after the scope, even if a signal arrives."""
    with ExitStack() as stack:
        with interruptions_held():
            directory = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
            stack.callback(_remove, directory)
        yield Path(directory.name)


def _remove(directory: tempfile.TemporaryDirectory[str]) -> None:
    with interruptions_held():
        directory.cleanup()
