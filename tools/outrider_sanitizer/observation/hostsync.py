"""Edges between host threads, from the means by which Python programs hand over data.

While a run is watched, these report to the observer: starting and joining threads, finding a thread dead, events, conditions,
barriers, executors' futures, and single items. A plain lock reports only a hand-over, i.e. a release by another thread than
the acquiring one: two threads that hold a lock in turn have no fixed order. The lock of a condition also reports its holds,
because the waiting thread checks the state that was changed under it.

Single items go through queues, semaphores, `multiprocessing` pipes, waits for several futures, and event-loop callbacks. Each
item orders the giving thread before the taking thread. Each item has a token of its own, so taking an item orders nothing
after later items. If the taken item is unknown (a queue that changes its items), the taking thread is ordered after all items
given so far.

The module replaces names of `threading`, `queue` and `multiprocessing.connection`. Objects that a program imported from them
earlier are not seen.
"""

from __future__ import annotations

import queue
import sys
import threading
from asyncio import BaseEventLoop
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import _base as futures
from concurrent.futures._base import _AllCompletedWaiter
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing import connection
from typing import Any
from weakref import WeakKeyDictionary

from outrider.device import Observer
from outrider_sanitizer.detector.actors import THREAD_IS_ALIVE, SingleUseToken

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""A module or class, the name of its attribute, and a function that returns a wrapper of the attribute's value."""


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Generator[None]:
    """Replace each attribute by its wrapper in this scope."""
    with ExitStack() as stack:
        for owner, name, wrap in replacements:
            before = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, wrap(before))
        yield


_MAX_PENDING_MESSAGES = 4096
"""Maximum number of messages of a pipe that no thread of this process has taken: another process may have taken them."""


class HandOverTokens:
    """Tokens of items and permits that were handed over and not yet taken, per queue, semaphore or pipe."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._items: WeakKeyDictionary[Any, defaultdict[int, deque[SingleUseToken]]] = WeakKeyDictionary()
        self._permits: WeakKeyDictionary[Any, deque[SingleUseToken | None]] = WeakKeyDictionary()
        self._messages: WeakKeyDictionary[Any, deque[SingleUseToken]] = WeakKeyDictionary()
        self._peers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._elsewhere: list[object] = []  # a token: what other processes may have been told

    def changes(self) -> list[Replacement]:
        """Return (owner, attribute name, wrapper factory) of each method to wrap."""
        return [
            (queue.Queue, "put", self.put),
            (queue.Queue, "get", self.get),
            (threading.Semaphore, "release", self._release),
            (threading.BoundedSemaphore, "release", self._release),
            (threading.Semaphore, "acquire", self._acquire),
            (threading.Semaphore, "__enter__", self._acquire),
            (connection._ConnectionBase, "send", self._send),
            (connection._ConnectionBase, "send_bytes", self._send),
            (connection._ConnectionBase, "recv", self._receive),
            (connection._ConnectionBase, "recv_bytes", self._receive),
            (connection._ConnectionBase, "recv_bytes_into", self._receive),
            (connection, "Pipe", self._pipe),
            (futures.Future, "add_done_callback", self.calling(lambda future: future)),
            (futures._AcquireFutures, "__exit__", self._looked_at),
            (BaseEventLoop, "call_soon_threadsafe", self.calling()),
            (ThreadPoolExecutor, "submit", self.calling()),
        ]

    def _release_token(self, taker: Any = None) -> SingleUseToken:
        token = SingleUseToken(for_task=getattr(taker, "_max_workers", 1) > 1)
        self._observer.host_released(token)
        return token

    # -- queues ------------------------------------------------------------------------------------------------------

    def put(self, original: Any) -> Any:
        """Wrap ``Queue.put``: the item carries the clock of the putting thread."""

        def put(this: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = self._items.setdefault(this, defaultdict(deque))[id(item)]
            token = self._release_token()
            tokens.append(token)
            self._observer.host_released(this)
            try:
                return original(this, item, *args, **kwargs)
            except queue.Full:
                tokens.remove(token)
                raise

        return put

    def get(self, original: Any) -> Any:
        """Wrap ``Queue.get``: the getting thread acquires the clock of the item."""

        def get(this: Any, *args: Any, **kwargs: Any) -> Any:
            item = original(this, *args, **kwargs)
            known = self._items.get(this)
            tokens = None if known is None else known.get(id(item))
            if known is None or not tokens:
                self._observer.host_acquired(this)
                return item
            token = tokens.pop() if isinstance(this, queue.LifoQueue) else tokens.popleft()
            if not tokens:
                known.pop(id(item), None)
            self._observer.host_acquired(token)
            return item

        return get

    # -- semaphores --------------------------------------------------------------------------------------------------

    def _free(self, semaphore: Any) -> deque[SingleUseToken | None]:
        """Return the tokens of a semaphore's free permits, in the order of acquisition; None for an initial permit."""
        found = self._permits.get(semaphore)
        return found if found is not None else self._permits.setdefault(semaphore, deque([None] * semaphore._value))

    def _release(self, original: Any) -> Any:
        def release(this: Any, n: int = 1) -> None:
            free = self._free(this)
            tokens = [self._release_token() for _ in range(n)]
            free.extend(tokens)
            try:
                original(this, n)
            except ValueError:  # of a bounded one that is full
                for token in tokens:
                    free.remove(token)
                raise

        return release

    def _acquire(self, original: Any) -> Any:
        def acquire(this: Any, *args: Any, **kwargs: Any) -> Any:
            free = self._free(this)
            taken = original(this, *args, **kwargs)
            if taken and free:
                token = free.popleft()
                if token is not None:
                    self._observer.host_acquired(token)
            return taken

        return acquire

    # -- pipes -------------------------------------------------------------------------------------------------------

    def _pipe(self, original: Any) -> Any:
        def pipe(*args: Any, **kwargs: Any) -> Any:
            ends = original(*args, **kwargs)
            self._peers[ends[0]], self._peers[ends[1]] = ends[1], ends[0]
            return ends

        return pipe

    def _send(self, original: Any) -> Any:
        def send(this: Any, *args: Any, **kwargs: Any) -> None:
            messages = self._messages.setdefault(this, deque(maxlen=_MAX_PENDING_MESSAGES))
            messages.append(self._release_token())
            self._observer.host_released(self._elsewhere)
            original(this, *args, **kwargs)

        return send

    def _receive(self, original: Any) -> Any:
        def receive(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            peer = self._peers.get(this)
            messages = None if peer is None else self._messages.get(peer)
            # Nothing was sent here: it comes from another process, which may answer to what it was told.
            self._observer.host_acquired(messages.popleft() if messages else self._elsewhere)
            return result

        return receive

    # -- futures and event loops -------------------------------------------------------------------------------------

    def calling(self, token_of: Callable[[Any], object] | None = None) -> Callable[[Any], Any]:
        """Return a wrapper of a method that takes a function: the function first acquires the calling thread's clock.

        With ``token_of``, it acquires the clock of that token of the method's object instead.
        """

        def wrap(original: Any) -> Any:
            def call(this: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
                token = self._release_token(this) if token_of is None else token_of(this)

                def body(*inner: Any, **named: Any) -> Any:
                    self._observer.host_acquired(token)
                    return fn(*inner, **named)

                return original(this, body, *args, **kwargs)

            return call

        return wrap

    def _looked_at(self, original: Any) -> Any:
        """Wrap the check for finished futures with which `wait` and `as_completed` begin: the thread acquires
        each of them.
        """

        def leave(this: Any, *args: Any) -> None:
            for future in this.futures:
                if future._state == futures.FINISHED:
                    self._observer.host_acquired(future)
            original(this, *args)

        return leave


def _started() -> bool:
    # A thread announces that it has started before threading knows it; asking who it is would start that again.
    known: dict[int, threading.Thread] = getattr(threading, "_active", {})
    return threading.get_ident() in known


def _with_tokens(
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


def _unchanged(told: object) -> object:
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
        if own and hasattr(held, "tells"):
            held.tells = True

    return init


def _locks(observer: Observer) -> Callable[[Any], Any]:
    """Return a replacement of `threading.Lock` or `RLock` that reports each hand-over, and holds for conditions."""

    def wrap(before: Any) -> Any:
        class Lock:
            """A lock that reports every acquisition and release after a condition was created from it."""

            tells = False

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
        (threading.Thread, "join", _with_tokens(observer, acquired=_ended)),
        (threading.Thread, "is_alive", _with_tokens(observer, acquired=_ended, after_false=True)),
        (threading.Event, "set", _with_tokens(observer, released=_unchanged)),
        (threading.Event, "wait", _with_tokens(observer, acquired=_unchanged)),
        (threading.Event, "is_set", _with_tokens(observer, acquired=_unchanged)),
        (threading.Barrier, "wait", _with_tokens(observer, released=_unchanged, acquired=_unchanged)),
        (threading.Condition, "__init__", _condition_made),
        (threading.Condition, "__enter__", _with_tokens(observer, acquired=_lock_of, after_false=True)),
        (threading.Condition, "__exit__", _with_tokens(observer, released=_lock_of)),
        (threading.Condition, "wait", _with_tokens(observer, released=_lock_of, acquired=_lock_of, after_false=True)),
        (queue.Queue, "task_done", _with_tokens(observer, released=done)),
        (queue.Queue, "join", _with_tokens(observer, acquired=done)),
        (_AllCompletedWaiter, "_decrement_pending_calls", _with_tokens(observer, released=lambda waiter: waiter.event)),
        (Future, "set_result", _with_tokens(observer, released=_unchanged)),
        (Future, "set_exception", _with_tokens(observer, released=_unchanged)),
        (Future, "result", _with_tokens(observer, acquired=_unchanged)),
        (Future, "exception", _with_tokens(observer, acquired=_unchanged)),
        (Future, "done", _with_tokens(observer, acquired=_unchanged)),
        *pieces.changes(),
        (threading, "Lock", _locks(observer)),
        (threading, "RLock", _locks(observer)),
        (queue, "SimpleQueue", lambda before: _simple_queues(pieces, before)),
    ]
    with replaced(changes):
        yield
