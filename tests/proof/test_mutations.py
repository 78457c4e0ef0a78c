"""The changes that ``python -m outrider_proof.mutations`` makes, and one of them judged."""

import os
from importlib import import_module

import pytest

from outrider.engine.requests import scheduler
from outrider.engine.requests.scheduler import Scheduler
from outrider_proof.mutations import deck
from outrider_proof.mutations.sites import apply, sites
from outrider_proof.proposers import EXTREMES
from outrider_proof.setups import MODES, PERSONALITIES, PROPOSERS, Setup

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 says it of each fork
FREED = "Scheduler.retire: leave an operand out: r.finished and r.in_flight == 0 → r.finished"


def site(text):
    (found,) = [each for each in sites(scheduler) if each.name.endswith(text)]
    return found


def test_changes_are_many_and_their_names_are_unique():
    names = [each.name for each in sites(scheduler)]
    assert len(set(names)) == len(names) > 80
    assert all(sites(import_module(module)) for module in deck.MODULES)


def test_a_change_is_made_in_the_process_that_makes_it():
    code = Scheduler.retire.__code__
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            apply(scheduler, site(FREED))
            os.write(writer, b"the same" if Scheduler.retire.__code__ == code else b"another")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b"another"
    os.waitpid(child, 0)
    assert Scheduler.retire.__code__ is code


def test_the_deck_has_each_proposer_mode_and_personality():
    setups = [setup for setup, _ in deck.programs()]
    assert tuple(dict.fromkeys(setup.proposer for setup in setups)) == (*PROPOSERS, *EXTREMES)
    assert {setup.mode for setup in setups} == set(MODES)
    assert {setup.like for setup in setups} == set(PERSONALITIES)


@pytest.fixture
def one_program(monkeypatch):
    monkeypatch.setattr(deck, "programs", lambda: [(Setup("none", "staged"), 2)])
    monkeypatch.setattr(deck, "FAULTY", ())
    deck.warm()


@pytest.mark.usefixtures("one_program")
def test_a_change_that_frees_rows_early_is_killed_and_no_change_survives(monkeypatch):
    assert deck.judge(site(FREED), 60) == ("FreedInFlight", "none, staged, cuda, 2")
    monkeypatch.setattr(deck, "apply", lambda module, change: None)
    assert deck.judge(site(FREED), 60) == (None, None)
