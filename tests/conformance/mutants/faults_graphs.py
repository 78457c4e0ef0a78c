"""Faults of capture and replay, of flags and of graph parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from conformance.mutants.catalogue import Mutant, patch

THREADS, SIM, NPU = "threads", "sim", "sim like npu"


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
        ("Flag._wait", "lowers the flag", THREADS, 3, _consuming),
        ("Flag._wait", "blocks the host", THREADS, 3, _host_wait),
        ("Flag._set", "counts, and a second set isn't lost", THREADS, 3, _counting),
        ("Backend._create_flag", "gives every flag the same state", THREADS, 3, _one_flag),
        ("Backend._create_flag", "starts up", THREADS, 3, _starts_up),
        ("Flag._wait", "isn't captured", THREADS, 3, _not_in_graph("_wait")),
        ("Graph._update_params", "happens at once, on the host", NPU, 3, _rebind_at_once),
        ("Graph._update_params", "comes a rebind late", NPU, 3, _rebind_late),
        ("Graph._update_params", "keeps the caller's list", NPU, 3, _rebind_alias),
        ("Graph._update_params", "rebinds the other parameter", NPU, 3, _rebind_other),
        ("Graph._update_params", "does nothing where it isn't declared", THREADS, 3, _silent_rebind),
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
        def make(original):
            def capture(self, *arguments):
                graph = original(self, *arguments)
                graph.program[:] = change(graph.program)
                return graph

            return capture

        patch(base.backend, "_capture", make)

    return apply


def _inside(base, change):
    """`change(fn)` is captured in the place of the callable."""

    def make(original):
        def capture(self, name, fn, context, stream, pool):
            return original(self, name, lambda given: change(self, fn, given, stream), context, stream, pool)

        return capture

    patch(base.backend, "_capture", make)


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
    def make(original):
        def capture(self, *arguments):
            try:
                return original(self, *arguments)
            except BaseException:
                self._thread.program = []
                raise

        return capture

    patch(base.backend, "_capture", make)


def _stays_current(base):
    def make(original):
        def capture(self, name, fn, context, stream, pool):
            before = getattr(self._thread, "stream", None)
            try:
                return original(self, name, fn, context, stream, pool)
            finally:
                if before is not None:
                    self._thread.stream = stream

        return capture

    patch(base.backend, "_capture", make)


def _dead_stream(base):
    def make(original):
        def capture(self, name, fn, context, stream, pool):
            try:
                return original(self, name, fn, context, stream, pool)
            except BaseException:
                stream.worker.put = lambda task: (
                    None if "reach" not in str(task) else type(stream.worker).put(stream.worker, task)
                )
                raise

        return capture

    patch(base.backend, "_capture", make)


def _global_capture(base):
    def get(self):
        return self.__dict__.get("global_program")

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

    def make(original):
        def init(self):
            original(self)
            self._thread = Everywhere(self._thread)

        return init

    patch(base.backend, "__init__", make)


def _branch_lost(base):
    def make(original):
        def put(self, task):
            program = self._backend.program
            if program is not None and self is not self._backend._local.capture_stream:
                self.worker.put(task)
            else:
                original(self, task)

        return put

    patch(base.stream, "put", make)


def _unmarked(base):
    @contextmanager
    def capturing(self, graph, stream):
        yield None

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


def _seam_context(change):
    """The seam's own context, made with `change(fields)`: for what no plugin can get wrong, but the seam could."""
    import outrider.device.backend as seam

    original = seam.CaptureContext
    seam.CaptureContext = lambda **fields: original(**change(fields))


def _scalars_live(base):
    import outrider.device.backend as seam

    _live(seam, "scalars")


def _tables_live(base):
    import outrider.device.backend as seam

    _live(seam, "inputs", "outputs")


def _live(seam, *names):
    make_graph = seam.Backend.capture

    def capture(self, name, fn, **arguments):
        graph = make_graph(self, name, fn, **arguments)
        if hasattr(graph, "_fn"):
            for key in names:
                object.__setattr__(graph.context, key, arguments.get(key) or {})
        return graph

    import functools

    functools.update_wrapper(capture, make_graph)
    seam.Backend.capture = capture


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
    def make(original):
        def init(self, backend, name, context, *rest):
            original(self, backend, name, context, *rest)
            for key in ("inputs", "outputs"):
                object.__setattr__(context, key, weakref.WeakValueDictionary(getattr(context, key)))

        return init

    patch(base.graph, "__init__", make)


def _old_inputs(base):
    def make(original):
        def run(self):
            now = {key: tensor.clone() for key, tensor in self.context.inputs.items()}
            for key, tensor in getattr(self, "_old", now).items():
                self.context.inputs[key].copy_(tensor)
            original(self)
            for key, tensor in now.items():
                self.context.inputs[key].copy_(tensor)
            self._old = now

        return run

    patch(base.graph, "_run", make)


def _beside(base):
    import threading

    patch(
        base.graph,
        "_replay",
        lambda original: lambda self, stream: threading.Thread(target=self._run, daemon=True).start(),
    )


def _origin(which):
    def apply(base):
        def make(original):
            def capture(self, name, fn, context, stream, pool):
                graph = original(self, name, fn, context, stream, pool)
                graph.captured_on = stream
                return graph

            return capture

        patch(base.backend, "_capture", make)
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
    from outrider_sim.graphs import Capture
    from outrider_sim.memory import Pool

    pools = {}

    def make(original):
        def init(self, sim, name, pool, *rest):
            original(self, sim, name, pools.setdefault(id(sim), Pool("the one")), *rest)

        return init

    patch(Capture, "__init__", make)


# -- flags ----------------------------------------------------------------------------------------------------------------


def _consuming(base):
    base.flag._wait = lambda self, stream: stream.put(lambda: (self._flag.wait(), self._flag.clear()))


def _host_wait(base):
    base.flag._wait = lambda self, stream: self._flag.wait()


def _counting(base):
    import threading

    def make(original):
        def init(self, backend, name):
            original(self, backend, name)
            self.count, self.lock = 0, threading.Lock()

        return init

    def up(self):
        with self.lock:
            self.count += 1
            self._flag.set()

    def down(self):
        with self.lock:
            self.count = max(0, self.count - 1)
            if not self.count:
                self._flag.clear()

    patch(base.flag, "__init__", make)
    base.flag._set = lambda self, stream: stream.put(lambda: up(self))
    base.flag._reset = lambda self, stream: stream.put(lambda: down(self))


def _one_flag(base):
    def make(original):
        def create(self, name):
            flag = original(self, name)
            flag._flag = self.__dict__.setdefault("shared_flag", flag._flag)
            return flag

        return create

    patch(base.backend, "_create_flag", make)


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
    from outrider_sim.graphs import Program
    from outrider_sim.queue import Kind

    def make(original):
        def rebind(self, other, stream):
            enqueue = self.sim.machine.enqueue

            def now(op, where):
                op.fn()

            self.sim.machine.enqueue = now
            try:
                original(self, other, stream)
            finally:
                del self.sim.machine.enqueue
            assert enqueue is not None
            assert Kind.LAUNCH is not None

        return rebind

    patch(Program, "rebind", make)


def _rebind_late(base):
    def make(original):
        def update(self, params, stream):
            original(self, getattr(self, "_late", {key: p.value for key, p in self.context.params.items()}), stream)
            self._late = dict(params)

        return update

    patch(base.graph, "_update_params", make)


def _rebind_alias(base):
    from outrider.device import Graph

    def update(self, params, *, stream):
        self._update_params(params, stream)

    def make(original):
        def replay(self, stream):
            if getattr(self, "_aliased", None):
                original_update(self, {key: tuple(value) for key, value in self._aliased.items()}, stream)
            original(self, stream)

        return replay

    original_update = base.graph._update_params

    def keep(self, params, stream):
        self._aliased = dict(params)

    def checked(original):
        def outer(self, params, *, stream):
            original(self, params, stream=stream)
            self._aliased = dict(params)

        return outer

    base.graph._update_params = keep
    patch(Graph, "update_params", checked)
    patch(base.graph, "_replay", make)


def _rebind_other(base):
    def make(original):
        def update(self, params, stream):
            wrong = {"n": "unused", "unused": "n"}
            now = {key: param.value for key, param in self.context.params.items()}
            swapped = {wrong.get(key, key): value for key, value in params.items()}
            original(self, {**now, **swapped} if len(now) > 1 else params, stream)

        return update

    patch(base.graph, "_update_params", make)


def _silent_rebind(base):
    base.graph._update_params = lambda self, params, stream: None
