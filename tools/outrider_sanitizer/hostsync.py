"""Edges between host threads, from the ways in which Python programs hand things over.

While a run is watched, these tell the observer: starting and joining threads, queues (also that what was taken is done),
events, conditions, semaphores, barriers, and executors' futures. A plain lock tells it only where it's handed over: released
by another thread than the one that took it. Holding the same lock one after the other orders nothing that a program could
rely on for its results.

Names of the modules `threading` and `queue` are exchanged, so what a program imported from them before isn't seen.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from outrider.device import Observer

Wrapped = tuple[type[Any], str, Callable[[Any], Any]]


def _started() -> bool:
    # A thread announces that it has started before threading knows it; asking who it is would start that again.
    known: dict[int, threading.Thread] = getattr(threading, "_active", {})
    return threading.get_ident() in known


def _release_before(observer: Observer, token: Callable[..., object]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _started():
                observer.host_released(token(self, *args))
            return original(self, *args, **kwargs)

        return call

    return wrap


def _acquire_after(observer: Observer, token: Callable[..., object]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            # False: it gave up waiting, so nothing is known.
            if result is not False and _started():
                observer.host_acquired(token(self, *args))
            return result

        return call

    return wrap


def _thread_body(observer: Observer, around: Callable[[], AbstractContextManager[Any]]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def run(self: threading.Thread) -> None:
            observer.host_acquired(self)
            try:
                with around():
                    original(self)
            finally:
                observer.host_released(self)

        return run

    return wrap


def _submit(observer: Observer) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            token = object()
            observer.host_released(token)

            def body(*inner: Any, **named: Any) -> Any:
                observer.host_acquired(token)
                return fn(*inner, **named)

            return original(self, body, *args, **kwargs)

        return submit

    return wrap


def _join(observer: Observer) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def join(self: threading.Thread, timeout: float | None = None) -> None:
            original(self, timeout)
            if not self.is_alive():
                observer.host_acquired(self)

        return join

    return wrap


def _both(observer: Observer) -> Callable[[Any], Any]:
    """Everybody who meets here tells, and learns what the others told."""

    def wrap(original: Any) -> Any:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            observer.host_released(self)
            result = original(self, *args, **kwargs)
            observer.host_acquired(self)
            return result

        return wait

    return wrap


def _own(condition: threading.Condition) -> bool:
    """Whether a program made the condition, and not one of the classes here, which tell more exactly."""
    found: bool = condition.__dict__.get("_outrider_own", False)
    return found


def _condition_made(original: Any) -> Any:
    def init(self: threading.Condition, lock: Any = None) -> None:
        original(self, lock)
        module = sys._getframe(1).f_globals.get("__name__", "")
        self.__dict__["_outrider_own"] = module not in ("threading", "queue") and not module.startswith("concurrent.")

    return init


def _condition_left(observer: Observer) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def leave(self: threading.Condition, *args: Any) -> Any:
            if _own(self):
                observer.host_released(self)
            return original(self, *args)

        return leave

    return wrap


def _condition_entered(observer: Observer) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def enter(self: threading.Condition, *args: Any) -> Any:
            result = original(self, *args)
            if _own(self):
                observer.host_acquired(self)
            return result

        return enter

    return wrap


def _condition_waits(observer: Observer) -> Callable[[Any], Any]:
    """Waiting gives the lock up, and takes it again, also where nobody notified."""

    def wrap(original: Any) -> Any:
        meets = _both(observer)(original)

        def wait(self: threading.Condition, *args: Any, **kwargs: Any) -> Any:
            return (meets if _own(self) else original)(self, *args, **kwargs)

        return wait

    return wrap


def _locks(observer: Observer, before: Any) -> Any:
    """A class for `threading.Lock` that tells of each hand-over."""

    class Lock:
        def __init__(self) -> None:
            self._lock = before()
            self._owner = 0
            self._handed = False

        def acquire(self, *args: Any, **kwargs: Any) -> bool:
            taken: bool = self._lock.acquire(*args, **kwargs)
            if taken:
                self._owner = threading.get_ident()
                if self._handed:
                    self._handed = False
                    observer.host_acquired(self)
            return taken

        def release(self) -> None:
            if self._owner != threading.get_ident() and _started():
                observer.host_released(self)
                self._handed = True
            self._lock.release()

        def locked(self) -> bool:
            found: bool = self._lock.locked()
            return found

        def _at_fork_reinit(self) -> None:
            self._lock._at_fork_reinit()

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *error: object) -> None:
            self.release()

    return Lock


def _simple_queues(observer: Observer, before: Any) -> Any:
    """A class for `queue.SimpleQueue`, which is C."""

    class SimpleQueue(before):  # type: ignore[misc]  # a class that is only known at run time
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            observer.host_released(self)
            super().put(item, block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            item = super().get(block, timeout)
            observer.host_acquired(self)
            return item

        def put_nowait(self, item: Any) -> None:
            self.put(item, False)

        def get_nowait(self) -> Any:
            return self.get(False)

    return SimpleQueue


@contextmanager
def host_edges(observer: Observer, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Generator[None]:
    """Tell ``observer`` of hand-overs between host threads while the scope lasts; new threads run inside ``around()``."""
    second: WeakKeyDictionary[Any, object] = WeakKeyDictionary()

    def itself(self: Any, *_: Any) -> object:
        return self

    def done(self: Any, *_: Any) -> object:
        return second.setdefault(self, [])

    changes: list[Wrapped] = [
        (threading.Thread, "start", _release_before(observer, itself)),
        (threading.Thread, "run", _thread_body(observer, around)),
        (threading.Thread, "join", _join(observer)),
        (threading.Event, "set", _release_before(observer, itself)),
        (threading.Event, "wait", _acquire_after(observer, itself)),
        (threading.Event, "is_set", _acquire_after(observer, itself)),
        (threading.Semaphore, "release", _release_before(observer, itself)),
        (threading.BoundedSemaphore, "release", _release_before(observer, itself)),
        (threading.Semaphore, "acquire", _acquire_after(observer, itself)),
        (threading.Semaphore, "__enter__", _acquire_after(observer, itself)),
        (threading.Barrier, "wait", _both(observer)),
        (threading.Condition, "__init__", _condition_made),
        (threading.Condition, "__enter__", _condition_entered(observer)),
        (threading.Condition, "__exit__", _condition_left(observer)),
        (threading.Condition, "wait", _condition_waits(observer)),
        (queue.Queue, "put", _release_before(observer, itself)),
        (queue.Queue, "get", _acquire_after(observer, itself)),
        (queue.Queue, "task_done", _release_before(observer, done)),
        (queue.Queue, "join", _acquire_after(observer, done)),
        (ThreadPoolExecutor, "submit", _submit(observer)),
        (Future, "set_result", _release_before(observer, itself)),
        (Future, "set_exception", _release_before(observer, itself)),
        (Future, "result", _acquire_after(observer, itself)),
        (Future, "exception", _acquire_after(observer, itself)),
        (Future, "done", _acquire_after(observer, itself)),
    ]
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
    names = ((threading, "Lock", threading.Lock, _locks), (queue, "SimpleQueue", queue.SimpleQueue, _simple_queues))
    for owner, name, wrap in changes:
        setattr(owner, name, wrap(owner.__dict__[name]))
    for module, name, original, make in names:
        setattr(module, name, make(observer, original))
    try:
        yield
    finally:
        for module, name, original, _ in names:
            setattr(module, name, original)
        for owner, name, original in before:
            setattr(owner, name, original)
