"""The changes that ``python -m proof.mutants`` makes, and one of them judged."""

import itertools
import os
from collections import Counter
from importlib import import_module

import pytest

from outrider.engine.requests import scheduler
from outrider.engine.requests.scheduler import Scheduler
from outrider_proof.engine_setups import MODES, random_host_program
from outrider_proof.proposers import EXTREMES
from proof.mutants import program_set
from proof.mutants.classes import CLASSES, class_of, sample_sites
from proof.mutants.mutation_sites import apply, sites
from proof.mutants.survivors import REASONS
from proof.setups import PERSONALITIES, PROPOSERS, EngineSetup

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 says it of each fork
FREED = "Scheduler.retire: leave an operand out: r.finished and r.in_flight == 0 → r.finished"


def site(text):
    (found,) = [each for each in sites(scheduler) if each.name.endswith(text)]
    return found


@pytest.fixture(scope="module")
def every():
    return [each for module in program_set.modules() for each in sites(import_module(module))]


def test_changes_are_many_and_their_names_are_unique(every):
    assert len({each.name for each in every}) == len(every) > 4000
    assert {each.module for each in every} >= {"outrider.engine.requests.scheduler", "outrider.engine.fences"}
    assert len({each.module for each in every if each.module.startswith("outrider.speculative.")}) > 5


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
    setups = [setup for setup, _ in program_set.programs()]
    assert tuple(dict.fromkeys(setup.proposer for setup in setups)) == (*PROPOSERS, *EXTREMES)
    assert {setup.mode for setup in setups} == set(MODES)
    assert {setup.like for setup in setups} == set(PERSONALITIES)


def test_a_sample_has_its_share_of_each_class(every):
    drawn = sample_sites(every, 10 * (len(CLASSES) + 1), seed=3)
    assert set(Counter(map(class_of, drawn)).values()) == {10}
    assert drawn[:9] == sample_sites(every, 9, seed=3)


def test_each_reason_and_each_class_names_code_that_exists(every):
    """After a rename, a stale reason would explain no survivor and a stale class would draw no sample."""
    assert [pattern for pattern in REASONS if not any(pattern in each.name for each in every)] == []
    modules = program_set.modules()
    for _, parts, _ in CLASSES:
        for part in parts:
            assert [each for each in modules if (part in each if part.endswith(".") else each.endswith(part))], part


@pytest.fixture(scope="module")
def one_program():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_set, "programs", lambda: [(EngineSetup("none", "staged"), 2)])
        patch.setattr(program_set, "FAULTY", ())
        patch.setattr(program_set, "OPTIONED", ())
        return program_set.record_baselines([scheduler.__name__])


def judged(change, known):
    (trial,) = program_set.judge_all([change], known, program_set.Limits(processes=1, patience=60))
    return trial.result()


def test_a_change_that_frees_rows_early_is_killed_and_no_change_survives(monkeypatch, one_program):
    assert judged(site(FREED), one_program) == ("FreedInFlight", "none, staged, cuda, 2")
    monkeypatch.setattr(program_set, "apply", lambda module, change: None)
    assert judged(site(FREED), one_program) == (None, None)


def test_what_hangs_and_what_dies_is_told(monkeypatch):
    def program(name, judge):
        return program_set.ProgramBaseline(name, judge, frozenset({(scheduler.__name__, site(FREED).line)}), 0.0)

    monkeypatch.setattr(program_set, "apply", lambda module, change: None)
    monkeypatch.setattr(
        program_set.signal, "setitimer", lambda which, seconds, real=program_set.signal.setitimer: real(which, 0.1)
    )
    assert judged(site(FREED), [program("spins", lambda: "x" * sum(1 for _ in itertools.count()))]) == ("hang", "spins")
    assert judged(site(FREED), [program("dies", lambda: os._exit(3))]) == ("crash", "dies")


def test_only_programs_that_run_the_line_judge(one_program):
    (known,) = one_program
    assert known.reaches(site(FREED))
    unreached = [each for each in sites(scheduler) if not known.reaches(each)]
    assert 0 < len(unreached) < len(sites(scheduler))


def test_guided_programs_with_faults_guide_their_requests():
    """Of the engine as it is, no token is wrong."""
    proposer, mode, like, number = program_set.FAULTY[0]
    assert any(arrival.guided for arrival in random_host_program(number).arrivals)
    assert program_set._faulted(proposer, mode, like, number) == ""
