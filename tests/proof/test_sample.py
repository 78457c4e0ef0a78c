"""A sample of python -m proof.long_proof: programs of each kind of setup, and a few fences left out."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from outrider.device import CapabilityError
from outrider.engine.requests.draft_length import LengthSchedule
from outrider_proof.decode_program import MOVING
from outrider_proof.engine_setups import MODES, VISION, random_host_program
from proof.program_checks import drop_fence, measure_rate, prove_program, run_once_checked
from proof.quantised import QUANTISED
from proof.setups import PERSONALITIES, PROPOSERS, EngineSetup, all_setups, engines_for

SAMPLE = [
    (EngineSetup("eagle-tree", "graphs"), 4),
    (EngineSetup("mtp", "fused"), 5),
    (EngineSetup("draft-model-tree", "staged", "rocm"), 6),
    pytest.param(EngineSetup("eagle3", "fused", "rocm"), 4, marks=pytest.mark.slow),
    (EngineSetup("none", "staged"), 0),
    (EngineSetup("eagle-tree, experts", "fused"), 4),
    pytest.param(EngineSetup("mtp, experts", "graphs", "npu"), 3, marks=pytest.mark.slow),
    (EngineSetup("ngram-tree", "graphs", "npu"), 3),
    pytest.param(EngineSetup("mtp", "graphs", "npu"), 1, marks=pytest.mark.slow),
    pytest.param(EngineSetup("peagle", "graphs", "npu"), 2, marks=pytest.mark.slow),
    (EngineSetup("dflash", "graphs", "npu"), 4),
    (EngineSetup("peagle", "fused"), 4),
    (EngineSetup("suffix+eagle", "fused"), 3),
    (EngineSetup(VISION, "graphs", "rocm"), 4),
    (EngineSetup(QUANTISED, "fused", "rocm"), 5),
]


def test_every_setup_is_another():
    assert len(set(all_setups())) == len(all_setups()) > 2 * len(PROPOSERS) * len(MODES)
    assert {setup.like for setup in all_setups()} == set(PERSONALITIES)


def test_what_is_left_out_is_refused():
    setup = EngineSetup("eagle", "fused", "npu")
    assert setup not in all_setups()
    with pytest.raises(CapabilityError):
        engines_for(setup, random_host_program(0))


def test_programs_differ():
    assert len({random_host_program(number) for number in range(600)}) == 600


@pytest.mark.sample(1)
@pytest.mark.parametrize(("setup", "number"), SAMPLE, ids=lambda value: getattr(value, "name", str(value)))
def test_a_program_under_some_schedules(setup, number):
    record = prove_program(setup, number, 2)
    assert record["failures"] == []
    assert record["schedules"] == 2
    assert (
        record["compared"] > 0
        or record["aborted"]
        or record["preempted"]
        or random_host_program(number).draft_lengths
        or random_host_program(number).by_load
    )
    if setup.proposer in ("eagle-tree", "mtp", "draft-model-tree", "eagle3"):
        assert record["verified"] > record["iterations"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "setup",
    [EngineSetup("eagle", "staged"), EngineSetup("eagle", "graphs"), EngineSetup("mtp", "fused")],
    ids=lambda each: each.name,
)
def test_lengths_of_each_request_need_no_other_order(setup):
    """Neither a race nor an undeclared access, and the tokens of non-speculative decoding."""
    arrivals = tuple(replace(arrival, moves=()) for arrival in MOVING.arrivals)
    program = replace(MOVING, arrivals=arrivals, draft_lengths=(3, 0, 1, 2, 3, 1, 0), by_request=True)
    found, inner = [], LengthSchedule.choose_each

    def noted(self, requests, cached):
        found.append(inner(self, requests, cached)[1])
        return inner(self, requests, cached)

    with patch.object(LengthSchedule, "choose_each", noted):
        outcome = run_once_checked(setup, program, strategy="random", seed=3)
    assert (outcome.error, outcome.text) == ("", "")
    assert sum(len(set(lengths)) > 1 for lengths in found) >= 4


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("setup", "fence", "half", "consumer", "result"),
    [
        (EngineSetup("eagle-tree", "graphs"), "draft_outputs_ready", "wait", "plan", "live"),
        (EngineSetup("mtp", "fused"), "inputs_ready", "record", None, "live"),
        (EngineSetup("none", "staged"), "handed_over", "wait", "forward", "live"),
        (
            EngineSetup("eagle", "fused"),
            "plan_ready",
            "wait",
            "forward",
            "live",
        ),  # in iterations with a guided request, which are staged
        (EngineSetup("eagle", "graphs"), "params_bound", "wait", "forward", "unused"),
        (EngineSetup("eagle", "graphs", "npu"), "params_free", "wait", "update", "live"),
        (EngineSetup("eagle", "graphs", "npu"), "params_bound", "wait", "forward", "live"),
        (
            EngineSetup("none", "graphs", "npu"),
            "params_bound",
            "wait",
            "forward",
            "live",
        ),  # one rebind, the last on its stream
        (EngineSetup("eagle", "staged", "npu"), "lengths_on_host", "wait", "host", "live"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_fence_left_out_is_live_or_unused(setup, fence, half, consumer, result):
    assert drop_fence(setup, fence, half, consumer, (1, 3, 7))["result"] == result


@pytest.mark.slow
def test_without_the_sanitizer_some_schedules_show_it_by_the_tokens():
    assert measure_rate(EngineSetup("eagle", "staged"), "results_copied", "host", 1, 4)["shown"]
    assert not run_once_checked(
        EngineSetup("eagle", "staged"), random_host_program(1), strategy="mixed", seed=1, watched=False
    ).error


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("setup", all_setups(), ids=lambda setup: setup.name)
def test_more_programs_of_every_setup(setup, count):
    for number in range(100, 100 + count):
        assert prove_program(setup, number, 5)["failures"] == []
