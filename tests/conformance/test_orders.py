"""The model against brute force: what any order of a small program leaves, the model allows."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.orders import outcomes
from outrider_conformance.programs import flows
from outrider_conformance.programs import language as lang
from outrider_conformance.programs.language import DeviceProgram, ElementSpan, ProgramMemory
from outrider_conformance.programs.model import Model, judge
from outrider_conformance.programs.nodes import ForbiddenStep, Unordered

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
    kind = draw(st.sampled_from(("racy", "racy", "upload", "write", "copy", "mix", "order", "host", "together")))
    stream = draw(STREAM)
    if kind == "racy":
        slot, source = draw(spans(SLOT, STREAM))
        return [lang.Download(stream, slot, source, racy=draw(st.integers(0, 3)) > 0)]
    if kind == "upload":
        to, slot = draw(spans(STREAM, SLOT))
        return [lang.Upload(stream, to, slot)]
    if kind in ("copy", "mix"):
        to, source = draw(spans(STREAM, STREAM))
        return [lang.Mix(stream, to, source, 1) if kind == "mix" else lang.Copy(stream, to, source, True)]
    if kind == "order":
        event = draw(EVENT)
        return [lang.RecordStep(stream, event), lang.WaitStep(draw(STREAM), event)]
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
    return [lang.FillStep(stream, to, draw(st.integers(1, 3)))]


@st.composite
def races(draw):
    """A racy download, something that reads its slot, and a write that races with it; other steps between them."""
    racing, other = draw(st.permutations(range(3)))[:2]
    slot, source = draw(spans(SLOT, STREAM))
    to, read = draw(spans(STREAM, st.just(slot.of)))
    onward = st.sampled_from(
        [lang.Upload(racing, to, read), lang.Synchronize("stream", racing), lang.Query("stream", racing, slot.of)]
    )
    reads = draw(st.lists(onward, min_size=1, max_size=2))
    reads += [lang.HostRead(slot.of)] * draw(st.booleans())
    write = lang.FillStep(other, ElementSpan(source.of, 0, 2), 5)
    between = [draw(st.lists(steps(), max_size=1)) for _ in range(3)]
    before, after, last = ([step for more in part for step in more] for part in between)
    apart = [lang.ThreadsStep(tuple(reads), (write,))] if draw(st.integers(0, 2)) == 0 else [*reads, *after, write]
    return [*before, lang.Download(racing, slot, source, racy=True), *apart, *last]


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
    return program, judge(program)


def beyond(program, model):
    """What is found and not allowed: (path, memory, content)."""
    for (path, key), contents in outcomes(program).items():
        allowed = [each.tolist() for each in model.state.expectations[path].allowed]
        for content in contents:
            place = next((s.index for n, s in lang.walk(program.steps) if n == path and isinstance(s, lang.Item)), None)
            if not all(any(v == each[n] for each in allowed) for n, v in enumerate(content) if place in (None, n)):
                yield path, key, content


ALL = ElementSpan(1, 0, 2)
LATE = (
    lang.Download(0, ElementSpan(0, 0, 2), ALL, racy=True),
    lang.Upload(0, ElementSpan(0, 0, 2), ElementSpan(0, 0, 2)),
    lang.Mix(0, ElementSpan(2, 0, 1), ElementSpan(0, 1, 1), 1),
    lang.FillStep(1, ALL, 5),
)
"""The write that the download races with comes when the slot has been copied on, and its copy too."""
APART = (
    lang.Download(0, ElementSpan(0, 0, 2), ALL, racy=True),
    lang.ThreadsStep((lang.Synchronize("stream", 0), lang.HostRead(0)), (lang.FillStep(1, ALL, 5),)),
)
"""The other thread's write isn't behind the read, though the program says it later."""


@pytest.mark.parametrize("program", [LATE, APART])
def test_a_race_reaches_what_was_read_before_the_program_says_it(program):
    program = DeviceProgram(steps=program, **SIZES)
    model = judge(program)
    assert not list(beyond(program, model))
    contents = outcomes(program)
    for (path, key), found in contents.items():  # and no more than that, element by element
        allowed = {tuple(each.tolist()) for each in model.state.expectations[path].allowed}
        assert {column[n] for column in allowed for n in range(2)} == {v for each in found for v in each}, (path, key)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(races(), st.lists(steps(), min_size=2, max_size=6).map(lambda drawn: [step for more in drawn for step in more]))
)
def test_the_model_allows_what_any_order_leaves(drawn):
    program, model = taken(drawn)
    assert not list(beyond(program, model))


def test_values_in_a_circle_come_to_an_end():
    made = flows.Flows({}, {})
    one, other = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    made.join(one, other, lambda content: content + 1, itself=False)
    with pytest.raises(ForbiddenStep, match="too many outcomes"):
        made.join(other, one, lambda content: content + 1, itself=True)
