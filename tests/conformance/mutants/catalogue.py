"""What a mutant is, and the tools to make one: a fault in a verb of a correct backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """`apply(base)` breaks the base's classes in this process; the kit must notice at `level`, and not before. `kind` is the
    class of a generated mutant in the matrix, which the kit must notice at `level` at the latest.
    """

    verb: str
    fault: str
    base: str
    level: int
    apply: Callable[[Any], None]
    kind: str = ""

    @property
    def tests(self):
        """Modules of the suite that are run on it; empty: all up to its level. What collectives do is seen at L6 alone."""
        return ("test_l6_collectives",) if self.level == 6 else ()

    @property
    def near(self):
        """Words in the names of tests that are about the verb: these are run first."""
        return self.verb.rpartition(".")[2]

    @property
    def name(self):
        return f"{self.verb}: {self.fault} ({self.base})"


def patch(owner, name, make):
    """`make(original)` gives the method that takes its place."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))


def patched(owner, name):
    """Decorate the function that takes the place of a method; it gets the original method as its first argument."""

    def decorate(function):
        patch(owner, name, lambda original: lambda *arguments, **options: function(original, *arguments, **options))
        return function

    return decorate


def other(stream):
    """Another stream of the same backend, the one made before it if there is one."""
    streams = stream.backend.streams
    return streams[streams.index(stream) - 1]


def previous(base):
    """Let events remember the record before the latest one, as ``before``, and their first, as ``first``."""

    @patched(base.stream, "_record")
    def record(original, self, event):
        old = base.get_record(event)
        original(self, event)
        event.before = old if old is not None else base.get_record(event)
        event.first = getattr(event, "first", base.get_record(event))


def under(base, event, record, call):
    """`call()` while the event's latest record is another one."""
    now = base.get_record(event)
    base.set_record(event, record)
    try:
        return call()
    finally:
        base.set_record(event, now)
