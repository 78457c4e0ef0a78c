"""Faults of queues, memory and placement, in the backend whose streams are threads, and of memory in the simulated one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from conformance.mutants.catalogue import Mutant, other, patch

THREADS, SIM = "threads", "sim"


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
        ("Backend._empty_pinned", "hands out the same memory again", 1, _same_pinned),
        ("Backend._empty_pinned", "has another dtype", 1, _pinned_dtype),
        ("Backend._empty_pinned", "isn't contiguous", 1, _pinned_strided),
        ("Backend._copy_async", "leaves the last element out", 1, _copy_short),
        ("Backend._copy_async", "goes the other way", 1, _copy_back),
        ("Backend._copy_async", "copies the neighbours of a slice too", 1, _copy_neighbours),
        ("Backend._copy_async", "reads the source at the call", 1, _copy_snapshot),
        ("Backend._copy_async", "goes to another stream", 1, _copy_elsewhere),
        ("Backend._copy_async", "writes memory of its own", 1, _copy_into_clone),
        ("Backend.memory_info", "is negative", 1, _negative_memory),
    ):
        yield Mutant(verb, fault, THREADS, level, apply)
    for verb, fault, level, apply in (
        ("Backend._empty_pinned", "is pageable", 1, _pageable),
        ("Backend._is_pinned", "is True for all memory", 1, lambda base: patch(base.backend, "_is_pinned", _true)),
        ("Backend._is_pinned", "is False for all memory", 1, lambda base: patch(base.backend, "_is_pinned", _false)),
        ("Backend._is_pinned", "doesn't know slices", 1, _forgets_slices),
        ("Backend.memory_info", "doesn't follow allocations", 1, _frozen_memory),
        ("Backend.memory_info", "counts backwards", 1, _reversed_memory),
        ("Backend.locate", "is one byte off", 1, _locate_off),
        ("Observer.launched", "isn't told of writes", 1, _writes_untold),
        ("Observer.rows_touched", "is told of one row more", 1, _rows_wrong),
        ("events", "are recycled by the driver", 1, _recycled_events),
    ):
        yield Mutant(verb, fault, SIM, level, apply)
    for base in (THREADS, SIM):
        yield Mutant("Backend.keep_alive", "holds nothing", base, 1, _hold_nothing)
        yield Mutant("Backend.release_finished", "drops everything", base, 1, _release_all)
        yield Mutant("Backend.release_finished", "drops nothing", base, 1, _release_none)
        yield Mutant("Backend.release_finished", "waits for the events", base, 1, _release_waits)
        yield Mutant("Fence", "is the same for every edge", base, 1, _one_fence)


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

    def make(original):
        def start(self, *arguments):
            original(self, *arguments)
            threading.Thread(target=worker._run, args=(self._state,), daemon=True).start()

        return start

    patch(worker.Worker, "__init__", make)


def _one_worker(base):
    shared = []

    def make(original):
        def init(self, backend, name):
            original(self, backend, name)
            if not backend.streams:
                shared.clear()
            shared.append(self.worker)
            self.worker = shared[0]

        return init

    patch(base.stream, "__init__", make)


def _recycled(after):
    def apply(base):
        def make(original):
            def init(self, backend, name):
                original(self, backend, name)
                made = backend.streams
                if len(made) >= after:
                    self.worker = made[len(made) % after].worker

            return init

        patch(base.stream, "__init__", make)

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
    def make(original):
        def record(self, event):
            if self._backend.program is None:
                for stream in self.backend.streams:
                    if stream is not self:
                        self.worker.put(stream.worker.mark().wait)
            original(self, event)

        return record

    patch(base.stream, "_record", make)


def _late_binding(base):
    def wait(self, event):
        if self._backend.program is None:
            self.worker.put(lambda: event.mark.wait())

    base.stream._wait = wait


def _waits_for_stream(base):
    def make(original):
        def wait(self, event):
            if self._backend.program is None:
                event.mark = event.on.mark()
            original(self, event)

        return wait

    def record(original):
        def recorded(self, event):
            original(self, event)
            event.on = self.worker

        return recorded

    patch(base.stream, "_record", record)
    patch(base.stream, "_wait", make)


def _wait_one_late(base):
    def wait(self, event):
        if self._backend.program is None:
            self.waiting = [*getattr(self, "waiting", []), event.mark]

    def put(original):
        def late(self, task):
            original(self, task)
            for mark in getattr(self, "waiting", []):
                self.worker.put(mark.wait)
            self.waiting = []

        return late

    base.stream._wait = wait
    patch(base.stream, "put", put)


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
        def make(original):
            @contextmanager
            def on(self, stream):
                before = getattr(self._thread, "stream", None)
                if before is None:
                    with original(self, stream):
                        yield
                    return
                self._thread.stream = stream
                yield
                if not always:  # an exception never gets here
                    self._thread.stream = before

            return on

        patch(base.backend, "_on", make)

    return apply


def _process_wide(base):
    class Everywhere:
        """One attribute namespace for all threads."""

    def make(original):
        def init(self):
            original(self)
            self._thread = Everywhere()

        return init

    patch(base.backend, "__init__", make)


def _on_synchronises(base):
    from contextlib import contextmanager

    def make(original):
        @contextmanager
        def on(self, stream):
            with original(self, stream):
                yield
            if self.active_capture is None:
                stream._synchronize()

        return on

    patch(base.backend, "_on", make)


# -- memory ---------------------------------------------------------------------------------------------------------------


def _same_pinned(base):
    def make(original):
        kept = {}

        def empty(self, shape, dtype):
            return kept.setdefault((shape, dtype), original(self, shape, dtype))

        return empty

    patch(base.backend, "_empty_pinned", make)


def _pinned_dtype(base):
    import torch

    patch(base.backend, "_empty_pinned", lambda original: lambda self, shape, dtype: original(self, shape, torch.float64))


def _pinned_strided(base):
    patch(
        base.backend, "_empty_pinned", lambda original: lambda self, shape, dtype: original(self, (*shape, 2), dtype)[..., 0]
    )


def _copy(base, change):
    def make(original):
        return lambda self, destination, source: change(self, original, destination, source)

    patch(base.backend, "_copy_async", make)


def _copy_short(base):
    def change(self, original, destination, source):
        original(self, destination.flatten()[:-1], source.flatten()[:-1])

    _copy(base, change)


def _copy_back(base):
    _copy(base, lambda self, original, destination, source: original(self, source, destination))


def _copy_neighbours(base):
    def change(self, original, destination, source):
        if destination._base is not None and source._base is not None and destination._base.shape == source._base.shape:
            return original(self, destination._base, source._base)
        return original(self, destination, source)

    _copy(base, change)


def _copy_snapshot(base):
    def change(self, original, destination, source):
        import torch

        with torch.utils._python_dispatch._disable_current_modes():
            snapshot = source.clone()
        original(self, destination, snapshot)

    _copy(base, change)


def _copy_elsewhere(base):
    def change(self, original, destination, source):
        with self._on(other(self._thread.stream)):
            original(self, destination, source)

    _copy(base, change)


def _copy_into_clone(base):
    import torch

    _copy(base, lambda self, original, destination, source: original(self, torch.empty_like(destination), source))


def _negative_memory(base):
    from outrider.device import MemoryInfo

    base.backend.memory_info = lambda self: MemoryInfo(total=0, free=0, allocated=-1)


def _pageable(base):
    import torch

    base.backend._empty_pinned = lambda self, shape, dtype: torch.empty(shape, dtype=dtype)


def _true(original):
    return lambda self, tensor: True


def _false(original):
    return lambda self, tensor: False


def _forgets_slices(base):
    patch(base.backend, "_is_pinned", lambda original: lambda self, t: original(self, t) and t.storage_offset() == 0)


def _frozen_memory(base):
    from dataclasses import replace

    patch(base.backend, "memory_info", lambda original: lambda self: replace(original(self), allocated=0))


def _reversed_memory(base):
    from dataclasses import replace

    def make(original):
        def info(self):
            found = original(self)
            return replace(found, allocated=found.free, free=max(found.allocated, 1))

        return info

    patch(base.backend, "memory_info", make)


def _locate_off(base):
    from dataclasses import replace

    def make(original):
        def locate(self, tensor):
            place = original(self, tensor)
            return replace(place, start=place.start + 1)

        return locate

    patch(base.backend, "locate", make)


def _attached(base, change):
    """The observer that is attached is a changed one."""

    def make(original):
        def attach(self, observer):
            change(observer)
            original(self, observer)

        return attach

    patch(base.backend, "attach", make)


def _writes_untold(base):
    from dataclasses import replace

    def change(observer):
        told = observer.launched
        observer.launched = lambda o: told(replace(o, accesses=tuple(a for a in o.accesses if not a.write)))

    _attached(base, change)


def _rows_wrong(base):
    from dataclasses import replace

    def change(observer):
        told = observer.rows_touched
        observer.rows_touched = lambda o, rows: told(o, tuple(replace(a, end=a.end + (a.end - a.start)) for a in rows))

    _attached(base, change)


def _recycled_events(base):
    base.spec = "sim:events=recycled"


# -- lifetime -------------------------------------------------------------------------------------------------------------


def _keeper():
    from outrider.device.memory import KeepAlive

    return KeepAlive


def _hold_nothing(base):
    _keeper().hold = lambda self, objects, until: None


def _release_all(base):
    _keeper().release_finished = lambda self: (self._held.clear(), 0)[1]


def _release_none(base):
    _keeper().release_finished = lambda self: len(self._held)


def _release_waits(base):
    def make(original):
        return lambda self: ([event.synchronize() for event, _ in self._held], original(self))[1]

    patch(_keeper(), "release_finished", make)


def _one_fence(base):
    def make(original):
        def create(self, name):
            fence = original(self, name)
            fence.event = self.__dict__.setdefault("shared", fence.event)
            return fence

        return create

    patch(base.sync, "create_fence", make)
