"""Faults of capture and replay."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from conformance.mutants.catalogue import Mutant, patch, patched

THREADS, SIM = "threads", "sim"


def mutants() -> Iterator[Mutant]:
    for verb, fault, base, level, apply in (
        ("Backend._capture", "keeps the callable and runs it at each replay", THREADS, 2, _eager),
        ("Backend._capture", "leaves the last operation out", THREADS, 2, _program(lambda p: p[:-1])),
        ("Backend._capture", "leaves the first operation out", THREADS, 2, _program(lambda p: p[1:])),
        ("Backend._capture", "turns the order round", THREADS, 2, _program(lambda p: p[::-1])),
        ("Backend._capture", "keeps the first operation alone", THREADS, 2, _program(lambda p: p[:1])),
        ("Backend._capture", "runs the work and notes nothing", THREADS, 2, _not_captured),
        ("Backend._capture", "swallows an error of the callable", THREADS, 2, _swallows),
        ("Backend._capture", "loses the cause of an error", THREADS, 2, _loses_cause),
        ("Backend._capture", "dresses up a device error", THREADS, 2, _dresses_up),
        ("Backend._capture", "stays open after an error", THREADS, 2, _stays_open),
        ("Backend._capture", "leaves its stream current", THREADS, 2, _stays_current),
        ("Backend._capture", "leaves the stream dead after an error", THREADS, 2, _dead_stream),
        ("Backend._capture", "takes in what other threads enqueue", THREADS, 2, _global_capture),
        ("Backend._capture", "runs a branch once, outside the graph", THREADS, 2, _branch_lost),
        ("Backend._capture", "doesn't say that it captures", THREADS, 2, _unmarked),
        ("Backend.capture", "doesn't freeze host scalars", "cpu", 2, _scalars_live),
        ("Backend.capture", "doesn't freeze the table of buffers", "cpu", 2, _tables_live),
        ("Graph", "works on copies of its inputs", THREADS, 2, _own(inputs=True)),
        ("Graph", "works on copies of its outputs", THREADS, 2, _own(outputs=True)),
        ("Graph", "forgets its buffers", SIM, 2, _weak_buffers),
        ("Graph._replay", "reads inputs as they were a replay ago", THREADS, 2, _old_inputs),
        ("Graph._replay", "runs beside its stream", THREADS, 2, _beside),
        ("Graph._replay", "goes to the stream of the capture", THREADS, 2, _origin(THREADS)),
        ("Graph._replay", "goes to the stream of the capture", SIM, 2, _origin(SIM)),
        ("Graph._replay", "skips every second time", THREADS, 2, _every_second),
        ("Graph._replay", "skips every second time", SIM, 2, _every_second),
        ("Graph._replay", "enqueues operation by operation, each on a stream in turn", THREADS, 2, _scattered),
        ("Backend.create_graph_pool", "gives every pool the same name", THREADS, 2, _pool_name),
        ("Backend.create_graph_pool", "gives every graph the same memory", SIM, 2, _one_pool),
    ):
        yield Mutant(verb, fault, base, level, apply)


def _eager(base):
    from outrider.device import EagerGraph, Graph

    class Eager(EagerGraph):
        _update_params = Graph._update_params  # as a graph that can't be rebound

    def capture(self, name, fn, context, stream, pool):
        graph = Eager(self, name, context, fn)
        with self._on(stream), self.capturing(graph, stream):
            self._thread.program = []
            try:
                fn(context)
            finally:
                self._thread.program = None
        return graph

    base.declare(waits_inside_graphs=True)  # they come with it
    base.backend._capture = capture


def _program(change):
    def apply(base):
        @patched(base.backend, "_capture")
        def capture(original, self, *arguments):
            graph = original(self, *arguments)
            graph.program[:] = change(graph.program)
            return graph

    return apply


def _inside(base, change):
    """`change(fn)` is captured in the place of the callable."""

    @patched(base.backend, "_capture")
    def capture(original, self, name, fn, context, stream, pool):
        return original(self, name, lambda given: change(self, fn, given, stream), context, stream, pool)


def _not_captured(base):
    def change(self, fn, context, stream):
        self._thread.program, program = None, self._thread.program
        try:
            fn(context)
        finally:
            self._thread.program = program

    _inside(base, change)


def _swallows(base):
    def change(self, fn, context, stream):
        try:
            fn(context)
        except Exception:
            return

    _inside(base, change)


def _loses_cause(base):
    from outrider.device import CaptureError

    def change(self, fn, context, stream):
        try:
            fn(context)
        except Exception:
            raise CaptureError("something failed") from None

    _inside(base, change)


def _dresses_up(base):
    from outrider.device import CaptureError

    def change(self, fn, context, stream):
        try:
            fn(context)
        except Exception as error:
            raise CaptureError(f"capture failed: {error}") from error

    _inside(base, change)


def _stays_open(base):
    @patched(base.backend, "_capture")
    def capture(original, self, *arguments):
        try:
            return original(self, *arguments)
        except BaseException:
            self._thread.program = []
            raise


def _stays_current(base):
    @patched(base.backend, "_capture")
    def capture(original, self, name, fn, context, stream, pool):
        before = getattr(self._thread, "stream", None)
        try:
            return original(self, name, fn, context, stream, pool)
        finally:
            if before is not None:
                self._thread.stream = stream


def _dead_stream(base):
    @patched(base.backend, "_capture")
    def capture(original, self, name, fn, context, stream, pool):
        try:
            return original(self, name, fn, context, stream, pool)
        except BaseException:
            stream.worker.put = lambda task: (
                None if "reach" not in str(task) else type(stream.worker).put(stream.worker, task)
            )
            raise


def _global_capture(base):
    class Everywhere:
        """Where the program is, for all threads."""

        def __init__(self, thread):
            object.__setattr__(self, "thread", thread)

        def __getattr__(self, name):
            return getattr(self.thread, name)

        def __setattr__(self, name, value):
            if name == "program":
                object.__setattr__(self, name, value)
            else:
                setattr(self.thread, name, value)

    @patched(base.backend, "__init__")
    def init(original, self):
        original(self)
        self._thread = Everywhere(self._thread)


def _branch_lost(base):
    @patched(base.stream, "put")
    def put(original, self, task):
        program = self._backend.program
        if program is not None and self is not self._backend._local.capture_stream:
            self.worker.put(task)
        else:
            original(self, task)


def _unmarked(base):
    def capture(self, name, fn, context, stream, pool):
        from outrider_threads.backend import ThreadGraph

        graph = ThreadGraph(self, name, context)
        graph.program = self._thread.program = []
        try:
            with self._on(stream):
                fn(context)
        finally:
            self._thread.program = None
        return graph

    base.backend._capture = capture


def _scalars_live(base):
    import outrider.device.backend as device_backend

    _live(device_backend, "scalars")


def _tables_live(base):
    import outrider.device.backend as device_backend

    _live(device_backend, "inputs", "outputs")


def _live(device_backend, *names):
    make_graph = device_backend.Backend.capture

    def capture(self, name, fn, **arguments):
        graph = make_graph(self, name, fn, **arguments)
        if hasattr(graph, "_fn"):
            for key in names:
                object.__setattr__(graph.context, key, arguments.get(key) or {})
        return graph

    device_backend.Backend.capture = capture


def _own(*, inputs=False, outputs=False):
    def apply(base):
        def change(self, fn, context, stream):
            from dataclasses import replace

            copied = {}
            if inputs:
                copied["inputs"] = {key: _detached(value) for key, value in context.inputs.items()}
            if outputs:
                copied["outputs"] = {key: _detached(value) for key, value in context.outputs.items()}
            fn(replace(context, **copied))

        _inside(base, change)

    return apply


def _detached(tensor):
    import torch

    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.clone()


def _weak_buffers(base):
    @patched(base.graph, "__init__")
    def init(original, self, backend, name, context, *rest):
        original(self, backend, name, context, *rest)
        for key in ("inputs", "outputs"):
            object.__setattr__(context, key, weakref.WeakValueDictionary(getattr(context, key)))


def _old_inputs(base):
    @patched(base.graph, "_run")
    def run(original, self):
        now = {key: tensor.clone() for key, tensor in self.context.inputs.items()}
        for key, tensor in getattr(self, "_old", now).items():
            self.context.inputs[key].copy_(tensor)
        original(self)
        for key, tensor in now.items():
            self.context.inputs[key].copy_(tensor)
        self._old = now


def _beside(base):
    import threading

    patch(
        base.graph,
        "_replay",
        lambda original: lambda self, stream: threading.Thread(target=self._run, daemon=True).start(),
    )


def _origin(which):
    def apply(base):
        @patched(base.backend, "_capture")
        def capture(original, self, name, fn, context, stream, pool):
            graph = original(self, name, fn, context, stream, pool)
            graph.captured_on = stream
            return graph

        patch(base.graph, "_replay", lambda original: lambda self, stream: original(self, self.captured_on))

    return apply


def _every_second(base):
    patch(
        base.graph,
        "_replay",
        lambda original: lambda self, stream: original(self, stream) if self._generation % 2 else None,
    )


def _scattered(base):
    def replay(self, stream):
        streams = self.backend.streams
        for number, task in enumerate(self.program):
            streams[(streams.index(stream) + number) % len(streams)].put(task)

    base.graph._replay = replay


def _pool_name(base):
    patch(base.backend, "create_graph_pool", lambda original: lambda self, name: original(self, "pool"))


def _one_pool(base):
    from outrider_sim.machine.graphs import OpenCapture
    from outrider_sim.machine.memory import Pool

    pools = {}

    @patched(OpenCapture, "__init__")
    def init(original, self, sim, name, pool, *rest):
        original(self, sim, name, pools.setdefault(id(sim), Pool("the one")), *rest)
