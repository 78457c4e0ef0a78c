"""Edges between host threads that hand over single items: each item orders the giving thread before the taking thread.

The items go through queues, semaphores, `multiprocessing` pipes, waits for several futures, and event-loop callbacks. Each
item has a token of its own, so taking an item orders nothing after later items. If the taken item is unknown (a queue that
changes its items), the taking thread is ordered after all items given so far.
"""

from __future__ import annotations

import queue
import threading
from asyncio import BaseEventLoop
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import _base as futures
from multiprocessing import connection
from typing import Any
from weakref import WeakKeyDictionary

from outrider.device import Observer
from outrider_sanitizer.detector.actors import SingleUseToken, TaskToken
from outrider_sanitizer.observation.replaced_names import Replacement

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

    def _give(self, taker: Any = None) -> SingleUseToken:
        token = TaskToken() if getattr(taker, "_max_workers", 1) > 1 else SingleUseToken()
        self._observer.host_released(token)
        return token

    # -- queues ------------------------------------------------------------------------------------------------------

    def put(self, original: Any) -> Any:
        """Wrap ``Queue.put``: the item carries the clock of the putting thread."""

        def put(this: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = self._items.setdefault(this, defaultdict(deque))[id(item)]
            token = self._give()
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
            tokens = [self._give() for _ in range(n)]
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
            messages.append(self._give())
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
                token = self._give(this) if token_of is None else token_of(this)

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
