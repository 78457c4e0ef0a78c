"""Faults of capture and replay."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.mutants.catalogue import Mutant, patch, patched

THREADS, SIM = "threads", "sim"


def mutants() -> Iterator[Mutant]:
    for verb, fault, base, level, apply in (
        ("Backend._capture", "keeps the callable and runs it at each replay", THREADS, 2, _eager),
        ("Backend._capture", "loses the cause of an error", THREADS, 2, _loses_cause),
        ("Backend._capture", "dresses up a device error", THREADS, 2, _dresses_up),
        ("Backend._capture", "leaves its stream current", THREADS, 2, _stays_current),
        ("Backend._capture", "leaves the stream dead after an error", THREADS, 2, _dead_stream),
        ("Backend._capture", "takes in what other threads enqueue", THREADS, 2, _global_capture),
        ("Backend._capture", "runs a branch once, outside the graph", THREADS, 2, _branch_lost),
        ("Backend._capture", "doesn't say that it captures", THREADS, 2, _unmarked),
        ("Backend.capture", "doesn't freeze host scalars", "cpu", 2, _scalars_live),
        ("Backend.capture", "doesn't freeze the table of buffers", "cpu", 2, _tables_live),
        ("Backend.create_graph_pool", "gives every pool the same name", THREADS, 2, _pool_name),
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


def _inside(base, change):
    """`change(fn)` is captured in the place of the callable."""

    @patched(base.backend, "_capture")
    def capture(original, self, name, fn, context, stream, pool):
        return original(self, name, lambda given: change(self, fn, given, stream), context, stream, pool)


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


def _pool_name(base):
    patch(base.backend, "create_graph_pool", lambda original: lambda self, name: original(self, "pool"))
