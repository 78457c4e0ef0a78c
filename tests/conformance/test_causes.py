"""A failure names the promise that broke and the likely cause; what is outside any promise quotes none."""

import ast

import pytest

from conformance.conftest import suite_modules
from outrider.device import DeviceFault
from outrider.registry import get_backend
from outrider_conformance import engines
from outrider_conformance.lab import expect
from outrider_conformance.programs.trial import PROMISES, ProgramFailed
from outrider_conformance.random_kernels.kernels import KERNELS
from outrider_conformance.reporting.causes import CAUSES, cause_of, diagnose

CHECKED = ("SpeculativeSync.step_modes", "The modes that are right on this device.")


def promised():
    """Every member that a test of the suite, a random program or a random kernel problem holds a backend to."""
    found = {member for member, _ in PROMISES.values()}
    for path in suite_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "promise":
                found.add(node.args[0].value)
    return found | {f"KernelSet.{name.partition(',')[0]}" for name in KERNELS}


def caught(run):
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_each_promise_has_a_cause_and_each_cause_a_promise():
    assert [member for member in sorted(promised()) if not cause_of(member)] == []
    used = promised() | {member.partition(".")[0] for member in promised()}
    assert sorted(set(CAUSES) - used) == []


def test_the_kits_own_check_is_about_the_tests_promise():
    found = diagnose(("Stream.wait", "…"), caught(lambda: expect(0.0, 1.0, "what was read")))
    assert found.promise == ("Stream.wait", "…")
    assert found.causes == (CAUSES["Stream.wait"],)


def test_a_program_names_its_own_promise():
    found = diagnose(("Stream", "…"), ProgramFailed("said", ("Stream.record", "words")))
    assert found.promise == ("Stream.record", "words")
    assert found.causes[0].startswith(CAUSES["Stream.record"])
    assert "`_record`" in found.causes[0]


def test_loading_a_checkpoint_quotes_no_promise(monkeypatch):
    """Neither where a file can't be read, nor where an assertion fails in there."""

    def breaks(*_, **__):
        raise OSError("no such file")

    monkeypatch.setattr("outrider.engine.engine.load_checkpoint", breaks)
    error = caught(lambda: engines.engine_on(get_backend("cpu"), speculate="none"))
    found = diagnose(CHECKED, error)
    assert found.promise is None
    assert "while loading a checkpoint" in found.where


def test_a_verb_that_raises_is_named_with_its_own_words(monkeypatch):
    backend = get_backend("cpu")
    stream = backend.create_stream("s")

    def fails():
        raise DeviceFault("a kernel failed")

    monkeypatch.setattr(stream, "_synchronize", fails)
    found = diagnose(CHECKED, caught(stream.synchronize))
    assert found.promise[0] == "Stream.synchronize"
    assert found.promise[1].startswith("Block the calling thread until everything enqueued on this stream")
    assert "raised in Stream.synchronize" in found.where
    assert "earlier queued work failed" in found.causes[0]
    assert diagnose(("Stream.synchronize", "its words"), caught(stream.synchronize)).promise[1] == "its words"


def test_a_callers_mistake_inside_a_verb_is_no_promise():
    """The verb runs the caller's function, which raises: that is the engine's or the kit's."""

    def wrong(_):
        engines.run(None)  # the kit's own code, inside a capture

    backend = get_backend("cpu")
    stream = backend.create_stream("s")
    graph = backend.capture("g", wrong, stream=stream, inputs={}, outputs={})
    found = diagnose(CHECKED, caught(lambda: graph.replay(stream)))
    assert found.promise is None


def test_a_schedules_failure_is_its_cause():
    def run():
        try:
            raise ValueError("in a program")
        except ValueError as error:
            raise AssertionError("smallest schedule") from error

    assert diagnose(CHECKED, caught(run)).promise is None


def test_what_hangs_while_loading_quotes_no_promise(monkeypatch):
    def hangs(*_, **__):
        pytest.fail("still running after 1 s: …")

    monkeypatch.setattr("outrider.engine.engine.load_checkpoint", hangs)
    found = diagnose(CHECKED, caught(lambda: engines.engine_on(get_backend("cpu"), speculate="none")))
    assert found.promise is None
    assert "loading" in found.where
