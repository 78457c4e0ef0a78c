"""Choosing among candidates by the time of what they're used in: one choice after another, while the others stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")
Report = Callable[[str], None]
"""Takes a line of progress."""

BETTER = 0.999
"""A smaller gain than this is taken for noise."""


def fastest(measure: Callable[[T], float], trials: Iterable[T], start: tuple[T, float] | None = None) -> tuple[T, float]:
    """The fastest of ``start`` and ``trials``, with its microseconds; the first among equals.

    Raises :class:`ValueError` where there is nothing to choose from.
    """
    best = start
    for trial in trials:
        us = measure(trial)
        if best is None or us < best[1]:
            best = trial, us
    if best is None:
        raise ValueError("there is nothing to choose from: no start and no trial")
    return best


class Search(Generic[T]):
    """What was kept so far: ``table``, a record of every choice, and ``us``, the microseconds that ``measure`` says it takes.

    ``measure`` returns infinity for a table something of which can't be compiled. ``before_us``: what the first table took.
    """

    def __init__(self, measure: Callable[[T], float], table: T, us: float, report: Report) -> None:
        self.measure, self.table, self.report = measure, table, report
        self.before_us = self.us = us

    def best(self, trials: Iterable[T], start: tuple[T, float] | None = None) -> tuple[T, float]:
        """See :func:`fastest`. Nothing is kept yet."""
        return fastest(self.measure, trials, start)

    def offer(self, table: T, us: float) -> bool:
        """Keep ``table`` if it's faster than what is kept, by more than noise; whether it was."""
        kept = us < self.us * BETTER
        if kept:
            self.table, self.us = table, us
        return kept
