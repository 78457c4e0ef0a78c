"""Callbacks of the detectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.device import Access
from outrider_sanitizer.detector.clocks import NOTHING, Clock, Point

if TYPE_CHECKING:
    from outrider_sanitizer.detector.intervals import Record
    from outrider_sanitizer.detector.memory import Shadow


@dataclass
class Listener:
    """Callbacks of the ordering detector; the default of each does nothing.

    ``conflict`` and ``stale`` also get the owner of the history: the shadow of a storage, or the name of a graph.

    ``steps`` returns the name of a stream in schedules and the number of its steps so far, or None.
    """

    conflict: Callable[[Record, Point, Access | None, Any], None] = lambda *_: None
    settled: Callable[[], Clock] = lambda: NOTHING
    steps: Callable[[str], tuple[str, int] | None] = lambda _: None
    reused: Callable[[Shadow, Record, Point, str], None] = lambda *_: None
    stale: Callable[[str, Record | None, Point, Access, Any], None] = lambda *_: None
    read: Callable[[Point, Access, Shadow], None] | None = None
    dead: Callable[[Shadow, Point, str], None] = lambda *_: None
    flag: Callable[[str, str, Point | None, Point], None] = lambda *_: None
    rebind: Callable[[Record, Point, Access | None, str], None] = lambda *_: None
    waited: Callable[[str, str, int, str, bool], None] = lambda *_: None
