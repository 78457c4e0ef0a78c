"""Drawn host programs (arrivals, aborts, preemptions, prefix hits, hand-overs) through a plugin, for every proposer and mode
that it runs: tokens equal plain decoding, nothing is lost, the sanitizer is silent. ``proof.long_proof --through PLUGIN
--emulations DIR`` runs many more.
"""

import os
from pathlib import Path

import pytest

from outrider_proof.engine_setups import random_host_program
from proof.program_checks import drop_fence, prove_program
from proof.setups import EngineSetup, all_setups

PLUGIN = os.environ["PROVED_PLUGIN"]
EMULATIONS = Path(__file__).resolve().parents[1] / "emulated"


@pytest.mark.parametrize(
    ("setup", "number"),
    # Two programs in turn: a proposer has one setup for each of the two modes.
    [(setup, 1 + index // 2 % 2) for index, setup in enumerate(all_setups((PLUGIN,), EMULATIONS))],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_program_of_every_setup(setup, number):
    record = prove_program(setup, number, 2)
    assert record["failures"] == []
    assert record["schedules"] == 2


@pytest.mark.parametrize("proposer", ["eagle", "draft-model"])
def test_graphs_of_several_lengths(proposer):
    """Program 4 drafts fewer tokens than can be: a shorter draft's graph is rebound without the passes that it leaves out."""
    setup, number = EngineSetup(proposer, "graphs", PLUGIN, EMULATIONS), 4
    assert random_host_program(number).draft_lengths
    assert prove_program(setup, number, 1)["failures"] == []


@pytest.mark.skipif(PLUGIN != "outrider_npu", reason="not run: CANN's operator belongs to outrider_npu")
def test_attention_is_canns_operator(fused_calls):
    assert prove_program(EngineSetup("eagle", "graphs", PLUGIN, EMULATIONS), 2, 1)["failures"] == []
    assert len(fused_calls) > 20


def test_a_fence_left_out_is_named():
    fence, half, consumer = (
        ("params_free", "wait", "update") if PLUGIN == "outrider_npu" else ("accept_ready", "wait", "plan")
    )
    assert (
        drop_fence(EngineSetup("eagle", "graphs", PLUGIN, EMULATIONS), fence, half, consumer, (1, 3, 7))["result"] == "live"
    )
