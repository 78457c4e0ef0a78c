"""The Python line that a tool wants to see: the innermost one outside torch and this project."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep


class Line(NamedTuple):
    """A place in a program, formatted only when somebody looks."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def _inside(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith((_TORCH, _HERE, "<")) or f"{os.sep}outrider{os.sep}device{os.sep}" in name


def python_line() -> Line | None:
    """The line that is running now; None where every frame is inside."""
    frame = sys._getframe(1)
    while frame is not None:
        if not _inside(frame.f_code):
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None
