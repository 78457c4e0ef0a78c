"""Temporary directories of commands, removed at the end of their scope even after an interruption."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from outrider.registry.interruptions import interruptions_held


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Generator[Path]:
    """Create a temporary directory, in ``parent`` if set, and remove it after the scope, even if a signal arrives."""
    with ExitStack() as stack:
        with interruptions_held():
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
            stack.callback(_remove, made)
        yield Path(made.name)


def _remove(made: tempfile.TemporaryDirectory[str]) -> None:
    with interruptions_held():
        made.cleanup()
