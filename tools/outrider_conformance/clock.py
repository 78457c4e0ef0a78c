"""A limit for each phase of each test of the suite: a wait that never ends is what a broken plugin does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from outrider_conformance.levels import level_of

_AGAIN = 2.0


class Clock:
    """Interrupts a phase that runs for longer than ``limit`` seconds, where the platform has an alarm clock."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._armed = False

    def renew(self) -> None:
        """Start the limit again, where a test is many things of which each may hang."""
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, self._limit, min(self._limit, _AGAIN))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Opening a device may hang."""
        with self._limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """So may using it."""
        with self._limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """And draining it."""
        with self._limited(item):
            return (yield)

    @contextmanager
    def _limited(self, item: pytest.Item) -> Generator[None]:
        usable = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
        if level_of(item.path) is None or self._limit <= 0 or not usable:
            yield
            return

        def late(*_: object) -> None:
            pytest.fail(f"still running after {self._limit:g} s: enqueued work never finishes, or a call never returns")

        before = signal.signal(signal.SIGALRM, late)
        # Again and again: what drains the device on the way out of a test that hangs, hangs too.
        signal.setitimer(signal.ITIMER_REAL, self._limit, min(self._limit, _AGAIN))
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
