"""A schedule: the deviations of a run from program order.

By default, the machine runs each operation as soon as possible, in program order, before the host continues. A schedule
is a list of *delays* of the form "step X not before step Y is done". A step is `(actor, number)`. An actor is a stream
(by name) or a host thread (`host0`, `host1`, …); the number counts that actor's steps since the last reset. In
`forward.5@plan.3/host0.2@copy.1`, operation 5 of stream `forward` waits until operation 3 of `plan` has run, and step 2
of `host0` waits for operation 1 of `copy`. `-` is program order.

A delay names operations and not positions in a log, so the string keeps its meaning while a schedule is shrunk. The
delays that remain after shrinking are the ordering that causes the failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from outrider.device import ConfigError

PROGRAM = "-"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+~-]")


class ScheduleStep(NamedTuple):
    """One step of a stream or host thread, identified by the actor's name and the step's number."""

    actor: str
    number: int

    def __str__(self) -> str:
        return f"{self.actor}.{self.number}"


class Delay(NamedTuple):
    """A constraint: `step` doesn't run before `after` has run."""

    step: ScheduleStep
    after: ScheduleStep

    def __str__(self) -> str:
        return f"{self.step}@{self.after}"


def safe_name(name: str) -> str:
    """Return the actor name of a stream: only letters, digits and `_.+~-`, so that a schedule needs no quoting."""
    return _UNSAFE.sub("-", name)


class Schedule:
    """An immutable list of delays, at most one for each step."""

    __slots__ = ("_after",)

    def __init__(self, delays: Iterable[Delay] = ()) -> None:
        self._after: dict[ScheduleStep, ScheduleStep] = {}
        for delay in delays:
            self._after[delay.step] = delay.after

    @classmethod
    def from_delays(cls, after: Mapping[ScheduleStep, ScheduleStep]) -> Schedule:
        """Return the schedule in which each key of `delays` waits for the step that is its value."""
        return cls(Delay(step, other) for step, other in after.items())

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule from the text that `str` returns. Raises `ConfigError` for other text."""
        text = text.strip()
        if text in ("", PROGRAM):
            return cls()
        delays = []
        for part in text.split("/"):
            step, at, after = part.partition("@")
            if not at:
                raise ConfigError(
                    f"schedule: {part!r} is not a delay; expected actor.index@actor.index, joined by '/', as "
                    "printed by a failing run"
                )
            delays.append(Delay(_parse_step(step, part), _parse_step(after, part)))
        return cls(delays)

    def __iter__(self) -> Iterator[Delay]:
        return (Delay(step, after) for step, after in self._after.items())

    def __len__(self) -> int:
        return len(self._after)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._after == other._after

    def __hash__(self) -> int:
        return hash(frozenset(self._after.items()))

    def __str__(self) -> str:
        return "/".join(str(delay) for delay in self) or PROGRAM

    def __repr__(self) -> str:
        return f"Schedule({str(self)!r})"

    @property
    def after(self) -> Mapping[ScheduleStep, ScheduleStep]:
        """The delays as a mapping from each delayed step to the step that it waits for."""
        return self._after

    def explain(self) -> list[str]:
        """Return one readable sentence per delay."""
        return [f"{d.step} runs after {d.after}, although the program enqueued it first" for d in self]


def _parse_step(text: str, part: str) -> ScheduleStep:
    actor, dot, index = text.rpartition(".")
    if not dot or not actor or not index.isdigit():
        raise ConfigError(f"schedule: {text!r} in {part!r} is not a step; expected actor.index, such as forward.5")
    return ScheduleStep(actor, int(index))
