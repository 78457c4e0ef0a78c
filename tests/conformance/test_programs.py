"""Random programs: what the model takes, refuses and allows; and what becomes of a backend that breaks a promise."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.registry import get_backend
from outrider_conformance.lab import Lab
from outrider_conformance.programs import language as lang
from outrider_conformance.programs.execution import WrongProgramValue
from outrider_conformance.programs.generator import FAMILIES
from outrider_conformance.programs.language import DeviceProgram, ElementSpan, ProgramMemory
from outrider_conformance.programs.model import ForbiddenStep, Unordered, run_on_model
from outrider_conformance.programs.trial import ProgramFailed, program_count, script, try_program, try_programs

WHOLE = ElementSpan(0, 0, 4)
WRITE, READ = lang.WorkStep(0, "fill", WHOLE, value=7), lang.copy_step(1, ElementSpan(0, 0, 4, pinned=True), WHOLE, True)
RECORD, WAIT = lang.EventStep("record", 0, 0), lang.EventStep("wait", 1, 0)
LONG = Path(__file__).parent / "long_programs.py"


def program(*steps, **more):
    sizes = {
        "streams": 2,
        "buffers": (ProgramMemory("int64", 4),),
        "slots": (ProgramMemory("int64", 4),),
        "events": 2,
        **more,
    }
    return DeviceProgram(steps=steps, **sizes)


def expected(model, key):
    return next(e for e in model.state.expectations.values() if e.key == key)


@pytest.mark.parametrize(
    ("steps", "free"),
    [
        ((WRITE, READ), False),
        ((WRITE, RECORD, WAIT, READ), True),
        ((RECORD, WRITE, WAIT, READ), False),  # the record was too early
        ((WRITE, RECORD, READ, WAIT), False),  # the wait is too late
        ((WRITE, RECORD, WAIT, READ, WRITE), False),  # nothing keeps the second write behind the read
        ((WRITE, RECORD, lang.Synchronize("within", 0), READ), True),
        ((WRITE, RECORD, lang.EventStep("record", 1, 0), WAIT, READ), False),  # a later generation, of another stream
        ((WRITE, lang.Synchronize("stream", 1), READ), False),
        ((WRITE, lang.ThreadsStep((RECORD, WAIT)), READ), True),
        ((WRITE, lang.ThreadsStep((RECORD,), (lang.Slow(1),)), READ), False),
        ((WRITE, RECORD, WAIT, READ, lang.HostRead(0)), False),  # the host waited for nothing
    ],
)
def test_the_model_takes_what_edges_order_and_nothing_else(steps, free):
    if free:
        run_on_model(program(*steps))
    else:
        with pytest.raises(Unordered):
            run_on_model(program(*steps))


def test_the_model_refuses_what_the_contract_forbids():
    for steps in ((WAIT,), (lang.ReplayStep(0, 0),), (lang.ThreadsStep((WRITE,), (lang.EventStep("record", 0, 0),)),)):
        with pytest.raises(ForbiddenStep):
            run_on_model(program(*steps))


def test_replays_count_and_scalars_are_frozen():
    buffers = (ProgramMemory("int64", 2), ProgramMemory("int64", 2))
    body = (lang.WorkStep(0, "mix", ElementSpan(0, 0, 2), ElementSpan(0, 0, 2), "scalar"),)
    steps = (lang.CaptureStep(0, 0, body, scalar=5, value=1), lang.ReplayStep(0, 0, times=3))
    model = run_on_model(program(*steps, buffers=buffers))
    assert expected(model, ("buffer", 0)).wanted.tolist() == [92, 92]  # 1 → 8 → 29 → 92
    for name in ("cpu", "sim"):
        try_program(Lab(get_backend(name)), model)


def test_a_device_without_graphs_replays_on_the_stream_of_the_replay(monkeypatch):
    """Its callable runs at each replay, and places its work there by name, whatever stream the capture was on."""
    buffers = (ProgramMemory("int64", 2), ProgramMemory("int64", 2))
    mix = lang.WorkStep(0, "mix", ElementSpan(0, 0, 2), ElementSpan(0, 0, 2), "scalar")
    capture = lang.CaptureStep(0, 0, (mix,), scalar=5, value=1, fork=2, branch=(mix,), tail=(mix,))
    behind = (
        lang.EventStep("record", 0, 0),
        lang.EventStep("wait", 1, 0),
        lang.Slow(1),
        lang.WorkStep(1, "fill", ElementSpan(0, 0, 2), value=2),
    )
    model = run_on_model(program(capture, *behind, lang.ReplayStep(0, 1, times=2), buffers=buffers, streams=3))
    backend = get_backend("sim")
    declared = replace(backend.capabilities, captures_graphs=False, forks_in_capture=False)
    monkeypatch.setattr(type(backend), "capabilities", declared)
    try_program(Lab(backend), model, 1)  # in orders of which one shows it


def test_a_pattern_has_every_kind_of_bits():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert lang.pattern(3, 70_000, dtype).isnan().any()
        assert not torch.equal(lang.bits(lang.pattern(3, 9, dtype)), lang.bits(lang.pattern(4, 9, dtype)))
    assert lang.pattern(0, 0, torch.bool).numel() == 0


def test_shares_come_to_the_whole():
    assert sum(program_count(family, 300) for family in FAMILIES) == 300


BROKEN = "sim:events=recycled"  # an event has one completed flag for all its records


@pytest.fixture(scope="module")
def conviction():
    with pytest.raises(ProgramFailed) as caught:
        try_programs(lambda: get_backend(BROKEN), backend=BROKEN, family="order", count=50)
    return str(caught.value)


@pytest.mark.slow
def test_a_conviction_names_the_promise(conviction):
    assert "promises: “" in conviction
    assert conviction.count("Record(") < 25, conviction  # it was made smaller


@pytest.mark.parametrize(("backend", "code"), [(BROKEN, 1), ("sim", 0)])
@pytest.mark.slow
def test_a_failing_program_is_a_script_that_runs_alone(conviction, backend, code, monkeypatch):
    text = conviction[conviction.index('"""Run it:') :]
    monkeypatch.setattr(sys, "argv", ["failing.py", "--backend", backend, "--times", "3"])
    with pytest.raises(SystemExit) as ended:
        exec(compile(text, "failing.py", "exec"), {"__name__": "__main__"})
    assert ended.value.code == code


def test_a_script_names_the_steps_of_its_graphs():
    """A kernel may be nowhere but in the body of a capture."""
    copy = lang.copy_step(0, ElementSpan(0, 0, 4), ElementSpan(1, 0, 4), False)
    signal = lang.Signal(
        0, 0, 0, 1, lang.WorkStep(0, "fill", WHOLE, value=7), lang.WorkStep(1, "mix", WHOLE, WHOLE, 1), False
    )
    steps = (lang.CaptureStep(0, 0, (copy,), scalar=1, value=2), signal)
    text = script(program(*steps), "sim").partition("if __name__")[0]
    found = {}
    exec(compile(text, "failing.py", "exec"), found)
    assert found["program"] == program(*steps)


@pytest.mark.slow
def test_the_same_seed_draws_the_same_programs(conviction):
    with pytest.raises(ProgramFailed) as again:
        try_programs(lambda: get_backend(BROKEN), backend=BROKEN, family="order", count=50)
    assert str(again.value).partition("A random program")[0] == conviction.partition("A random program")[0]


def test_a_wrong_byte_is_found_among_many():
    model = run_on_model(program(WRITE, RECORD, WAIT, READ))
    backend = get_backend("cpu")
    copy = backend._copy_async
    backend._copy_async = lambda to, source: copy(to[:-1], source[:-1])
    with pytest.raises(WrongProgramValue, match="element 3 is"):
        try_program(Lab(backend), model)


@pytest.mark.parametrize("count", [pytest.param(60, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)])
def test_many_programs_convict_no_right_backend(count):
    command = [sys.executable, str(LONG), "--programs", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * 3600, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_long_programs_run_by_one_command():
    """One command, two processes, a program a family; a backend that is written for it, and one on its emulation."""
    command = [sys.executable, str(LONG), "--backend", "own-queue", "--backend", "npu", "--programs", "6", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "own-queue: 6 programs, 0 of 1 portions convict" in done.stdout
    assert "npu: 6 programs, 0 of 1 portions convict" in done.stdout
