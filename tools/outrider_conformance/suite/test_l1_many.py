"""L1: many objects of each kind, and random programs.

Counters wrap, tables and pools run out, and memory of dropped objects is reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from outrider_conformance.lab import Lab, expect, in_every_order
from outrider_conformance.promises import blamed_on, needs, promise
from outrider_conformance.reporting.verdict import not_applicable

_MANY = 300
"""Number of objects of a kind: more than the 256 values of a byte, and than the entries of small tables."""
_DEEP = 520
_LONG = 33_000
"""Number of records: more than half of the range of 16 bits, beyond which a difference of counters changes its sign."""
_BETWEEN, _DELAYS = 64, 16
"""Numbers of records between two operations, and of delays during which thousands of them are enqueued."""
_PENDING = 1 << 18
"""Number of elements of an operation that is pending when its call returns."""
_SECONDS = 1.0
_ROUNDS, _WRITES = 4, 12


@promise("Stream.query")
@in_every_order(schedules=2)
def test_queries_are_right_behind_any_number_of_operations(lab: Lab) -> None:
    """Queries after each of 520 operations that follow slow work never report pending work as complete, and agree with each
    other.
    """
    backend = lab.backend
    stream, x = lab.one_stream()
    before, after = backend.create_event("before the work"), backend.create_event("after the work")
    stream.record(before)
    stream.synchronize()
    for _ in range(4):
        lab.slow(stream)
    stream.record(after)
    for number in range(_DEEP):
        lab.fill(stream, x, number)
        idle, over = stream.query(), after.query()
        assert not idle or over, f"an idle stream with {number + 1} operations after an event that isn't over"
        if idle:
            expect(lab.current_values(x), float(number), f"what {number + 1} operations left on a stream that says it's idle")
    assert before.query(), "an event that was over isn't over any more"
    expect(lab.read_tensor(stream, x), float(_DEEP - 1), "what the last operation left")


@needs("asynchronous")
@promise("Event.synchronize")
@pytest.mark.parametrize("waited", ["event", "stream", "backend"])
def test_none_of_hundreds_of_waits_returns_early(lab: Lab, waited: str) -> None:
    """Each of hundreds of calls of ``synchronize`` returns after the work that it covers. The kit asks after each wait."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    x = lab.full(stream, 0, width=_PENDING)
    event = backend.create_event("e")
    waits = {"event": event.synchronize, "stream": stream.synchronize, "backend": backend.synchronize}
    for _ in range(_DEEP if backend.control is None else 1):
        with backend.on(stream):
            x.add_(1)
        stream.record(event)
        waits[waited]()
    backend.synchronize()


@promise("Event", "A wait that is enqueued stays valid when the Python object is dropped.")
@in_every_order(schedules=2)
def test_hundreds_of_events_are_all_their_own(lab: Lab) -> None:
    """Each of 300 events of one name, recorded after its own write, orders its own wait, while further events are dropped."""
    backend = lab.backend
    a, b = lab.streams("a", "b")
    with backend.on(a):
        x = torch.zeros(_MANY, device=backend.device)
        y = torch.zeros(_MANY, device=backend.device)
    backend.synchronize()
    lab.slow(a)
    events = []
    for number in range(_MANY):
        with backend.on(a):
            x[number : number + 1].fill_(number + 1.0)
        events.append(lab.record(a, "same"))
        lab.record(b, "same")
    for number in reversed(range(_MANY)):
        b.wait(events[number])
        with backend.on(b):
            y[number : number + 1].copy_(x[number : number + 1])
        events[number] = lab.record(a, "same")  # the wait outlives its event
    b.synchronize()
    found = y.cpu()
    wrong = [number for number in range(_MANY) if found[number] != number + 1.0]
    expect(wrong, [], "events whose waiter read too early")


@promise("Event.query")
def test_an_old_generation_stays_over(lab: Lab) -> None:
    """A completed generation stays completed after 33,000 further records that are pending at first, or as many as a slow
    device makes in one second. No operation between them is lost.
    """
    backend = lab.backend
    a, b = lab.streams("a", "b")
    old, other = lab.record(a, "old"), backend.create_event("again and again")
    x, counted = lab.full(b, 0), lab.full(a, 0)
    for _ in range(_DELAYS):
        lab.slow(a)
    until, records = time.monotonic() + _SECONDS, 0
    while records < _LONG and time.monotonic() < until:
        a.record(other)
        records += 1
        if records % _BETWEEN == 0:
            with backend.on(a):
                counted.add_(1)
    with blamed_on("Stream"):
        ran = lab.read_tensor(a, counted)
        expect(ran, float(records // _BETWEEN), f"operations that ran, one after {_BETWEEN} records each")
    assert old.query(), f"an event that was over isn't, {records} records later"
    old.synchronize()
    b.wait(old)
    lab.fill(b, x, 1)
    expect(lab.read_tensor(b, x), 1.0, "what was written after a wait for an old event")


@promise("Stream", "dropping the object neither cancels nor waits for its work.")
@in_every_order(schedules=8)
def test_streams_are_dropped_with_work_of_theirs_pending(lab: Lab) -> None:
    """The work of a dropped stream runs, ordered by the event that was recorded after it."""
    (last,) = lab.streams("last")
    tensors, events = [lab.full(last, 0) for _ in range(4)], []
    for number, tensor in enumerate(tensors):
        stream = lab.backend.create_stream("dropped")
        lab.fill_late(stream, tensor, number + 1)
        lab.slow(stream)
        lab.fill(stream, tensor, number + 10)
        events.append(lab.record(stream))
        del stream
    for event in events:
        last.wait(event)
    last.synchronize()
    expect(
        [lab.current_values(tensor) for tensor in tensors], [10.0, 11.0, 12.0, 13.0], "what streams that were dropped wrote"
    )


@promise("Backend.copy_async", "The bytes of the source are read, and those of the destination written, in stream order")
@pytest.mark.parametrize("how", ["between each other", "behind each other"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@in_every_order(schedules=4)
def test_writers_of_neighbouring_elements_leave_each_other_alone(lab: Lab, dtype: torch.dtype, how: str) -> None:
    """Two streams concurrently write neighbouring elements of one tensor.

    A copy engine that reads a word or a row, changes its part and writes all of it back loses the other stream's writes.
    """
    if dtype.is_floating_point and dtype not in lab.backend.capabilities.dtypes:
        not_applicable(f"{dtype} isn't declared")
    count, cut = 255, 127  # no whole words of any size
    ours, theirs = (slice(0, None, 2), slice(1, None, 2)) if how.startswith("between") else (slice(cut), slice(cut, None))
    backend = lab.backend
    a, b = lab.streams("a", "b")
    pinned = backend.empty_pinned("of both", (count,), dtype).tensor
    x, first, second = (lab.full(a, value, dtype=dtype, width=count) for value in (0, 3, 5))
    for number in range(_ROUNDS):
        lab.slow(a)
        b.wait(lab.record(a))  # both begin at one moment
        for turn in range(_WRITES):
            with backend.on(a):
                x[ours].fill_(turn + number)
            backend.copy_async(x[ours], first[ours], stream=a)
            if turn % 2 == 0:
                with backend.on(b):
                    x[theirs].copy_(second[theirs])
                backend.copy_async(x[theirs], second[theirs], stream=b)
        if not how.startswith("between"):
            backend.copy_async(pinned[theirs], second[theirs], stream=b)
            backend.copy_async(pinned[ours], first[ours], stream=a)
        backend.synchronize()
        found = x.cpu()
        expect(set(found[ours].tolist()), {3}, "the elements that one stream wrote")
        expect(set(found[theirs].tolist()), {5}, "the elements that the other stream wrote")
        if not how.startswith("between"):
            expect(pinned.tolist(), [3] * cut + [5] * (count - cut), "pinned memory that both streams copied to")
        with backend.on(a):
            x.zero_()
        a.synchronize()


@promise("Stream")
@pytest.mark.parametrize("family", ["order", "copies", "memory", "threads"])
def test_random_programs(random_programs: Callable[[str], None], family: str) -> None:
    """Each value that the host reads is allowed by the model of the contract. The report shows the smallest failing
    program.
    """
    random_programs(family)
