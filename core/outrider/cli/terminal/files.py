"""Output files and directories of commands: checked before long work starts, and written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from outrider.device.errors import ConfigError


def check_directory(option: str, path: Path, *, make: bool = True) -> None:
    """Raise :class:`ConfigError` if no files can be written in the directory ``path``, which ``option`` named.

    ``make``: create the directory if it is missing; otherwise a missing directory is an error.
    """
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\n")
    except (OSError, ValueError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError(
            f"{option} is {str(path)!r}, and no files can be written there: {why}; name a directory that you can write to"
        ) from None


def output_problem(path: Path, suffix: str | None = None) -> str | None:
    """Return why no file can be written at ``path``, or that its name doesn't end in ``suffix``; None: it can be written."""
    if suffix is not None and path.suffix != suffix:
        return f"expected a file that ends in {suffix}"
    if path.is_dir():
        return "which is a directory; name a file"
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a device, a pipe, or a link to something
        return None
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\n")
    except OSError as error:
        return f"nothing can be written in {str(path.parent)!r}: {error.strerror}; name a file elsewhere"
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all: a regular file is written under a temporary name and then renamed.

    An :class:`OSError` names ``path``, also if the disk is full.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):  # a device, a pipe, or a link to something
            path.write_text(text, encoding="utf-8")
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            if path.exists():
                temporary.chmod(path.stat().st_mode & 0o7777)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
