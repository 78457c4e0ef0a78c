"""A tracer of the lines that run in given modules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

Lines = frozenset[tuple[str, int]]
"""Names of modules, and lines in them."""


@contextmanager
def lines_run(modules: Sequence[str]) -> Generator[set[tuple[str, int]]]:
    """Yield a set of executed (module, line) pairs, filled by the calling thread and by threads started in this scope."""
    files = {import_module(name).__file__: name for name in modules}
    found: set[tuple[str, int]] = set()

    def called(frame: FrameType, event: str, value: Any) -> Any:
        del event, value
        name = files.get(frame.f_code.co_filename)
        if name is None:
            return None

        def on_line(frame: FrameType, event: str, value: Any) -> Any:
            del event, value
            found.add((name, frame.f_lineno))
            return on_line

        return on_line(frame, "call", None)

    before, before_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(called)
    threading.settrace(called)
    try:
        yield found
    finally:
        sys.settrace(before)
        threading.settrace(before_threads)
