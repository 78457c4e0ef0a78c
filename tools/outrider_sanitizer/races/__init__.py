"""A corpus of stream programs: each fault in a program as small as it can be, and the same program corrected.

The sanitizer and the explorer are tested on it, and ``outrider explore NAME`` runs one. The programs use the seam alone,
so they run on any backend that has what they need.
"""

from collections.abc import Mapping
from types import MappingProxyType

from outrider_sanitizer.races import flags, graphs, host, streams
from outrider_sanitizer.races.program import Race, WrongValue

RACES: Mapping[str, Race] = MappingProxyType(
    {race.name: race for module in (streams, graphs, host, flags) for race in module.RACES}
)

__all__ = ["RACES", "Race", "WrongValue"]
