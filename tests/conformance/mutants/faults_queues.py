"""Faults of queues, events and placement, in the backend whose streams are threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from conformance.mutants.catalogue import Mutant, patch, patched

THREADS = "threads"


def mutants() -> Iterator[Mutant]:
    for verb, fault, level, apply in (
        ("Backend._create_stream", "hands out a recycled stream after sixteen", 1, _recycled(16)),
        ("Backend._create_stream", "hands out a recycled stream after two", 1, _recycled(2)),
        ("Stream._wait", "looks at the event when it runs", 1, _late_binding),
        ("Stream._wait", "waits for the whole producing stream", 1, _waits_for_stream),
        ("Event._synchronize", "waits for the whole stream", 1, _event_waits_for_stream),
        ("Event._elapsed_ms", "measures seconds", 1, _elapsed(lambda ms: ms / 1e3)),
        ("Event._elapsed_ms", "is always zero", 1, _elapsed(lambda ms: 0.0)),
        ("Event._elapsed_ms", "is negative", 1, _elapsed(lambda ms: -ms)),
        ("Event._elapsed_ms", "is the same for everything", 1, _elapsed(lambda ms: 1.0)),
        ("Backend._on", "isn't restored on exit", 1, _not_restored(always=True)),
        ("Backend._on", "isn't restored after an exception", 1, _not_restored(always=False)),
        ("Backend._on", "moves every thread's work", 1, _process_wide),
    ):
        yield Mutant(verb, fault, THREADS, level, apply)


# -- order ----------------------------------------------------------------------------------------------------------------


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


def _event_waits_for_stream(base):
    patch(base.stream, "_record", lambda original: lambda self, event: (original(self, event), setattr(event, "on", self))[0])
    base.event._synchronize = lambda self: self.on._synchronize()


def _elapsed(change):
    return lambda base: patch(base.event, "_elapsed_ms", lambda original: lambda self, end: change(original(self, end)))


# -- streams and scopes ---------------------------------------------------------------------------------------------------


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
