"""Faults of flags and of graph parameters."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.mutants.catalogue import Mutant, patch, patched

THREADS, NPU = "threads", "sim like npu"


def mutants() -> Iterator[Mutant]:
    for verb, fault, base, level, apply in (
        ("Flag._wait", "lowers the flag", THREADS, 3, _consuming),
        ("Flag._wait", "blocks the host", THREADS, 3, _host_wait),
        ("Flag._set", "counts, and a second set isn't lost", THREADS, 3, _counting),
        ("Backend._create_flag", "starts up", THREADS, 3, _starts_up),
        ("Flag._wait", "isn't captured", THREADS, 3, _not_in_graph("_wait")),
        ("Graph._update_params", "happens at once, on the host", NPU, 3, _rebind_at_once),
        ("Graph._update_params", "keeps the caller's list", NPU, 3, _rebind_alias),
        ("Graph._update_params", "does nothing where it isn't declared", THREADS, 3, _silent_rebind),
    ):
        yield Mutant(verb, fault, base, level, apply)


def _consuming(base):
    base.flag._wait = lambda self, stream: stream.put(lambda: (self._flag.wait(), self._flag.clear()))


def _host_wait(base):
    base.flag._wait = lambda self, stream: self._flag.wait()


def _counting(base):
    import threading

    @patched(base.flag, "__init__")
    def init(original, self, backend, name):
        original(self, backend, name)
        self.count, self.lock = 0, threading.Lock()

    def up(self):
        with self.lock:
            self.count += 1
            self._flag.set()

    def down(self):
        with self.lock:
            self.count = max(0, self.count - 1)
            if not self.count:
                self._flag.clear()

    base.flag._set = lambda self, stream: stream.put(lambda: up(self))
    base.flag._reset = lambda self, stream: stream.put(lambda: down(self))


def _starts_up(base):
    patch(base.flag, "__init__", lambda original: lambda self, *a: (original(self, *a), self._flag.set())[0])


def _not_in_graph(name):
    def apply(base):
        def make(original):
            return lambda self, stream: None if self.backend.active_capture is not None else original(self, stream)

        patch(base.flag, name, make)

    return apply


# -- parameters -----------------------------------------------------------------------------------------------------------


def _rebind_at_once(base):
    from outrider_sim.machine.graphs import GraphProgram

    @patched(GraphProgram, "rebind")
    def rebind(original, self, other, stream):
        def now(op, where):
            op.fn()

        self.sim.machine.enqueue = now
        try:
            original(self, other, stream)
        finally:
            del self.sim.machine.enqueue


def _rebind_alias(base):
    from outrider.device import Graph

    def update(self, params, *, stream):
        self._update_params(params, stream)

    @patched(base.graph, "_replay")
    def replay(original, self, stream):
        if getattr(self, "_aliased", None):
            original_update(self, {key: tuple(value) for key, value in self._aliased.items()}, stream)
        original(self, stream)

    original_update = base.graph._update_params

    def keep(self, params, stream):
        self._aliased = dict(params)

    @patched(Graph, "update_params")
    def outer(original, self, params, *, stream):
        original(self, params, stream=stream)
        self._aliased = dict(params)

    base.graph._update_params = keep


def _silent_rebind(base):
    base.graph._update_params = lambda self, params, stream: None
