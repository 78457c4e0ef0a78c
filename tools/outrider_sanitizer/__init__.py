"""The sanitizer: finds missing, stale and misplaced orderings between streams, host threads and graph replays.

Example::

    from outrider_sanitizer import watch

    with watch(backend) as report:
        run(backend)
    report.raise_if_any()
"""

from outrider_sanitizer.observation.sanitizer import Sanitizer, watch, watch_ranks, watching
from outrider_sanitizer.report import AccessSite, Advice, Finding, FindingKind, RaceError, Report

__all__ = [
    "AccessSite",
    "Advice",
    "Finding",
    "FindingKind",
    "RaceError",
    "Report",
    "Sanitizer",
    "watch",
    "watch_ranks",
    "watching",
]
