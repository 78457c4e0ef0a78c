"""L3: resettable flags that order streams."""

from __future__ import annotations

import pytest
from torch import Tensor

from outrider.device import CaptureContext, Stream
from outrider_conformance.lab import CALLS, Lab, call_on_new_thread, expect, in_every_order
from outrider_conformance.promises import needs, promise

_MANY = 32
_SEVERAL = 7
_ROUNDS = 3
"""Rounds of one flag. The wait of a round checks the reset of the round before: two rounds would leave the second reset,
and so any reset after the first one, unchecked.
"""


@needs("flags")
@promise("Capabilities.flags", "resettable flags, for which a wait may be enqueued before its set.")
@in_every_order()
def test_a_wait_may_precede_its_set(lab: Lab) -> None:
    """A wait that is enqueued before the set holds its stream, and not the host."""
    a, b, x, y = lab.two_streams()
    flag = lab.backend.create_flag("f")
    flag.wait(b)
    lab.copy(b, y, x)
    assert not b.query(), "work after a wait for a flag that has not been set is said to have run"
    lab.fill_late(a, x, 1)
    flag.set(a)
    expect(lab.read_tensor(b, y), 1.0, "what was read after the wait")


@needs("flags")
@promise(
    "Flag.set", "Raise the flag after everything enqueued on ``stream`` so far. The set is lost if the flag is up by then."
)
@in_every_order()
def test_a_wait_after_the_set_passes(lab: Lab) -> None:
    """Several waits pass one set, also a wait after the others have passed."""
    a, b, c = lab.streams("a", "b", "c")
    x, y, z = lab.full(a, 0), lab.full(b, 0), lab.full(c, 0)
    last = lab.full(a, 0)
    flag = lab.backend.create_flag("f")
    lab.fill_late(a, x, 1)
    flag.set(a)
    for stream, tensor in ((b, y), (c, z)):
        flag.wait(stream)
        lab.copy(stream, tensor, x)
    expect([lab.read_tensor(b, y), lab.read_tensor(c, z)], [1.0, 1.0], "what two streams read after one set")
    flag.wait(b)
    lab.expect_read(b, last, x, 1.0, "what was read after a wait that others had passed")


def _check_rounds(lab: Lab, rounds: int) -> None:
    """Fail unless rounds of wait, reset and set of one flag transfer the value of each round."""
    backend = lab.backend
    a, b, x, y = lab.two_streams()
    flag, done = backend.create_flag("f"), backend.create_event("done")
    for turn in map(float, range(1, rounds + 1)):
        flag.wait(b)
        lab.copy(b, y, x)
        flag.reset(b)
        b.record(done)
        lab.fill_late(a, x, turn)
        flag.set(a)
        a.wait(done)
        expect(lab.read_tensor(b, y), turn, "what was read in a round")


@needs("flags")
@promise("Flag.reset", "Lower the flag, in the order of ``stream``.")
@in_every_order()
def test_a_reset_makes_the_next_wait_wait_again(lab: Lab) -> None:
    """Each wait after a reset holds its stream until the next set, after the first reset and after the second one."""
    _check_rounds(lab, _ROUNDS)


@needs("flags")
@promise("Flag", "``set``, ``wait`` and ``reset`` are device operations in the order of their stream.")
@in_every_order(schedules=8)
def test_one_flag_serves_many_rounds(lab: Lab) -> None:
    """Many rounds of wait, reset and set of one flag transfer the value of each round."""
    _check_rounds(lab, CALLS)


@needs("flags")
@promise("Flag", "A set of a flag that is already up is lost.")
@in_every_order()
def test_a_second_set_is_lost(lab: Lab) -> None:
    """A flag that was set twice and reset once is down."""
    a, b, x, y = lab.two_streams()
    flag = lab.backend.create_flag("f")
    flag.set(a)
    flag.set(a)
    flag.reset(a)
    b.wait(lab.record(a))
    flag.wait(b)
    lab.copy(b, y, x)
    assert not b.query(), "a wait passed a flag that was set twice and reset once"
    lab.fill_late(a, x, 1)
    flag.set(a)
    expect(lab.read_tensor(b, y), 1.0, "what was read after the set that came after the reset")


@needs("flags")
@promise("Flag", "``set``, ``wait`` and ``reset`` are device operations in the order of their stream.")
@in_every_order()
def test_two_flags_are_two(lab: Lab) -> None:
    """Setting one flag does not release the waiter of another flag."""
    backend = lab.backend
    a, b, x, y = lab.two_streams()
    first, second = backend.create_flag("first"), backend.create_flag("second")
    second.wait(b)
    lab.copy(b, y, x)
    first.set(a)
    a.synchronize()
    assert not b.query(), "a wait for one flag passed on another's set"
    lab.fill_late(a, x, 1)
    second.set(a)
    expect(lab.read_tensor(b, y), 1.0, "what was read after the right flag")


@needs("flags")
@promise("Flag", "``set``, ``wait`` and ``reset`` are device operations in the order of their stream.")
@in_every_order()
def test_each_of_several_flags_is_its_own(lab: Lab) -> None:
    """Seven streams wait for one flag each; each set, after its own write, releases one stream."""
    backend = lab.backend
    setter, *waiters = lab.streams("setter", *(f"waiter {n}" for n in range(_SEVERAL)))
    x, passed = lab.full(setter, -1), backend.create_event("passed")
    found = [lab.full(waiter, -1) for waiter in waiters]
    flags = [backend.create_flag(f"f{n}") for n in range(_SEVERAL)]
    for flag, waiter, tensor in zip(flags, waiters, found, strict=True):
        flag.wait(waiter)
        lab.copy(waiter, tensor, x)
    for number, (flag, waiter) in enumerate(zip(flags, waiters, strict=True)):
        lab.fill_late(setter, x, number)
        flag.set(setter)
        waiter.record(passed)
        setter.wait(passed)
    setter.synchronize()
    expect(
        [lab.current_values(tensor) for tensor in found],
        [float(n) for n in range(_SEVERAL)],
        "what was read behind each flag",
    )


@needs("flags")
@promise("Flag", "``set``, ``wait`` and ``reset`` are device operations in the order of their stream.")
@in_every_order(schedules=8)
def test_flags_work_behind_much_that_is_pending(lab: Lab) -> None:
    """Wait, set and reset work after dozens of pending operations."""
    a, b, x, y = lab.two_streams()
    flag = lab.backend.create_flag("f")

    def pile(stream: Stream, tensor: Tensor) -> None:
        lab.slow(stream)
        for value in range(_MANY):
            lab.fill(stream, tensor, -value)

    pile(b, y)
    flag.wait(b)
    lab.copy(b, y, x)
    for _ in range(2):
        lab.slow(a)
    lab.fill_late(a, x, 1)
    flag.set(a)
    expect(lab.read_tensor(b, y), 1.0, "what was read after a wait that came after many operations")
    pile(b, y)
    flag.reset(b)
    a.wait(lab.record(b, "lowered"))
    flag.wait(b)
    lab.copy(b, y, x)
    assert not b.query(), "a wait passed a flag whose reset came after many operations"
    pile(a, x)
    lab.fill(a, x, 2)
    flag.set(a)
    expect(lab.read_tensor(b, y), 2.0, "what was read after a set that came after many operations")


@needs("flags")
@promise("Flag", "``set``, ``wait`` and ``reset`` are device operations in the order of their stream.")
@pytest.mark.parametrize("verb", ["wait", "set", "reset"])
@in_every_order(schedules=8)
def test_flags_work_from_another_thread(lab: Lab, verb: str) -> None:
    """Wait, set or reset works when another thread calls it."""
    backend = lab.backend
    a, b, x, y = lab.two_streams()
    flag, done = backend.create_flag("f"), backend.create_event("done")

    def call(name: str, stream: Stream) -> None:
        if name == verb:
            call_on_new_thread(lambda: getattr(flag, name)(stream))
        else:
            getattr(flag, name)(stream)

    for turn in map(float, range(1, _ROUNDS + 1)):
        call("wait", b)
        lab.copy(b, y, x)
        call("reset", b)
        b.record(done)
        lab.fill_late(a, x, turn)
        call("set", a)
        a.wait(done)
        expect(lab.read_tensor(b, y), turn, "what was read in a round")


@needs("flags", "captures_graphs")
@promise("Flag", "All three may be captured where the backend declares ``flags`` and ``captures_graphs``.")
@in_every_order()
def test_flags_work_inside_a_graph(lab: Lab) -> None:
    """A graph waits for a flag and resets it, and each replay is released by its own set."""
    backend = lab.backend
    a, b, x, y = lab.two_streams()
    flag = backend.create_flag("f")

    def fn(context: CaptureContext) -> None:
        if backend.active_capture is not None:  # a warm-up would wait forever
            flag.wait(b)
            flag.reset(b)
        context.outputs["y"].copy_(context.inputs["x"])

    graph = backend.capture("waits", fn, stream=b, inputs={"x": x}, outputs={"y": y})
    for turn in map(float, range(1, _ROUNDS + 1)):
        graph.replay(b)
        assert not b.query(), "a graph that waits for a flag ran before the flag was set"
        lab.fill_late(a, x, turn)
        flag.set(a)
        expect(lab.read_tensor(b, y), turn, "what the graph read after the flag")
