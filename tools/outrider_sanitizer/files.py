"""Files of commands that may be interrupted: looked at before the work, written whole, and gone if for a while."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from outrider.device.errors import ConfigError
from outrider.registry.interruptions import interruptions_held


def check_output(option: str, path: Path | None, suffix: str | None = None) -> None:
    """Raise :class:`ConfigError` where no file can be written at ``path``, or its name doesn't end in ``suffix``."""
    if path is None:
        return
    if suffix is not None and path.suffix != suffix:
        raise ConfigError(f"{option} is {str(path)!r}; expected a file that ends in {suffix}")
    if path.is_dir():
        raise ConfigError(f"{option} is {str(path)!r}, which is a directory; name a file")
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a device, a pipe, or a link to something
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\n")
    except OSError as error:
        raise ConfigError(
            f"{option} is {str(path)!r}, and nothing can be written in {str(path.parent)!r}: {error.strerror}; "
            "name a file elsewhere"
        ) from None


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing: a regular one is written beside its place first and then moved there.

    An :class:`OSError` names ``path``, also where the disk is full.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):  # a device, a pipe, or a link to something
            path.write_text(text, encoding="utf-8")
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_text(text, encoding="utf-8")
            if path.exists():
                beside.chmod(path.stat().st_mode & 0o7777)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None


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
