"""Faults between host threads, and the means of handing over that correct them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from outrider.device import Backend
from outrider_sanitizer.races.race import Race, expect, expect_values, filled, race
from outrider_sanitizer.report.findings import FindingKind

RACES: list[Race] = []

Ends = tuple[Callable[[], Any], Callable[[], Any]]
"""What the thread does that hands over, and the one that takes over."""


def handing_over(ends: Callable[[], Ends]) -> Callable[[Backend, bool], None]:
    """Return a program in which one thread fills a staging buffer and another sends it.

    The corrected program hands over by ``ends``; the wrong one by a variable, which orders nothing.
    """

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


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("order host thread filler",), visible=False)
def timed_out(backend: Backend, fixed: bool) -> None:
    """A wait that has timed out orders nothing.

    A wait for the other thread times out, and the program continues with the other thread's buffer.
    """
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


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("record an event on 'side'", "make 'default' wait"))
def thread_on_the_default_stream(backend: Backend, fixed: bool) -> None:
    """A new thread begins on the default stream, whichever stream was current where it started.

    A thread started inside a stream scope works on the default stream, not on the scope's.
    """
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


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("record an event on 'copy'",))
def loop_over_query(backend: Backend, fixed: bool) -> None:
    """The host reads a result without a successful query.

    The corrected host polls until the copy is complete; the wrong one queries once and reads the result anyway.
    """
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
    expect_values(results.tensor.tolist(), 7.0)
    backend.synchronize()


def handover(name: str, ends: Callable[[], Ends], through: str) -> Race:
    """Return the race whose program is :func:`handing_over` with ``ends``; ``through`` names the means."""
    return Race(
        name=name,
        about=f"A buffer goes from one host thread to another; {through} orders them, a variable doesn't.",
        body=handing_over(ends),
        kind=FindingKind.READ_AFTER_WRITE,
        names=("order host thread filler", "hand over"),
        visible=False,
    )


RACES += (
    handover("over-a-simple-queue", _simple_queue, "a SimpleQueue"),
    handover("until-a-task-is-done", _task_done, "Queue.join"),
    handover("over-a-semaphore", _semaphore, "a semaphore"),
    handover("over-a-condition", _condition, "a condition"),
    handover("at-a-barrier", _barrier, "a barrier"),
    handover("over-a-lock", _lock, "a lock that the other thread releases"),
    handover("until-an-event-is-set", _polled_event, "Event.is_set"),
)
