"""Source locations in the watched program."""

from __future__ import annotations

import sys
from functools import lru_cache

_INSIDE = ("outrider.device", "outrider_", "torch", "triton", "numpy", "typing_extensions")
_PROGRAMS = "outrider_sanitizer.races"


def caller_location() -> str:
    """Return ``file:line`` of the innermost caller outside torch, the interface, the sanitizer and plugins, or ""."""
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
    """Return True if the module belongs to a library and not to the watched program."""
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return True
    return module.startswith(_INSIDE) and not module.startswith(_PROGRAMS)
