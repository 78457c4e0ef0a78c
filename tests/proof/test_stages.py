"""Each stage of an iteration accesses the memory that it declares, and declares no other."""

import pytest

from outrider import Engine, SamplingParams
from outrider.device import Observer
from outrider.engine.stages import STAGES, Extend, PlanTokens, Verify
from outrider_proof.engine_setups import random_host_program, text_proposer, text_target
from outrider_proof.monitors import StageMonitor, is_part
from outrider_proof.tiny import plain_config
from outrider_sim.plugin import create_backend
from proof.program_checks import run_once_checked
from proof.setups import EngineSetup

ELSEWHERE = {
    ("gather", "reads", "published lengths"),  # inside the graph of a fused iteration
    ("verify attention", "reads", "inputs.tables"),  # kernels that plan attention
    ("verify attention", "reads", "verify.seq_lens"),
    ("verify attention", "reads", "verify.mask"),
    ("extend attention", "reads", "inputs.tables"),
    ("extend attention", "reads", "extend.seq_lens"),
    ("verify", "reads", "recurrent states"),  # a hybrid model
    ("verify", "writes", "recurrent states"),
    ("verify", "reads", "token masks"),  # a guided request
    ("verify", "reads", "staged inputs"),  # prompts in the same pass, which a graph of a fused iteration holds
    ("extend", "reads", "target cache"),  # a move of keys and values is one access, a write
}
"""Declarations that text without guides does not use on the simulated device. Those of rope positions are left out, too."""


def monitored(name):
    """A monitor of an engine that has served a greedy and a penalized request, and the faults that it noted."""
    backend, faults = create_backend(0, {"like": "cuda"}), []
    loading = backend.create_stream("load")
    with backend.on(loading):
        target = text_target(name, backend, None)
        proposer = text_proposer(name, target, backend)
    loading.synchronize()
    config = plain_config(dtype="float64", max_context=32, max_requests=2, page_size=4, overlap=True)
    engine = Engine(target, backend, proposer=proposer, config=config)
    monitor = StageMonitor(engine, faults.append)
    backend.attach(Observer())
    penalized = SamplingParams(max_tokens=4, temperature=1.0, presence_penalty=0.5, ignore_eos=True)
    engine.generate([(3, 1), (1, 2, 3)], [SamplingParams(max_tokens=6, ignore_eos=True), penalized])
    backend.detach()
    return monitor, faults


def unused_declarations(monitor, stage):
    """The declarations of ``stage`` that no access has used: ``reads`` or ``writes``, and the memory."""
    accessed = monitor.accessed[stage.name]
    return {
        (kind, declared)
        for kind in ("reads", "writes")
        for declared in getattr(stage, kind)
        if not any(each == kind and is_part(name, declared) for each, name in accessed)
    }


def test_stages_access_what_they_declare_and_nothing_else():
    unused = set()
    for name in ("eagle", "eagle-tree"):
        monitor, faults = monitored(name)
        assert faults == []
        found = {(stage.name, *each) for stage in STAGES for each in unused_declarations(monitor, stage)}
        unused = found if name == "eagle" else unused & found
    assert {each for each in unused - ELSEWHERE if "rope_position" not in each[2]} == set()


@pytest.mark.parametrize(
    ("stage", "kind", "left_out"),
    [(PlanTokens, "reads", "draft"), (Extend, "writes", "stash")],
)
def test_an_access_that_is_not_declared_is_named(monkeypatch, stage, kind, left_out):
    monkeypatch.setattr(stage, kind, tuple(each for each in getattr(stage, kind) if each != left_out))
    _, faults = monitored("eagle")
    assert faults
    assert all(f"the stage {stage.name!r} {kind} '{left_out}" in str(fault) for fault in faults)


def test_the_programs_of_the_proof_check_declarations(monkeypatch):
    monkeypatch.setattr(Verify, "writes", tuple(each for each in Verify.writes if each != "published lengths"))
    outcome = run_once_checked(EngineSetup("none", "staged"), random_host_program(2))
    assert outcome.error == "UndeclaredAccess", outcome.text
    assert "published lengths" in outcome.text
