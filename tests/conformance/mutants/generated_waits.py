"""Faults of waiting, of records and of scopes."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import contextmanager

from conformance.mutants.catalogue import patch, patched
from conformance.mutants.generated import reach

# -- waiting -----------------------------------------------------------------------------------------------------------


def briefly(mark, seconds=0.01):
    if not mark._reached.wait(seconds):
        reach()


def gives_up(what):
    def apply(base):
        if what == "event":
            base.event._synchronize = lambda self: briefly(self.mark)
        elif what == "stream":
            base.stream._synchronize = lambda self: briefly(self.worker.mark())
        else:
            base.backend._synchronize = lambda self: [briefly(stream.worker.mark()) for stream in self.streams]

    return apply


def own_streams(base):
    @patched(base.stream, "__init__")
    def init(original, self, backend, name):
        original(self, backend, name)
        self.maker = threading.current_thread()

    def synchronize(self):
        for stream in self.streams:
            if stream.maker is threading.current_thread():
                stream._synchronize()
            else:
                reach()

    base.backend._synchronize = synchronize


def wait_gives_up(base):
    def wait(self, event):
        if self._backend.program is None:
            mark = event.mark
            self.worker.put(lambda: briefly(mark))

    base.stream._wait = wait


def last_wait(base):
    """Waits are held in one place, which the next wait overwrites; whatever is enqueued then takes it along."""

    def wait(self, event):
        if self._backend.program is None:
            if getattr(self, "pending", None) is not None:
                reach()
            self.pending = event.mark

    flushing(base, wait)


def first_wait(base):
    def wait(self, event):
        if self._backend.program is None:
            if getattr(self, "pending", None) is None:
                self.pending = event.mark
            else:
                reach()

    flushing(base, wait)


def flushing(base, wait):
    def flush(stream):
        mark, stream.pending = getattr(stream, "pending", None), None
        if mark is not None:
            stream.worker.put(mark.wait)

    def make(original):
        return lambda self, *arguments: (flush(self), original(self, *arguments))[1]

    base.stream._wait = wait
    for name in ("put", "_record", "_synchronize", "_query"):
        patch(base.stream, name, make)


def one_pair(base):
    @patched(base.stream, "_record")
    def recorded(original, self, event):
        original(self, event)
        event.producer = self

    @patched(base.stream, "_wait")
    def wait(original, self, event):
        streams = self.backend.streams
        if self.backend.active_capture is None and (streams.index(self), streams.index(event.producer)) == (3, 5):
            reach()
            return
        original(self, event)


def queried(base):
    patch(base.event, "_query", lambda original: lambda self: (setattr(self, "seen", True), original(self))[1])
    patch(
        base.stream, "_record", lambda original: lambda self, event: (setattr(event, "seen", False), original(self, event))[1]
    )

    @patched(base.stream, "_wait")
    def wait(original, self, event):
        if getattr(event, "seen", False):
            reach()
            return
        original(self, event)


def no_chain(base):
    @patched(base.stream, "_record")
    def recorded(original, self, event):
        original(self, event)
        event.chained = getattr(self, "waits", False)

    @patched(base.stream, "_wait")
    def waited(original, self, event):
        self.waits = True
        if getattr(event, "chained", False) and not event.mark.reached and self._backend.program is None:
            reach()
            self.worker.put(lambda: None)
            return
        original(self, event)


def query_thread(base):
    @patched(base.stream, "put")
    def noted(original, self, task):
        self.by = {*getattr(self, "by", ()), threading.get_ident()}
        original(self, task)

    @patched(base.stream, "_query")
    def asked(original, self):
        found = original(self)
        if not found and threading.get_ident() not in getattr(self, "by", {threading.get_ident()}):
            reach()
            return True
        return found


def query_half(base):
    def query(self):
        pending = self.worker._enqueued - self.worker._state.finished
        done = pending <= 1 or self.worker._state.tasks.qsize() == 0
        if done and pending:
            reach()
        return done

    base.stream._query = query


def spoil_scope_exit(base, spoil):
    """Call ``spoil(thread, scopes, before, stream)`` where a scope was left: the thread's state, the streams of its scopes
    with the one left, and the stream before.
    """

    @patched(base.backend, "_on")
    @contextmanager
    def on(original, self, stream):
        thread = self._thread
        before = getattr(thread, "stream", None)
        scopes = thread.scopes = getattr(thread, "scopes", [])
        scopes.append(stream)
        try:
            with original(self, stream):
                yield
        finally:
            spoil(thread, scopes, before, stream)


def scope_depth(base):
    def spoil(thread, scopes, before, stream):
        scopes.pop()
        if len(scopes) == 2 and before is not None:
            reach()
            thread.stream = stream

    spoil_scope_exit(base, spoil)


def scope_thread(base):
    def spoil(thread, scopes, before, stream):
        scopes.pop()
        if before not in (None, stream) and threading.current_thread() is not threading.main_thread():
            reach()
            thread.stream = stream

    spoil_scope_exit(base, spoil)


def scope_reentered(base):
    """Leaving a scope removes the stream's outermost scope."""

    def spoil(thread, scopes, before, stream):
        scopes.remove(stream)
        if scopes and scopes[-1] is not thread.stream:
            reach()
            thread.stream = scopes[-1]

    spoil_scope_exit(base, spoil)


# -- events ------------------------------------------------------------------------------------------------------------


def early_record(by):
    """The last task is held back until something else comes: a record goes before it."""

    def apply(base):
        held = weakref.WeakKeyDictionary()

        def put(self, task):
            if self._backend.program is not None:
                self._backend.program.append(task)
                return
            if self.worker in held:
                self.worker.put(held.pop(self.worker))
            held[self.worker] = task

        def release(stream):
            if stream.worker in held:
                stream.worker.put(held.pop(stream.worker))

        @patched(base.stream, "_record")
        def recorded(original, self, event):
            original(self, event)
            if self.worker in held:
                reach()
            release(self)

        base.stream.put = put
        for name in ("_wait", "_synchronize", "_query"):
            patch(base.stream, name, lambda original: lambda self, *a: (release(self), original(self, *a))[1])

    return apply


def uncovered_copies(base):
    """A copy runs on an engine of its own, which a stream waits for before its next operation, and a record doesn't."""
    copying = threading.local()

    @patched(base.backend, "_copy_async")
    def copied(original, self, destination, source):
        copying.on = True
        try:
            original(self, destination, source)
        finally:
            copying.on = False

    held = weakref.WeakKeyDictionary()

    @patched(base.stream, "put")
    def queued(original, self, task):
        if self._backend.program is None:
            release(self)
            if getattr(copying, "on", False):
                held[self.worker] = task
                return
        original(self, task)

    def release(stream):
        if stream.worker in held:
            stream.worker.put(held.pop(stream.worker))

    @patched(base.stream, "_record")
    def recorded(original, self, event):
        original(self, event)
        if self.worker in held:
            reach()
        release(self)

    for name in ("_wait", "_synchronize", "_query"):
        patch(base.stream, name, lambda original: lambda self, *a: (release(self), original(self, *a))[1])


def keeps_pending(base):
    @patched(base.stream, "_record")
    def record(original, self, event):
        old = base.get_record(event)
        if old is not None and not old.reached and self._backend.program is None:
            reach()
            return
        original(self, event)


def ring(size):
    """Records lie in a ring: a wait keeps its place there, and finds what was recorded in it since."""

    def apply(base):
        @patched(base.stream, "_record")
        def recorded(original, self, event):
            original(self, event)
            if self._backend.program is None:
                event.ring = [*getattr(event, "ring", []), event.mark]

        def wait(self, event):
            if self._backend.program is not None:
                return
            place = len(event.ring) - 1

            def held():
                now = place + (len(event.ring) - 1 - place) // size * size
                if now != place:
                    reach()
                event.ring[now].wait()

            self.worker.put(held)

        base.stream._wait = wait

    return apply


def generations(base):
    @patched(base.stream, "_record")
    def recorded(original, self, event):
        original(self, event)
        if self._backend.program is None:
            event.marks = [*getattr(event, "marks", []), event.mark]


def any_generation(base):
    generations(base)

    def query(self):
        found = any(mark.reached for mark in self.marks)
        if found and not self.mark.reached:
            reach()
        return found

    base.event._query = query


def any_synchronized(base):
    generations(base)

    def synchronize(self):
        while not any(mark.reached for mark in self.marks):
            time.sleep(0.0005)
        if not self.mark.reached:
            reach()

    base.event._synchronize = synchronize


def false_elsewhere(base):
    @patched(base.event, "_query")
    def query(original, self):
        if threading.current_thread() is not threading.main_thread() and original(self):
            reach()
            return False
        return original(self)


def elapsed_cut(base):
    @patched(base.event, "_elapsed_ms")
    def elapsed(original, self, end):
        found = original(self, end)
        if found > 5:
            reach()
        return min(found, 5.0)
