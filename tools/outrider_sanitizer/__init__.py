"""The sanitizer: finds missing, stale and misplaced orderings between streams, host threads and graph replays.

from outrider_sanitizer import watch

with watch(backend) as report:
run(backend)
report.raise_if_any()
"""

from outrider_sanitizer.advisor import Advice
from outrider_sanitizer.findings import Finding, Kind, RaceError, Report, Site
from outrider_sanitizer.sanitizer import Sanitizer
from outrider_sanitizer.session import watch, watch_ranks, watching

__all__ = ["Advice", "Finding", "Kind", "RaceError", "Report", "Sanitizer", "Site", "watch", "watch_ranks", "watching"]
