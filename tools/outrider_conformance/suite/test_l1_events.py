"""L1: events and the fences of the policy order streams and the host by generations."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor

from outrider.device import Event, Stream
from outrider_conformance.lab import Lab, call_on_new_thread, expect, in_every_order, in_some_order, run_concurrently
from outrider_conformance.promises import blamed_on, needs, promise
from outrider_conformance.reporting.verdict import not_applicable

_LONGEST_S = 2.0**32
"""Seconds of a time limit: 0 in any smaller unit, if a driver keeps 32 bits of the number."""
_LONG_MS = 1500.0
"""Milliseconds of work for which a driver with a time limit gives up."""
_SHORT_S, _FRACTION_S = 0.005, 0.6
"""Time limits in seconds: one that is shorter than a delay, and one that is none in whole seconds."""
_QUERIES = 8
_PENDING_RATIO, _PENDING_S = 4.0, 0.001
"""The shortest query of pending work takes at most this many times as long as one of completed work, and this long in
seconds.
"""


@promise("Stream.wait")
@in_every_order()
def test_a_wait_orders_two_streams(lab: Lab) -> None:
    """A stream that waits for an event reads the late write of the recording stream."""
    a, b, x, y = lab.two_streams()
    lab.fill_late(a, x, 1)
    b.wait(lab.record(a))
    lab.expect_read(b, y, x, 1.0, "what the waiting stream read")


@promise("Stream.wait")
@in_every_order(schedules=4)
def test_waits_order_every_pair_of_many_streams(lab: Lab) -> None:
    """Eight streams wait for events of all eight, of which each in turn comes late, and read the late write. The host has
    queried streams and events before.
    """
    streams = lab.streams(*"abcdefgh")
    copies = [lab.full(stream, 0) for stream in streams]
    x = lab.full(streams[0], 0)
    for turn, late in enumerate(streams, 1):
        lab.fill_late(late, x, turn)
        events = [lab.record(stream) for stream in streams]
        for event, stream in zip(events, streams, strict=True):
            event.query()
            stream.query()
        for stream, copy in zip(streams, copies, strict=True):
            for event in events:
                stream.wait(event)
            lab.copy(stream, copy, x)
        found = [lab.read_tensor(stream, copy) for stream, copy in zip(streams, copies, strict=True)]
        expect(found, [float(turn)] * len(streams), f"what each stream read after its waits, with stream {turn} late")


@promise("Stream.record", "An event may be recorded again at any time, on any stream")
@pytest.mark.parametrize("moved", [False, True], ids=["by one stream", "by another stream"])
@in_every_order()
def test_a_wait_takes_the_newest_record(lab: Lab, moved: bool) -> None:
    """A wait after the second record of an event, by the same or another stream, orders after the second record."""
    a, b, c = lab.streams("a", "b", "c")
    recorder = b if moved else a
    x, y = lab.full(recorder, 0), lab.full(c, 0)
    event = lab.record(a)
    a.synchronize()
    lab.fill_late(recorder, x, 1)
    recorder.record(event)
    c.wait(event)
    lab.expect_read(c, y, x, 1.0, "what was read after the second generation")


@promise("Stream.record", "waits that were enqueued before keep the generation that they took.")
@in_every_order()
def test_a_wait_keeps_the_generation_that_it_took(lab: Lab) -> None:
    """A later record on an idle stream does not replace the generation of a queued wait."""
    a, b, c = lab.streams("a", "b", "c")
    x, y = lab.full(a, 0), lab.full(b, 0)
    lab.fill_late(a, x, 1)
    event = lab.record(a)
    b.wait(event)
    c.record(event)
    lab.expect_read(b, y, x, 1.0, "what was read after the generation that was visible at the wait")


@needs("asynchronous", "concurrent_streams")
@promise("Stream.wait", "A record after this call doesn't change what is waited for.")
@in_some_order("work after the first generation always waited for the second, recorded after the wait")
def test_a_later_record_holds_nobody_up(lab: Lab) -> bool:
    """A wait for a completed generation does not wait for a later record."""
    a, b, x, y = lab.two_streams()
    event = lab.record(a)
    b.wait(event)
    lab.fill_late(a, x, 1)
    a.record(event)
    lab.fill(b, y, 2)
    b.synchronize()
    pending = not a.query()
    expect(lab.current_values(y), 2.0, "work after the first generation")
    return pending


@needs("asynchronous", "concurrent_streams")
@promise("Stream.record")
@in_some_order("a wait always held the stream until work was over that came after the record")
def test_a_wait_covers_no_more_than_the_record(lab: Lab) -> bool:
    """A wait does not cover work that the producer enqueued between the record and the wait."""
    a, b, x, y = lab.two_streams()
    event = lab.record(a)
    lab.fill_late(a, x, 1)
    b.wait(event)
    lab.fill(b, y, 2)
    b.synchronize()
    return not a.query()


@needs("asynchronous", "concurrent_streams")
@promise("Stream", "Nothing orders two streams but a record on one and a wait on the other.")
@in_some_order("a stream that recorded an event was always held until the other stream was empty")
def test_a_record_waits_for_no_other_stream(lab: Lab) -> bool:
    """A stream records an event and continues while another stream is busy, also if that one recorded the event before."""
    a, b, x, y = lab.two_streams()
    lab.fill_late(a, x, 1)
    event = lab.record(a)
    b.record(event)
    event.synchronize()
    lab.fill(b, y, 2)
    b.synchronize()
    return not a.query()


@promise("Event", "Each record is a *generation*: 0 before the first, then counted up.")
@in_every_order()
def test_one_event_fences_a_long_exchange(lab: Lab) -> None:
    """Two streams update one value in turn, ordered by two events that they record repeatedly."""
    backend = lab.backend
    a, b = lab.streams("a", "b")
    x = lab.full(a, 1)
    there, back = backend.create_event("there"), backend.create_event("back")
    a.record(back)
    for turn in range(1, 5):
        a.wait(back)
        if turn % 2:
            lab.slow(a)
        with backend.on(a):
            x.mul_(3)
        a.record(there)
        b.wait(there)
        if not turn % 2:
            lab.slow(b)
        with backend.on(b):
            x.add_(turn)
        b.record(back)
    a.wait(back)
    expect(lab.read_tensor(a, x), 139.0, "1 tripled and increased by 1, 2, 3, 4 in turn, by two streams")


@needs("asynchronous")
@promise("Event.synchronize_within", "After False, the calling thread is ordered after nothing.")
@in_some_order("waits with the limits 0 and 5 ms always waited for the work")
def test_synchronize_within_gives_up(lab: Lab) -> bool:
    """The wait returns False for work that takes longer than the limit. A device without a clock may complete the work
    instead.
    """
    a, x = lab.one_stream()
    lab.fill_late(a, x, 1)
    event = lab.record(a)
    came = event.synchronize_within(0.0) or event.synchronize_within(_SHORT_S)
    assert came or lab.backend.control is None, "a device without a clock gave up"
    if came:
        expect(lab.current_values(x), 1.0, "what the host read after the generation")
    assert event.synchronize_within(_LONGEST_S), f"False at once within a limit of {_LONGEST_S:g} s: does it overflow?"
    assert event.synchronize_within(0.0), "False for a generation that is over"
    lab.fill_late(a, x, 2)
    a.record(event)
    event.synchronize_within(_FRACTION_S)  # the kit checks that it doesn't give up earlier
    return not came or lab.backend.control is not None


@promise("Event.query", "Return True if the latest generation has completed. Never blocks.")
@in_every_order()
def test_query_speaks_of_the_latest_generation(lab: Lab) -> None:
    """A query that returns True after the second record means the second generation."""
    a, x = lab.one_stream()
    event = lab.record(a)
    event.synchronize()
    assert event.query(), "query is False for a generation that is over"
    lab.fill_late(a, x, 1)
    a.record(event)
    if event.query():
        expect(lab.current_values(x), 1.0, "the write before the generation that query says is over")
    a.synchronize()
    assert event.query(), "query is False though the stream is empty"


@needs("asynchronous")
@promise("Event.synchronize", "Orders this thread, and only this one, after what the record covers.")
@in_some_order("synchronising with an event always waits for what was enqueued after its record too")
def test_synchronize_waits_for_what_the_record_covers(lab: Lab) -> bool:
    """The host does not wait for work that was enqueued after the record."""
    a, x = lab.one_stream()
    event = lab.record(a)
    lab.fill_late(a, x, 1)
    event.synchronize()
    return not a.query()


@needs("asynchronous")
@promise("Event.query", "Return True if the latest generation has completed. Never blocks.")
@in_some_order("query was never False while the stream was busy: it blocks, or speaks of an older generation")
def test_query_is_false_while_the_work_runs(lab: Lab) -> bool:
    """The query of an event after slow work returns False, also if an older generation has completed."""
    a, x = lab.one_stream()
    event = lab.record(a)
    a.synchronize()
    lab.fill_late(a, x, 1)
    a.record(event)
    return not event.query() and not a.query()


def _measured_ms(lab: Lab) -> tuple[float, ...]:
    """Return the milliseconds of no work, one delay, three delays and all of it by events, and of all by the host's clock.

    The three delays are on another stream.
    """
    a, b = lab.streams("a", "b")
    events = [lab.backend.create_event(f"t{number}", timing=True) for number in range(4)]
    for event in events:
        a.record(event)  # an older generation, whose times must not be those of the latest
    a.synchronize()
    for first, last in itertools.pairwise(events):
        first.elapsed_ms(last)
    lab.slow(a)  # so that the events below aren't reached by an idle device
    began = time.perf_counter()
    a.record(events[0])
    for event, delays, stream in zip(events[1:], (0, 1, 3), (a, a, b), strict=True):
        if stream is b:
            b.wait(events[2])
        for _ in range(delays):
            lab.slow(stream)
        stream.record(event)
    b.synchronize()
    parts = [first.elapsed_ms(last) for first, last in itertools.pairwise(events)]
    return *parts, events[0].elapsed_ms(events[3]), (time.perf_counter() - began) * 1e3


@needs("event_timing")
@promise("Event.elapsed_ms", "Device milliseconds between the latest generations of this event and of ``end``")
@in_every_order(schedules=4)
def test_time_is_measured(lab: Lab) -> None:
    """Measured times add up, and their unit is the host's millisecond."""
    nothing, once, thrice, total, wall = _measured_ms(lab)
    assert 0 <= nothing <= total, f"nothing took {nothing} ms, everything {total} ms"
    assert abs(total - nothing - once - thrice) <= max(0.05 * total, 0.01), (
        f"parts of {nothing}, {once} and {thrice} ms, the whole {total} ms"
    )
    if lab.backend.control is None:  # a simulated device has a clock of its own
        assert total <= 1.1 * wall + 0.1, f"the device measured {total} ms within {wall} ms of the host's"
        assert total >= 0.1 * wall - 1, f"the device measured {total} ms, the host {wall} ms: milliseconds?"
        assert once % 1 or thrice % 1 or not lab.asynchronous, f"{once} and {thrice} ms have no fraction: don't round"


@needs("event_timing", "asynchronous")
@promise("Event.elapsed_ms", "Device milliseconds between the latest generations of this event and of ``end``")
@in_some_order("a delay never measured longer than nothing, and three delays longer than one")
def test_longer_work_measures_longer(lab: Lab) -> bool:
    """No work, one delay and three delays take increasing times in at least one run."""
    nothing, once, thrice, *_ = _measured_ms(lab)
    return nothing < once < thrice


_ASKED = 4


@promise("Fence.wait_host_within")
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


@promise("Fence.done")
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


@promise("SpeculativeSync.create_fence")
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
@pytest.mark.parametrize("pending", [0, 30], ids=["alone", "after much work"])
@in_every_order()
def test_the_policys_fences_order_streams_and_the_host(lab: Lab, pending: int) -> None:
    """Fences of the policy order two streams and the host over three rounds, also after many queued operations, with calls
    from this thread and, without a controlled schedule, other threads.
    """

    def here(call: Callable[[], None]) -> None:
        call()

    backend = lab.backend
    a, b, x, y = lab.two_streams()
    z = lab.full(b, 0)
    ready, taken = (backend.speculative_sync.create_fence(name) for name in ("ready", "taken"))
    expect(ready.name, "ready", "the fence's name")
    assert ready.mechanism.strip(), "the fence doesn't say what it's made of"
    ready.signal(a)
    taken.signal(b)
    for turn, by in enumerate((here, call_on_new_thread if backend.control is None else here, here), 1):
        taken.wait(a)
        for stream in (a, b, a) if pending else ():  # both have much to do, and the one that signals has more
            lab.slow(stream)
        for _ in range(pending):
            lab.fill(a, x, turn)
            lab.fill(b, z, turn)
        lab.fill_late(a, x, turn)
        by(partial(ready.signal, a))
        by(partial(ready.wait, b))
        lab.copy(b, y, x)
        by(partial(taken.signal, b))
        by(taken.wait_host)
        assert taken.done(), "done is False after wait_host"
        expect(lab.current_values(y), float(turn), "what crossed the fence")


@promise("Fence", "a ``wait`` takes the generation that is visible when the wait is enqueued.")
@in_every_order()
def test_each_stream_that_waits_for_a_fence_is_ordered(lab: Lab) -> None:
    """Two streams wait for each of three generations of one fence of the policy, and both read what was written before."""
    a, b, x, y = lab.two_streams()
    (c,) = lab.streams("c")
    copies = {b: y, c: lab.full(c, 0)}
    fence = lab.backend.speculative_sync.create_fence("ready")
    for turn in range(1, 4):
        lab.fill_late(a, x, turn)
        fence.signal(a)
        for stream, copied in copies.items():
            fence.wait(stream)
            lab.copy(stream, copied, x)
        for stream in copies:
            a.wait(lab.record(stream, f"copied on {stream.name}"))
        found = [lab.read_tensor(stream, copied) for stream, copied in copies.items()]
        expect(found, [float(turn)] * 2, f"what two streams read after generation {turn} of a fence")


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


def _shortest_query_s(asked: Stream | Event) -> float:
    """Return the seconds of the shortest of several queries: a busy host makes some longer."""

    def query_s() -> float:
        began = time.perf_counter()
        asked.query()
        return time.perf_counter() - began

    return min(query_s() for _ in range(_QUERIES))


@needs("asynchronous", "perturbs_timing")
@promise("Event.synchronize")
def test_waits_have_no_time_limit(lab: Lab) -> None:
    """Work of more than a second ends before any wait for it does: waits of the host, of another stream, and for a flag.
    Queries wait for none of it.
    """
    if lab.backend.control is not None:
        not_applicable("a tool decides the schedule, so there is no time")
    a, b, late, copy = lab.two_streams()
    (c,) = lab.streams("c")
    flagged = lab.full(c, 0)
    lab.backend.delay(a, lab.delay_length * round(_LONG_MS / lab.pace.target_ms))
    lab.fill(a, late, 1)
    event = lab.record(a)
    b.wait(event)
    lab.copy(b, copy, late)
    flag = lab.backend.create_flag("f") if lab.backend.capabilities.flags else None
    if flag is not None:
        flag.wait(c)
        flag.set(a)
    else:
        c.wait(event)
    lab.copy(c, flagged, late)
    asked: tuple[tuple[str, Stream | Event], ...] = ("Stream.query", a), ("Event.query", event)
    pending_s = [_shortest_query_s(each) for _, each in asked]
    event.synchronize_within(_FRACTION_S)  # the kit checks that it doesn't give up earlier

    def check(wait: Callable[[], None], name: str, tensor: Tensor) -> None:
        wait()
        with blamed_on(name):
            expect(lab.current_values(tensor), 1, f"{name} returned before {_LONG_MS / 1e3} s of work had ended: its result")

    third = "Flag.wait" if flag is not None else "Stream.wait"
    failed = run_concurrently(
        partial(check, event.synchronize, "Event.synchronize", late),
        partial(check, a.synchronize, "Stream.synchronize", late),
        partial(check, b.synchronize, "Stream.wait", copy),
        partial(check, c.synchronize, third, flagged),
    )
    if failed:
        raise failed[0]
    for (name, each), seconds in zip(asked, pending_s, strict=True):
        done_s = _shortest_query_s(each)
        with blamed_on(name):
            assert seconds <= _PENDING_RATIO * done_s + _PENDING_S, (
                f"a query takes {seconds * 1e3:.1f} ms while work is pending, {done_s * 1e3:.1f} ms afterwards: don't wait"
            )
