"""The Python line that a tool wants to see: the innermost one outside torch and this project."""

from __future__ import annotations

import os
import sys
from functools import cache
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep


@cache
def _inside(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith((_TORCH, _HERE, "<")) or f"{os.sep}outrider{os.sep}device{os.sep}" in name


@cache
def _line(code: CodeType, number: int) -> str:
    return f"{code.co_filename}:{number}"


def python_line() -> str:
    """`file:line` of what is running now; empty where every frame is inside."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _inside(frame.f_code):
            return _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""
