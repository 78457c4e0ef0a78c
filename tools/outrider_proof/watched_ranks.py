"""Ranks as threads of simulated devices, on the schedule that is set, and watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider_proof.decode_program import WrongTokens

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider_sanitizer import Report


def run_watched(
    backends: Sequence[Backend],
    body: Callable[[int], None],
    *,
    lost: Sequence[str],
    told: Callable[[Report], None] = lambda report: None,
) -> None:
    """``body(rank)`` for each of ``backends``, on a thread of its own. ``told`` gets the sanitizer's report before they run.

    Raises :class:`RaceError` for what the sanitizer found, what a body raised, and :class:`WrongTokens` for what is ``lost``
    at the end.
    """
    from outrider_sanitizer import RaceError, watch_ranks
    from outrider_sanitizer.races.rank_program import control_of

    # The engine orders whole tensors of rows, never some rows of one against others.
    with watch_ranks(backends, rows_apart=False) as report:
        told(report)
        problem: Exception | None = None
        try:
            control_of(backends[0]).run_threads(*((lambda rank=rank: body(rank)) for rank in range(len(backends))))
        except Exception as error:
            problem = error
    if not report.clean:
        # A race explains a wrong token, not the other way round; what ended the run may explain a call left out.
        raise RaceError(report) from problem
    if problem is not None:
        raise problem
    if lost:
        raise WrongTokens("; ".join(lost))
