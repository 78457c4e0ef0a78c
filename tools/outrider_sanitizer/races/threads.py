"""Faults between host threads, and the ways of handing over that correct them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from outrider.device import Backend
from outrider_sanitizer.findings import Kind
from outrider_sanitizer.races.program import Race, expect, filled

Ends = tuple[Callable[[], Any], Callable[[], Any]]
"""What the thread does that hands over, and the one that takes over."""


def _handing_over(ends: Callable[[], Ends]) -> Callable[[Backend, bool], None]:
    """A thread fills a staging buffer, and another sends it. Wrong: they agree through a variable, which orders nothing."""

    def body(backend: Backend, fixed: bool) -> None:
        copy = backend.create_stream("copy")
        staging = backend.empty_pinned("staging", (4,), torch.float32)
        x = filled(backend, copy, 0.0)
        give, take = ends()
        filled_now: list[bool] = []

        def fill() -> None:
            staging.tensor.fill_(1.0)
            filled_now.append(True)
            if fixed:
                give()

        thread = threading.Thread(target=fill, name="filler")
        thread.start()
        while not filled_now:
            time.sleep(0)
        if fixed:
            take()
        backend.copy_async(x, staging.tensor, stream=copy)
        copy.synchronize()
        thread.join()
        expect(backend, x, 1.0)

    return body


def _simple_queue() -> Ends:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    return lambda: items.put(1), items.get


def _task_done() -> Ends:
    items: queue.Queue[int] = queue.Queue()
    items.put(1)

    def give() -> None:
        items.get()
        items.task_done()

    return give, items.join


def _semaphore() -> Ends:
    free = threading.Semaphore(0)
    return free.release, free.acquire


def _condition() -> Ends:
    changed = threading.Condition()
    ready: list[bool] = []

    def give() -> None:
        with changed:
            ready.append(True)
            changed.notify_all()

    def take() -> None:
        with changed:
            changed.wait_for(lambda: bool(ready))

    return give, take


def _barrier() -> Ends:
    meeting = threading.Barrier(2)
    return meeting.wait, meeting.wait


def _lock() -> Ends:
    lock = threading.Lock()
    lock.acquire()
    return lock.release, lock.acquire


def _polled_event() -> Ends:
    ready = threading.Event()

    def take() -> None:
        while not ready.is_set():
            time.sleep(0)

    return ready.set, take


def _pipe() -> Ends:
    here, there = multiprocessing.Pipe()
    return lambda: here.send(1), there.recv


def _several_futures() -> Ends:
    waited: list[concurrent.futures.Future[None]] = [concurrent.futures.Future(), concurrent.futures.Future()]
    waited[1].set_result(None)
    return lambda: waited[0].set_result(None), lambda: concurrent.futures.wait(waited)


def _two_conditions() -> Ends:
    lock = threading.Lock()
    filled_now, free = threading.Condition(lock), threading.Condition(lock)
    ready: list[bool] = []

    def give() -> None:
        with free:
            ready.append(True)
            filled_now.notify()

    def take() -> None:
        with filled_now:
            filled_now.wait_for(lambda: bool(ready))

    return give, take


def in_an_event_loop(backend: Backend, fixed: bool) -> None:
    """A thread fills a buffer and stops the loop of another, or lets it find a variable."""
    copy = backend.create_stream("copy")
    staging = backend.empty_pinned("staging", (4,), torch.float32)
    x = filled(backend, copy, 0.0)
    loop = asyncio.new_event_loop()
    filled_now: list[bool] = []

    def fill() -> None:
        staging.tensor.fill_(1.0)
        filled_now.append(True)
        if fixed:
            loop.call_soon_threadsafe(loop.stop)

    async def look() -> None:
        while not filled_now:
            await asyncio.sleep(0)

    thread = threading.Thread(target=fill, name="filler")
    thread.start()
    if fixed:
        loop.run_forever()
    else:
        loop.run_until_complete(look())
    loop.close()
    backend.copy_async(x, staging.tensor, stream=copy)
    copy.synchronize()
    thread.join()
    expect(backend, x, 1.0)


class _Filler(threading.Thread):
    """A thread with a `run` of its own."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__(name="filler")
        self.buffer = buffer
        self.done = False

    def run(self) -> None:
        """Fill, and say so in a variable."""
        self.buffer.fill_(1.0)
        self.done = True


def until_a_thread_has_ended(backend: Backend, fixed: bool) -> None:
    """A thread of a class of its own fills a buffer; the host asks whether it lives, or looks at a variable."""
    copy = backend.create_stream("copy")
    staging = backend.empty_pinned("staging", (4,), torch.float32)
    x = filled(backend, copy, 0.0)
    staging.tensor.zero_()
    thread = _Filler(staging.tensor)
    thread.start()
    while thread.is_alive() if fixed else not thread.done:
        time.sleep(0)
    backend.copy_async(x, staging.tensor, stream=copy)
    copy.synchronize()
    thread.join()
    expect(backend, x, 1.0)


def the_other_item(backend: Backend, fixed: bool) -> None:
    """Two buffers are given away one after the other; who has taken the first item uses the second one's."""
    copy = backend.create_stream("copy")
    staging = [backend.empty_pinned(f"staging{n}", (4,), torch.float32) for n in range(2)]
    x = filled(backend, copy, 0.0)
    items: queue.Queue[int] = queue.Queue()
    given: list[bool] = []

    def fill() -> None:
        for number, buffer in enumerate(staging):
            buffer.tensor.fill_(1.0)
            items.put(number)
        given.append(True)

    thread = threading.Thread(target=fill, name="filler")
    thread.start()
    while not given:
        time.sleep(0)
    taken = items.get()
    if fixed:
        taken = items.get()
    else:
        taken += 1
    backend.copy_async(x, staging[taken].tensor, stream=copy)
    copy.synchronize()
    thread.join()
    expect(backend, x, 1.0)


def timed_out(backend: Backend, fixed: bool) -> None:
    """A wait for the other thread gives up, and the program goes on."""
    copy = backend.create_stream("copy")
    staging = backend.empty_pinned("staging", (4,), torch.float32)
    x = filled(backend, copy, 0.0)
    ready, filled_now = threading.Event(), threading.Event()
    wrote: list[bool] = []

    def fill() -> None:
        staging.tensor.fill_(1.0)
        wrote.append(True)
        if fixed:
            filled_now.set()
        ready.wait()

    thread = threading.Thread(target=fill, name="filler")
    thread.start()
    while not wrote:
        time.sleep(0)
    filled_now.wait(None if fixed else 0)
    backend.copy_async(x, staging.tensor, stream=copy)
    copy.synchronize()
    ready.set()
    thread.join()
    expect(backend, x, 1.0)


def new_thread_default_stream(backend: Backend, fixed: bool) -> None:
    """A thread that was started inside a stream scope works on the default stream, not on the scope's."""
    side = backend.create_stream("side")
    with backend.on(side):
        x = torch.zeros(4, device=backend.device)
        backend.synchronize()
        x.fill_(7.0)
        seen: list[torch.Tensor] = []

        def use() -> None:
            if fixed:
                with backend.on(side):
                    seen.append(x * 1.0)
            else:
                seen.append(x * 1.0)

        thread = threading.Thread(target=use, name="user")
        thread.start()
        thread.join()
    expect(backend, seen[0], 7.0)


def loop_over_query(backend: Backend, fixed: bool) -> None:
    """The host asks until a copy is over, or asks once and reads whatever is there."""
    copy = backend.create_stream("copy")
    landed = backend.create_event("results_copied")
    results = backend.empty_pinned("results", (4,), torch.float32)
    results.tensor.zero_()
    x = filled(backend, copy, 7.0)
    backend.copy_async(results.tensor, x, stream=copy)
    if fixed:
        copy.record(landed)
        while not landed.query():
            pass
    expect_host(results.tensor.tolist())
    backend.synchronize()


def expect_host(seen: list[float]) -> None:
    """Raises `WrongValue` unless everything is 7."""
    from outrider_sanitizer.races.program import WrongValue

    if seen != [7.0] * len(seen):
        raise WrongValue(f"expected 7, found {seen}")


def _race(name: str, ends: Callable[[], Ends], through: str) -> Race:
    return Race(
        name=name,
        about=f"A buffer goes from one host thread to another; {through} orders them, a variable doesn't.",
        body=_handing_over(ends),
        kind=Kind.READ_AFTER_WRITE,
        names=("order host thread filler", "hand over"),
        visible=False,
    )


RACES = (
    _race("over-a-simple-queue", _simple_queue, "a SimpleQueue"),
    _race("until-a-task-is-done", _task_done, "Queue.join"),
    _race("over-a-semaphore", _semaphore, "a semaphore"),
    _race("over-a-condition", _condition, "a condition"),
    _race("at-a-barrier", _barrier, "a barrier"),
    _race("over-a-lock", _lock, "a lock that the other thread releases"),
    _race("until-an-event-is-set", _polled_event, "Event.is_set"),
    _race("over-a-pipe", _pipe, "a pipe"),
    _race("until-several-futures-are-done", _several_futures, "concurrent.futures.wait"),
    _race("conditions-of-one-lock", _two_conditions, "a condition of the same lock"),
    Race(
        name="in-an-event-loop",
        about="A callback from another thread comes after what that thread did; a loop that looks at a variable doesn't.",
        body=in_an_event_loop,
        kind=Kind.READ_AFTER_WRITE,
        names=("order host thread filler",),
        visible=False,
    ),
    Race(
        name="until-a-thread-has-ended",
        about="A thread that isn't alive any more has done its work; a variable says nothing of it.",
        body=until_a_thread_has_ended,
        kind=Kind.READ_AFTER_WRITE,
        names=("order host thread filler",),
        visible=False,
    ),
    Race(
        name="the-other-item",
        about="Taking one item of a queue orders what was done before it was put, and not what was put after it.",
        body=the_other_item,
        kind=Kind.READ_AFTER_WRITE,
        names=("order host thread filler",),
        visible=False,
    ),
    Race(
        name="timed-out",
        about="A wait that gave up orders nothing.",
        body=timed_out,
        kind=Kind.READ_AFTER_WRITE,
        names=("order host thread filler",),
        visible=False,
    ),
    Race(
        name="thread-on-the-default-stream",
        about="A new thread begins on the default stream, wherever it was started.",
        body=new_thread_default_stream,
        kind=Kind.READ_AFTER_WRITE,
        names=("record an event on 'side'", "make 'default' wait"),
    ),
    Race(
        name="loop-over-query",
        about="The host reads a result without having asked whether it's there.",
        body=loop_over_query,
        kind=Kind.READ_AFTER_WRITE,
        names=("record an event on 'copy'",),
    ),
)
