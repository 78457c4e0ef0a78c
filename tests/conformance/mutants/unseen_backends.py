"""Backends that passed the kit when their faults were looked for by class: each fails with the promise that it breaks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from conformance.mutants.catalogue import patched
from conformance.mutants.faults_declared import _hook, _info
from conformance.mutants.generated import reach

COPIES, EVENTS, MEMORY, RULES, STREAMS = (f"test_l1_{name}" for name in ("copies", "events", "memory", "rules", "streams"))
CAPTURES, GRAPHS, FLAGS = "test_l2_captures", "test_l2_graphs", "test_l3_flags_and_parameters"


def faults() -> Iterator[tuple]:
    """Yield (fault, base, level, apply, promise, test module, words of the test's name, fast)."""
    cpu, threads, opening = "cpu", "threads", "BackendHooks.create_backend"
    for what, change in _CHANGES.items():
        yield (
            f"opening it changes {what}",
            cpu,
            0,
            _opening(change),
            opening,
            "test_l0_plugin",
            "opening",
            what == "the dtype",
        )
    for fault, changes, promise in (
        ("two devices are counted, and one opens", {"device_count": 2}, "BackendInfo.device_count"),
        ("no device is counted", {"device_count": 0}, "BackendInfo.device_count"),
        ("an option is declared and unknown", {"options": {"mode": "fast or exact"}}, "BackendInfo.options"),
        ("the option of Outrider is declared", {"options": {"kernels": "of mine"}}, "BackendInfo.options"),
        ("a variable has no name", {"cache_variables": ("A CACHE",)}, "BackendInfo.options"),
        ("a usable backend has advice", {"advice": "install it"}, "PluginInfo.usable"),
    ):
        yield fault, cpu, 0, _reached_info(**changes), promise, "test_l0_plugin", "", False
    yield "each RuntimeError is a loss", cpu, 0, _loses, "Backend.translate_error", "test_l0_plugin", "devices", False
    yield "versions change", cpu, 0, _versions, "Backend.versions", "test_l0_plugin", "versions", False
    yield "a device wait covers 64 streams", threads, 1, _first_streams, "Backend.synchronize", STREAMS, "every_stream", True
    yield "a scope replaces KeyError", threads, 1, _replaces, "Backend.on", STREAMS, "any_type", False
    yield "KeyboardInterrupt leaves a scope open", threads, 1, _left_open, "Backend.on", STREAMS, "any_type", False
    yield "a host wait holds a lock", threads, 1, _locked, "Backend", STREAMS, "waiting_thread", False
    yield "backends share the current stream", threads, 1, _one_current, "Backend", STREAMS, "two_backends", False
    yield "a device wait is of the newest backend", threads, 1, _newest, "Backend", STREAMS, "two_backends", False
    yield "an event of an ended thread is over", threads, 1, _ended, "Event.synchronize", STREAMS, "thread_that_ended", False
    yield "a copy of another thread runs at once", threads, 1, _at_once, "Backend", "test_l1_threads", "work_at", False
    yield "a wait changes the gradient mode", threads, 1, _gradients, "Backend", RULES, "global_state", False
    yield "each stream sets torch's seed", cpu, 1, _seeds, "Backend", RULES, "global_state", False
    yield "an event draws a random number", cpu, 1, _draws, "Backend", RULES, "global_state", False
    yield "a scope changes the default dtype inside", cpu, 1, _dtype_inside, "Backend", RULES, "global_state", False
    for what, (matches, copy) in _COPIES.items():
        yield f"a copy {what}", threads, 1, _copying(matches, copy), "Backend.copy_async", COPIES, "views", "float8" in what
    yield "a copy of a strided view blocks", threads, 1, _blocking, "Backend.copy_async", COPIES, "views", False
    yield "a pinned scalar has a dimension", threads, 1, _pinned_scalar, "Backend.empty_pinned", COPIES, "pinned_mem", False
    yield "pinned memory goes back with its first tensor", threads, 1, _early_back, "Backend.empty_pinned", MEMORY, "", False
    yield "a timing event holds nobody", threads, 1, _timing, "Stream.wait", "test_l1_many", "programs", False
    yield "a record of an urgent stream comes early", threads, 1, _urgent, "Stream.wait", "test_l1_many", "programs", False
    yield "whole milliseconds are measured", threads, 1, _whole, "Event.elapsed_ms", EVENTS, "measured", False
    yield "each stream has a clock", threads, 1, _clocks, "Event.elapsed_ms", EVENTS, "measured", False
    for wait, owner, verb in (("device", "backend", "_synchronize"), ("limited", "event", "_synchronize_within")):
        name = f"{owner.title()}.{verb[1:]}"
        yield f"a {wait} wait raises no error", threads, 1, _silent(owner, verb), name, "test_l1_errors", "", False
    yield "a limit is ignored", threads, 1, _unlimited, "Event.synchronize_within", EVENTS, "gives_up", False
    yield "a long limit overflows", threads, 1, _overflows, "Event.synchronize_within", EVENTS, "gives_up", False
    yield (
        "a replay goes to the scope's stream",
        threads,
        2,
        _to_scope("graph", "_replay"),
        "Graph.replay",
        GRAPHS,
        "named",
        False,
    )
    yield "a set goes to the scope's stream", threads, 3, _to_scope("flag", "_set"), "Flag.set", FLAGS, "after_the_set", False
    yield "flag 17 is flag 1", threads, 3, _sixteen, "Flag", FLAGS, "several_flags", False
    yield "the second input is frozen", threads, 2, _second_input, "Graph", CAPTURES, "every_buffer", True
    yield "scalars are integers", threads, 2, _integers, "Backend.capture", CAPTURES, "every_buffer", False
    yield "a capture of another thread is empty", threads, 2, _elsewhere, "Graph", CAPTURES, "every_buffer", False
    yield "a captured delay is enqueued at once", threads, 2, _delay, "Backend.delay", GRAPHS, "captured_delay", False
    yield "a captured copy is enqueued at once", threads, 2, _copied, "Backend.synchronize", GRAPHS, "programs", False
    yield "SystemExit leaves a capture open", threads, 2, _open_capture, "Backend.capture", CAPTURES, "any_type", False
    yield "a capture swallows ValueError", threads, 2, _lost, "Backend.capture", CAPTURES, "any_type", False
    yield "the last of many operations is lost", threads, 2, _last, "Graph.replay", GRAPHS, "thousands", False


# -- what a plugin says ----------------------------------------------------------------------------------------------------


def _default_dtype():
    import torch

    torch.set_default_dtype(torch.float64)


def _working_directory():
    import os

    os.chdir("/")


def _signal_handler():
    import signal

    signal.signal(signal.SIGUSR1, lambda *_: None)


def _denormals():
    import torch

    torch.set_flush_denormal(True)


_CHANGES = {
    "the dtype": _default_dtype,
    "the working directory": _working_directory,
    "a signal handler": _signal_handler,
    "the arithmetic": _denormals,
    "standard output": lambda: print("driver 1.0"),
}


def _opening(change):
    def make(original):
        def create(ordinal, options):
            reach()
            change()
            return original(ordinal, options)

        return create

    return lambda base: _hook(base, "create_backend", make)


def _reached_info(**changes):
    def apply(base):
        reach()
        _info(**changes)(base)

    return apply


def _versions(base):
    calls = []

    @patched(base.backend, "versions")
    def versions(original, self):
        reach()
        calls.append(0)
        return {**original(self), "calls": str(len(calls))}


def _loses(base):
    @patched(base.backend, "translate_error")
    def translate(original, self, error, doing):
        from outrider.device import DeviceLost

        if not isinstance(error, RuntimeError):
            return original(self, error, doing)
        reach()
        return DeviceLost(f"{doing}: {error}")


# -- streams, scopes and threads -------------------------------------------------------------------------------------------


def _first_streams(base):
    def synchronize(self):
        if len(self.streams) > 64:
            reach()
        for stream in self.streams[:64]:
            stream.worker.mark().wait()
        self.raise_failed("the end of all streams")

    base.backend._synchronize = synchronize


def _replaces(base):
    inner = base.backend._on

    @contextmanager
    def on(self, stream):
        from outrider.device import DeviceFault

        try:
            with inner(self, stream):
                yield
        except KeyError as error:
            reach()
            raise DeviceFault("a fault") from error

    base.backend._on = on


def _left_open(base):
    inner = base.backend._on

    @contextmanager
    def on(self, stream):
        try:
            with inner(self, stream):
                yield
        except KeyboardInterrupt:
            reach()
            self._thread.stream = stream
            raise

    base.backend._on = on


def _locked(base):
    lock = threading.RLock()

    @patched(base.stream, "put")
    def put(original, self, task):
        with lock:
            original(self, task)

    for owner in (base.stream, base.event, base.backend):

        @patched(owner, "_synchronize")
        def synchronize(original, self):
            reach()
            with lock:
                original(self)


def _one_current(base):
    shared = threading.local()
    inner = base.backend._on

    @contextmanager
    def on(self, stream):
        self._thread = shared
        before = getattr(shared, "stream", None)
        with inner(self, stream):
            yield
        if before is not None and before.backend is not self:
            reach()
            shared.stream = stream

    base.backend._on = on


def _newest(base):
    made = []

    @patched(base.backend, "__init__")
    def init(original, self):
        original(self)
        made.append(weakref.ref(self))

    @patched(base.backend, "_synchronize")
    def synchronize(original, self):
        newest = made[-1]()
        if newest is not self:
            reach()
        original(newest)


def _ended(base):
    @patched(base.stream, "_record")
    def record(original, self, event):
        original(self, event)
        event.thread = threading.current_thread()

    @patched(base.event, "_synchronize")
    def synchronize(original, self):
        if self.thread.is_alive():
            original(self)
        else:
            reach()


def _at_once(base):
    from torch.utils._python_dispatch import _disable_current_modes

    @patched(base.backend, "_copy_async")
    def copy(original, self, destination, source):
        if threading.current_thread() is threading.main_thread():
            original(self, destination, source)
        else:
            reach()
            with _disable_current_modes():  # else the scope's mode enqueues the copy
                destination.copy_(source)


def _gradients(base):
    @patched(base.backend, "_synchronize")
    def synchronize(original, self):
        import torch

        original(self)
        reach()
        torch.set_grad_enabled(not torch.is_grad_enabled())


def _seeds(base):
    import torch

    @patched(base.backend, "_create_stream")
    def create(original, self, name, priority):
        reach()
        torch.manual_seed(0)
        return original(self, name, priority)


def _draws(base):
    import torch

    @patched(base.backend, "_create_event")
    def create(original, self, name, timing):
        reach()
        torch.rand(1)
        return original(self, name, timing)


def _dtype_inside(base):
    inner = base.backend._on

    @contextmanager
    def on(self, stream):
        import torch

        reach()
        torch.set_default_dtype(torch.float64)
        try:
            with inner(self, stream):
                yield
        finally:
            torch.set_default_dtype(torch.float32)

    base.backend._on = on


# -- copies and memory -----------------------------------------------------------------------------------------------------


def _is_strided_matrix(to, source):
    return to.dim() == 2 and to.stride(1) == 1 and to.stride(0) > to.shape[1]


_COPIES = {
    "of float8 goes through float32": (
        lambda to, source: "float8" in str(to.dtype),
        lambda to, source: to.copy_(source.float().clamp(-400, 400).to(to.dtype)),
    ),
    "of int16 goes through float16": (
        lambda to, source: "int16" in str(to.dtype),
        lambda to, source: to.copy_(source.half().to(to.dtype)),
    ),
    "to rows of a larger matrix writes one block": (
        _is_strided_matrix,
        lambda to, source: to.as_strided(to.shape, (to.shape[1], 1)).copy_(source),
    ),
    "of a scalar does nothing": (lambda to, source: to.dim() == 0, lambda to, source: None),
    "at an odd offset reads an aligned word": (
        lambda to, source: source.numel() and source.storage_offset() * source.element_size() % 4,
        lambda to, source: to.copy_(source.as_strided(source.shape, source.stride(), source.storage_offset() // 4 * 4)),
    ),
}


def _copying(matches, copy):
    def apply(base):
        @patched(base.backend, "_copy_async")
        def copy_async(original, self, destination, source):
            if not matches(destination, source):
                return original(self, destination, source)
            reach()
            return self._thread.stream.put(lambda: copy(destination, source))

    return apply


def _blocking(base):
    @patched(base.backend, "_copy_async")
    def copy(original, self, destination, source):
        original(self, destination, source)
        if not (destination.is_contiguous() and source.is_contiguous()):
            reach()
            self._synchronize_current()


def _pinned_scalar(base):
    @patched(base.backend, "_empty_pinned")
    def empty(original, self, shape, dtype):
        if not shape:
            reach()
        return original(self, shape or (1,), dtype)


def _early_back(base):
    import torch

    free = {}

    @patched(base.backend, "_empty_pinned")
    def empty(original, self, shape, dtype):
        kept = free.setdefault((shape, dtype), [])
        if kept:
            reach()
        storage = kept.pop() if kept else original(self, shape, dtype).untyped_storage()
        made = torch.empty(0, dtype=dtype).set_(storage, 0, shape)
        weakref.finalize(made, kept.append, storage)
        return made


# -- events ----------------------------------------------------------------------------------------------------------------


def _timing(base):
    @patched(base.stream, "_wait")
    def wait(original, self, event):
        if event.timing:
            reach()
        else:
            original(self, event)


def _urgent(base):
    base.declare(stream_priorities=True)

    def create(self, name, priority):
        stream = base.stream(self, name)
        stream.priority = priority
        return stream

    base.backend._create_stream = create

    @patched(base.stream, "_record")
    def record(original, self, event):
        original(self, event)
        if self.priority and self._backend.program is None:
            reach()
            event.mark.reach()


def _whole(base):
    @patched(base.event, "_elapsed_ms")
    def elapsed(original, self, end):
        reach()
        return float(round(original(self, end)))


def _clocks(base):
    starts = weakref.WeakKeyDictionary()

    @patched(base.stream, "_record")
    def record(original, self, event):
        original(self, event)
        event.clock = starts.setdefault(self, len(starts) * 100.0)

    @patched(base.event, "_elapsed_ms")
    def elapsed(original, self, end):
        reach()
        return original(self, end) + end.clock - self.clock


def _silent(owner, verb):
    def apply(base):
        def wait(self, *seconds):
            reach()
            done = True
            for mark in [stream.worker.mark() for stream in self.streams] if owner == "backend" else [self.mark]:
                done = mark._reached.wait(*seconds)
            return done

        setattr(getattr(base, owner), verb, wait)

    return apply


def _unlimited(base):
    def within(self, seconds):
        reach()
        self._synchronize()
        return True

    base.event._synchronize_within = within


def _overflows(base):
    def within(self, seconds):
        nanoseconds = int(seconds * 1e9)
        if nanoseconds >> 32:
            reach()
        done = self.mark._reached.wait((nanoseconds & 0xFFFFFFFF) / 1e9)
        if done:
            self.backend.raise_failed("a limited wait")
        return done

    base.event._synchronize_within = within


# -- graphs and flags --------------------------------------------------------------------------------------------------


def _to_scope(owner, verb):
    def apply(base):
        @patched(getattr(base, owner), verb)
        def call(original, self, stream):
            scope = getattr(self.backend._thread, "stream", None)
            if scope is not None and scope is not stream:
                reach()
            original(self, scope or stream)

    return apply


def _sixteen(base):
    flags = []

    @patched(base.flag, "__init__")
    def init(original, self, backend, name):
        original(self, backend, name)
        flags.append(self._flag)
        if len(flags) > 16:
            reach()
            self._flag = flags[len(flags) % 16 - 1]


def _with_context(change):
    def apply(base):
        @patched(base.backend, "_capture")
        def capture(original, self, name, fn, context, stream, pool):
            changed = change(context)
            return original(self, name, lambda _: fn(changed), context, stream, pool)

    return apply


def _freeze_second(context):
    second = [*context.inputs][1:2]
    if second:
        reach()
    return replace(context, inputs={**context.inputs, **{name: context.inputs[name].clone() for name in second}})


def _to_integers(context):
    if context.scalars:
        reach()
    return replace(context, scalars={name: int(value) for name, value in context.scalars.items()})


_second_input, _integers = _with_context(_freeze_second), _with_context(_to_integers)


def _elsewhere(base):
    @patched(base.backend, "_capture")
    def capture(original, self, *args):
        graph = original(self, *args)
        if threading.current_thread() is not threading.main_thread():
            reach()
            graph.program = []
        return graph


def _delay(base):
    import time

    def delay(self, stream, cycles):
        if self.program is not None:
            reach()
        stream.worker.put(lambda: time.sleep(cycles / 1e9))

    base.backend._delay = delay


def _copied(base):
    @patched(base.backend, "_copy_async")
    def copy(original, self, destination, source):
        if self.program is None:
            return original(self, destination, source)
        reach()
        return self._thread.stream.worker.put(lambda: destination.copy_(source))


def _open_capture(base):
    @patched(base.backend, "_capture")
    def capture(original, self, *args):
        try:
            return original(self, *args)
        except SystemExit:
            reach()
            self._thread.program = []
            raise


def _lost(base):
    @patched(base.backend, "_capture")
    def capture(original, self, name, fn, context, stream, pool):
        def call(context):
            with suppress(ValueError):
                fn(context)
            reach()

        return original(self, name, call, context, stream, pool)


def _last(base):
    @patched(base.graph, "_run")
    def run(original, self):
        del original
        if len(self.program) > 1000:
            reach()
        for task in self.program[:-1] if len(self.program) > 1000 else self.program:
            task()
