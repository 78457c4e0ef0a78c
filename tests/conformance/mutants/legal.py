"""Correct backends with unusual but legal behaviour: all of them must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.mutants.catalogue import patch, patched


@dataclass(frozen=True)
class Legal:
    """`apply(base)` changes the base within the backend interface's promises; it must pass every level up to `level`."""

    what: str
    base: str
    apply: Callable[[Any], None]
    level: int = 4

    @property
    def name(self):
        return f"{self.what} ({self.base})"


def legal():
    return (
        Legal("the reference: synchronous, no graphs", "cpu", _as_it_is),
        Legal("streams are threads, graphs, flags", "threads", _as_it_is),
        Legal("the simulated device", "sim", _as_it_is),
        # Its policy needs exact host lengths, which the engine of this version doesn't carry out: level 4 refuses it.
        Legal("host parameters in graphs, flags, exact host lengths", "sim like npu", _as_it_is, 3),
        Legal("the tutorial's device", "toy", _as_it_is),
        Legal("an asynchronous device without graphs", "threads", _without("captures_graphs", "forks_in_capture")),
        Legal("no flags", "threads", _without("flags")),
        Legal("no timing, no delays: busy with work alone", "threads", _without("event_timing", "perturbs_timing")),
        Legal("one dtype", "threads", _one_dtype),
        Legal("one queue for all streams", "threads", _one_queue),
        Legal("synchronous streams with graphs and flags undeclared", "threads", _synchronous),
        Legal("slow events: records and waits take milliseconds", "threads", _slow_events),
        Legal("slow queries", "threads", _slow_queries),
        Legal("the host waits for what was published", "threads", _host_waits),
        Legal("results on the forward stream", "threads", _results_on_forward),
        Legal("positions are computed again after the join", "threads", _recomputes),
        Legal("a callable is run before its capture", "threads", _warms_up),
        Legal("a capture waits for its stream first", "threads", _synchronises_before_capture),
        Legal("streams at irregular speeds", "threads", _irregular),
        Legal("create_stream and empty_pinned wait for the device", "threads", _creation_waits),
        Legal("priorities are taken", "threads", _priorities),
        Legal("a fast kernel of its own", "threads", _own_kernel),
    )


def _as_it_is(base):
    del base


def _without(*abilities):
    def apply(base):
        base.declare(**dict.fromkeys(abilities, False))
        verbs = {"captures_graphs": "_capture", "flags": "_create_flag", "perturbs_timing": "_delay"}
        for ability in abilities:
            if ability in verbs:
                delattr(base.backend, verbs[ability])
            if ability == "event_timing":
                del base.event._elapsed_ms

    return apply


def _one_dtype(base):
    import torch

    base.declare(dtypes=frozenset({torch.float32}))


def _one_queue(base):
    from outrider_threads.worker import Worker

    # With one order, a graph that waits for an event outside holds by itself.
    base.declare(concurrent_streams=False, flags=False, waits_inside_graphs=True)
    del base.backend._create_flag  # a wait before its set would stop everything

    @patched(base.stream, "__init__")
    def init(original, self, backend, name):
        super(base.stream, self).__init__(backend, name)
        self._backend = backend
        self.worker = backend.__dict__.setdefault("the_worker", None) or Worker("all", backend.failures)
        backend.the_worker = self.worker


def _synchronous(base):
    _without("captures_graphs", "forks_in_capture", "flags", "perturbs_timing", "event_timing")(base)
    base.declare(asynchronous=False, concurrent_streams=False)

    @patched(base.stream, "put")
    def put(original, self, task):
        original(self, task)
        self.worker.mark().wait()

    patch(base.stream, "_record", lambda original: lambda self, e: (original(self, e), e.mark.wait())[0])


def _slow_events(base):
    import time

    def make(original):
        def slow(self, event):
            if self._backend.program is None:
                self.worker.put(lambda: time.sleep(0.003))
            original(self, event)

        return slow

    patch(base.stream, "_record", make)
    patch(base.stream, "_wait", make)


def _slow_queries(base):
    import time

    for owner in (base.stream, base.event):
        patch(owner, "_query", lambda original: lambda self: (time.sleep(0.002), original(self))[1])


def _host_waits(base):
    from outrider.device import Waiter

    base.sync.published_waiter = Waiter.HOST


def _results_on_forward(base):
    base.sync.results_on_forward = True


def _recomputes(base):
    from outrider.device import Recompute

    base.sync.recompute_after_join = frozenset({Recompute.MROPE_POSITIONS})


def _warms_up(base):
    @patched(base.backend, "_capture")
    def capture(original, self, name, fn, context, stream, pool):
        with self.on(stream), self.rehearsing(context, stream):
            fn(context)
        stream.synchronize()
        return original(self, name, fn, context, stream, pool)


def _synchronises_before_capture(base):
    @patched(base.backend, "_capture")
    def capture(original, self, name, fn, context, stream, pool):
        self._synchronize()
        return original(self, name, fn, context, stream, pool)


def _irregular(base):
    import random
    import time

    dice = random.Random(7)

    @patched(base.stream, "put")
    def put(original, self, task):
        if dice.random() < 0.01:
            original(self, lambda: time.sleep(0.002))
        original(self, task)


def _creation_waits(base):
    for name in ("_create_stream", "_empty_pinned"):
        patch(base.backend, name, lambda original: lambda self, *a: (self._synchronize(), original(self, *a))[1])


def _priorities(base):
    base.declare(stream_priorities=True)

    @patched(base.backend, "_create_stream")
    def create(original, self, name, priority):
        stream = original(self, name, priority)
        stream.priority = priority
        return stream


def _own_kernel(base):
    import torch

    from outrider.device import KernelSet

    class Own(KernelSet):
        name = "own"

        def silu_mul(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up

    kernels = Own()
    base.backend.kernels = property(lambda self: kernels)
