"""Host threads: several actors in one program, one at a time.

Each is an operating-system thread, so that any code may run in it, but it runs only while it holds the baton, and who
gets the baton is a decision of the strategy like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.device import StreamOrderError
from outrider_sim.queue import Action, HostThread

if TYPE_CHECKING:
    from outrider_sim.machine import Machine


class HostThreads:
    """Starts, joins and gives up host threads of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.count = 1  # threads so far, the first one included: numbers the next

    def spawn(self, fn: Callable[[], None], name: str = "") -> HostThread:
        """Start a host thread. It runs when the strategy picks it; its current stream is the caller's."""
        self._machine.point(Action("spawn"))
        thread = HostThread(self.count, name, self._machine.stream)
        self.count += 1
        thread.baton = threading.Semaphore(0)
        if self._machine.main.baton is None:
            self._machine.main.baton = threading.Semaphore(0)
        me = self._machine.thread
        thread.clock = me.clock

        def body() -> None:
            thread.baton.acquire()
            self._machine.local.thread, self._machine.local.stream = thread, thread.stream
            thread.step += 1
            thread.ready = None
            if self._machine.note is not None:
                self._machine.note(thread.label, thread.step)
            try:
                if self._machine.diverged is None:
                    fn()
            except BaseException as error:
                thread.error = error
            thread.finished = True
            self._leave(thread)

        # A daemon, so that a program that fails before joining can still end.
        thread.os = threading.Thread(target=body, name=f"outrider-sim {thread.label}", daemon=True)
        self._machine.threads.append(thread)
        self._machine.update_mode()
        thread.os.start()
        return thread

    def join(self, thread: HostThread) -> None:
        """Block until `thread` has finished; raises what it raised."""
        self._machine.turns(self._machine.thread, Action("join", thread), lambda: thread.finished, str(thread))
        if thread.os is not None:
            thread.os.join()
        if thread in self._machine.threads:
            self._machine.threads.remove(thread)
        self._machine.update_mode()
        if self._machine.diverged is not None:
            raise self._machine.diverged
        if thread.error is not None:
            raise thread.error

    def run_threads(self, *bodies: Callable[[], None]) -> None:
        """Run the callables as host threads beside each other and join them all."""
        threads = [self.spawn(body, getattr(body, "__name__", "")) for body in bodies]
        failed: BaseException | None = None
        for thread in threads:
            try:
                self.join(thread)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _leave(self, thread: HostThread) -> None:
        """A finished thread passes its turn on; where nobody can go on, the first thread wakes up and raises."""
        try:
            if self._machine.diverged is None:
                self._machine.turns(thread, Action("exit"), None, "")
        except BaseException as error:
            self._machine.diverged = error
        if self._machine.diverged is not None:
            self._machine.main.baton.release()

    def abort(self) -> None:
        """End threads that a failed run left parked: each raises at the point where it waits."""
        self._machine.diverged = self._machine.diverged or StreamOrderError("the run was given up")
        for thread in self._machine.threads[1:]:
            if not thread.finished:
                thread.baton.release()
            thread.os.join()
        if self._machine.main.baton is not None:
            self._machine.main.baton = threading.Semaphore(0)
        self._machine.threads = [self._machine.main]


def hand_over(me: HostThread, other: HostThread) -> None:
    """Let `other` run; returns when somebody hands back, unless `me` is done for good."""
    other.baton.release()
    if not me.finished:
        me.baton.acquire()
