"""Host threads: several actors in one program, of which one runs at a time.

Each host thread is an operating-system thread, so it can run any code. It runs only while it holds the baton. The strategy
decides which thread gets the baton.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.device import StreamOrderError
from outrider_sim.machine.queue import Action, HostThread

if TYPE_CHECKING:
    from outrider_sim.machine.host_scheduler import HostScheduler


class Baton:
    """A lock that a parked thread waits for.

    It is the interpreter's own lock type, so tools that watch the program's locks don't report the scheduler's turns.
    """

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def acquire(self) -> None:
        """Block until another thread releases the baton."""
        self._lock.acquire()

    def release(self) -> None:
        """Pass the baton to its waiting thread. Repeated calls have no further effect."""
        if self._lock.locked():
            self._lock.release()


class HostThreads:
    """Starts, joins and aborts the host threads of one scheduler."""

    def __init__(self, scheduler: HostScheduler) -> None:
        self._scheduler = scheduler
        self.count = 1  # threads so far, the first one included: numbers the next
        self.failed: list[tuple[HostThread, BaseException]] = []  # in the order in which they did

    def spawn(self, fn: Callable[[], None], name: str = "") -> HostThread:
        """Start a host thread. It runs when the strategy picks it; each device's default stream is its current stream."""
        scheduler = self._scheduler
        scheduler.point(Action("spawn"))
        thread = HostThread(self.count, name, [(machine, machine.default) for machine in scheduler.machines])
        self.count += 1
        thread.baton = Baton()
        if scheduler.main.baton is None:
            scheduler.main.baton = Baton()
        thread.clock = scheduler.thread.clock
        thread.saved = [each.save() for each in scheduler.ambient]

        def body() -> None:
            thread.baton.acquire()
            scheduler.local.thread = thread
            for machine, stream in thread.streams:
                machine.local.stream = stream
            _restore(scheduler, thread)
            thread.step += 1
            thread.ready = None
            if scheduler.note is not None:
                scheduler.note(thread.label, thread.step)
            try:
                if scheduler.diverged is None:
                    fn()
            except BaseException as error:
                thread.error = error
                self.failed.append((thread, error))
            thread.finished = True
            self._leave(thread)

        # A daemon, so that a program that fails before joining can still end.
        thread.os = threading.Thread(target=body, name=f"outrider-sim {thread.label}", daemon=True)
        scheduler.threads.append(thread)
        scheduler.update_mode()
        thread.os.start()
        return thread

    def join(self, thread: HostThread) -> None:
        """Block until `thread` has finished; raise the error that the thread raised, if any."""
        scheduler = self._scheduler
        scheduler.turns(scheduler.thread, Action("join", thread), lambda: thread.finished, str(thread))
        if thread.os is not None:
            thread.os.join()
        if thread in scheduler.threads:
            scheduler.threads.remove(thread)
        scheduler.update_mode()
        if scheduler.diverged is not None:
            raise scheduler.diverged
        if thread.error is not None:
            raise thread.error

    def run_threads(self, *bodies: Callable[[], None]) -> None:
        """Run the callables as interleaved host threads and join them all.

        Raises the error of the thread that failed first.
        """
        self.failed.clear()
        threads = [self.spawn(body, getattr(body, "__name__", "")) for body in bodies]
        failed: BaseException | None = None
        for thread in threads:
            try:
                self.join(thread)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            # The first failure may have left other threads waiting, so their errors are consequences.
            raise self.failed[0][1] if self.failed else failed

    def _leave(self, thread: HostThread) -> None:
        """Give the baton of a finished thread to another. If no thread can continue, the first thread wakes up and raises."""
        scheduler = self._scheduler
        try:
            if scheduler.diverged is None:
                scheduler.turns(thread, Action("exit"), None, "")
        except BaseException as error:
            scheduler.diverged = error
        if scheduler.diverged is not None:
            scheduler.main.baton.release()

    def abort(self) -> None:
        """End the threads that a failed run left parked: each raises an error at the point where it waits."""
        scheduler = self._scheduler
        scheduler.diverged = scheduler.diverged or StreamOrderError("the run was given up")
        for thread in scheduler.threads[1:]:
            if not thread.finished:
                thread.baton.release()
            thread.os.join()
        if scheduler.main.baton is not None:
            scheduler.main.baton = Baton()
        scheduler.threads = [scheduler.main]


def hand_over(scheduler: HostScheduler, me: HostThread, other: HostThread) -> None:
    """Give the baton to thread `other`. Returns when `me` gets the baton again, or at once if `me` has finished."""
    me.saved = [each.save() for each in scheduler.ambient]
    other.baton.release()
    if not me.finished:
        me.baton.acquire()
        _restore(scheduler, me)


def _restore(scheduler: HostScheduler, thread: HostThread) -> None:
    for each, saved in zip(scheduler.ambient, thread.saved, strict=False):
        each.restore(saved)
