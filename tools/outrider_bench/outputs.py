"""Files that a benchmark writes behind its measurements: looked at before these, and no reason to lose them."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.files import write_whole
from outrider.cli.streams import note


def write_output(option: str, path: Path, text: str) -> str | None:
    """Write a file; where that fails, say so on standard error and return the reason: what was measured goes on."""
    try:
        write_whole(path, text)
    except OSError as error:
        reason = f"{option} {path} wasn't written: {error.strerror or error}"
        note(f"{reason}\n")
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
        note(f"{failed}\n")
    if failed is None:
        return 0
    data["plot_failed"] = failed
    return 1
