"""Programs in which one host thread fills a staging buffer and another sends it, wrong and corrected.

No schedule shows a wrong value: the programs wait by a variable, which orders nothing, before they hand over.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from outrider.device import Backend

Program = Callable[[Backend, bool], None]
"""Called with the backend, and True for the corrected program."""
Ends = tuple[Callable[[], Any], Callable[[], Any]]
"""The call of the thread that hands over, and the call of the thread that takes over."""
Waited = Iterable[Future[None]]


class Staging:
    """Staging buffers that the thread "filler" fills and the calling thread sends."""

    def __init__(self, backend: Backend, buffers: int = 1) -> None:
        self.backend = backend
        self.copy = backend.create_stream("copy")
        self.buffers = [backend.empty_pinned(f"staging{n}", (4,), torch.float32) for n in range(buffers)]
        with backend.on(self.copy):
            self.x = torch.zeros(4, device=backend.device)
        self.filled: list[bool] = []

    def fill(self) -> None:
        for buffer in self.buffers:
            buffer.tensor.fill_(1.0)
        self.filled.append(True)

    def wait_for_filler(self) -> None:
        while not self.filled:
            time.sleep(0)

    def send(self) -> None:
        self.backend.copy_async(self.x, self.buffers[-1].tensor, stream=self.copy)
        self.copy.synchronize()
        assert self.x.tolist() == [1.0] * 4


@contextmanager
def running(*bodies: Callable[[], Any]) -> Generator[None]:
    """Threads that run in the scope; the first one is the filler."""
    threads = [threading.Thread(target=body, name=name) for body, name in zip(bodies, ("filler", "closer"), strict=False)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def handing_over(ends: Callable[[], Ends]) -> Program:
    """A program that hands over by ``ends``; the wrong one hands over nothing."""

    def program(backend: Backend, fixed: bool) -> None:
        staging, (give, take) = Staging(backend), ends()
        with running(lambda: (staging.fill(), give() if fixed else None)):
            staging.wait_for_filler()
            if fixed:
                take()
            staging.send()

    return program


def simple_queue() -> Ends:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    return lambda: items.put(1), items.get


def plain_queue() -> Ends:
    items: queue.Queue[int] = queue.Queue()
    return lambda: items.put(1), items.get


def task_done() -> Ends:
    items: queue.Queue[int] = queue.Queue()
    items.put(1)
    return lambda: (items.get(), items.task_done()), items.join


def semaphore() -> Ends:
    free = threading.Semaphore(0)
    return free.release, free.acquire


def barrier() -> Ends:
    meeting = threading.Barrier(2)
    return meeting.wait, meeting.wait


def lock() -> Ends:
    held = threading.Lock()
    held.acquire()
    return held.release, held.acquire


def polled_event() -> Ends:
    ready = threading.Event()

    def take() -> None:
        while not ready.is_set():
            time.sleep(0)

    return ready.set, take


def pipe() -> Ends:
    here, there = multiprocessing.Pipe()
    return lambda: here.send(1), there.recv


def conditions(
    made: Callable[[threading.Lock], tuple[threading.Condition, Any, threading.Condition]],
) -> Callable[[], Ends]:
    """Hand-over by a condition: the one that is told, what the telling thread holds, the one that waits."""

    def ends() -> Ends:
        told, held, waited = made(threading.Lock())
        ready: list[bool] = []

        def give() -> None:
            with held:
                ready.append(True)
                told.notify_all()

        def take() -> None:
            with waited:
                waited.wait_for(lambda: bool(ready))

        return give, take

    return ends


def one_condition(_: threading.Lock) -> tuple[threading.Condition, Any, threading.Condition]:
    changed = threading.Condition()
    return changed, changed, changed


def two_conditions(lock: threading.Lock) -> tuple[threading.Condition, Any, threading.Condition]:
    there = threading.Condition(lock)
    return there, threading.Condition(lock), there


def lock_of_a_condition(lock: threading.Lock) -> tuple[threading.Condition, Any, threading.Condition]:
    changed = threading.Condition(lock)
    return changed, lock, changed


def future(look: Callable[[Future[None]], object]) -> Callable[[], Ends]:
    """Hand-over by a future: one thread completes it, the other looks at it afterwards."""

    def ends() -> Ends:
        made: Future[None] = Future()

        def take() -> None:
            while made.__dict__["_state"] != "FINISHED":
                time.sleep(0)
            look(made)

        return lambda: made.set_result(None), take

    return ends


def several_futures(wait: Callable[[Waited], Any], wait_for_one: Callable[[Waited], Any]) -> Program:
    """A program in which the wrong host goes on when one of two futures is done: not the filler's."""

    def program(backend: Backend, fixed: bool) -> None:
        staging = Staging(backend)
        waited: list[Future[None]] = [Future(), Future()]
        over = threading.Event()

        def fill() -> None:
            while not waited[0]._waiters:  # type: ignore[attr-defined]  # the waiting thread must not find the future done
                time.sleep(0)
            staging.fill()
            if not fixed:
                over.wait()
            waited[0].set_result(None)

        def close() -> None:
            staging.wait_for_filler()
            waited[1].set_result(None)

        with running(fill, close):
            (wait if fixed else wait_for_one)(waited)
            staging.send()
            over.set()

    return program


def one_of(waited: Waited) -> None:
    concurrent.futures.wait(waited, return_when=concurrent.futures.FIRST_COMPLETED)


def each_of(waited: Waited) -> None:
    assert len(list(concurrent.futures.as_completed(waited))) == 2


def next_of(waited: Waited) -> None:
    next(concurrent.futures.as_completed(waited))


def later_item(ends: Callable[[], Ends]) -> Program:
    """A program that hands over two buffers one after the other; the wrong host takes one item and sends the second."""

    def program(backend: Backend, fixed: bool) -> None:
        staging, (give, take) = Staging(backend, buffers=2), ends()

        def fill() -> None:
            for buffer in staging.buffers:
                buffer.tensor.fill_(1.0)
                give()
            staging.filled.append(True)

        with running(fill):
            staging.wait_for_filler()
            take()
            if fixed:
                take()
            staging.send()

    return program


def timed_out(backend: Backend, fixed: bool) -> None:
    """A wait that has timed out orders nothing."""
    staging = Staging(backend)
    ready, filled = threading.Event(), threading.Event()
    with running(lambda: (staging.fill(), filled.set() if fixed else None, ready.wait())):
        staging.wait_for_filler()
        filled.wait(None if fixed else 0)
        staging.send()
        ready.set()


def event_loop(backend: Backend, fixed: bool) -> None:
    """The filling thread stops a loop; the wrong program's loop looks at a variable."""
    staging, loop = Staging(backend), asyncio.new_event_loop()

    async def look() -> None:
        while not staging.filled:
            await asyncio.sleep(0)

    with running(lambda: (staging.fill(), loop.call_soon_threadsafe(loop.stop) if fixed else None)):
        loop.run_forever() if fixed else loop.run_until_complete(look())
        loop.close()
        staging.send()


class Filler(threading.Thread):
    """A subclass of `Thread` whose `run` fills the buffer."""

    def __init__(self, staging: Staging) -> None:
        super().__init__(name="filler")
        self.staging = staging

    def run(self) -> None:
        self.staging.fill()


def ended_thread(backend: Backend, fixed: bool) -> None:
    """The host looks whether the thread lives; the wrong one looks at a variable."""
    staging = Staging(backend)
    thread = Filler(staging)
    thread.start()
    while thread.is_alive() if fixed else not staging.filled:
        time.sleep(0)
    staging.send()
    thread.join()


class Sender(threading.Thread):
    """A subclass of `Thread` whose `run` sends the buffer once it is filled."""

    def __init__(self, staging: Staging) -> None:
        super().__init__(name="sender")
        self.staging = staging

    def run(self) -> None:
        self.staging.wait_for_filler()
        self.staging.send()


def started_thread(backend: Backend, fixed: bool) -> None:
    """The host fills the buffer before it starts the sender; the wrong one fills it afterwards."""
    staging = Staging(backend)
    thread = Sender(staging)
    if not fixed:
        thread.start()
    staging.fill()
    if fixed:
        thread.start()
    thread.join()


ENDS = (simple_queue, plain_queue, task_done, semaphore, barrier, lock, polled_event, pipe)
PROGRAMS: dict[str, Program] = {
    **{ends.__name__: handing_over(ends) for ends in ENDS},
    **{made.__name__: handing_over(conditions(made)) for made in (one_condition, two_conditions, lock_of_a_condition)},
    "wait_for_a_future": handing_over(future(lambda made: concurrent.futures.wait([made]))),
    "callback_of_a_future": handing_over(future(lambda made: made.add_done_callback(id))),
    "all_futures": several_futures(concurrent.futures.wait, one_of),
    "futures_as_they_complete": several_futures(each_of, next_of),
    "later_item_of_a_queue": later_item(plain_queue),
    "later_message_of_a_pipe": later_item(pipe),
    "later_permit_of_a_semaphore": later_item(semaphore),
    **{program.__name__: program for program in (timed_out, event_loop, ended_thread, started_thread)},
}
