"""Where in the person's program something happened."""

from __future__ import annotations

import sys
from functools import lru_cache

_INSIDE = (
    "outrider.device",
    "outrider_sanitizer",
    "outrider_",
    "torch",
    "triton",
    "contextlib",
    "threading",
    "weakref",
    "concurrent.",
)

_PROGRAMS = "outrider_sanitizer.races"


def here() -> str:
    """``file:line`` of the innermost caller outside torch, the interface, the sanitizer and plugins; or an empty string."""
    frame = sys._getframe(1)
    while frame is not None:
        if not _inside(frame.f_globals.get("__name__", "")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


@lru_cache(1 << 12)
def _inside(module: str) -> bool:
    """Whether a module's code is no place of the program."""
    return module.startswith(_INSIDE) and not module.startswith(_PROGRAMS)
