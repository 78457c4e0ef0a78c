"""Time limits for each phase of each test of the suite: a broken plugin may wait forever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from outrider_conformance.levels import level_of

_REPEAT_S = 2.0


class PhaseTimeLimit:
    """A pytest plugin that interrupts a phase of a test after ``limit`` seconds. It needs a platform with ``SIGALRM``."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._armed = False

    def renew(self) -> None:
        """Restart the time limit. A test calls this between parts of which each may hang."""
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, self._limit, min(self._limit, _REPEAT_S))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Limit the time in which the backend opens."""
        with self._limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Limit the time of the test's body."""
        with self._limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Limit the time in which the device drains after the test."""
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
        # The alarm repeats: draining the device after a test that hangs may hang too.
        signal.setitimer(signal.ITIMER_REAL, self._limit, min(self._limit, _REPEAT_S))
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
