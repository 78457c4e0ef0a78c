"""Faults between host threads that hand over single items: pipes, futures, event loops, thread subclasses, conditions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch

from outrider.device import Backend
from outrider_sanitizer.races.race import Race, expect, filled
from outrider_sanitizer.races.threads import Ends, handover
from outrider_sanitizer.report.findings import FindingKind

RACES: list[Race] = []

Waited = Iterable[Future[None]]


def _pipe() -> Ends:
    here, there = multiprocessing.Pipe()
    return lambda: here.send(1), there.recv


def _done(look: Callable[[Future[None]], object]) -> Callable[[], Ends]:
    """Return hand-over ends: one thread completes a future, the other thread looks at it."""

    def ends() -> Ends:
        future: Future[None] = Future()
        said: list[bool] = []

        def give() -> None:
            future.set_result(None)
            said.append(True)

        def take() -> None:
            while not said:
                time.sleep(0)
            look(future)

        return give, take

    return ends


def _two_conditions() -> Ends:
    lock = threading.Lock()
    there, free = threading.Condition(lock), threading.Condition(lock)
    ready: list[bool] = []

    def give() -> None:
        with free:
            ready.append(True)
            there.notify()

    def take() -> None:
        with there:
            there.wait_for(lambda: bool(ready))

    return give, take


def _lock_of_a_condition() -> Ends:
    lock = threading.Lock()
    changed = threading.Condition(lock)
    ready: list[bool] = []

    def give() -> None:
        with lock:
            ready.append(True)
            changed.notify()

    def take() -> None:
        with changed:
            changed.wait_for(lambda: bool(ready))

    return give, take


def _several(wait: Callable[[Waited], Any], wait_for_one: Callable[[Waited], Any]) -> Callable[[Backend, bool], None]:
    """Return a program in which one thread fills a buffer and two futures complete.

    In the wrong program the host continues when one of the futures is done, before the buffer is filled.
    """

    def body(backend: Backend, fixed: bool) -> None:
        copy = backend.create_stream("copy")
        staging = backend.empty_pinned("staging", (4,), torch.float32)
        x = filled(backend, copy, 0.0)
        waited: list[Future[None]] = [Future(), Future()]
        filled_now: list[bool] = []
        over = threading.Event()

        def fill() -> None:
            staging.tensor.fill_(1.0)
            while not waited[0]._waiters:  # the waiting thread must not find the future done
                time.sleep(0)
            if fixed:
                waited[0].set_result(None)
            filled_now.append(True)
            if not fixed:
                over.wait()
                waited[0].set_result(None)

        def close() -> None:
            while not filled_now:
                time.sleep(0)
            waited[1].set_result(None)

        threads = [threading.Thread(target=fill, name="filler"), threading.Thread(target=close, name="closer")]
        for thread in threads:
            thread.start()
        (wait if fixed else wait_for_one)(waited)
        backend.copy_async(x, staging.tensor, stream=copy)
        copy.synchronize()
        over.set()
        for thread in threads:
            thread.join()
        expect(backend, x, 1.0)

    return body


def _one_of(waited: Waited) -> None:
    concurrent.futures.wait(waited, return_when=concurrent.futures.FIRST_COMPLETED)


def _each(waited: Waited) -> None:
    for _ in concurrent.futures.as_completed(waited):
        pass


def _next(waited: Waited) -> None:
    next(concurrent.futures.as_completed(waited))


def in_an_event_loop(backend: Backend, fixed: bool) -> None:
    """A thread fills a buffer, and another thread's event loop sends it.

    The filling thread stops the loop; in the wrong program the loop only polls a variable.
    """
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
    """A thread subclass whose `run` fills the buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__(name="filler")
        self.buffer = buffer
        self.done = False

    def run(self) -> None:
        """Fill the buffer, then set the variable that says so."""
        self.buffer.fill_(1.0)
        self.done = True


def until_a_thread_has_ended(backend: Backend, fixed: bool) -> None:
    """A thread subclass fills a buffer and the host sends it after the thread has ended.

    In the wrong program the host only polls a variable.
    """
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


class _Sender(threading.Thread):
    """A thread subclass whose `run` sends a buffer when a variable says that the buffer is filled."""

    def __init__(self, send: Callable[[], None]) -> None:
        super().__init__(name="sender")
        self.send = send
        self.filled = False

    def run(self) -> None:
        """Poll the variable, then send the buffer."""
        while not self.filled:
            time.sleep(0)
        self.send()


def before_a_thread_starts(backend: Backend, fixed: bool) -> None:
    """The host fills a buffer that a thread subclass sends.

    In the wrong program the thread has started before the host fills the buffer.
    """
    copy = backend.create_stream("copy")
    staging = backend.empty_pinned("staging", (4,), torch.float32)
    x = filled(backend, copy, 0.0)
    thread = _Sender(lambda: backend.copy_async(x, staging.tensor, stream=copy))
    if not fixed:
        thread.start()
    staging.tensor.fill_(1.0)
    thread.filled = True
    if fixed:
        thread.start()
    thread.join()
    copy.synchronize()
    expect(backend, x, 1.0)


def _the_other(ends: Callable[[], Ends]) -> Callable[[Backend, bool], None]:
    """Return a program in which a thread fills two buffers and hands them over one after the other.

    In the wrong program the host takes the first item and uses the second buffer.
    """

    def body(backend: Backend, fixed: bool) -> None:
        copy = backend.create_stream("copy")
        staging = [backend.empty_pinned(f"staging{n}", (4,), torch.float32) for n in range(2)]
        x = filled(backend, copy, 0.0)
        give, take = ends()
        given: list[bool] = []

        def fill() -> None:
            for buffer in staging:
                buffer.tensor.fill_(1.0)
                give()
            given.append(True)

        thread = threading.Thread(target=fill, name="filler")
        thread.start()
        while not given:
            time.sleep(0)
        take()
        if fixed:
            take()
        backend.copy_async(x, staging[1].tensor, stream=copy)
        copy.synchronize()
        thread.join()
        expect(backend, x, 1.0)

    return body


def _queue() -> Ends:
    items: queue.Queue[int] = queue.Queue()
    return lambda: items.put(1), items.get


def _semaphore() -> Ends:
    free = threading.Semaphore(0)
    return free.release, free.acquire


def _race(name: str, body: Callable[[Backend, bool], None], about: str, thread: str = "filler") -> Race:
    return Race(
        name=name,
        about=about,
        body=body,
        kind=FindingKind.READ_AFTER_WRITE,
        names=(f"order host thread {thread}",),
        visible=False,
    )


RACES += (
    handover("over-a-pipe", _pipe, "a pipe"),
    handover("when-futures-are-done", _done(lambda future: concurrent.futures.wait([future])), "concurrent.futures.wait"),
    handover("called-back-by-a-future", _done(lambda future: future.add_done_callback(id)), "a future's callback"),
    handover("conditions-of-one-lock", _two_conditions, "a condition of the same lock"),
    handover("under-the-lock-of-a-condition", _lock_of_a_condition, "the lock of a condition"),
    _race(
        "until-all-futures-are-done",
        _several(concurrent.futures.wait, _one_of),
        "Who waits for all futures learns of each; who waits for the first learns of that one.",
    ),
    _race(
        "as-futures-complete",
        _several(_each, _next),
        "as_completed orders the futures that it gave, and not those that it hasn't given yet.",
    ),
    _race(
        "in-an-event-loop",
        in_an_event_loop,
        "A callback from another thread comes after what that thread did; a loop that looks at a variable doesn't.",
    ),
    _race(
        "until-a-thread-has-ended",
        until_a_thread_has_ended,
        "A thread that isn't alive any more has done its work; a variable says nothing of it.",
    ),
    _race(
        "before-a-thread-starts",
        before_a_thread_starts,
        "A thread knows what was done before it was started, and not what came later.",
        thread="MainThread",
    ),
    _race(
        "the-other-item",
        _the_other(_queue),
        "Taking one item of a queue orders what was done before it was put, and not what was put after it.",
    ),
    _race(
        "the-other-message",
        _the_other(_pipe),
        "Receiving one message orders what was done before it was sent, and not what was sent after it.",
    ),
    _race(
        "the-other-permit",
        _the_other(_semaphore),
        "Taking one permit of a semaphore orders what was done before it was released, and not what was released after it.",
    ),
)
