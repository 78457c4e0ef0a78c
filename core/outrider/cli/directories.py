"""Directories that commands write to, looked at before anything takes long."""

from __future__ import annotations

import tempfile
from pathlib import Path

from outrider.device.errors import ConfigError


def check_directory(option: str, path: Path, *, make: bool = True) -> None:
    """Raise :class:`ConfigError` where no files can be written in ``path``, which ``option`` named.

    ``make``: it's made where it isn't there; else it must be.
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
