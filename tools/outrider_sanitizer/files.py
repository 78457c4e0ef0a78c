"""Files of commands that may be interrupted: written whole, and gone when they were for a while."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from outrider.registry.interruptions import interruptions_held


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing: a regular one is written beside its place first and then moved there."""
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a device, a pipe, or a link to something
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        if path.exists():
            beside.chmod(path.stat().st_mode & 0o7777)
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise


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
