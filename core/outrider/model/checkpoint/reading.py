"""Reading of checkpoint files: regular files only, of bounded size, with a uniform error type.

Every reader of a checkpoint uses :func:`wrap_read_errors`, which converts any parser's exception to a
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
"""Maximum size of a JSON file in bytes. An index of a hundred thousand tensors has nine million."""
EXPECTED_CHECKPOINT = "expected a checkpoint directory as Hugging Face writes it"
"""Advice of messages about missing files."""
_MAX_JSON_DEPTH = 64  # published configs nest four deep


@contextmanager
def wrap_read_errors(path: Path, content: str, advice: str = "") -> Generator[None]:
    """Convert any failure of the block to a :class:`CheckpointError` that names ``path``, its expected ``content`` and
    ``advice``.

    A :class:`ConfigError` keeps its message. Other Outrider errors pass unchanged, and so do KeyboardInterrupt and
    SystemExit.
    """
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OutriderError:
        raise
    except BaseException as error:
        # A panic in a Rust extension derives from BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        suffix = f"; {advice}" if advice else ""
        raise CheckpointError(f"{path}: can't be read as {content}: {describe(error)}{suffix}") from error


def describe(error: BaseException) -> str:
    """Return the error as one line of bounded length. The line includes the error's type if its text alone is unclear."""
    text = one_line(str(error))
    return text if type(error) in (OSError, ValueError, RuntimeError) and text else f"{type(error).__name__}: {text}"


def present(path: Path) -> bool:
    """Return True if the directory of ``path`` has an entry of that name, even a dangling link."""
    return path.is_symlink() or path.exists()


def regular_size(path: Path) -> int:
    """Return the bytes of a regular file or of a link's target. Raises :class:`CheckpointError` for anything else, without
    opening it.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a link to a file that isn't there") from None
        raise CheckpointError(f"{path}: no such file; {EXPECTED_CHECKPOINT}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read: {describe(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise CheckpointError(f"{path}: is {kind}, expected a regular file")
    return found.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises :class:`CheckpointError` otherwise."""
    size = regular_size(path)
    with wrap_read_errors(path, "a file"):
        if size <= limit:
            with path.open("rb") as file:
                content = file.read(limit + 1)
            size = max(size, len(content))
    if size > limit:
        raise CheckpointError(f"{path}: has {size} bytes, expected at most {limit}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the checkpoint.

    Raises :class:`CheckpointError` if the file is too large, nested too deeply, or not a JSON object.
    """
    content = read_bytes(path, JSON_LIMIT)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: isn't valid JSON: {describe(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(_MAX_JSON_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return value
    raise CheckpointError(f"{path}: its values are nested more than {_MAX_JSON_DEPTH} deep")
