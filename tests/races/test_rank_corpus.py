"""Each program of several ranks: the wrong one is named at its first different decision, the corrected one is silent."""

from __future__ import annotations

from contextlib import suppress

import pytest

from outrider.device import CollectiveError
from outrider.registry import Registry
from outrider_proof.rank_exploration import simulated_hosts
from outrider_sanitizer import FindingKind, watch_ranks
from outrider_sanitizer.races import RANK_RACES, RankRace, decision_named

BETWEEN_RANKS = {FindingKind.SENDS}
HOSTS = simulated_hosts(Registry())
ALL = [pytest.param(race, id=name) for name, race in RANK_RACES.items()]


@pytest.mark.parametrize("race", ALL)
def test_one_run_names_the_first_decision_with_both_call_sites(race: RankRace) -> None:
    devices = HOSTS(race, 2)
    devices[0].control.reset()
    with watch_ranks(devices) as report, suppress(CollectiveError):
        race.run_race(devices, fixed=False)
    assert {finding.kind for finding in report} == race.kinds, str(report)
    assert decision_named(report) == race.decision
    for name in race.names:
        assert name in str(report)
    first = next((finding for finding in report if finding.kind is FindingKind.DECISION), report.findings[0])
    for site in (first.first, first.second):
        assert site is not None
        assert "/races/ranks" in site.location, str(report)
    ranks = {site.rank for site in (first.first, first.second) if site is not None}
    both = race.decision or race.kinds <= BETWEEN_RANKS
    assert ranks == ({0, 1} if both else {0}), str(report)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("race", ALL)
def test_the_corrected_program_is_silent_in_every_schedule(race: RankRace, ranks: int) -> None:
    devices = HOSTS(race, ranks)
    control = devices[0].control
    assert control is not None

    def program(_: object) -> None:
        with watch_ranks(devices) as report:
            race.run_race(devices, fixed=True)
        report.raise_if_any()

    found = control.explore(program, strategy="mixed", iterations=8 // ranks, seed=0)
    assert found.failure is None, f"{found.failure.error}\nschedule {found.failure.schedule}"
