"""Hand-overs between host threads that are made of others, and locks that were there before the run was watched."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from outrider_sanitizer import FindingKind, Report, watch
from outrider_sim.backend import SimBackend
from outrider_sim.exploration import run_once
from outrider_sim.options import parse_options
from outrider_sim.strategies import Strategy, make_strategy
from sanitizer.handover_programs import PROGRAMS

Fill = Callable[[], None]
Way = Callable[[Fill, ExitStack], None]
"""Calls the first argument in another thread, and returns when it was told. The second one tidies up, after the run."""

LOCK = threading.Lock()


def started(scope: ExitStack, body: Fill) -> None:
    """A thread that isn't joined before the run is over."""
    thread = threading.Thread(target=body, name="filler")
    thread.start()
    scope.callback(thread.join)


def to_thread(fill: Fill, _: ExitStack) -> None:
    async def main() -> None:
        await asyncio.to_thread(fill)

    asyncio.run(main())


def on_the_loop_of_another_thread(fill: Fill, scope: ExitStack) -> None:
    loop = asyncio.new_event_loop()
    scope.callback(loop.close)
    started(scope, loop.run_forever)

    async def call() -> None:
        fill()

    asyncio.run_coroutine_threadsafe(call(), loop).result()
    loop.call_soon_threadsafe(loop.stop)


def asyncio_queue(fill: Fill, scope: ExitStack) -> None:
    async def main() -> None:
        items: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        started(scope, lambda: (fill(), loop.call_soon_threadsafe(items.put_nowait, 1)))
        await items.get()

    asyncio.run(main())


def timer(fill: Fill, scope: ExitStack) -> None:
    over = threading.Event()
    thread = threading.Timer(0, lambda: (fill(), over.set()))
    thread.start()
    scope.callback(thread.join)
    over.wait()


def map_of_a_pool(fill: Fill, scope: ExitStack) -> None:
    pool = scope.enter_context(ThreadPoolExecutor(2))
    assert len(list(pool.map(lambda _: fill(), [1]))) == 1


def callback(fill: Fill, scope: ExitStack) -> None:
    over = threading.Event()
    future: Future[None] = scope.enter_context(ThreadPoolExecutor(1)).submit(fill)
    future.add_done_callback(lambda _: over.set())
    over.wait()


def queue_of_processes(fill: Fill, scope: ExitStack) -> None:
    items: multiprocessing.Queue[int] = multiprocessing.Queue()
    started(scope, lambda: (fill(), items.put(1)))
    items.get()
    items.close()
    scope.callback(items.join_thread)


def priority_queue(fill: Fill, scope: ExitStack) -> None:
    items: queue.PriorityQueue[tuple[int, int]] = queue.PriorityQueue()
    started(scope, lambda: (fill(), items.put((1, 2))))
    items.get()


def conditions_of_an_older_lock(fill: Fill, scope: ExitStack) -> None:
    told, other = threading.Condition(LOCK), threading.Condition(LOCK)
    ready: list[bool] = []

    def body() -> None:
        fill()
        with other:
            ready.append(True)
            told.notify()

    started(scope, body)
    with told:
        told.wait_for(lambda: bool(ready))


def variable(fill: Fill, scope: ExitStack) -> None:
    ready: list[bool] = []
    started(scope, lambda: (fill(), ready.append(True)))
    while not ready:
        time.sleep(0)


ORDERED = (
    to_thread, on_the_loop_of_another_thread, asyncio_queue, timer, map_of_a_pool, callback, queue_of_processes,
    priority_queue, conditions_of_an_older_lock,
)  # fmt: skip


@pytest.mark.parametrize("way", [*ORDERED, variable])
def test_what_another_thread_fills_is_sent(way: Way) -> None:
    backend = SimBackend(parse_options({}))
    with ExitStack() as scope, watch(backend) as report:
        copy = backend.create_stream("copy")
        staging = backend.empty_pinned("staging", (4,), torch.float32)
        with backend.on(copy):
            x = torch.zeros(4, device=backend.device)
        way(lambda: staging.tensor.fill_(1.0), scope)
        backend.copy_async(x, staging.tensor, stream=copy)
        copy.synchronize()
    kinds = [finding.kind for finding in report]
    assert kinds == ([FindingKind.READ_AFTER_WRITE] if way is variable else []), str(report)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hand_over_is_seen_and_its_lack_is_named(name: str) -> None:
    def report_of(backend: SimBackend, strategy: Strategy, *, fixed: bool) -> Report:
        with watch(backend) as report:
            error = run_once(backend, lambda device: PROGRAMS[name](device, fixed), strategy)
        assert error is None
        return report

    backend = SimBackend(parse_options({}))
    report = report_of(backend, Strategy(), fixed=False)
    assert [finding.kind for finding in report] == [FindingKind.READ_AFTER_WRITE], str(report)
    thread = "MainThread" if name == "started_thread" else "filler"
    assert f"order host thread {thread}" in str(report)
    assert "hand over" in str(report)
    for seed in range(5):
        report = report_of(backend, make_strategy("mixed", seed, {}), fixed=True)
        assert report.clean, str(report)


def test_a_thread_that_collects_memory_while_it_starts_keeps_its_name() -> None:
    backend = SimBackend(parse_options({}))
    kept = [torch.zeros(4, device=backend.device)]

    class Started(threading.Event):
        """Set before threading knows which thread is the calling one."""

        def set(self) -> None:
            kept.clear()
            super().set()

    with watch(backend) as report:
        copy = backend.create_stream("copy")
        staging = backend.empty_pinned("staging", (4,), torch.float32)
        with backend.on(copy):
            x = torch.zeros(4, device=backend.device)
        done: list[bool] = []
        thread = threading.Thread(target=lambda: (staging.tensor.fill_(1.0), done.append(True)), name="filler")
        thread._started = Started()
        thread.start()
        while not done:
            time.sleep(0)
        backend.copy_async(x, staging.tensor, stream=copy)
        copy.synchronize()
        thread.join()
    assert [finding.first.actor for finding in report if finding.first] == ["host thread filler"], str(report)
