"""A check of every wait of the host in the suite: when it returns, the records that it covers have completed.

A driver that returns early once in hundreds of calls rarely does so where a test reads a result. A query after each wait
finds the call.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

from outrider.device import Backend, DeviceError, Event, Stream
from outrider_conformance.promises import blamed_on

_EARLY_FRACTION, _CLOCK_S = 0.9, 0.01
"""A wait that gives up before this fraction of its limit, less the step of a coarse clock in seconds, is too early."""


class _Record(NamedTuple):
    event: weakref.ref[Event]
    generation: int

    @property
    def is_pending(self) -> bool:
        """True if the event exists, wasn't recorded again, and hasn't completed."""
        event = self.event()
        if event is None or event.generation != self.generation:
            return False
        with event.backend.guard(f"asking event {event.name!r}"):
            done = event._query()
        return not done and event.generation == self.generation


@contextmanager
def checking_waits() -> Generator[None]:
    """Check every return of ``synchronize`` of an event, a stream or a backend inside the scope, on any thread.

    Raises :class:`AssertionError` in the wait if a record that it covers is pending, or has failed and the wait didn't raise,
    and if ``synchronize_within`` returns False before its limit.
    Devices whose schedule a tool controls aren't checked: a query is a step of their schedules.
    """
    latest: weakref.WeakKeyDictionary[Stream, _Record] = weakref.WeakKeyDictionary()
    original = Stream.record

    @wraps(original)
    def record(stream: Stream, event: Event) -> int:
        generation = original(stream, event)
        if generation:
            latest[stream] = _Record(weakref.ref(event), generation)
        return generation

    def of_event(event: Event) -> list[_Record]:
        return [_Record(weakref.ref(event), event.generation)]

    def of_stream(stream: Stream) -> list[_Record]:
        return [latest[stream]] if stream in latest else []

    def of_backend(backend: Backend) -> list[_Record]:
        return [latest[stream] for stream in backend.streams if stream in latest]

    waits: list[tuple[type, str, Callable[[Any], Iterable[_Record]]]] = [
        (Event, "synchronize", of_event),
        (Event, "synchronize_within", of_event),
        (Stream, "synchronize", of_stream),
        (Backend, "synchronize", of_backend),
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.object(Stream, "record", record))
        for owner, name, covered in waits:
            checked = _checked(f"{owner.__name__}.{name}", getattr(owner, name), covered)
            stack.enter_context(patch.object(owner, name, checked))
        yield


def _checked(member: str, method: Callable[..., Any], covered: Callable[[Any], Iterable[_Record]]) -> Callable[..., Any]:
    @wraps(method)
    def wait(waited: Any, *args: Any, **kwargs: Any) -> Any:
        backend: Backend = waited if isinstance(waited, Backend) else waited.backend
        records = () if backend.control is not None else covered(waited)
        began = time.monotonic()
        result, fault = method(waited, *args, **kwargs), ""
        spent = time.monotonic() - began
        try:
            if result is not False and any(each.is_pending for each in records):
                fault = "a record that it covers is pending"
            if result is False and spent < _EARLY_FRACTION * args[0] - _CLOCK_S:
                fault = f"it gave up after {spent:.2g} s of {args[0]:g} s: are these other units, or whole seconds?"
        except DeviceError as failed:  # raised here, the error would hide that the wait has not raised it
            fault = f"work that it covers has failed: raise this error there: {failed}"
        if fault:
            with blamed_on(member):
                raise AssertionError(f"{member} has returned, and {fault}")
        return result

    return wait
