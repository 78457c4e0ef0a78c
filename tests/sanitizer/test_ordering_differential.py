"""The detector against the brute-force oracle: no false alarm, and the first race on each byte is found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis.errors import NoSuchExample

from drawing import some_and_many
from outrider_sanitizer.detector import intervals
from outrider_sanitizer.detector.actors import Actor, Actors
from sanitizer.ordering_oracle import Oracle, Recorder, programs, run


def check(program: Any) -> bool:
    detector, oracle = run(program)
    found = {(oracle.names[one], oracle.names[two]) for one, two in detector.found}
    races = oracle.races()
    assert found <= races, f"false alarm: {found - races} of {detector.found}"
    first: dict[tuple[int, int], int] = {}
    for one, two in sorted(races, key=lambda pair: pair[1]):
        for byte in oracle.racing_bytes(one, two):
            if not oracle.hidden(one, two, byte):
                first.setdefault(byte, two)
    for byte, two in first.items():
        assert any(second == two and byte in oracle.racing_bytes(one, second) for one, second in found), (
            f"missed: {byte} at {two}; found {detector.found}"
        )
    return bool(races)


def agrees(program: Any) -> None:
    check(program)


def agrees_where_strided_accesses_are_kept_whole(program: Any) -> None:
    kept, intervals._MAX_SPLIT_PARTS = intervals._MAX_SPLIT_PARTS, 1
    try:
        check(program)
    finally:
        intervals._MAX_SPLIT_PARTS = kept


test_the_detector_agrees_with_the_transitive_closure, test_it_agrees_in_many_programs = some_and_many(
    agrees, given(programs), some=100, many=500
)
test_it_agrees_where_strided_accesses_are_kept_whole, test_it_agrees_so_in_many_programs = some_and_many(
    agrees_where_strided_accesses_are_kept_whole, given(programs), some=60, many=300
)


def without_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Actor, "join", lambda self, other: False)


def without_new_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Actor, "release", lambda self: self.clock)


def without_exact_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_MAX_SPLIT_PARTS", 1)
    monkeypatch.setattr(intervals, "overlap", lambda one, other: True)


def without_reads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_unless_covered", lambda records, point: ())


def without_a_look_at_what_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_MAX_SPLIT_PARTS", 1)
    monkeypatch.setattr(intervals, "_covers", lambda access, old: True)


def without_the_order_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Actors, "_ordered_launches", lambda self, clock, *_: clock)


FAULTS = [
    without_the_order_of_launches,
    without_join,
    without_new_epochs,
    without_exact_overlap,
    without_reads_of_others,
    without_a_look_at_what_is_dropped,
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("broken", FAULTS, ids=lambda f: f.__name__)
def test_the_comparison_notices_a_broken_detector(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)

    def differs(program: Any) -> bool:
        try:
            check(program)
        except AssertionError:
            return True
        return False

    try:
        find(programs, differs, settings=settings(max_examples=3000, deadline=None, database=None, phases=[Phase.generate]))
    except NoSuchExample:
        pytest.fail("a detector with that fault passed the comparison")


def test_the_oracle_knows_a_race_and_an_order() -> None:
    oracle = Oracle()
    one = oracle.node("a", [])
    two = oracle.node("b", [])
    three = oracle.node("b", [one])
    assert not oracle.ordered(one, two)
    assert oracle.ordered(one, three)
    assert isinstance(Recorder(), Recorder)
