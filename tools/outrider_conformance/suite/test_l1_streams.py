"""L1: a stream keeps its order, work runs on the named stream, and calls wait for no more than they promise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, Event, Stream
from outrider_conformance.kit import Kit
from outrider_conformance.lab import (
    WIDTH,
    Lab,
    builtin_exceptions,
    call_on_new_thread,
    error_of,
    expect,
    in_every_order,
    in_some_order,
)
from outrider_conformance.promises import blamed_on, needs, promise
from outrider_conformance.reporting.verdict import not_applicable
from outrider_conformance.suite.test_l1_errors import WAITS, query_until_done

_BEGINNING = 0.002  # seconds in which an operation is taken from its queue
_MANY = 34
_VERY_MANY = 130
"""More streams than tables of 32, 64 or 128 entries hold."""
_LONG = 8  # so many round trips take a while, too


@promise("Backend.on", "Place the calling thread's torch work on ``stream``")
@pytest.mark.parametrize("name", ["nonzero", "masked_select", "repeat_interleave"])
def test_a_shape_may_depend_on_values(lab: Lab, name: str) -> None:
    """Operators whose result has a shape that depends on values see the late write before them."""
    (stream,) = lab.streams("s")
    x, y = lab.full(stream, 0, dtype=torch.int64), lab.full(stream, 0, dtype=torch.int64)
    with lab.backend.on(stream):
        operators: dict[str, Callable[[], Tensor]] = {
            "nonzero": lambda: y[x.nonzero().flatten()],
            "masked_select": lambda: torch.masked_select(x, x > 0),
            "repeat_interleave": lambda: torch.repeat_interleave(y, x),
        }
        lab.slow(stream)
        x.fill_(2)
        shape = tuple(operators[name]().shape)
    stream.synchronize()
    expect(shape, (2 * WIDTH if name == "repeat_interleave" else WIDTH,), f"the shape of what {name} returned")


@promise("Stream", "Work on one stream runs in order.")
@in_every_order()
def test_one_stream_keeps_its_order(lab: Lab) -> None:
    """Steps that do not commute give the result of their order on one stream."""
    (stream,) = lab.streams("s")
    x, y = lab.full(stream, 1), lab.full(stream, 0)
    lab.slow(stream)
    with lab.backend.on(stream):
        for step in range(1, 5):
            x.mul_(2).add_(step)
        y.copy_(x)
        x.zero_()
    expect(lab.read_tensor(stream, y), 42.0, "1 doubled and increased by 1, 2, 3, 4 in turn")
    expect(lab.current_values(x), 0.0, "what was zeroed at the end")


def _create_streams(lab: Lab, count: int) -> list[Stream]:
    """Create ``count`` streams, or as many as the backend can have but one, which the check itself may create."""
    streams: list[Stream] = []
    while len(streams) < count:
        try:
            streams.append(lab.backend.create_stream(f"s{len(streams)}"))
        except CapabilityError:
            return streams[:-1]
    return streams


@promise("Backend.synchronize")
@in_every_order(schedules=4)
def test_the_device_synchronizes_every_stream(lab: Lab) -> None:
    """The late write of the first, the middle or the last of 130 streams is complete when the call returns."""
    made = _create_streams(lab, _VERY_MANY)
    for late in (made[0], made[len(made) // 2], made[-1]):
        x = lab.full(late, 0)
        lab.slow(late)  # a wait for so many streams takes a while, too
        lab.fill_late(late, x, 1)
        lab.backend.synchronize()
        expect(lab.current_values(x), 1.0, f"the late write of {late.name!r}, of {len(made)} streams")
    assert all(stream.query() for stream in made), "a stream isn't empty after synchronize"


@promise("Stream.query", "Return True if everything enqueued on this stream so far has run. Never blocks.")
@in_every_order()
def test_query_is_true_only_when_the_work_is_done(lab: Lab) -> None:
    """A host that polls a stream until True may read its results."""
    stream, x = lab.one_stream()
    lab.fill_late(stream, x, 1)
    if stream.query():
        expect(lab.current_values(x), 1.0, "the write that query says has run")
    query_until_done(stream)
    expect(lab.current_values(x), 1.0, "the write, after queries of its stream alone")
    stream.synchronize()
    assert stream.query(), "query is False though the stream is empty"


@needs("asynchronous")
@promise("Stream.query", "Return True if everything enqueued on this stream so far has run. Never blocks.")
@in_some_order("query was always True while a long operation ran: it asks whether the queue is empty")
def test_query_is_false_while_the_last_operation_runs(lab: Lab) -> bool:
    """A query returns False while the last operation runs and the queue is empty."""
    (stream,) = lab.streams("s")
    lab.slow(stream)
    if lab.backend.control is None:
        time.sleep(_BEGINNING)
    return not stream.query()


@needs("asynchronous")
@promise("Capabilities.asynchronous")
@in_some_order("every operation had run when its call returned: the device is declared asynchronous and isn't")
def test_work_returns_before_it_has_run(lab: Lab) -> bool:
    """The call of an operation returns while the operation is pending."""
    stream, x = lab.one_stream()
    lab.fill_late(stream, x, 1)
    if not stream.query():
        return True
    expect(lab.current_values(x), 1.0, "the write that query says has run")
    return False


@needs("asynchronous", "concurrent_streams")
@promise("Capabilities.concurrent_streams")
@in_some_order("the second stream never finished before the first: the streams secretly run one after the other")
def test_streams_run_beside_each_other(lab: Lab) -> bool:
    """A short job on one stream finishes before a long job that was enqueued earlier on another stream."""
    long, short = lab.streams("long", "short")
    x, y = lab.full(long, 0), lab.full(short, 0)
    lab.fill_late(long, x, 1)
    lab.fill(short, y, 2)
    short.synchronize()
    pending = not long.query()
    expect(lab.current_values(y), 2.0, "the short job")
    return pending


@needs("asynchronous", "concurrent_streams")
@promise("Backend.create_stream")
@pytest.mark.parametrize("which", [0, -1], ids=["the first", "the last"])
def test_many_streams_are_all_their_own(lab: Lab, which: int) -> None:
    """While the first or the last of 34 streams is busy, no other is busy. A backend may refuse further streams earlier."""

    def is_alone() -> bool:
        others = _create_streams(lab, _MANY)
        assert len(others) > 1, "a second stream can't be made, and concurrent_streams is declared"
        busy = others.pop(which)
        x = lab.full(busy, 0)
        for _ in range(_LONG):
            lab.slow(busy)
        lab.fill(busy, x, 1)
        for event in [lab.record(stream) for stream in others]:
            event.synchronize()
        return not busy.query()

    lab.check_in_some_order(is_alone, "one of many streams always waited for another one: it's handed out twice")


@needs("asynchronous", "concurrent_streams")
@promise("Stream.synchronize", "Orders this thread, and only this one, after that work.")
@in_some_order("synchronising with an empty stream always waits for the other one")
def test_synchronize_waits_for_nothing_else(lab: Lab) -> bool:
    """Synchronising with an empty stream returns while another stream is busy."""
    busy, idle = lab.streams("busy", "idle")
    x = lab.full(busy, 0)
    lab.fill_late(busy, x, 1)
    idle.synchronize()
    return not busy.query()


def _copy_in_nested_scopes(
    backend: Backend, streams: Sequence[Stream], late: Stream, source: Tensor, copies: list[Tensor]
) -> None:
    """Open a scope of each stream inside the scope before it. Append a copy of ``source`` to ``copies`` in each scope of
    ``late``, after the inner scopes.
    """
    if streams:
        with backend.on(streams[0]):
            _copy_in_nested_scopes(backend, streams[1:], late, source, copies)
            if streams[0] is late:
                copies.append(source.clone())


@promise("Backend.on", "Scopes nest; leaving one restores the one around it, also after an exception.")
@in_every_order()
def test_scopes_nest_and_are_restored(lab: Lab) -> None:
    """Work after inner scopes runs on the enclosing scope's stream: on two threads, also after a scope of the same stream."""
    a, b, c = lab.streams("a", "b", "c")
    nested = (a, b, a, c, b)
    for late in (a, b, c):  # its work alone comes late, so that elsewhere it would come too early
        source = lab.full(late, 0)
        copies: list[Tensor] = []
        lab.fill_late(late, source, 1)
        nest = partial(_copy_in_nested_scopes, lab.backend, nested, late, source, copies)
        nest()
        call_on_new_thread(nest)
        found = [lab.read_tensor(late, copy) for copy in copies]
        expect(found, [1.0] * (2 * nested.count(late)), f"work in scopes of {late.name!r}, after the scopes inside them")


@promise("Backend.on", "Scopes nest; leaving one restores the one around it, also after an exception.")
@in_every_order(schedules=2)
def test_an_exception_of_any_type_leaves_a_scope(lab: Lab) -> None:
    """Each builtin exception leaves a scope unchanged, and the scope around it is restored: also KeyboardInterrupt."""
    a, b = lab.streams("a", "b")
    x, copies = lab.full(b, 0), {}
    lab.fill_late(b, x, 1)

    def leave(error: BaseException) -> None:
        with lab.backend.on(a):
            raise error

    with lab.backend.on(b):
        for error in builtin_exceptions():
            left = error_of(partial(leave, error))
            assert left is error, f"{error!r} left a scope as {left!r}: let exceptions pass `_on` unchanged"
            copies[repr(error)] = x.clone()
    b.synchronize()
    wrong = [error for error, copy in copies.items() if lab.current_values(copy) != 1.0]
    expect(wrong, [], "exceptions after which work of the outer scope ran on another stream")


@needs("asynchronous", "concurrent_streams")
@promise("Backend", "*Threads.* Every method may be called from any thread.")
@pytest.mark.parametrize("wait", [name for name in WAITS if not name.endswith("query")])
def test_a_waiting_thread_holds_no_other_up(lab: Lab, wait: str) -> None:
    """While one thread waits for a slow stream, another thread enqueues on its own stream and waits for that."""
    backend = lab.backend
    if backend.control is not None:
        not_applicable("threads of the host are taken in turn by the tool that decides the schedule")

    def is_pending() -> bool:
        slow, quick = lab.streams("slow", "quick")
        x = lab.full(quick, 0)
        lab.slow(slow)
        event = lab.record(slow)
        waiter = threading.Thread(target=WAITS[wait], args=(backend, slow, event), daemon=True)
        waiter.start()
        time.sleep(_BEGINNING)
        lab.fill(quick, x, 1)
        lab.record(quick).synchronize()
        pending = not event.query()
        waiter.join()
        expect(lab.current_values(x), 1.0, "what the other thread wrote")
        return pending

    words = f"a thread that enqueues always waited for another one in {wait}: release the GIL there, and hold no lock"
    lab.check_in_some_order(is_pending, words)


@promise("Backend", "Two backend objects for one device share nothing")
def test_two_backends_keep_scopes_and_waits_apart(kit: Kit, lab: Lab) -> None:
    """A scope of a second backend inside a scope leaves the outer one as it was, and each backend waits for its own work."""
    other = kit.open()
    (ours,), theirs = lab.streams("s"), other.create_stream("s")
    x = lab.full(ours, 0)
    lab.fill_late(ours, x, 1)
    with lab.backend.on(ours):
        with other.on(theirs):
            pass
        copy = x.clone()
    lab.fill_late(ours, x, 2)
    lab.backend.synchronize()
    expect([lab.current_values(copy), lab.current_values(x)], [1.0, 2.0], "work after a scope of another backend")


@promise("Backend.on", "A tensor made, cast or filled inside a scope belongs to that scope's stream.")
@in_every_order()
def test_work_is_placed_on_the_scopes_stream(lab: Lab) -> None:
    """Reads, casts, new tensors and fills inside a scope run in the order of the scope's stream."""
    backend = lab.backend
    producer, stream, consumer = lab.streams("producer", "stream", "consumer")
    x, out = lab.full(producer, 0), lab.full(consumer, 0)
    lab.fill_late(producer, x, 3)
    stream.wait(lab.record(producer))
    with backend.on(stream):
        cast = x.to(torch.float64)
        made = torch.full_like(x, 2)
        total = made + cast.to(torch.float32)
    lab.slow(stream)
    lab.fill(stream, made, 7)
    consumer.wait(lab.record(stream))
    with backend.on(consumer):
        out.copy_(total + made)
    expect(lab.read_tensor(consumer, out), 12.0, "2 + 3 and then 7, through three streams")
    expect(cast.dtype, torch.float64, "the dtype of the cast")


@promise("Backend", "``on`` scopes and captures belong to the thread that opened")
def test_scopes_belong_to_their_thread(lab: Lab) -> None:
    """An open scope of another thread does not move the work of this thread."""
    backend = lab.backend
    ours, theirs = lab.streams("ours", "theirs")
    x, y, z = lab.full(ours, 0), lab.full(ours, 0), lab.full(theirs, 0)
    opened, closing = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def hold() -> None:
        try:
            with backend.on(theirs):
                opened.set()
                closing.wait(20)
                z.fill_(4)
        except BaseException as error:
            failures.append(error)
            opened.set()

    lab.slow(ours)
    with backend.on(ours):
        x.fill_(1)
        thread = threading.Thread(target=hold, name="holds-a-scope")
        thread.start()
        opened.wait(20)
        y.copy_(x)
        closing.set()
        thread.join()
    if failures:
        raise failures[0]
    expect(lab.read_tensor(ours, y), 1.0, "work of this thread while another one holds a scope")
    expect(lab.read_tensor(theirs, z), 4.0, "work of the other thread, which must follow its own scope")


@needs("stream_priorities")
@promise("Capabilities.stream_priorities")
@in_every_order()
def test_priorities_change_urgency_alone(lab: Lab) -> None:
    """An urgent stream obeys waits like any other stream."""
    backend = lab.backend
    urgent, usual = backend.create_stream("urgent", priority=-1), backend.create_stream("usual")
    expect(urgent.priority, -1, "the priority of an urgent stream")
    x, y = lab.full(usual, 0), lab.full(urgent, 0)
    lab.fill_late(usual, x, 1)
    urgent.wait(lab.record(usual))
    lab.expect_read(urgent, y, x, 1.0, "what the urgent stream read after its wait")


@needs("perturbs_timing", "asynchronous")
@promise("Backend.delay")
@in_some_order("a delayed stream is idle: delay does nothing, or blocks the host")
def test_a_delay_keeps_the_stream_busy(lab: Lab) -> bool:
    """A delayed stream is busy when the call of the delay has returned."""
    (stream,) = lab.streams("s")
    lab.slow(stream)
    return not stream.query()


@needs("asynchronous")
@promise("Stream.query", "Return True if everything enqueued on this stream so far has run. Never blocks.")
def test_any_thread_may_query(lab: Lab) -> None:
    """A thread that enqueued nothing sees a busy stream busy, and a finished stream finished."""
    if lab.backend.control is not None:
        not_applicable("threads of the host are taken in turn by the tool that decides the schedule")
    stream, x = lab.one_stream()

    def query_on_new_thread() -> bool:
        answers: list[bool] = []
        call_on_new_thread(lambda: answers.append(stream.query()))
        return answers[0]

    def is_pending() -> bool:
        lab.fill_late(stream, x, 1)
        return not query_on_new_thread()

    lab.check_in_some_order(is_pending, "a stream with pending work is always empty for a thread that enqueued none of it")
    stream.synchronize()
    assert query_on_new_thread(), "a stream that is synchronised isn't empty for another thread"


@promise("Backend.on", "Place the calling thread's torch work on ``stream``")
@pytest.mark.parametrize("wait", [name for name in WAITS if "synchronize" in name])
@in_every_order()
def test_a_host_wait_covers_the_latest_record(lab: Lab, wait: str) -> None:
    """A host wait covers the latest record of an event, and all earlier work of its stream: outside of scopes, and inside the
    scope of any stream.
    """
    backend = lab.backend
    streams = lab.streams("a", "b", "c", "d")
    x, event = lab.full(streams[0], 0), lab.record(streams[0])

    def check(turn: int, scope: AbstractContextManager[None], where: str) -> None:
        lab.fill_late(streams[0], x, turn)
        streams[0].record(event)
        with scope:
            WAITS[wait](backend, streams[0], event)
        expect(lab.current_values(x), float(turn), f"what the host read after waiting {where}")
        assert event.query(), f"query is False right after the host has waited {where}"

    with blamed_on(wait.capitalize()):
        check(1, nullcontext(), "outside of scopes")
    for turn, stream in enumerate(streams, 2):
        check(turn, backend.on(stream), f"in the scope of {stream.name!r}")


@promise("Backend", "*Threads.* Every method may be called from any thread.")
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_covers_the_work_of_a_thread_that_ended(lab: Lab, wait: str) -> None:
    """A host wait covers a late write on a stream that another thread created and used, and an event that it recorded."""
    made: list[tuple[Stream, Tensor, Event]] = []

    def work() -> None:
        stream, x = lab.one_stream()
        lab.fill_late(stream, x, 1)
        made.append((stream, x, lab.record(stream)))

    call_on_new_thread(work)
    for stream, x, event in made:
        WAITS[wait](lab.backend, stream, event)
        expect(lab.current_values(x), 1.0, "a late write on a stream of another thread")


@promise("Stream.record")
@in_every_order(schedules=8)
def test_a_record_covers_waits_behind_the_last_record(lab: Lab) -> None:
    """The second record of a stream covers a wait that the stream enqueued after its first record."""
    a, between, c = lab.streams("a", "between", "c")
    x, y = lab.full(a, 0), lab.full(c, 0)
    for value in (1.0, 2.0):
        first = lab.record(between)
        lab.fill_late(a, x, value)
        between.wait(lab.record(a))
        second = lab.record(between)
        c.wait(second)
        lab.expect_read(c, y, x, value, "the value passed on by a stream that only waited")
        second.synchronize()
        first.synchronize()
        last = lab.record(between)
        between.synchronize()
        assert last.query(), "the last record of a stream that was synchronised isn't over"
