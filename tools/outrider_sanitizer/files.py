"""Directories of commands that may be interrupted: gone behind their scope."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from outrider.registry.interruptions import interruptions_held


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Generator[Path]:
    """A temporary directory, in ``parent`` if given, that is gone behind the scope, whenever a signal comes."""
    with ExitStack() as stack:
        with interruptions_held():
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
            stack.callback(_remove, made)
        yield Path(made.name)


def _remove(made: tempfile.TemporaryDirectory[str]) -> None:
    with interruptions_held():
        made.cleanup()
