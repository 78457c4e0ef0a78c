"""A watched run: the right sanitizer for a backend, attached while a scope lasts."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from outrider_sanitizer.findings import Report
from outrider_sanitizer.hostsync import host_edges
from outrider_sanitizer.ranks import Ranks
from outrider_sanitizer.sanitizer import Sanitizer

if TYPE_CHECKING:
    from outrider.device import Backend


def _make(backend: Backend, rows_apart: bool, ranks: Ranks | None) -> Sanitizer:
    if backend.capabilities.reports_accesses:
        return Sanitizer(backend, ranks)
    from outrider_sanitizer.dispatch import DerivedSanitizer  # it imports torch, which a command's help does without

    return DerivedSanitizer(backend, ranks, rows_apart=rows_apart)


@contextmanager
def watch(backend: Backend, *, rows_apart: bool = True) -> Generator[Report]:
    """Sanitize what runs inside the ``with``; the report fills as it goes and is complete at its end.

    On a backend that reports its memory accesses nothing else is needed. Elsewhere they are derived from torch's
    dispatcher on the calling thread and on the threads that it starts. There, two accesses whose rows are decided by data
    are taken to be disjoint; without ``rows_apart`` they're taken to overlap, which finds more and may raise false alarms.
    """
    with watching(backend, rows_apart=rows_apart) as sanitizer:
        yield sanitizer.report


@contextmanager
def watch_ranks(backends: Iterable[Backend], *, rows_apart: bool = True) -> Generator[Report]:
    """:func:`watch` over the devices of several ranks, which are threads of this process: one report for all of them.

    Beside what each rank does for itself, it finds collectives that don't match, that nothing orders or that a rank leaves
    out, and names the first decision (``Group.decide``) in which ranks differ.
    """
    ranks = Ranks()
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(watching(backend, rows_apart=rows_apart, ranks=ranks))
        yield ranks.report


@contextmanager
def watching(backend: Backend, *, rows_apart: bool = True, ranks: Ranks | None = None) -> Generator[Sanitizer]:
    """:func:`watch`, for tools that also ask where streams stand; ``ranks``: shared with the sanitizers of other ranks."""
    with ExitStack() as stack:
        sanitizer = _make(backend, rows_apart, ranks)
        backend.attach(sanitizer)
        stack.callback(backend.detach)
        stack.enter_context(host_edges(sanitizer, sanitizer.thread_scope))
        stack.enter_context(sanitizer.scope())
        stack.enter_context(sanitizer.thread_scope())
        try:
            yield sanitizer
        finally:
            sanitizer.finish()
