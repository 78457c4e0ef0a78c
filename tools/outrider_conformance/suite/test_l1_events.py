"""L1: events order streams by generations."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial

from outrider.device import Backend
from outrider_conformance.lab import Lab, Seen, expect
from outrider_conformance.promises import needs, promise


@promise("Stream.wait", "Run what is enqueued on this stream from now on after the event's generation that is visible now.")
def test_a_wait_orders_two_streams(lab: Lab) -> None:
    """What one stream wrote late, the other reads."""

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y = lab.full(a, 0), lab.full(b, 0)
        lab.later(a, x, 1)
        b.wait(lab.record(a))
        lab.copy(b, y, x)
        expect(lab.read(b, y), 1.0, "what the waiting stream read")

    lab.always(program)


@promise("Stream.record", "Complete a new generation of ``event`` after everything that was enqueued on this stream so far.")
def test_a_wait_takes_the_newest_record(lab: Lab) -> None:
    """The first record is long over; the wait is for the second."""

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y = lab.full(a, 0), lab.full(b, 0)
        event = lab.record(a)
        a.synchronize()
        lab.later(a, x, 1)
        a.record(event)
        b.wait(event)
        lab.copy(b, y, x)
        expect(lab.read(b, y), 1.0, "what the stream read behind the second generation")

    lab.always(program)


@promise("Stream.record", "An event may be recorded again at any time, on any stream")
def test_an_event_moves_between_streams(lab: Lab) -> None:
    """Recorded on one stream, then on another: a wait is for the other."""

    def program(backend: Backend) -> None:
        a, b, c = lab.streams("a", "b", "c")
        x, y = lab.full(b, 0), lab.full(c, 0)
        event = lab.record(a)
        lab.later(b, x, 1)
        b.record(event)
        c.wait(event)
        lab.copy(c, y, x)
        expect(lab.read(c, y), 1.0, "what was read behind the record of the second stream")

    lab.always(program)


@promise("Stream.record", "waits that were enqueued before keep the generation that they took.")
def test_a_wait_keeps_the_generation_that_it_took(lab: Lab) -> None:
    """The event is recorded again on a stream that runs on at once; the wait is still for the late one."""

    def program(backend: Backend) -> None:
        a, b, c = lab.streams("a", "b", "c")
        x, y = lab.full(a, 0), lab.full(b, 0)
        lab.later(a, x, 1)
        event = lab.record(a)
        b.wait(event)
        c.record(event)
        lab.copy(b, y, x)
        expect(lab.read(b, y), 1.0, "what was read behind the generation that was visible at the wait")

    lab.always(program)


@needs("asynchronous", "concurrent_streams")
@promise("Stream.wait", "A record after this call doesn't change what is waited for.")
def test_a_later_record_holds_nobody_up(lab: Lab) -> None:
    """A wait for a generation that is over isn't moved to a later one that isn't."""

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y = lab.full(a, 0), lab.full(b, 0)
        event = lab.record(a)
        b.wait(event)
        lab.later(a, x, 1)
        a.record(event)
        lab.fill(b, y, 2)
        b.synchronize()
        pending = not a.query()
        expect(lab.peek(y), 2.0, "work behind the first generation")
        if pending:
            raise Seen

    lab.sometimes(program, "work behind the first generation always waited for the second, recorded after the wait")


@needs("asynchronous", "concurrent_streams")
@promise("Stream.record", "Complete a new generation of ``event`` after everything that was enqueued on this stream so far.")
def test_a_wait_covers_no_more_than_the_record(lab: Lab) -> None:
    """Work that the producer got between record and wait holds nobody up."""

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y = lab.full(a, 0), lab.full(b, 0)
        event = lab.record(a)
        lab.later(a, x, 1)
        b.wait(event)
        lab.fill(b, y, 2)
        b.synchronize()
        if not a.query():
            raise Seen

    lab.sometimes(program, "a wait always held the stream until work was over that came after the record")


@needs("asynchronous", "concurrent_streams")
@promise("Stream", "Nothing orders two streams but a record on one and a wait on the other.")
def test_a_record_waits_for_no_other_stream(lab: Lab) -> None:
    """A stream records, and goes on while another is busy."""

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y = lab.full(a, 0), lab.full(b, 0)
        lab.later(a, x, 1)
        lab.record(b).synchronize()
        lab.fill(b, y, 2)
        b.synchronize()
        if not a.query():
            raise Seen

    lab.sometimes(program, "a stream that recorded an event was always held until the other stream was empty")


@promise("Event", "Each record is a *generation*: 0 before the first, then counted up.")
def test_one_event_fences_a_long_exchange(lab: Lab) -> None:
    """Two streams take turns at one value through two events, recorded again and again."""

    def program(backend: Backend) -> None:
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
        expect(lab.read(a, x), 139.0, "1 tripled and increased by 1, 2, 3, 4 in turn, by two streams")

    lab.always(program)


@promise("Event", "A wait that is enqueued stays valid when the Python object is dropped.")
def test_a_wait_outlives_the_event_object(lab: Lab) -> None:
    """Dropped and its memory taken by other events, recorded elsewhere: the wait holds."""

    def program(backend: Backend) -> None:
        a, b, c = lab.streams("a", "b", "c")
        x, y = lab.full(a, 0), lab.full(b, 0)
        lab.later(a, x, 1)
        event = lab.record(a)
        b.wait(event)
        del event
        others = [lab.record(c, f"other {number}") for number in range(4)]
        lab.copy(b, y, x)
        expect(lab.read(b, y), 1.0, "what was read behind an event whose object is gone")
        del others

    lab.always(program)


@promise("Event.synchronize", "Block the calling thread until the latest generation has completed.")
def test_synchronize_waits_for_the_latest_generation(lab: Lab) -> None:
    """The host reads behind the second record of an event whose first is over."""

    def program(backend: Backend) -> None:
        (a,) = lab.streams("a")
        x = lab.full(a, 0)
        event = lab.record(a)
        event.synchronize()
        lab.later(a, x, 1)
        a.record(event)
        event.synchronize()
        expect(lab.peek(x), 1.0, "what the host read behind the second generation")
        assert event.query(), "query is False right after synchronize"

    lab.always(program)


@promise("Event.synchronize_within", "return True if the generation has completed.")
def test_synchronize_within_waits_like_synchronize(lab: Lab) -> None:
    """With a limit that is far away it orders the host as synchronize does, behind each of several long pieces of work."""

    def program(backend: Backend) -> None:
        (a,) = lab.streams("a")
        x = lab.full(a, 0)
        for piece in (1, 2, 3):
            lab.later(a, x, piece)
        event = lab.record(a)
        assert event.synchronize_within(60.0), "a minute wasn't enough"
        expect(lab.peek(x), 3.0, "what the host read behind the generation")

    lab.always(program)


@needs("asynchronous")
@promise("Event.synchronize_within", "After False, the calling thread is ordered after nothing.")
def test_synchronize_within_gives_up(lab: Lab) -> None:
    """The work takes longer than the host waits. A device without a clock of its own waits for it all the same."""
    (a,) = lab.streams("a")
    x = lab.full(a, 0)
    lab.later(a, x, 1)
    event = lab.record(a)
    came = event.synchronize_within(0.0)
    assert came or lab.backend.control is None, "a device without a clock gave up"
    if came:
        expect(lab.peek(x), 1.0, "what the host read behind the generation")
    a.synchronize()
    assert event.synchronize_within(0.0), "False for a generation that is over"


@promise("Event.query", "Return True if the latest generation has completed. Never blocks.")
def test_query_speaks_of_the_latest_generation(lab: Lab) -> None:
    """The first generation is over; True must mean the second."""

    def program(backend: Backend) -> None:
        (a,) = lab.streams("a")
        x = lab.full(a, 0)
        event = lab.record(a)
        event.synchronize()
        assert event.query(), "query is False for a generation that is over"
        lab.later(a, x, 1)
        a.record(event)
        if event.query():
            expect(lab.peek(x), 1.0, "the write before the generation that query says is over")
        a.synchronize()
        assert event.query(), "query is False though the stream is empty"

    lab.always(program)


@needs("asynchronous")
@promise("Event.synchronize", "Orders this thread, and only this one, after what the record covers.")
def test_synchronize_waits_for_what_the_record_covers(lab: Lab) -> None:
    """Work that was enqueued after the record isn't waited for."""

    def program(backend: Backend) -> None:
        (a,) = lab.streams("a")
        x = lab.full(a, 0)
        event = lab.record(a)
        lab.later(a, x, 1)
        event.synchronize()
        if not a.query():
            raise Seen

    lab.sometimes(program, "synchronising with an event always waits for what was enqueued after its record too")


@needs("asynchronous")
@promise("Stream.wait", "Never blocks the host.")
def test_records_and_waits_do_not_block_the_host(lab: Lab) -> None:
    """After a record and a wait the producer is still busy."""

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x = lab.full(a, 0)
        lab.later(a, x, 1)
        event = lab.record(a)
        b.wait(event)
        if not a.query():
            raise Seen

    lab.sometimes(program, "the producing stream was always empty after a record and a wait: one of them blocks the host")


@needs("asynchronous")
@promise("Event.query", "Return True if the latest generation has completed. Never blocks.")
def test_query_is_false_while_the_work_runs(lab: Lab) -> None:
    """An event behind a long job is seen pending, also when an older generation is over."""

    def program(backend: Backend) -> None:
        (a,) = lab.streams("a")
        x = lab.full(a, 0)
        event = lab.record(a)
        a.synchronize()
        lab.later(a, x, 1)
        a.record(event)
        if not event.query() and not a.query():
            raise Seen

    lab.sometimes(program, "query was never False while the stream was busy: it blocks, or speaks of an older generation")


@needs("event_timing")
@promise("Event.elapsed_ms", "Device milliseconds between the latest generations of this event and of ``end``")
def test_time_is_measured(lab: Lab) -> None:
    """Times add up, and are the host's milliseconds."""

    def program(backend: Backend) -> None:
        (a,) = lab.streams("a")
        events = [backend.create_event(f"t{number}", timing=True) for number in range(4)]
        lab.slow(a)  # so that the events below aren't behind an idle device
        began = time.perf_counter()
        a.record(events[0])
        a.record(events[1])
        lab.slow(a)
        a.record(events[2])
        for _ in range(3):
            lab.slow(a)
        a.record(events[3])
        a.synchronize()
        nothing, once, thrice = (first.elapsed_ms(last) for first, last in itertools.pairwise(events))
        total = events[0].elapsed_ms(events[3])
        assert 0 <= nothing <= total, f"nothing took {nothing} ms, everything {total} ms"
        assert abs(total - nothing - once - thrice) <= max(0.05 * total, 0.01), (
            f"parts of {nothing}, {once} and {thrice} ms, the whole {total} ms"
        )
        if backend.control is None:  # a simulated device has a clock of its own
            wall = (time.perf_counter() - began) * 1e3
            assert total <= 1.1 * wall + 0.1, f"the device measured {total} ms within {wall} ms of the host's"
            assert total >= 0.1 * wall - 1, f"the device measured {total} ms, the host {wall} ms: milliseconds?"

    lab.always(program, schedules=4)


@needs("event_timing", "asynchronous")
@promise("Event.elapsed_ms", "Device milliseconds between the latest generations of this event and of ``end``")
def test_longer_work_measures_longer(lab: Lab) -> None:
    """Nothing, a delay, three delays: in this order, unless the host is so busy that its pauses are longer than all of it."""

    def program(backend: Backend) -> None:
        (a,) = lab.streams("a")
        events = [backend.create_event(f"t{number}", timing=True) for number in range(4)]
        lab.slow(a)
        a.record(events[0])
        a.record(events[1])
        lab.slow(a)
        a.record(events[2])
        for _ in range(3):
            lab.slow(a)
        a.record(events[3])
        a.synchronize()
        nothing, once, thrice = (first.elapsed_ms(last) for first, last in itertools.pairwise(events))
        if nothing < once < thrice:
            raise Seen

    lab.sometimes(program, "a delay never measured longer than nothing, and three delays longer than one")


@promise("Fence", "a ``wait`` takes the generation that is visible when the wait is enqueued.")
def test_the_policys_fences_order_streams_and_the_host(lab: Lab) -> None:
    """Signalled again and again, waited for by a stream and by the host."""

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y = lab.full(a, 0), lab.full(b, 0)
        ready = backend.speculative_sync.create_fence("ready")
        taken = backend.speculative_sync.create_fence("taken")
        expect(ready.name, "ready", "the fence's name")
        assert ready.mechanism.strip(), "the fence doesn't say what it's made of"
        taken.signal(b)
        for turn in (1.0, 2.0, 3.0):
            taken.wait(a)
            lab.later(a, x, turn)
            ready.signal(a)
            ready.wait(b)
            lab.copy(b, y, x)
            taken.signal(b)
            taken.wait_host()
            assert taken.done(), "done is False after wait_host"
            expect(lab.peek(y), turn, "what crossed the fence")

    lab.always(program)


@promise("Fence", "a ``wait`` takes the generation that is visible when the wait is enqueued.")
def test_fences_serve_every_thread_behind_much_work(lab: Lab) -> None:
    """Signalled and waited for behind thirty operations, by this thread and, where the device runs by itself, by others."""

    def elsewhere(call: Callable[[], None]) -> None:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="at the fence")
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def here(call: Callable[[], None]) -> None:
        call()

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y, z = lab.full(a, 0), lab.full(b, 0), lab.full(b, 0)
        ready, taken = (backend.speculative_sync.create_fence(name) for name in ("ready", "taken"))
        ready.signal(a)
        taken.signal(b)
        for turn, by in enumerate((here, elsewhere, here) if backend.control is None else (here, here), 1):
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
            expect(lab.peek(y), float(turn), "what crossed the fence")

    lab.always(program)


@promise("SpeculativeSync.create_fence", "Create the mechanism of the fence ``name``; called once per fence and engine.")
def test_two_fences_are_two(lab: Lab) -> None:
    """One is signalled late, the other at once and after it: a wait for the first is for the late one."""

    def program(backend: Backend) -> None:
        a, b, c = lab.streams("a", "b", "c")
        x, y = lab.full(a, 0), lab.full(c, 0)
        late, early = (backend.speculative_sync.create_fence(name) for name in ("late", "early"))
        lab.later(a, x, 1)
        late.signal(a)
        early.signal(b)
        late.wait(c)
        lab.copy(c, y, x)
        expect(lab.read(c, y), 1.0, "what was read behind one fence while another was open")

    lab.always(program)


@needs("asynchronous")
@promise("Fence.done", "Return True if the visible generation has completed. Never blocks.")
def test_a_fence_is_pending_while_the_work_runs(lab: Lab) -> None:
    """Signal and done don't block."""

    def program(backend: Backend) -> None:
        (a,) = lab.streams("a")
        x = lab.full(a, 0)
        fence = backend.speculative_sync.create_fence("fence")
        fence.signal(a)
        fence.wait_host()
        lab.later(a, x, 1)
        fence.signal(a)
        if not fence.done() and not a.query():
            raise Seen
        if fence.done():
            expect(lab.peek(x), 1.0, "the write before the signal that is done")

    lab.sometimes(program, "a fence was never pending while its stream was busy")


@promise("Stream.wait", "Run what is enqueued on this stream from now on after the event's generation that is visible now.")
def test_a_wait_holds_whoever_has_asked_before(lab: Lab) -> None:
    """The host has asked whether the generation is over, and was told no; then a stream waits for it."""

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y = lab.full(a, 0), lab.full(b, 0)
        lab.later(a, x, 1)
        event = lab.record(a)
        for _ in range(2):
            event.query()
            a.query()
        b.wait(event)
        lab.copy(b, y, x)
        expect(lab.read(b, y), 1.0, "what was read behind a wait for an event that the host had asked about")

    lab.always(program)
