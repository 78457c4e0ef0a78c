"""L1: fences of the policy order streams and the host, and report completion to the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from outrider.device import Backend
from outrider_conformance.lab import Lab, call_on_new_thread, expect, in_every_order, in_some_order
from outrider_conformance.promises import needs, promise

_ASKED = 4


@promise(
    "Fence.wait_host_within",
    "Block the calling thread for at most ``seconds``; return True if the visible generation completed.",
)
@in_every_order()
def test_the_host_waits_for_a_fence_within_a_limit(lab: Lab) -> None:
    """A wait with a distant limit returns True, and True with limit 0 means completion."""
    a, x = lab.one_stream()
    fence = lab.backend.speculative_sync.create_fence("fence")
    for turn in (1.0, 2.0):
        lab.fill_late(a, x, turn)
        fence.signal(a)
        if fence.wait_host_within(0.0):
            expect(lab.current_values(x), turn, "what the host read when a fence came at once")
        assert fence.wait_host_within(60.0), "a minute wasn't enough"
        expect(lab.current_values(x), turn, "what the host read after the fence")


@promise("Fence.done", "Return True if the visible generation has completed.")
@in_every_order()
def test_a_fence_that_is_done_is_done(lab: Lab) -> None:
    """Repeated queries of a fence return True only after the work has run."""
    a, x = lab.one_stream()
    fence = lab.backend.speculative_sync.create_fence("fence")
    for turn in (1.0, 2.0):
        lab.fill_late(a, x, turn)
        fence.signal(a)
        for _ in range(_ASKED):
            if fence.done():
                expect(lab.current_values(x), turn, "the write before the signal that is done")
        fence.wait_host()
        assert fence.done(), "done is False after wait_host"


@promise("SpeculativeSync.create_fence", "Create the mechanism of the fence ``name``; called once per fence and engine.")
@pytest.mark.parametrize("names", [("late", "early"), ("fence", "fence")], ids=["two names", "two engines"])
@in_every_order()
def test_two_fences_are_two(lab: Lab, names: tuple[str, str]) -> None:
    """A wait for a fence with a late signal does not pass when another fence is signalled."""
    a, b, c = lab.streams("a", "b", "c")
    x, y = lab.full(a, 0), lab.full(c, 0)
    late, early = (lab.backend.speculative_sync.create_fence(name) for name in names)
    lab.fill_late(a, x, 1)
    late.signal(a)
    early.signal(b)
    late.wait(c)
    lab.expect_read(c, y, x, 1.0, "what was read after one fence while another was open")


@promise("Fence", "a ``wait`` takes the generation that is visible when the wait is enqueued.")
@in_every_order()
def test_the_policys_fences_order_streams_and_the_host(lab: Lab) -> None:
    """Fences of the policy order two streams and the host over three rounds."""
    backend = lab.backend
    a, b, x, y = lab.two_streams()
    ready = backend.speculative_sync.create_fence("ready")
    taken = backend.speculative_sync.create_fence("taken")
    expect(ready.name, "ready", "the fence's name")
    assert ready.mechanism.strip(), "the fence doesn't say what it's made of"
    taken.signal(b)
    for turn in (1.0, 2.0, 3.0):
        taken.wait(a)
        lab.fill_late(a, x, turn)
        ready.signal(a)
        ready.wait(b)
        lab.copy(b, y, x)
        taken.signal(b)
        taken.wait_host()
        assert taken.done(), "done is False after wait_host"
        expect(lab.current_values(y), turn, "what crossed the fence")


@promise("Fence", "a ``wait`` takes the generation that is visible when the wait is enqueued.")
def test_fences_serve_every_thread_behind_much_work(lab: Lab) -> None:
    """Fences order after thirty queued operations, with calls from this thread and, without a controlled schedule, other
    threads.
    """

    def here(call: Callable[[], None]) -> None:
        call()

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y, z = lab.full(a, 0), lab.full(b, 0), lab.full(b, 0)
        ready, taken = (backend.speculative_sync.create_fence(name) for name in ("ready", "taken"))
        ready.signal(a)
        taken.signal(b)
        for turn, by in enumerate((here, call_on_new_thread, here) if backend.control is None else (here, here), 1):
            for stream in (a, b, a, a):  # both have much to do, and the one that signals has more
                lab.slow(stream)
            for _ in range(30):
                lab.fill(a, x, turn)
                lab.fill(b, z, turn)
            by(partial(ready.signal, a))
            by(partial(ready.wait, b))
            lab.copy(b, y, x)
            by(partial(taken.signal, b))
            by(taken.wait_host)
            expect(lab.current_values(y), float(turn), "what crossed the fence")

    lab.check_in_every_order(program)


@needs("asynchronous")
@promise("Fence.done", "Return True if the visible generation has completed. Never blocks.")
@in_some_order("a fence was never pending while its stream was busy")
def test_a_fence_is_pending_while_the_work_runs(lab: Lab) -> bool:
    """A fence after slow work is pending: neither its signal nor its query blocks."""
    a, x = lab.one_stream()
    fence = lab.backend.speculative_sync.create_fence("fence")
    fence.signal(a)
    fence.wait_host()
    lab.fill_late(a, x, 1)
    fence.signal(a)
    if not fence.done() and not a.query():
        return True
    if fence.done():
        expect(lab.current_values(x), 1.0, "the write before the signal that is done")
    return False
