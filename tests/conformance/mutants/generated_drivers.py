"""Ways in which real drivers break streams, events, copies, memory and graphs: each shows now and then, in the right company.

A fault of a verb that shows at its first use dies by the tests that are written for the verb. These need a program: an event
that was recorded elsewhere, the twentieth replay in a row, an odd offset, two graphs at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

from conformance.mutants import generated_copies as copies
from conformance.mutants import generated_driver_memory as memory
from conformance.mutants.catalogue import Mutant, patched, previous, under
from conformance.mutants.generated import reach

THREADS, SIM, NPU = "threads", "sim", "sim like npu"


def mutants() -> Iterator[Mutant]:
    for kind, rule, fault, base, level, apply in (
        ("other thread", "Stream._wait", "is nothing for another thread's record", THREADS, 1, _wait_foreign),
        ("other thread", "Stream._wait", "is nothing for another thread's record", SIM, 1, _wait_foreign),
        ("other thread", "Event._synchronize", "returns for another thread's record", THREADS, 1, _sync_foreign),
        ("other thread", "Backend._on", "places a thread's work on the first thread's stream", SIM, 1, _thread_stream),
        ("dropped", "Stream._wait", "is lost when sixteen are pending", THREADS, 1, _wait_lost_when_pending),
        ("dropped", "Stream._wait", "is lost when sixteen are pending", SIM, 1, _wait_lost_when_pending),
        ("dropped", "Stream._wait", "is lost behind a copy", SIM, 1, _wait_lost_behind_copy),
        (
            "dropped",
            "Stream._wait",
            "is dropped when the stream waited for the same event before",
            SIM,
            1,
            _wait_deduplicated,
        ),
        ("late", "Stream._wait", "begins with the second operation after it", SIM, 1, _wait_late),
        ("stale generation", "Stream._wait", "takes the generation before when the record is fresh", SIM, 1, _wait_stale),
        ("stale generation", "Event._synchronize", "is for the generation before from the third on", THREADS, 1, _sync_stale),
        ("stale generation", "Event._query", "is True once any generation was", SIM, 1, _query_sticky),
        ("early", "Event._query", "is True while the last operation runs", SIM, 1, _query_early),
        (
            "wrong slice",
            "Backend._copy_async",
            "rounds odd offsets down to four elements",
            THREADS,
            1,
            memory.copy_offset_rounded,
        ),
        (
            "wrong slice",
            "Backend._copy_async",
            "rounds odd offsets down to four elements",
            SIM,
            1,
            memory.copy_offset_rounded,
        ),
        (
            "wrong slice",
            "Backend._copy_async",
            "takes strided destinations for dense ones",
            SIM,
            1,
            copies.copy(copies.flat("destination")),
        ),
        ("wrong slice", "Backend._copy_async", "copies whole words of eight bytes", THREADS, 1, memory.copy_words),
        ("wrong slice", "Backend._copy_async", "cuts what is longer than a MiB", SIM, 1, copies.copy(copies.up_to(1 << 20))),
        ("wrong slice", "Backend._copy_async", "refuses no bytes", SIM, 1, copies.copy(copies.nothing_fails)),
        ("wrong slice", "Backend._copy_async", "quiets a NaN", SIM, 1, memory.copy_quiets),
        ("early", "Backend._copy_async", "from the host is read at the call when it's short", SIM, 1, memory.copy_snapshot),
        ("shared scratch", "Backend._capture", "gives graphs one pool", SIM, 2, _one_pool),
        ("dropped", "Graph._replay", "is skipped when twenty are pending", THREADS, 2, _replay_skipped),
        ("dropped", "Graph._replay", "is skipped when twenty are pending", SIM, 2, _replay_skipped),
        ("late", "Backend._capture", "reads scalars at the replay", SIM, 2, _scalars_at_replay),
        ("dropped", "Graph", "takes queued replays along when it's dropped", SIM, 2, _dropped_graph),
        ("early", "memory", "is reused while work that reads it is queued", SIM, 1, memory.freed_early),
        ("dropped", "Event", "takes pending waits along when it's dropped", SIM, 1, memory.dropped_event),
        ("stale generation", "Graph._update_params", "comes too late for the next replay but one", NPU, 3, _update_late),
    ):
        yield Mutant(rule, fault, base, level, apply, kind)


# -- threads ----------------------------------------------------------------------------------------------------------


def _remember_thread(base):
    @patched(base.stream, "_record")
    def record(original, self, event):
        original(self, event)
        event.recorded_by = threading.get_ident()


def _wait_foreign(base):
    _remember_thread(base)

    @patched(base.stream, "_wait")
    def wait(original, self, event):
        if event.recorded_by == threading.get_ident() or self.backend.active_capture is not None:
            original(self, event)
        else:
            reach()


def _sync_foreign(base):
    _remember_thread(base)

    @patched(base.event, "_synchronize")
    def synchronize(original, self):
        if self.recorded_by == threading.get_ident():
            original(self)
        else:
            reach()


def _thread_stream(base):
    from outrider_sim.machine.stream_machine import StreamMachine

    main, right = threading.get_ident(), StreamMachine.stream.fget

    def get(self):
        if threading.get_ident() != main and self.scheduler.local.thread is None:
            reach()
            return self.main_stream
        return right(self)

    StreamMachine.stream = property(get)


# -- waits ------------------------------------------------------------------------------------------------------------


def _pending(stream):
    """How much is queued on a stream."""
    worker = getattr(stream, "worker", None)
    if worker is not None:
        return worker._enqueued - worker._state.finished
    return len(stream.queue_state.queue)


def _wait_lost_when_pending(base):
    @patched(base.stream, "_wait")
    def wait(original, self, event):
        if _pending(self) < 16:
            original(self, event)
        else:
            reach()


def _wait_lost_behind_copy(base):
    from outrider_sim.machine.queue import OperationKind

    @patched(base.stream, "_wait")
    def wait(original, self, event):
        queue = self.queue_state.queue
        if queue and queue[-1].kind == OperationKind.COPY:
            reach()
        else:
            original(self, event)


def _wait_deduplicated(base):
    @patched(base.stream, "_wait")
    def wait(original, self, event):
        known = self.__dict__.setdefault("waited_for", {})
        if known.get(id(event)) == event._generation - 1:
            reach()
        else:
            original(self, event)
        known[id(event)] = event._generation


def _wait_late(base):
    from outrider_sim.machine.queue import OperationKind
    from outrider_sim.machine.stream_machine import StreamMachine

    @patched(StreamMachine, "enqueue")
    def enqueue(original, self, op, stream):
        original(self, op, stream)
        queue = stream.queue
        if (
            stream.capture is None
            and op.kind < OperationKind.RECORD
            and len(queue) > 1
            and queue[-2].kind == OperationKind.WAIT
        ):
            reach()
            queue[-1], queue[-2] = queue[-2], queue[-1]


def _wait_stale(base):
    previous(base)

    @patched(base.stream, "_wait")
    def wait(original, self, event):
        record = base.get_record(event)
        fresh = self.backend.active_capture is None and not record.done and event.before is not record
        if fresh and event._generation > 1:
            reach()
            under(base, event, event.before, lambda: original(self, event))
        else:
            original(self, event)


def _sync_stale(base):
    previous(base)

    @patched(base.event, "_synchronize")
    def synchronize(original, self):
        if self._generation > 2:
            reach()
            under(base, self, self.before, lambda: original(self))
        else:
            original(self)


def _query_sticky(base):
    @patched(base.event, "_query")
    def query(original, self):
        if getattr(self, "was", False):
            reach()
            return True
        self.was = original(self)
        return self.was


def _query_early(base):
    def query(self):
        generation = self.state.latest
        machine = self.backend.sim.machine
        reach()
        return machine.query(lambda: generation.done or generation.stream.done >= generation.issued - 1, generation)

    base.event._query = query


# -- graphs -----------------------------------------------------------------------------------------------------------


def _one_pool(base):
    from outrider_sim.machine.memory import Pool

    shared = {}

    @patched(base.backend, "_capture")
    def captured(original, self, name, fn, context, stream, pool):
        from outrider.device import GraphPool

        if pool is None:
            reach()
            pool = shared.setdefault(id(self), GraphPool(self, "all", Pool("all")))
        return original(self, name, fn, context, stream, pool)


def _replay_skipped(base):
    @patched(base.graph, "_replay")
    def replay(original, self, stream):
        recent = self.__dict__.setdefault("recent", [])
        recent.append(stream)
        # Nothing on this stream has been waited for since: twenty in a row.
        if len(recent) >= 20 and _pending(stream) >= 19:
            reach()
            return
        original(self, stream)


def _scalars_at_replay(base):
    from types import MappingProxyType

    from outrider.device import Backend

    @patched(Backend, "capture")  # an override would be found by its being there
    def captured(original, self, name, fn, *, scalars=None, **others):
        made = original(self, name, fn, scalars=scalars, **others)
        made.given, made.frozen = scalars, dict(scalars or {})
        return made

    @patched(base.graph, "_replay")
    def replayed(original, self, stream):
        if self.given is not None and dict(self.given) != self.frozen:
            reach()
            object.__setattr__(self.context, "scalars", MappingProxyType(dict(self.given)))
            fresh = self.backend.record_program(self, self.fn, self.origin, self.pool, seen=False)
            self.program = fresh
            self.frozen = dict(self.given)
        original(self, stream)


def _dropped_graph(base):
    @patched(base.graph, "_replay")
    def replay(original, self, stream):
        queue = stream.queue_state.queue
        before = len(queue)
        original(self, stream)
        mine = list(queue)[before:]

        def gone():
            for op in mine:
                if op in queue:
                    reach()
                    op.fn, op.args, op.kwargs, op.post = _nothing, (), {}, None

        weakref.finalize(self, gone)


def _nothing(*_, **__):
    return None


def _update_late(base):
    @patched(base.graph, "_update_params")
    def update(original, self, params, stream):
        late = getattr(self, "late", None)
        self.late = params
        if late is None:
            original(self, params, stream)
        else:
            reach()
            original(self, late, stream)
