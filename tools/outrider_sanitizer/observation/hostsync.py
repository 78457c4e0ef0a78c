"""Edges between host threads, from the means by which Python programs hand over data.

While a run is watched, these report to the observer: starting and joining threads, finding a thread dead, events, conditions,
barriers, executors' futures, and the items of `handed_over`. A plain lock reports only a hand-over, i.e. a release by another
thread than the acquiring one: two threads that hold a lock in turn have no fixed order. The lock of a condition also reports
its holds, because the waiting thread checks the state that was changed under it.

The module replaces names of `threading`, `queue` and `multiprocessing.connection`. Objects that a program imported from them
earlier are not seen.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures._base import _AllCompletedWaiter
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from outrider.device import Observer
from outrider_sanitizer.detector.actors import THREAD_IS_ALIVE
from outrider_sanitizer.observation.handed_over import HandOverTokens
from outrider_sanitizer.observation.replaced_names import Replacement, replaced


def _started() -> bool:
    # A thread announces that it has started before threading knows it; asking who it is would start that again.
    known: dict[int, threading.Thread] = getattr(threading, "_active", {})
    return threading.get_ident() in known


def _told(
    observer: Observer,
    *,
    released: Callable[..., object] | None = None,
    acquired: Callable[..., object] | None = None,
    after_false: bool = False,
) -> Callable[[Any], Any]:
    """Return a wrapper of a method: the calling thread releases a token before the call and acquires a token afterwards.

    ``released`` and ``acquired`` return the tokens; None stands for no token. A result of False means that the method gave up
    waiting: then nothing is acquired, unless ``after_false`` is set.
    """

    def wrap(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            token = released(self) if released is not None and _started() else None
            if token is not None:
                observer.host_released(token)
            result = original(self, *args, **kwargs)
            if acquired is not None and (after_false or result is not False) and _started():
                token = acquired(self)
                if token is not None:
                    observer.host_acquired(token)
            return result

        return call

    return wrap


def _itself(told: object) -> object:
    return told


def _start(observer: Observer, around: Callable[[], AbstractContextManager[Any]]) -> Callable[[Any], Any]:
    """Return a wrapper of ``Thread.start``, which lets the new thread run inside the watched scope, also for subclasses with
    their own `run`.
    """

    def wrap(original: Any) -> Any:
        def start(self: threading.Thread) -> None:
            if _started():
                observer.host_released(self)
            body, own = self.run, "run" in self.__dict__

            def run() -> None:
                observer.host_acquired(self)
                try:
                    with around():
                        body()
                finally:
                    observer.host_released(self)
                    if own:
                        self.__dict__["run"] = body
                    else:
                        self.__dict__.pop("run", None)

            self.__dict__["run"] = run
            original(self)

        return start

    return wrap


def _ended(thread: threading.Thread) -> object | None:
    return None if THREAD_IS_ALIVE(thread) else thread


def _lock_of(condition: threading.Condition) -> object | None:
    """Return the lock as the token of a condition: conditions with one lock can notify each other's threads.

    Returns None unless a program created the condition: wrapped classes report more exactly than their conditions.
    """
    own = condition.__dict__.get("_outrider_own", False)
    lock: object = condition._lock  # type: ignore[attr-defined]
    return lock if own else None


def _condition_made(original: Any) -> Any:
    def init(self: threading.Condition, lock: Any = None) -> None:
        original(self, lock)
        caller: Any = sys._getframe(1)
        while caller.f_globals.get("__name__") == __name__:  # several devices are watched, so it's wrapped several times
            caller = caller.f_back
        module = caller.f_globals.get("__name__", "")
        own = module not in ("threading", "queue") and not module.startswith("concurrent.")
        self.__dict__["_outrider_own"] = own
        held: Any = self._lock  # type: ignore[attr-defined]  # what notify and wait go by
        if own and isinstance(held, _Lock):
            held.tells = True

    return init


class _Lock:
    """A lock that reports every acquisition and release after a condition was created from it."""

    tells = False


def _locks(observer: Observer) -> Callable[[Any], Any]:
    """Return a replacement of `threading.Lock` or `RLock` that reports each hand-over, and holds for conditions."""

    def wrap(before: Any) -> Any:
        class Lock(_Lock):
            def __init__(self) -> None:
                self._lock = before()
                self._owner = 0
                self._handed = False

            def acquire(self, *args: Any, **kwargs: Any) -> bool:
                taken: bool = self._lock.acquire(*args, **kwargs)
                if taken:
                    self._owner = threading.get_ident()
                    if (self._handed or self.tells) and _started():
                        self._handed = False
                        observer.host_acquired(self)
                return taken

            def release(self) -> None:
                if (self.tells or self._owner != threading.get_ident()) and _started():
                    observer.host_released(self)
                    self._handed = True
                self._lock.release()

            def __enter__(self) -> bool:
                return self.acquire()

            def __exit__(self, *error: object) -> None:
                self.release()

            def __getattr__(self, name: str) -> Any:  # what a condition or a fork asks of its lock
                return getattr(self._lock, name)

        return Lock

    return wrap


def _simple_queues(pieces: HandOverTokens, before: Any) -> Any:
    """Return a replacement of the C class `queue.SimpleQueue` that reports each item."""
    give, take = pieces.put(before.put), pieces.get(before.get)

    class SimpleQueue(before):  # type: ignore[misc]  # a class that is only known at run time
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            give(self, item, block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            return take(self, block, timeout)

        def put_nowait(self, item: Any) -> None:
            self.put(item, False)

        def get_nowait(self) -> Any:
            return self.get(False)

    return SimpleQueue


@contextmanager
def host_edges(observer: Observer, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Generator[None]:
    """Report hand-overs between host threads to ``observer`` in this scope; new threads run inside ``around()``."""
    second: WeakKeyDictionary[Any, object] = WeakKeyDictionary()

    def done(told: Any) -> object:
        return second.setdefault(told, [])

    pieces = HandOverTokens(observer)
    changes: list[Replacement] = [
        (threading.Thread, "start", _start(observer, around)),
        (threading.Thread, "join", _told(observer, acquired=_ended)),
        (threading.Thread, "is_alive", _told(observer, acquired=_ended, after_false=True)),
        (threading.Event, "set", _told(observer, released=_itself)),
        (threading.Event, "wait", _told(observer, acquired=_itself)),
        (threading.Event, "is_set", _told(observer, acquired=_itself)),
        (threading.Barrier, "wait", _told(observer, released=_itself, acquired=_itself)),
        (threading.Condition, "__init__", _condition_made),
        (threading.Condition, "__enter__", _told(observer, acquired=_lock_of, after_false=True)),
        (threading.Condition, "__exit__", _told(observer, released=_lock_of)),
        (threading.Condition, "wait", _told(observer, released=_lock_of, acquired=_lock_of, after_false=True)),
        (queue.Queue, "task_done", _told(observer, released=done)),
        (queue.Queue, "join", _told(observer, acquired=done)),
        (_AllCompletedWaiter, "_decrement_pending_calls", _told(observer, released=lambda waiter: waiter.event)),
        (Future, "set_result", _told(observer, released=_itself)),
        (Future, "set_exception", _told(observer, released=_itself)),
        (Future, "result", _told(observer, acquired=_itself)),
        (Future, "exception", _told(observer, acquired=_itself)),
        (Future, "done", _told(observer, acquired=_itself)),
        *pieces.changes(),
        (threading, "Lock", _locks(observer)),
        (threading, "RLock", _locks(observer)),
        (queue, "SimpleQueue", lambda before: _simple_queues(pieces, before)),
    ]
    with replaced(changes):
        yield
