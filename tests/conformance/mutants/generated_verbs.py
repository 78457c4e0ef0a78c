"""Each verb of streams, events, copies, memory, graphs, flags and fences, with each circumstance in which drivers fail.

A circumstance says when: from a number of calls on, on another thread, with much pending, on a third stream. The verb
then does nothing. Where a verb has rules of its own (what a copy covers, what a record covers, who may reuse
memory), these are broken one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from conformance.mutants import generated_copies as copies
from conformance.mutants import generated_graphs as graphs
from conformance.mutants import generated_waits as waits
from conformance.mutants.catalogue import Mutant, patched
from conformance.mutants.faults_verbs import _method
from conformance.mutants.generated import reach

THREADS, SIM = "threads", "sim"
NPU = "sim like npu"

# verb → (class, level, base)
VERBS = {
    "Stream._record": ("events", 3, THREADS),
    "Stream._wait": ("streams", 3, THREADS),
    "Stream._synchronize": ("streams", 3, THREADS),
    "Event._synchronize": ("events", 3, THREADS),
    "Backend._copy_async": ("copies", 3, THREADS),
    "Graph._replay": ("graphs", 3, THREADS),
    "Flag._set": ("flags", 3, THREADS),
    "Flag._wait": ("flags", 3, THREADS),
    "Fence.wait": ("policies", 3, THREADS),
    "Fence.signal": ("policies", 3, THREADS),
}


def mutants() -> Iterator[Mutant]:
    for verb, (kind, level, base) in VERBS.items():
        for when, circumstance in CIRCUMSTANCES.items():
            yield Mutant(verb, f"does nothing {when}", base, level, _skipped(verb, circumstance), kind)
    for verb, kind in (("Stream._wait", "streams"), ("Backend._copy_async", "copies"), ("Graph._replay", "graphs")):
        yield Mutant(verb, "does nothing from the twentieth call on", SIM, 3, _skipped(verb, _after(20)), kind)
        if verb != "Backend._copy_async":
            yield Mutant(verb, "does nothing on a third stream", SIM, 3, _skipped(verb, _on_third), kind)
    for kind, rule, fault, base, apply in (*_stream_event_and_memory_faults(), *_graph_flag_and_policy_faults()):
        yield Mutant(rule, fault, base, 3, apply, kind)


def _stream_event_and_memory_faults() -> tuple[Any, ...]:
    return (
        ("streams", "Stream._synchronize", "gives up after 10 ms", THREADS, waits.gives_up("stream")),
        ("streams", "Backend._synchronize", "gives up after 10 ms", THREADS, waits.gives_up("backend")),
        ("streams", "Backend._synchronize", "leaves out streams that another thread made", THREADS, waits.own_streams),
        ("streams", "Stream._wait", "gives up after 10 ms", THREADS, waits.wait_gives_up),
        ("streams", "Stream._wait", "holds back the last of several waits alone", THREADS, waits.last_wait),
        ("streams", "Stream._wait", "holds back the first of several waits alone", THREADS, waits.first_wait),
        ("streams", "Stream._wait", "does nothing for one pair of streams", THREADS, waits.one_pair),
        ("streams", "Stream._wait", "is taken for done when the host has queried the event", THREADS, waits.queried),
        ("streams", "Stream._wait", "holds nothing back for an event of a stream that waits itself", THREADS, waits.no_chain),
        ("streams", "Stream._query", "is True when nothing was enqueued by the calling thread", THREADS, waits.query_thread),
        ("streams", "Stream._query", "is True after half of what is pending", THREADS, waits.query_half),
        ("streams", "Backend._on", "loses the outer scope of three", THREADS, waits.scope_depth),
        ("streams", "Backend._on", "isn't restored on another thread", THREADS, waits.scope_thread),
        ("streams", "Backend._on", "ends the outermost scope of its stream", THREADS, waits.scope_reentered),
        ("events", "Stream._record", "doesn't cover the last operation", THREADS, waits.early_record(1)),
        ("events", "Stream._record", "doesn't cover copies", THREADS, waits.uncovered_copies),
        ("events", "Stream._record", "keeps the record before while that is pending", THREADS, waits.keeps_pending),
        ("events", "Stream._record", "remembers four records and no more", THREADS, waits.ring(4)),
        ("events", "Stream._record", "remembers sixteen records and no more", THREADS, waits.ring(16)),
        ("events", "Event._query", "is True once any generation has completed", THREADS, waits.any_generation),
        ("events", "Event._query", "is False on another thread", THREADS, waits.false_elsewhere),
        ("events", "Event._synchronize", "gives up after 10 ms", THREADS, waits.gives_up("event")),
        ("events", "Event._synchronize", "returns when any generation has completed", THREADS, waits.any_synchronized),
        ("events", "Event._elapsed_ms", "leaves out the time in which the stream waited", THREADS, waits.elapsed_cut),
        *(("copies", "Backend._copy_async", fault, THREADS, copies.copy(change)) for fault, change in copies.COPIES.items()),
        (
            "memory",
            "allocations",
            "reuse a freed temporary while it's in flight on another stream",
            THREADS,
            copies.reused(across=True),
        ),
        ("memory", "allocations", "reuse a freed temporary whose work hasn't run", THREADS, copies.reused(across=False)),
        ("memory", "Backend.keep_alive", "holds the first object alone", THREADS, copies.holds_first),
        ("memory", "Backend.release_finished", "drops all once the first has completed", THREADS, copies.drops_all),
        ("memory", "Backend.release_finished", "returns how many it dropped", THREADS, copies.returns_dropped),
        ("memory", "Backend.memory_info", "reports what is free as what is taken", SIM, copies.info_swapped),
    )


def _graph_flag_and_policy_faults() -> tuple[Any, ...]:
    return (
        ("graphs", "Backend._capture", "gives graphs of one shape the same scratch memory", THREADS, graphs.shared_scratch),
        ("graphs", "Graph._replay", "ends when the graph is dropped", THREADS, graphs.weak_replay),
        ("graphs", "Graph._replay", "reads its inputs at the call", THREADS, graphs.inputs_at_call),
        ("graphs", "Graph._replay", "doesn't wait for what the stream has before it", THREADS, graphs.replay_early),
        ("graphs", "Graph._replay", "holds nothing back that follows it", THREADS, graphs.replay_async),
        ("graphs", "Graph._replay", "leaves out the last operation from the tenth time on", THREADS, graphs.replay_short),
        ("graphs", "Graph._replay", "leaves out copies", THREADS, graphs.replay_without("copy_")),
        ("graphs", "Graph._replay", "swallows an error of its work", THREADS, graphs.replay_swallows),
        ("graphs", "Graph._replay", "runs the graph that was captured last", THREADS, graphs.replay_last),
        ("graphs", "Graph._replay", "runs twice when two replays are pending", THREADS, graphs.replay_twice),
        ("graphs", "Backend._capture", "keeps sixteen operations and no more", THREADS, graphs.capture_most(16)),
        ("graphs", "Backend._capture", "keeps three operations and no more", THREADS, graphs.capture_most(3)),
        ("flags", "Flag._wait", "gives up after 10 ms", THREADS, graphs.flag_gives_up),
        ("flags", "Flag._set", "wakes one waiter alone", THREADS, graphs.flag_wakes_one),
        ("flags", "Flag._reset", "takes effect before what was enqueued", THREADS, graphs.flag_reset_early),
        ("flags", "Flag._reset", "does nothing the second time", THREADS, graphs.flag_reset_once),
        ("flags", "Backend._create_flag", "gives every third flag the first one's state", THREADS, graphs.flag_shared),
        ("errors", "Stream._synchronize", "swallows an error", THREADS, graphs.swallowed("Stream._synchronize")),
        ("errors", "Backend._synchronize", "swallows an error", THREADS, graphs.swallowed("Backend._synchronize")),
        ("errors", "Stream._synchronize", "raises an error again and again", THREADS, graphs.sticky_error),
        ("errors", "Stream._synchronize", "raises an error without its type", THREADS, graphs.untyped_error),
        ("errors", "Stream._synchronize", "waits for another stream's errors too", THREADS, graphs.other_errors_early),
        ("errors", "Stream", "stops after an error", THREADS, graphs.dead_after_error),
        ("policies", "Fence.done", "is True once any generation has completed", THREADS, graphs.fence_any),
        ("policies", "Fence.done", "is True for who asks a second time", THREADS, graphs.fence_second),
        ("policies", "Fence.wait_host", "gives up after 10 ms", THREADS, graphs.fence_gives_up),
        ("policies", "Fence.wait_host_within", "is always True", THREADS, graphs.fence_within(True)),
        ("policies", "Fence.wait_host_within", "is always False", THREADS, graphs.fence_within(False)),
        ("policies", "SpeculativeSync.create_fence", "gives fences of one name one event", THREADS, graphs.fence_names),
    )


# -- circumstances -----------------------------------------------------------------------------------------------------


def _after(count):
    def make():
        calls = [0]

        def when(self, arguments):
            calls[0] += 1
            return calls[0] >= count

        return when

    return make


def _stream_in(self, arguments):
    return next((a for a in (self, *arguments) if hasattr(a, "_record") and hasattr(a, "_wait")), None)


def _on_third():
    def when(self, arguments):
        backend = getattr(self, "backend", None) or getattr(getattr(self, "event", None), "backend", self)
        stream = _stream_in(self, arguments) or getattr(getattr(backend, "_thread", None), "stream", None)
        return stream is not None and stream in backend.streams[2:]

    return when


def _on_another_thread():
    def when(self, arguments):
        return threading.current_thread() is not threading.main_thread()

    return when


def _much_pending():
    def when(self, arguments):
        backend = getattr(self, "backend", None) or getattr(getattr(self, "event", None), "backend", self)
        stream = _stream_in(self, arguments) or backend._thread.stream
        if stream is None:  # nothing is being enqueued: the busiest
            return any(each.worker._enqueued - each.worker._state.finished > 12 for each in backend.streams)
        return stream.worker._enqueued - stream.worker._state.finished > 12

    return when


CIRCUMSTANCES = {
    "from the twentieth call on": _after(20),
    "on a third stream": _on_third,
    "on another thread": _on_another_thread,
    "when a dozen operations are pending": _much_pending,
}


def _skipped(verb, circumstance):
    def apply(base):
        when = circumstance()
        owner, name = _method(base, verb)

        @patched(owner, name)
        def skipped(original, self, *arguments):
            backend = getattr(self, "backend", None) or getattr(getattr(self, "event", None), "backend", self)
            if backend.active_capture is None and when(self, arguments):
                first = verb == "Stream._record" and base.get_record(arguments[0]) is None
                first = first or (verb == "Fence.signal" and self.event.generation == 0)
                if not first:
                    reach()
                    return None
            return original(self, *arguments)

    return apply
