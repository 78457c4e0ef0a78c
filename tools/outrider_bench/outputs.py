"""Files that a benchmark writes behind its measurements: looked at before these, and no reason to lose them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from outrider.device.errors import ConfigError
from outrider_sanitizer.files import write_whole


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


def write_output(option: str, path: Path, text: str) -> str | None:
    """Write a file; where that fails, say so on standard error and return the reason: what was measured goes on."""
    try:
        write_whole(path, text)
    except OSError as error:
        reason = f"{option} {path} wasn't written: {error.strerror or error}"
        sys.stderr.write(f"{reason}\n")
        sys.stderr.flush()
        return reason
    return None


def write_plot(path: Path, drawn: str | None, data: dict[str, object]) -> int:
    """Write what ``--plot`` asks for, None: there is nothing to draw. Returns the exit code; what failed is told, and in
    ``data`` as ``plot_failed``.
    """
    if drawn is not None:
        failed = write_output("--plot", path, drawn)
    else:
        failed = "--plot has nothing to draw: nothing was measured"
        sys.stderr.write(f"{failed}\n")
    if failed is None:
        return 0
    data["plot_failed"] = failed
    return 1
