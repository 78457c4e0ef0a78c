"""Run ranks as host threads on simulated devices, watched by the sanitizer."""

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
    on_report: Callable[[Report], None] = lambda report: None,
) -> None:
    """Run ``body(rank)`` for each of ``backends`` in its own thread, on the current schedule.

    ``on_report`` receives the sanitizer's report before the threads start. Raises :class:`RaceError` if the sanitizer has a
    finding, then the error of a body, then :class:`WrongTokens` if ``lost`` names pages or rows.
    """
    from outrider_sanitizer import RaceError, watch_ranks
    from outrider_sanitizer.races.rank_program import control_of

    # The engine orders accesses to whole tensors of rows, not to single rows.
    with watch_ranks(backends, rows_apart=False) as report:
        on_report(report)
        problem: Exception | None = None
        try:
            control_of(backends[0]).run_threads(*((lambda rank=rank: body(rank)) for rank in range(len(backends))))
        except Exception as error:
            problem = error
    if not report.clean:
        # A race explains wrong tokens, so it is the error; the error that ended the run may explain a missing collective.
        raise RaceError(report) from problem
    if problem is not None:
        raise problem
    if lost:
        raise WrongTokens("; ".join(lost))
