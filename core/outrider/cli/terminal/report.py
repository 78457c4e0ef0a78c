"""The result of a command: data for scripts, and a function that renders the data for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console

from outrider.device.errors import OutriderError


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandReport:
    """The result of a command, which the dispatcher prints; a command itself prints only text that it streams.

    ``silent``: print nothing, not even with ``--json``, because another process prints the result. ``streamed``: standard
    output has the text of a model, so ``render`` writes to standard error. ``traceback``: of a program that the command ran
    and that failed; printed on standard error with ``--debug``.
    """

    data: Mapping[str, object]
    render: Callable[[Console], None]
    exit_code: int = 0
    silent: bool = False
    traceback: str = ""
    streamed: bool = False

    @classmethod
    def silent_report(cls) -> CommandReport:
        """Return the silent report of a follower rank."""
        return cls(data={}, render=lambda console: None, silent=True)


class Unfinished(OutriderError):
    """An error of a command that has partial results: ``data``, for scripts. People have already seen the results."""

    def __init__(self, error: OutriderError, data: Mapping[str, object]) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__
        self.data = data


class Unsaid(typer.Exit):
    """Raised to end a rank without output, because another process reports the reason."""


class Interrupted(KeyboardInterrupt):
    """Raised for an interrupted command with the results so far; ``render`` prints results that the user hasn't seen yet."""

    def __init__(self, message: str, data: Mapping[str, object], render: Callable[[Console], None] | None = None) -> None:
        super().__init__(message)
        self.data = data
        self.render = render


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a process that raises ``error``: its number modulo 256, 0 for None, or 1 for a text."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def to_json(data: Mapping[str, object]) -> str:
    """Return ``data`` as one line of JSON; infinite numbers and NaN become null."""
    return json.dumps(_finite(data), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
