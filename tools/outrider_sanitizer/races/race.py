"""One program of the corpus: a fault in a stream program, and the same program corrected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.device import Backend, Stream
from outrider_sanitizer.report.findings import FindingKind

Body = Callable[[Backend, bool], None]


class WrongValue(AssertionError):
    """A program of the corpus read a wrong value."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """One class of fault, as a small program with the fault and the same program corrected."""

    name: str
    about: str
    body: Body
    """The function that runs the program, called with the backend, and True for the corrected program."""
    kind: FindingKind | None = None
    """Finding that the sanitizer must make after one run in program order; None if only some schedules show the fault."""
    names: tuple[str, ...] = ()
    """Texts that the sanitizer's report must contain."""
    visible: bool = True
    """True if some schedule gives a wrong value or a hang."""
    within: int = 20
    """Number of schedules within which a visible fault shows."""
    needs: str = ""
    """Name of a device capability that the program needs, or an empty string."""

    def wrong(self, backend: Backend) -> None:
        """Run the program with the fault. Raises :class:`WrongValue` if the program reads a wrong value."""
        self.body(backend, False)

    def right(self, backend: Backend) -> None:
        """Run the corrected program on ``backend``. Raises :class:`WrongValue` if the program reads a wrong value."""
        self.body(backend, True)


def race(races: list[Race], kind: FindingKind | None = None, **fields: Any) -> Callable[[Body], Body]:
    """Return a decorator that appends a body to ``races`` as a :class:`Race`.

    Its name is the function's, in hyphens, and its description is the first line of the docstring. ``fields`` are further
    fields of :class:`Race`.
    """

    def register(body: Body) -> Body:
        races.append(Race(name=body.__name__.replace("_", "-"), about=first_line(body), body=body, kind=kind, **fields))
        return body

    return register


def first_line(body: Callable[..., object]) -> str:
    """Return the first line of a function's docstring."""
    return (body.__doc__ or "").partition("\n")[0]


def filled(backend: Backend, stream: Stream, value: float, *shape: int) -> Tensor:
    """Return a device tensor of one value, created on ``stream``."""
    with backend.on(stream):
        return torch.full(shape or (4,), value, device=backend.device)


def order(first: Stream, *later: Stream) -> None:
    """Order the next operations of ``later`` after all operations enqueued on ``first`` so far."""
    event = first.backend.create_event("order")
    first.record(event)
    for stream in later:
        stream.wait(event)


def expect(backend: Backend, tensor: Tensor, *values: float) -> None:
    """Synchronize the device and compare a tensor. Raises :class:`WrongValue` unless each element is one of ``values``."""
    backend.synchronize()
    expect_values(tensor.flatten().tolist(), *values)


def expect_values(seen: list[float], *values: float) -> None:
    """Compare values that the host has read. Raises :class:`WrongValue` unless each of ``seen`` is one of ``values``."""
    if any(value not in values for value in seen):
        raise WrongValue(f"expected {' or '.join(map(str, values))}, found {seen}")
