"""A watched run: the sanitizer that suits a backend, attached for the duration of a scope."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from outrider_sanitizer.detector.ranks import RankClocks
from outrider_sanitizer.observation.hostsync import host_edges
from outrider_sanitizer.observation.sanitizer import Sanitizer
from outrider_sanitizer.report import Report

if TYPE_CHECKING:
    from outrider.device import Backend


def _make(backend: Backend, rows_apart: bool, ranks: RankClocks | None, torch_calls: bool) -> Sanitizer:
    if backend.capabilities.reports_accesses:
        return Sanitizer(backend, ranks)
    if torch_calls:
        from outrider_sanitizer.observation.torch_calls import TorchSanitizer, torch_trace_module

        trace = torch_trace_module(backend)
        if trace is not None:
            return TorchSanitizer(backend, trace, ranks, rows_apart=rows_apart)
    from outrider_sanitizer.observation.dispatch import (
        DerivedSanitizer,  # it imports torch, which a command's help does without
    )

    return DerivedSanitizer(backend, ranks, rows_apart=rows_apart)


@contextmanager
def watch(backend: Backend, *, rows_apart: bool = True, torch_calls: bool = False) -> Generator[Report]:
    """Sanitize the work inside the ``with``; the report fills during the run and is complete at the end of the scope.

    A backend that reports its memory accesses needs nothing else. For other backends, accesses are derived from torch's
    dispatcher on the calling thread and on the threads that it starts. There, two accesses whose rows depend on data count as
    disjoint; with ``rows_apart=False`` they count as overlapping, which finds more and may raise false alarms.

    ``torch_calls`` also watches the program's own torch streams, events and graphs outside the backend interface, where torch
    reports them (its CUDA module), for one backend of a device at a time. A backend that reports its accesses reports these
    too.
    """
    with watching(backend, rows_apart=rows_apart, torch_calls=torch_calls) as sanitizer:
        yield sanitizer.report


@contextmanager
def watch_ranks(backends: Iterable[Backend], *, rows_apart: bool = True) -> Generator[Report]:
    """Watch the devices of several ranks, which are threads of this process, and make one report for all of them.
    ``rows_apart``: see :func:`watch`.

    In addition to the faults of each rank, the report has collectives that do not match, have no order or are missing on a
    rank. It names the first decision (``Group.decide``) in which ranks differ.
    """
    ranks = RankClocks()
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(watching(backend, rows_apart=rows_apart, ranks=ranks))
        yield ranks.report


@contextmanager
def watching(
    backend: Backend, *, rows_apart: bool = True, ranks: RankClocks | None = None, torch_calls: bool = False
) -> Generator[Sanitizer]:
    """Attach a sanitizer to ``backend`` as :func:`watch` does, and yield the sanitizer instead of its report.

    ``rows_apart`` and ``torch_calls``: see :func:`watch`. ``ranks`` is the state shared with the sanitizers of other ranks.
    """
    with ExitStack() as stack:
        sanitizer = _make(backend, rows_apart, ranks, torch_calls)
        backend.attach(sanitizer)
        stack.callback(backend.detach)
        stack.enter_context(host_edges(sanitizer, sanitizer.thread_scope))
        stack.enter_context(sanitizer.scope())
        stack.enter_context(sanitizer.thread_scope())
        try:
            yield sanitizer
        finally:
            sanitizer.finish()
