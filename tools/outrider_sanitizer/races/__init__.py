"""A corpus of stream programs: each fault in a minimal program, and the corrected program.

The sanitizer and the explorer are tested on the corpus, and ``outrider explore NAME`` runs one program. The programs use only
the backend interface, so they run on any backend with the abilities that they need.
"""

from collections.abc import Mapping
from types import MappingProxyType

from outrider_sanitizer.races import graphs, memory, streams
from outrider_sanitizer.races.race import ProgramRank, Race, RankRace, WrongValue, decision_named
from outrider_sanitizer.races.ranks import RANK_RACES as _RANK_RACES

RACES: Mapping[str, Race] = MappingProxyType(
    {race.name: race for module in (streams, memory, graphs) for race in module.RACES}
)

RANK_RACES: Mapping[str, RankRace] = MappingProxyType({race.name: race for race in _RANK_RACES})
"""Programs of several ranks; ``outrider explore ranks`` runs them."""

__all__ = ["RACES", "RANK_RACES", "ProgramRank", "Race", "RankRace", "WrongValue", "decision_named"]
