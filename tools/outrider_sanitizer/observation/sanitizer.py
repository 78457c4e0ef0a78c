"""The observer that passes the backend's reports to the detectors, and the scopes in which it watches a backend."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from outrider.device import Access, CapabilityError, InterfaceError, Observer, Operation
from outrider_sanitizer.detector.diagnose import Diagnoser
from outrider_sanitizer.detector.intervals import Listener
from outrider_sanitizer.detector.ordering import Ordering
from outrider_sanitizer.detector.ranks import RankClocks
from outrider_sanitizer.detector.staleness import Staleness
from outrider_sanitizer.detector.synchronization import HOST
from outrider_sanitizer.observation.hostsync import host_edges
from outrider_sanitizer.report import Advice, Finding, Report, caller_location

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.device import Backend, Collective, Decision, Event, Flag, Graph, Group, Stream


class Sanitizer(Observer):
    """The base sanitizer: attach it to a backend (or use :func:`watch`), run, call :meth:`finish` and read ``report``."""

    def __init__(self, backend: Backend, ranks: RankClocks | None = None) -> None:
        """Create a sanitizer of ``backend``. ``ranks`` is the state shared with the sanitizers of other ranks, or None."""
        self.backend = backend
        self.ranks = ranks or RankClocks(alone=True)
        self.report = self.ranks.report
        self.report.backend += f", {backend.label}" if self.report.backend else backend.label
        self._lock = self.ranks.lock
        self._labels: dict[str, str] = {}
        self._used: set[str] = set()
        # Weakly, or the names of streams that are over would stay taken.
        self._streams: WeakValueDictionary[str, Stream] = WeakValueDictionary()
        self._diagnosis = Diagnoser(backend.control, self._labels, len(self.ranks.orderings) if ranks is not None else -1)
        self._waits: dict[tuple[str, str, str], list[int]] = {}  # stream, event, source line → all waits, ordering ones
        self._ordering = Ordering(
            Listener(
                steps=self._steps,
                conflict=lambda *of: self._add(self._diagnosis.conflict(*of)),
                reused=lambda *of: self._add(self._diagnosis.reused(*of)),
                dead=lambda *of: self._add(self._diagnosis.dead(*of)),
                stale=lambda *of: self._staleness.stale(*of),
                flag=lambda *of: self._add(self._diagnosis.flag(*of)),
                rebind=lambda *of: self._add(self._diagnosis.rebind(*of)),
                waited=self._count_wait,
            ),
            rows_follow=backend.capabilities.row_exact_accesses,
            ranks=self.ranks,
        )
        self._staleness = Staleness(self._ordering, self._diagnosis, self._add, self.locate)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _add(self, finding: Finding) -> None:
        if not self.ranks.broken:
            self.report.add(finding)

    def _steps(self, stream: str) -> tuple[str, int] | None:
        control = self.backend.control
        if control is None:
            return None
        if stream == HOST:
            return control.steps(None)
        known = self._streams.get(stream)
        return control.steps(known) if known is not None else None

    def position(self, stream: Stream | None) -> int:
        """Return the number of steps of ``stream`` (None: of the calling thread) so far; 0 if the device does not count."""
        control = self.backend.control
        steps = self._steps(stream.name if stream else HOST) if control is None else control.steps(stream)
        return 0 if steps is None else steps[1]

    def thread_scope(self) -> AbstractContextManager[Any]:
        """Return the scope in which a watched thread runs."""
        return nullcontext()

    def scope(self) -> AbstractContextManager[Any]:
        """Return the scope of a whole watched run: constructors report the pinned arrays that they read."""
        from outrider_sanitizer.observation.host_arrays import (
            converted_names,  # it imports torch, which a command's help does without
        )

        return converted_names()

    def locate(self, tensor: Tensor) -> Access | None:
        """Return the storage and byte range of a tensor, or None if the backend cannot tell."""
        try:
            return self.backend.locate(tensor)
        except (CapabilityError, InterfaceError):
            return None

    def _count_wait(self, stream: str, event: str, generation: int, location: str, new: bool) -> None:
        """Count a wait of ``stream``; ``new`` is True if the wait added an order."""
        del generation
        counts = self._waits.setdefault((stream, event, location), [0, 0])
        counts[0] += 1
        counts[1] += new

    def _uses(self, stream: str) -> None:
        """Record that a stream received an operation, for the report's counts."""
        if stream not in self._used:
            self._used.add(stream)
            self.report.streams += 1

    def _watch_reads(self) -> None:
        # Reads pass through Python once more only when a rule needs them.
        self._ordering.listener.read = self._staleness.check_read

    def finish(self) -> Report:
        """End the run and return the report, with flags that hang, waits that can be removed, and blind spots."""
        with self._lock:
            self._ordering.finish()
            self.ranks.finish()
            self.report.advice += [Advice(*wait, count) for wait, (count, ordering) in self._waits.items() if not ordering]
            blind = {
                "a flag was raised outside the backend interface": self._ordering.flags_set_outside,
                "the oldest of many accesses with holes to the same bytes": sum(
                    shadow.forgotten for shadow in self._ordering.memory.shadows.values()
                ),
            }
            self.report.blind_spots += [f"{what} ({count} times)" for what, count in blind.items() if count]
        return self.report

    # -- the observer ----------------------------------------------------------------------------------------------

    def stream_created(self, stream: Stream) -> None:
        with self._lock:
            self._streams[stream.name] = stream
            self._ordering.stream_actor(stream.name)
            if self.backend.control is not None:
                self._labels[stream.name] = self.backend.control.steps(stream)[0]

    def launched(self, operation: Operation) -> None:
        with self._lock:
            self.report.operations += 1
            self._uses(operation.stream)
            self._ordering.launched(operation)

    def rows_touched(self, operation: Operation, accesses: tuple[Access, ...]) -> None:
        with self._lock:
            self._ordering.rows_touched(operation, accesses)

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        with self._lock:
            self._ordering.recorded(stream.name, event, generation)

    def waited(self, stream: Stream, event: Event, generation: int) -> None:
        with self._lock:
            self._ordering.waited(stream.name, event, generation)

    def event_synchronized(self, event: Event, generation: int) -> None:
        with self._lock:
            self._ordering.event_synchronized(event, generation)

    def event_queried(self, event: Event, generation: int, done: bool) -> None:
        if done:
            self.event_synchronized(event, generation)

    def stream_synchronized(self, stream: Stream) -> None:
        with self._lock:
            self._ordering.stream_synchronized(stream.name)

    def stream_queried(self, stream: Stream, done: bool) -> None:
        if done:
            self.stream_synchronized(stream)

    def device_synchronized(self) -> None:
        with self._lock:
            self._ordering.device_synchronized()

    def flag_set(self, stream: Stream, flag: Flag) -> None:
        with self._lock:
            self._ordering.flag_step("set", stream.name, flag)

    def flag_waited(self, stream: Stream, flag: Flag) -> None:
        with self._lock:
            self._ordering.flag_step("await", stream.name, flag)

    def flag_reset(self, stream: Stream, flag: Flag) -> None:
        with self._lock:
            self._ordering.flag_step("reset", stream.name, flag)

    def allocated(self, storage: int, nbytes: int, stream: str, location: str) -> None:
        with self._lock:
            self._ordering.allocated(storage, nbytes, stream, location)

    def memory_shared(self, storage: int, stream: str) -> None:
        with self._lock:
            self._ordering.memory.share(storage, stream)

    def freed(self, storage: int, stream: str) -> None:
        with self._lock:
            self._staleness.freed(storage)
            self._ordering.freed(storage, stream)

    def address_reused(self, storage: int, previous: int) -> None:
        with self._lock:
            self._ordering.address_reused(storage, previous)

    def host_accessed(self, access: Access, location: str) -> None:
        with self._lock:
            self._ordering.host_accessed(access, location)

    def collective(
        self, group: Group, call: Collective, stream: Stream, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        with self._lock:
            accesses = [replace(at, argument="input") for tensor in reads if (at := self.locate(tensor)) is not None]
            accesses += [
                replace(at, write=True, argument="output") for tensor in writes if (at := self.locate(tensor)) is not None
            ]
            self.report.operations += 1
            self._uses(stream.name)
            self._ordering.collective(stream.name, group, call, tuple(accesses))

    def memory_remapped(self, storage: int) -> None:
        with self._lock:
            self._ordering.memory_remapped(storage, caller_location())

    def decided(self, group: Group, name: str, value: Decision) -> None:
        with self._lock:
            self.ranks.decided(group, name, value, caller_location())

    def capture_began(self, graph: Graph, stream: Stream) -> None:
        with self._lock:
            self._ordering.capture_began(graph, stream.name)

    def capture_ended(self, graph: Graph, failed: bool) -> None:
        with self._lock:
            self._ordering.capture_ended(graph, failed)

    def replayed(self, graph: Graph, stream: Stream, generation: int) -> None:
        with self._lock:
            self._watch_reads()
            self.report.replays += 1
            self._uses(stream.name)
            replays, location = self.backend.replays, caller_location()
            self._ordering.in_order(
                stream.name, lambda: self._staleness.replayed(graph, stream.name, generation, replays, location)
            )
            self._ordering.replayed(graph, stream.name, generation)

    def params_updated(self, graph: Graph, stream: Stream, params: Mapping[str, tuple[int, ...]]) -> None:
        with self._lock:
            self._ordering.params_updated(graph, stream.name, tuple(params))
            self._staleness.rebound(graph, tuple(params))

    def renewed(self, owner: str, tensor: Tensor, generation: int) -> None:
        with self._lock:
            place = self.locate(tensor)
            if place is None:
                return
            # Renewal claims that all readers and writers have finished: model it as a write, which checks the claim.
            label = f"pinned buffer {owner!r}"
            self._ordering.memory.shadow(place.storage).label = label
            self._ordering.host_accessed(
                Access(place.storage, place.start, place.end, True, argument="renew"), caller_location()
            )
            self._staleness.mark_stale(tensor, f"{label} was renewed for generation {generation} and not filled since")

    def marked_stale(self, tensor: Tensor, reason: str) -> None:
        with self._lock:
            self._staleness.mark_stale(tensor, reason)

    def marked_mirror(self, mirror: Tensor | tuple[Graph, str], source: Tensor) -> None:
        with self._lock:
            self._watch_reads()
            self._staleness.mirror(mirror, source)

    def host_released(self, token: object) -> None:
        with self._lock:
            self._ordering.host_released(token)

    def host_acquired(self, token: object) -> None:
        with self._lock:
            self._ordering.host_acquired(token)


# -- a watched run -----------------------------------------------------------------------------------------------------


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
