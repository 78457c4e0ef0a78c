"""The model against brute force: each order of a small program leaves what the model expects."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.orders import outcomes
from outrider_conformance.programs import language as lang
from outrider_conformance.programs.language import DeviceProgram, ElementSpan, ProgramMemory
from outrider_conformance.programs.model import ForbiddenStep, Model, Unordered, run_on_model

SIZES = {"streams": 3, "buffers": (ProgramMemory("int64", 2),) * 3, "slots": (ProgramMemory("int64", 2),) * 2, "events": 2}
STREAM, EVENT, SLOT = st.integers(0, 2), st.integers(0, 1), st.integers(0, 1)
PARTS = st.sampled_from([(0, 2), (0, 2), (0, 1), (1, 1)])


@st.composite
def spans(draw, one, other):
    """Two of one length."""
    (start, count), at = draw(PARTS), draw(st.integers(0, 1))
    return ElementSpan(draw(one), start, count), ElementSpan(draw(other), at if count == 1 else 0, count)


@st.composite
def steps(draw, within=False):
    kind = draw(st.sampled_from(("download", "download", "upload", "write", "copy", "mix", "order", "host", "together")))
    stream = draw(STREAM)
    if kind == "download":
        slot, source = draw(spans(SLOT, STREAM))
        return [lang.copy_step(stream, replace(slot, pinned=True), source, True)]
    if kind == "upload":
        to, slot = draw(spans(STREAM, SLOT))
        return [lang.copy_step(stream, to, replace(slot, pinned=True), True)]
    if kind in ("copy", "mix"):
        to, source = draw(spans(STREAM, STREAM))
        return [lang.WorkStep(stream, "mix", to, source, 1) if kind == "mix" else lang.copy_step(stream, to, source, True)]
    if kind == "order":
        event = draw(EVENT)
        return [lang.EventStep("record", stream, event), lang.EventStep("wait", draw(STREAM), event)]
    if kind == "host":
        slot, wait = draw(SLOT), draw(st.sampled_from([("stream", stream), ("device", 0)]))
        read = st.sampled_from(
            [lang.HostRead(slot), lang.HostWrite(ElementSpan(slot, 0, 2), 9), lang.Item(stream, stream, 0)]
        )
        return [draw(st.sampled_from([lang.Synchronize(*wait), lang.Query("stream", stream, slot)])), draw(read)]
    if kind == "together" and not within:
        return [
            lang.ThreadsStep(*(tuple(s for more in draw(st.lists(steps(True), max_size=2)) for s in more) for _ in range(2)))
        ]
    to, _ = draw(spans(STREAM, STREAM))
    return [lang.WorkStep(stream, "fill", to, value=draw(st.integers(1, 3)))]


def taken(drawn):
    """The program of those steps that the model takes, and the model."""
    program = DeviceProgram(steps=(), **SIZES)
    model, kept = Model(program), []
    for step in drawn:
        try:
            model.apply(step, (len(kept),))
        except (Unordered, ForbiddenStep):
            continue
        kept.append(step)
    program = DeviceProgram(steps=tuple(kept), **SIZES)
    return program, run_on_model(program)


def beyond(program, model):
    """What is found and not expected: (path, memory, content)."""
    for (path, key), contents in outcomes(program).items():
        wanted = model.state.expectations[path].wanted.tolist()
        place = next((s.index for n, s in lang.walk(program.steps) if n == path and isinstance(s, lang.Item)), None)
        for content in contents:
            if any(value != wanted[n] for n, value in enumerate(content) if place in (None, n)):
                yield path, key, content


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(steps(), min_size=2, max_size=6).map(lambda drawn: [step for more in drawn for step in more]))
def test_every_order_leaves_what_the_model_expects(drawn):
    program, model = taken(drawn)
    assert not list(beyond(program, model))
