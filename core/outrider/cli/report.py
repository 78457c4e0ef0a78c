"""What a command hands back: data for programs, and a way to show it to people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.device.errors import OutriderError

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Backend: a name such as cpu, NAME:1 for a device, NAME:key=value for options, or auto. "
        "Without it OUTRIDER_BACKEND decides, then probing.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of a command. `main` prints it: commands print nothing but what they stream. ``silent``: nothing is printed,
    with ``--json`` neither, since another process tells people.
    """

    data: Mapping[str, object]
    render: Callable[[Console], None]
    exit_code: int = 0
    silent: bool = False

    @classmethod
    def told_elsewhere(cls) -> Report:
        """What a rank has that follows another one."""
        return cls(data={}, render=lambda console: None, silent=True)


class Unfinished(OutriderError):
    """An error, with what had been made by then: ``data``, for scripts; people have seen it."""

    def __init__(self, error: OutriderError, data: Mapping[str, object]) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__
        self.data = data


class Unsaid(typer.Exit):
    """The command ends with an exit code and prints nothing: another process tells people why."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what had been made by then; ``render`` shows it to people, where they haven't seen it yet."""

    def __init__(self, message: str, data: Mapping[str, object], render: Callable[[Console], None] | None = None) -> None:
        super().__init__(message)
        self.data = data
        self.render = render


def exit_code(error: SystemExit) -> int:
    """The code that a process ends with which raises ``error``."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def to_json(data: Mapping[str, object]) -> str:
    """One line of JSON; numbers that JSON doesn't have become null."""
    return json.dumps(_finite(data), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
