"""A corpus of stream programs: each fault in a program as small as it can be, and the same program corrected.

The sanitizer and the explorer are tested on it, and ``outrider explore NAME`` runs one. The programs use the interface alone,
so they run on any backend that has what they need.
"""

from collections.abc import Mapping
from types import MappingProxyType

from outrider_sanitizer.races import flags, graphs, host, memory, pieces, streams, threads
from outrider_sanitizer.races.program import Race, WrongValue
from outrider_sanitizer.races.rank_program import Rank, RankRace, decision_named
from outrider_sanitizer.races.ranks import RANK_RACES as _RANK_RACES

RACES: Mapping[str, Race] = MappingProxyType(
    {race.name: race for module in (streams, memory, graphs, host, threads, pieces, flags) for race in module.RACES}
)

RANK_RACES: Mapping[str, RankRace] = MappingProxyType({race.name: race for race in _RANK_RACES})
"""Programs of several ranks; ``outrider explore ranks`` runs them."""

__all__ = ["RACES", "RANK_RACES", "Race", "Rank", "RankRace", "WrongValue", "decision_named"]
