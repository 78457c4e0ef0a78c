"""Each program of the corpus: the wrong one is found and named in one run, the corrected one passes."""

from __future__ import annotations

import pytest

from outrider_sanitizer import watch
from outrider_sanitizer.races import RACES, Race, WrongValue
from outrider_sanitizer.report import FindingKind
from outrider_sim.backend import SimBackend
from outrider_sim.exploration import explore, run_once
from outrider_sim.options import parse_options
from outrider_sim.strategies import Strategy, make_strategy

STALENESS = frozenset(
    {
        FindingKind.UNDEFINED,
        FindingKind.STALE,
        FindingKind.STALE_PADDING,
        FindingKind.STALE_OUTPUT,
        FindingKind.STALE_MIRROR,
        FindingKind.NOT_REBOUND,
    }
)

ALL = [pytest.param(race, id=name) for name, race in RACES.items()]
FLAGGED = [pytest.param(race, id=name) for name, race in RACES.items() if race.kind]
ORDERING = [
    pytest.param(race, id=name)
    for name, race in RACES.items()
    if race.visible and race.kind and race.kind not in STALENESS and not race.needs
]
VISIBLE = [pytest.param(race, id=name) for name, race in RACES.items() if race.visible]


def backend_for(race: Race) -> SimBackend:
    backend = SimBackend(parse_options({"like": "npu"} if race.needs else {}))
    assert not race.needs or getattr(backend.capabilities, race.needs)
    return backend


@pytest.mark.parametrize("race", FLAGGED)
def test_one_run_in_program_order_names_the_fault(race: Race) -> None:
    backend = backend_for(race)
    with watch(backend) as report:
        error = run_once(backend, race.wrong, Strategy())
    assert error is None or isinstance(error, WrongValue)
    kinds = {finding.kind for finding in report}
    assert kinds == {race.kind}, str(report)
    for name in race.names:
        assert name in str(report), f"{name!r} isn't in:\n{report}"


@pytest.mark.parametrize("race", ALL)
def test_the_corrected_program_is_clean(race: Race) -> None:
    backend = backend_for(race)
    with watch(backend) as report:
        error = run_once(backend, race.right, Strategy())
    assert error is None
    assert report.clean, str(report)


def sanitized(race: Race, backend: SimBackend) -> None:
    with watch(backend) as report:
        race.right(backend)
    report.raise_if_any()


def passes(race: Race, schedules: int) -> None:
    backend = backend_for(race)
    for seed in range(schedules):
        error = run_once(backend, lambda b: sanitized(race, b), make_strategy("mixed", seed, {}))
        if error is not None:
            raise AssertionError(f"schedule {backend.control.schedule()}") from error


@pytest.mark.parametrize("race", ALL)
def test_the_corrected_program_passes_every_schedule(race: Race) -> None:
    passes(race, 25)


@pytest.mark.parametrize(
    "schedules", [pytest.param(500, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("race", ALL)
def test_the_corrected_program_passes_many_schedules(race: Race, schedules: int) -> None:
    passes(race, schedules)


@pytest.mark.parametrize("race", VISIBLE)
def test_the_explorer_sees_the_damage_and_its_string_replays_it(race: Race) -> None:
    backend = backend_for(race)
    found = explore(backend, race.wrong, iterations=race.within)
    assert found.failure is not None, f"not within {race.within} schedules"
    assert isinstance(found.failure.error, WrongValue)
    again = explore(backend, race.wrong, strategy=f"replay:{found.failure.shrunk}", iterations=1)
    assert again.failure is not None
    assert str(again.failure.error) == str(found.failure.error)
    assert str(again.failure.schedule) == str(found.failure.shrunk)


@pytest.mark.parametrize("race", ORDERING)
def test_the_schedule_in_the_report_shows_the_damage(race: Race) -> None:
    backend = backend_for(race)
    with watch(backend) as report:
        run_once(backend, race.wrong, Strategy())
    strings = [finding.schedule for finding in report if finding.schedule]
    assert strings, str(report)
    shown = [explore(backend, race.wrong, strategy=f"replay:{text}", iterations=1).failure for text in strings]
    assert any(failure is not None and isinstance(failure.error, WrongValue) for failure in shown), f"{strings}\n{report}"
