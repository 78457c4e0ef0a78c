"""Errors about what Outrider is asked to run, a checkpoint or a request, and how messages quote what was given.

The tree of errors is in :mod:`outrider.device.errors`, whose other errors are about devices and those who drive them.
"""

from __future__ import annotations

from outrider.device.errors import OutriderError


class CheckpointError(OutriderError):
    """A checkpoint that is truncated, incomplete, of the wrong shape or of an unknown kind."""


class RequestError(OutriderError):
    """A request that can't be served: empty, too long for the context, or of an unknown id."""


_TEXT = 300
"""Characters of somebody else's words, or of a value."""


def shown(value: object) -> str:
    """A value for a message: one line, of bounded length."""
    try:
        return one_line(repr(value[: 2 * _TEXT] if isinstance(value, str | list) else value))
    except ValueError:  # Python doesn't write whole numbers of more than some thousand digits
        return "a number of thousands of digits"


def one_line(text: str) -> str:
    """A text for a message, on one line, cut where it's long."""
    text = " ".join(text[: 4 * _TEXT].split())
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}…"
