"""Edges between host threads, from the ways in which Python programs hand things over.

While a run is watched, starting and joining threads, queues, events and executors' futures tell the observer. Plain locks
don't: holding the same lock one after the other orders nothing that a program could rely on for its results.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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
            if _started():
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


@contextmanager
def host_edges(observer: Observer, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Generator[None]:
    """Tell ``observer`` of hand-overs between host threads while the scope lasts; new threads run inside ``around()``."""

    def itself(self: Any, *_: Any) -> object:
        return self

    changes: list[Wrapped] = [
        (threading.Thread, "start", _release_before(observer, itself)),
        (threading.Thread, "run", _thread_body(observer, around)),
        (threading.Thread, "join", _acquire_after(observer, itself)),
        (threading.Event, "set", _release_before(observer, itself)),
        (threading.Event, "wait", _acquire_after(observer, itself)),
        (queue.Queue, "put", _release_before(observer, itself)),
        (queue.Queue, "get", _acquire_after(observer, itself)),
        (ThreadPoolExecutor, "submit", _submit(observer)),
        (Future, "set_result", _release_before(observer, itself)),
        (Future, "set_exception", _release_before(observer, itself)),
        (Future, "result", _acquire_after(observer, itself)),
    ]
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
    for owner, name, wrap in changes:
        setattr(owner, name, wrap(owner.__dict__[name]))
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
