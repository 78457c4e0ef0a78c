"""Reading a checkpoint's files: regular files alone, up to a limit, and with one kind of error.

Everything that reads a checkpoint goes through :func:`reading`, so that whatever a parser raises becomes a
:class:`CheckpointError` that names the file.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.device import ConfigError, OutriderError
from outrider.errors import CheckpointError, one_line

JSON_LIMIT = 64 << 20
"""Bytes of a JSON file: an index of a hundred thousand tensors has nine million."""
EXPECTED = "expected a checkpoint directory as Hugging Face writes it"
"""What a message says where there's nothing."""
_DEPTH = 64  # a config nests four deep


@contextmanager
def reading(path: Path, what: str, advice: str = "") -> Generator[None]:
    """A scope that reads ``path`` as ``what``: each failure in it is a :class:`CheckpointError` that names both, with advice.

    A :class:`ConfigError` becomes one too, in its own words. Other errors of ours pass, as does what isn't a failure
    (KeyboardInterrupt, SystemExit).
    """
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OutriderError:
        raise
    except BaseException as error:
        # A panic of a library in Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        end = f"; {advice}" if advice else ""
        raise CheckpointError(f"{path}: can't be read as {what}: {describe(error)}{end}") from error


def describe(error: BaseException) -> str:
    """The error in one line of bounded length, with its kind where its text alone says little."""
    text = one_line(str(error))
    return text if type(error) in (OSError, ValueError, RuntimeError) and text else f"{type(error).__name__}: {text}"


def present(path: Path) -> bool:
    """Whether the directory has an entry of that name, be it a link to nowhere."""
    return path.is_symlink() or path.exists()


def regular_size(path: Path) -> int:
    """Bytes of a regular file or of what a link leads to; :class:`CheckpointError` for anything else, unopened."""
    try:
        found = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a link to a file that isn't there") from None
        raise CheckpointError(f"{path}: no such file; {EXPECTED}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read: {describe(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise CheckpointError(f"{path}: is {kind}, expected a regular file")
    return found.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; :class:`CheckpointError` otherwise."""
    size = regular_size(path)
    with reading(path, "a file"):
        if size <= limit:
            with path.open("rb") as file:
                content = file.read(limit + 1)
            size = max(size, len(content))
    if size > limit:
        raise CheckpointError(f"{path}: has {size} bytes, expected at most {limit}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; :class:`CheckpointError` if it's none, too large or too deep."""
    content = read_bytes(path, JSON_LIMIT)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: isn't valid JSON: {describe(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return value
    raise CheckpointError(f"{path}: its values are nested more than {_DEPTH} deep")
