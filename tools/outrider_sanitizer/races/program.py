"""One program of the corpus: a fault in a stream program, and the same program corrected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.device import Backend, Stream
from outrider_sanitizer.findings import Kind

Body = Callable[[Backend, bool], None]


class WrongValue(AssertionError):
    """A program of the corpus read a wrong value."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """One class of fault: ``body(backend, fixed)`` is the wrong program, or the corrected one.

    ``kind`` and ``names`` are what the sanitizer must say of the wrong one, after one run in program order; no kind: only
    some schedules show it. ``visible``: some schedule gives a wrong value or hangs, and ``within`` schedules are enough
    to find it. ``needs`` is a capability that it can't do without.
    """

    name: str
    about: str
    body: Body
    kind: Kind | None = None
    names: tuple[str, ...] = ()
    visible: bool = True
    within: int = 20
    needs: str = ""

    def wrong(self, backend: Backend) -> None:
        """The program with the fault; raises where it reads a wrong value."""
        self.body(backend, False)

    def right(self, backend: Backend) -> None:
        """The corrected program."""
        self.body(backend, True)


def race(races: list[Race], about: str, kind: Kind | None = None, **fields: Any) -> Callable[[Body], Body]:
    """Return a decorator that appends a body to ``races`` as a :class:`Race` with the function's name, in hyphens.

    ``fields`` are further fields of :class:`Race`.
    """

    def register(body: Body) -> Body:
        races.append(Race(name=body.__name__.replace("_", "-"), about=about, body=body, kind=kind, **fields))
        return body

    return register


def filled(backend: Backend, stream: Stream, value: float, *shape: int) -> Tensor:
    """A tensor of one value, made on ``stream``."""
    with backend.on(stream):
        return torch.full(shape or (4,), value, device=backend.device)


def order(first: Stream, *later: Stream) -> None:
    """Everything on ``first`` so far comes before what the others do from here."""
    event = first.backend.create_event("order")
    first.record(event)
    for stream in later:
        stream.wait(event)


def expect(backend: Backend, tensor: Tensor, *values: float) -> None:
    """Wait for the device and compare. Raises :class:`WrongValue`."""
    backend.synchronize()
    expect_values(tensor.flatten().tolist(), *values)


def expect_values(seen: list[float], *values: float) -> None:
    """Compare host values. Raises :class:`WrongValue` unless each of ``seen`` is one of ``values``."""
    if any(value not in values for value in seen):
        raise WrongValue(f"expected {' or '.join(map(str, values))}, found {seen}")
