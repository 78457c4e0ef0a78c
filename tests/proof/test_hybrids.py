"""Random programs over a hybrid model: the tokens of non-speculative decoding, and faults put back that they find."""

import pytest

from outrider_proof.engine_setups import HYBRID, EngineSetup, random_host_program, reference_tokens, without_schedule
from outrider_proof.program_checks import prove_program
from proof.hybrid_faults import FAULTS, PROPOSERS, wrong_requests

MODES = ("staged", "graphs", "fused")


@pytest.mark.parametrize(("proposer", "number"), [(name, number) for number, name in enumerate(PROPOSERS)])
def test_a_program_of_each_proposer(proposer, number):
    assert wrong_requests(proposer, number, MODES[number % 3])[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_many_programs_of_each_proposer(proposer, mode):
    counts = dict.fromkeys(("requests", "hits", "preempted", "moved"), 0)
    for number in range(100, 160):
        wrong, found = wrong_requests(proposer, number, mode)
        assert wrong == [], number
        counts = {name: counts[name] + found[name] for name in counts}
    assert min(counts.values()) > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_put_back_is_found(name):
    fault, proposer, number, mode = FAULTS[name]
    for arrival in random_host_program(number).arrivals:
        reference_tokens(proposer + HYBRID, without_schedule(arrival))
    with fault():
        assert wrong_requests(proposer, number, mode)[0] != []
    assert wrong_requests(proposer, number, mode)[0] == []


@pytest.mark.parametrize(
    ("setup", "number"),
    [
        pytest.param(EngineSetup("mtp-chain" + HYBRID, "fused"), 4, marks=pytest.mark.slow),
        pytest.param(EngineSetup("ngram" + HYBRID, "graphs", "npu"), 3, marks=pytest.mark.slow),
        (EngineSetup("none" + HYBRID, "staged", "rocm"), 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_program_under_some_schedules(setup, number):
    """On the simulated device, watched by the sanitizer: no edge is missing."""
    assert prove_program(setup, number, 2)["failures"] == []
