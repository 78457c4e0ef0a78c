"""Faults of queues, events and placement, in the backend whose streams are threads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace

from conformance.mutants.catalogue import Mutant, patch, patched

THREADS = "threads"


def mutants() -> Iterator[Mutant]:
    for verb, fault, level, apply in (
        ("Stream", "runs its work in pairs, the second first", 1, _pairs_swapped),
        ("Stream", "runs on two threads at a time", 1, _two_workers),
        ("Stream", "is secretly the same queue as every other", 1, _one_worker),
        ("Backend._create_stream", "hands out a recycled stream after sixteen", 1, _recycled(16)),
        ("Backend._create_stream", "hands out a recycled stream after two", 1, _recycled(2)),
        ("Stream._record", "is complete at once", 1, _complete_at_once),
        ("Stream._record", "covers what comes after it", 1, _late_record),
        ("Stream._record", "waits for every other stream first", 1, _record_joins_all),
        ("Stream._wait", "looks at the event when it runs", 1, _late_binding),
        ("Stream._wait", "waits for the whole producing stream", 1, _waits_for_stream),
        ("Stream._wait", "holds the next operation but one", 1, _wait_one_late),
        ("Stream._wait", "ends when the event object is dropped", 1, _weak_wait),
        ("Stream._synchronize", "leaves the last operation out", 1, _all_but_last),
        ("Stream._query", "is True while the last operation runs", 1, _queue_empty),
        ("Event._synchronize", "waits for the whole stream", 1, _event_waits_for_stream),
        ("Backend._create_event", "gives every event the same record", 1, _one_event),
        ("Event._elapsed_ms", "measures seconds", 1, _elapsed(lambda ms: ms / 1e3)),
        ("Event._elapsed_ms", "is always zero", 1, _elapsed(lambda ms: 0.0)),
        ("Event._elapsed_ms", "is negative", 1, _elapsed(lambda ms: -ms)),
        ("Event._elapsed_ms", "is the same for everything", 1, _elapsed(lambda ms: 1.0)),
        ("Backend._synchronize", "leaves the newest stream out", 1, _all_but_newest),
        ("Backend._synchronize", "waits for the first stream alone", 1, _first_only),
        ("Backend._on", "isn't restored on exit", 1, _not_restored(always=True)),
        ("Backend._on", "isn't restored after an exception", 1, _not_restored(always=False)),
        ("Backend._on", "moves every thread's work", 1, _process_wide),
        ("Backend._on", "synchronises on exit", 1, _on_synchronises),
    ):
        yield Mutant(verb, fault, THREADS, level, apply)


# -- order ----------------------------------------------------------------------------------------------------------------


def _pairs_swapped(base):
    from outrider_threads.backend import ThreadStream

    held = weakref.WeakKeyDictionary()

    def put(self, task):
        worker = self.worker
        if self._backend.program is not None:
            self._backend.program.append(task)
        elif worker in held:
            worker.put(task)
            worker.put(held.pop(worker))
        else:
            held[worker] = task

    def flush(original):
        def flushing(self, *arguments):
            if self.worker in held:
                self.worker.put(held.pop(self.worker))
            return original(self, *arguments)

        return flushing

    ThreadStream.put = put
    for name in ("_record", "_wait", "_synchronize", "_query"):
        patch(ThreadStream, name, flush)


def _two_workers(base):
    import threading

    from outrider_threads import worker

    @patched(worker.Worker, "__init__")
    def start(original, self, *arguments):
        original(self, *arguments)
        threading.Thread(target=worker._run, args=(self._state,), daemon=True).start()


def _one_worker(base):
    shared = []

    @patched(base.stream, "__init__")
    def init(original, self, backend, name):
        original(self, backend, name)
        if not backend.streams:
            shared.clear()
        shared.append(self.worker)
        self.worker = shared[0]


def _recycled(after):
    def apply(base):
        @patched(base.stream, "__init__")
        def init(original, self, backend, name):
            original(self, backend, name)
            made = backend.streams
            if len(made) >= after:
                self.worker = made[len(made) % after].worker

    return apply


# -- events ---------------------------------------------------------------------------------------------------------------


def _complete_at_once(base):
    patch(base.stream, "_record", lambda original: lambda self, event: (original(self, event), event.mark.reach())[0])


def _late_record(base):
    def record(self, event):
        from outrider_threads.worker import Mark

        if self._backend.program is not None:
            return
        event.mark, event.late = Mark(), self.worker

    def fix(event):
        if getattr(event, "late", None) is not None:
            event.late.put(event.mark.reach)
            event.late = None

    base.stream._record = record
    patch(base.stream, "_wait", lambda original: lambda self, event: (fix(event), original(self, event))[1])
    for name in ("_query", "_synchronize"):
        patch(base.event, name, lambda original: lambda self: (fix(self), original(self))[1])
    patch(base.event, "_elapsed_ms", lambda original: lambda self, end: (fix(self), fix(end), original(self, end))[2])


def _record_joins_all(base):
    @patched(base.stream, "_record")
    def record(original, self, event):
        if self._backend.program is None:
            for stream in self.backend.streams:
                if stream is not self:
                    self.worker.put(stream.worker.mark().wait)
        original(self, event)


def _late_binding(base):
    def wait(self, event):
        if self._backend.program is None:
            self.worker.put(lambda: event.mark.wait())

    base.stream._wait = wait


def _waits_for_stream(base):
    @patched(base.stream, "_wait")
    def wait(original, self, event):
        if self._backend.program is None:
            event.mark = event.on.mark()
        original(self, event)

    @patched(base.stream, "_record")
    def recorded(original, self, event):
        original(self, event)
        event.on = self.worker


def _wait_one_late(base):
    def wait(self, event):
        if self._backend.program is None:
            self.waiting = [*getattr(self, "waiting", []), event.mark]

    @patched(base.stream, "put")
    def late(original, self, task):
        original(self, task)
        for mark in getattr(self, "waiting", []):
            self.worker.put(mark.wait)
        self.waiting = []

    base.stream._wait = wait


def _weak_wait(base):
    def wait(self, event):
        if self._backend.program is None:
            mark, alive = event.mark, weakref.ref(event)
            self.worker.put(lambda: mark.wait() if alive() is not None else None)

    base.stream._wait = wait


def _all_but_last(base):
    def synchronize(self):
        state = self.worker._state
        import time

        while state.finished < self.worker._enqueued - 1:
            time.sleep(0.0005)

    base.stream._synchronize = synchronize


def _queue_empty(base):
    base.stream._query = lambda self: self.worker._state.tasks.empty()


def _event_waits_for_stream(base):
    patch(base.stream, "_record", lambda original: lambda self, event: (original(self, event), setattr(event, "on", self))[0])
    base.event._synchronize = lambda self: self.on._synchronize()


def _one_event(base):
    def mark(self):
        return self.backend.shared_mark

    base.event.mark = property(mark, lambda self, value: setattr(self.backend, "shared_mark", value))


def _elapsed(change):
    return lambda base: patch(base.event, "_elapsed_ms", lambda original: lambda self, end: change(original(self, end)))


# -- streams and scopes ---------------------------------------------------------------------------------------------------


def _all_but_newest(base):
    base.backend._synchronize = lambda self: [stream._synchronize() for stream in self.streams[:-1]]


def _first_only(base):
    base.backend._synchronize = lambda self: [stream._synchronize() for stream in self.streams[:1]]


def _not_restored(*, always):
    from contextlib import contextmanager

    def apply(base):
        @patched(base.backend, "_on")
        @contextmanager
        def on(original, self, stream):
            before = getattr(self._thread, "stream", None)
            if before is None:
                with original(self, stream):
                    yield
                return
            self._thread.stream = stream
            yield
            if not always:  # an exception never gets here
                self._thread.stream = before

    return apply


def _process_wide(base):
    @patched(base.backend, "__init__")
    def init(original, self):
        original(self)
        self._thread = SimpleNamespace()  # one for all threads


def _on_synchronises(base):
    from contextlib import contextmanager

    @patched(base.backend, "_on")
    @contextmanager
    def on(original, self, stream):
        with original(self, stream):
            yield
        if self.active_capture is None:
            stream._synchronize()
