"""Errors about checkpoints and requests, the quoting of their values in messages, and the check of an extra's packages.

The tree of all errors is in :mod:`outrider.device.errors`, which defines the errors about devices and plugins.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from outrider.device.errors import ConfigError, OutriderError


class CheckpointError(OutriderError):
    """A checkpoint that is truncated, incomplete, of the wrong shape or of an unknown kind."""


class RequestError(OutriderError):
    """A request that can't be served: empty, too long for the context, or of an unknown id."""


class BusyError(RequestError):
    """A request that can't be served now. The same request may be served later."""


_MAX_QUOTED_CHARACTERS = 300
"""Maximum number of characters of a quoted value or of a quoted message of another library."""


def shown(value: object) -> str:
    """Return the representation of ``value`` for a message: one line, of bounded length."""
    try:
        return one_line(repr(value[: 2 * _MAX_QUOTED_CHARACTERS] if isinstance(value, str | list) else value))
    except ValueError:  # Python doesn't write whole numbers of more than some thousand digits
        return "a number of thousands of digits"


def one_line(text: str) -> str:
    """Return ``text`` for a message: one line, truncated to a bounded length."""
    text = " ".join(text[: 4 * _MAX_QUOTED_CHARACTERS].split())
    return text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}…"


_DISTRIBUTIONS = {"PIL": "pillow"}
"""Name of a distribution that differs from the name of the package that it installs."""


def require_packages(what: str, packages: Sequence[str], extra: str) -> None:
    """Raise :class:`ConfigError` if one of ``packages``, which ``what`` needs, is missing. The message names the command that
    installs the ``extra`` of Outrider.
    """
    missing = [_DISTRIBUTIONS.get(name, name) for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            f"run: pip install 'outrider[{extra}]'"
        )
