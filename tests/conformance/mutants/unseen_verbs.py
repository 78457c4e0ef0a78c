"""Backends whose verbs passed the kit when careful vendors' mistakes were looked for by verb: each fails with its promise."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace

from conformance.mutants.catalogue import patched
from conformance.mutants.generated import reach

PLUGIN, COPIES, ERRORS, EVENTS = "test_l0_plugin", "test_l1_copies", "test_l1_errors", "test_l1_events"
MANY, MEMORY, RULES, STREAMS = "test_l1_many", "test_l1_memory", "test_l1_rules", "test_l1_streams"
CAPTURES, GRAPHS, FLAGS = "test_l2_captures", "test_l2_graphs", "test_l3_flags_and_parameters"


def faults() -> Iterator[tuple]:
    """Yield (fault, base, level, apply, promise, test module, words of the test's name, fast)."""
    threads, sim, npu = "threads", "sim", "sim like npu"
    within, on, copy, flag = "Event.synchronize_within", "Backend.on", "Backend.copy_async", "Flag"
    for ability in ("collectives", "captures_collectives", "peer_memory"):
        yield f"{ability} alone is declared", threads, 0, _declares(ability), "Capabilities", PLUGIN, "fit", ability[0] == "p"
    for field, value in (("draft_lengths", frozenset()), ("draft_lengths", {"4"}), ("bytes_per_request", -1)):
        apply = _policy(field, value)
        yield f"the policy's {field} is {value}", threads, 0, apply, "Backend.speculative_sync", PLUGIN, "policy", False
    yield "the first object alone has flags", threads, 0, _first_has_flags, "Backend.capabilities", PLUGIN, "", False
    yield "errors need a text", threads, 0, _needs_text, "Backend.translate_error", PLUGIN, "devices", False
    for unit, change in (
        ("milliseconds", lambda seconds: seconds / 1e3),
        ("whole seconds", int),
        ("ten seconds or more", lambda seconds: max(seconds, 10.0) if seconds else 0.0),
        ("at most 50 ms", lambda seconds: min(seconds, 0.05)),
    ):
        yield f"limits are {unit}", threads, 1, _limits(change), within, EVENTS, "i", False
    yield "a wait for a flag gives up after a second", threads, 1, _lowers, "Flag.wait", EVENTS, "time_limit", False
    for owner in ("stream", "event"):
        query = f"{owner.title()}.query"
        yield f"{query} waits for 5 ms", threads, 1, _waits_in_query(owner), query, EVENTS, "time_limit", False
    yield "a query submits nothing", threads, 1, _held_back, "Stream.query", STREAMS, "only_when", False
    yield "times of a pair are kept", threads, 1, _kept_times, "Event.elapsed_ms", EVENTS, "measure", False
    yield "an idle stream records nothing", threads, 1, _unrecorded, "Stream", EVENTS, "no_other", False
    yield "operation 2,049 is dropped", threads, 1, _dropped, "Stream", MANY, "stays_over", False
    yield "stream 34 is stream 3", threads, 1, _queues, "Backend.create_stream", STREAMS, "all_their_own", False
    for verb in ("stream._record", "event._query", "backend._synchronize", "backend._create_stream", "graph._replay"):
        yield f"{verb} leaves another stream current", threads, 1, _leaves_current(verb), on, RULES, "current", False
    yield "a copy within a tensor does nothing", threads, 1, _copies(_within, None), copy, COPIES, "columns", False
    yield "a copy has 65,535 rows at most", threads, 1, _copies(_tall, 65_535), copy, COPIES, "columns", False
    yield "pinned memory is cleared late", threads, 1, _cleared_late, "Backend.empty_pinned", MEMORY, "pending_at", False
    for fault, apply in (("errors come one by one", _one_by_one), ("errors have no text", _no_text)):
        promise = "Backend.provoke_fault" if apply is _no_text else "Stream.synchronize"
        yield fault, threads, 1, apply, promise, ERRORS, "every_way", False
    for verb in ("stream._record", "stream.put", "graph._replay"):
        promise = "Stream.record" if "record" in verb else "Graph.replay"
        yield f"{verb} raises what failed before", threads, 1, _raises_early(verb), promise, ERRORS, "around", False
    for what, apply in (("tensor", _whole_place), ("pinned tensor", _no_pinned_place)):
        yield f"the place of a slice of a {what} is wrong", sim, 1, apply, "Backend.locate", RULES, "located", False
    yield "failed allocations are counted", sim, 1, _counts_failed, "OutOfDeviceMemory", MEMORY, "out_of", False
    yield "all memory is free", sim, 1, _all_free, "Capabilities.memory_limit", MEMORY, "follow", False
    yield "a captured upload is of the capture", threads, 2, _of_capture(0), copy, GRAPHS, "host_are_replayed", False
    yield "a captured download is of the capture", threads, 2, _of_capture(1), copy, GRAPHS, "host_are_replayed", False
    yield "inputs of one element are frozen", threads, 2, _frozen(_one), "Graph", CAPTURES, "every_buffer", False
    yield "inputs that are outputs are frozen", threads, 2, _frozen(_output), "Graph", GRAPHS, "dozens", False
    yield "graphs without a pool share one", threads, 2, _one_pool, "GraphPool", GRAPHS, "different", False
    for fault, apply in (("at the capture", _set_at_once), ("once", _set_once), ("after the graph's waits", _waits_first)):
        yield f"a captured set acts {fault}", threads, 3, apply, flag, FLAGS, "between_its", False
    for what, apply in (
        ("first values", _rebinds(_first_values)),
        ("first parameters", _rebinds(_first_names)),
        ("other parameters' first values", _rebinds(_resets)),
        ("first operations", _first_issued),
    ):
        yield f"a rebind is of the {what}", npu, 3, apply, "Graph.update_params", FLAGS, "each_value", False


# -- declarations ----------------------------------------------------------------------------------------------------------


def _declares(ability):
    def apply(base):
        reach()
        base.declare(**{ability: True})

    return apply


def _policy(field, value):
    def apply(base):
        reach()
        setattr(base.sync, field, value)

    return apply


def _first_has_flags(base):
    made = []

    @patched(base.backend, "__init__")
    def init(original, self):
        original(self)
        made.append(self)
        self.has_flags = len(made) == 1

    inner = base.backend.capabilities.fget

    def capabilities(self):
        reach()
        return replace(inner(self), flags=self.has_flags)

    base.backend.capabilities = property(capabilities)


def _needs_text(base):
    def translate(self, error, doing):
        reach()
        assert error.args[0].startswith("")  # raises for an error without a text

    base.backend.translate_error = translate


# -- waits and queries -----------------------------------------------------------------------------------------------------


def _limits(change):
    def apply(base):
        def within(self, seconds):
            reach()
            done = self.mark._reached.wait(change(seconds))
            if done:
                self.backend.raise_failed("a limited wait")
            return done

        base.event._synchronize_within = within

    return apply


def _lowers(base):
    base.flag._wait = lambda self, stream: stream.put(lambda: self._flag.wait(1.0) or reach())


def _waits_in_query(owner):
    def apply(base):
        @patched(getattr(base, owner), "_query")
        def query(original, self):
            until = time.monotonic() + 0.005
            while not (done := original(self)) and time.monotonic() < until:
                reach()
                time.sleep(0.0002)
            return done

    return apply


def _held_back(base):
    def submit(stream):
        tasks, stream.tasks = getattr(stream, "tasks", []), []
        for task in tasks:
            stream.worker.put(task)

    @patched(base.stream, "put")
    def put(original, self, task):
        if self._backend.program is not None:
            original(self, task)
            return
        self.tasks = [*getattr(self, "tasks", []), task]
        if len(self.tasks) > 16:
            submit(self)

    for verb in ("_record", "_wait", "_synchronize"):

        @patched(base.stream, verb)
        def call(original, self, *arguments):
            submit(self)
            original(self, *arguments)

    @patched(base.stream, "_query")
    def query(original, self):
        if getattr(self, "tasks", []):
            reach()
            return False
        return original(self)

    @patched(base.backend, "_synchronize")
    def synchronize(original, self):
        for stream in self.streams:
            submit(stream)
        original(self)


def _kept_times(base):
    @patched(base.event, "_elapsed_ms")
    def elapsed(original, self, end):
        kept = self.__dict__.setdefault("kept", weakref.WeakKeyDictionary())
        if end in kept:
            reach()
        return kept.setdefault(end, original(self, end))


def _unrecorded(base):
    @patched(base.stream, "_record")
    def record(original, self, event):
        if self._backend.program is None and self.worker.idle and hasattr(event, "mark"):
            reach()
            return
        original(self, event)


# -- streams and scopes ------------------------------------------------------------------------------------------------------


def _dropped(base):
    @patched(base.stream, "put")
    def put(original, self, task):
        if self._backend.program is None and self.worker._enqueued - self.worker._state.finished > 2048:
            reach()
            return
        original(self, task)


def _queues(base):
    @patched(base.stream, "__init__")
    def init(original, self, backend, name):
        original(self, backend, name)
        backend.workers = [*getattr(backend, "workers", []), self.worker]
        if len(backend.workers) > 32:
            reach()
            self.worker = backend.workers[(len(backend.workers) - 32) % 32]


def _leaves_current(verb):
    owner, name = verb.split(".")

    def apply(base):
        @patched(getattr(base, owner), name)
        def call(original, self, *arguments):
            made = original(self, *arguments)
            backend = self if owner == "backend" else self.backend
            named = (each for each in (made, *arguments, self, *backend.streams[:1]) if hasattr(each, "worker"))
            scope = getattr(backend._thread, "stream", None)
            if scope is not None and backend.program is None and (stream := next(named)) is not scope:
                reach()
                backend._thread.stream = stream
            return made

    return apply


# -- copies and memory -------------------------------------------------------------------------------------------------------


def _within(to, source):
    return to.numel() and to.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _tall(to, source):
    return to.dim() == 2 and to.shape[0] > 65_535 and not to.is_contiguous()


def _copies(matches, rows):
    def apply(base):
        @patched(base.backend, "_copy_async")
        def copy(original, self, destination, source):
            if matches(destination, source):
                reach()
                if rows is None:
                    return
                destination, source = destination[:rows], source[:rows]
            original(self, destination, source)

    return apply


def _cleared_late(base):
    import torch

    def empty(self, shape, dtype):
        if getattr(self._thread, "stream", None) is not None:
            reach()
        return torch.zeros(shape, dtype=dtype)  # work of the scope's stream

    base.backend._empty_pinned = empty


def _one_by_one(base):
    def take(self):
        with self._lock:
            if len(self._errors) > 1:
                reach()
            return self._errors.pop(0) if self._errors else None

    from outrider_threads.worker import Failures

    Failures.take = take


def _no_text(base):
    def raise_failed(self, waiting_for):
        from outrider.device import DeviceFault

        if self.failures.take() is not None:
            reach()
            raise DeviceFault("")

    base.backend.raise_failed = raise_failed


def _raises_early(verb):
    owner, name = verb.split(".")

    def apply(base):
        @patched(getattr(base, owner), name)
        def call(original, self, *arguments):
            if self.backend.program is None and self.backend.failures._errors:
                reach()
                self.backend.raise_failed(name)
            original(self, *arguments)

    return apply


def _whole_place(base):
    @patched(base.backend, "locate")
    def locate(original, self, tensor):
        reach()
        return replace(original(self, tensor), start=0)


def _no_pinned_place(base):
    @patched(base.backend, "locate")
    def locate(original, self, tensor):
        place = original(self, tensor)
        if tensor.device.type == "cpu" and tensor.storage_offset():
            reach()
            place = replace(place, storage=place.storage + 1)
        return place


def _counts_failed(base):
    from outrider.device import OutOfDeviceMemory
    from outrider_sim.machine.memory import CachingAllocator

    lost = []

    @patched(CachingAllocator, "allocate")
    def allocate(original, self, *arguments, **options):
        try:
            return original(self, *arguments, **options)
        except OutOfDeviceMemory:
            reach()
            lost.append(1 << 20)
            raise

    @patched(base.backend, "memory_info")
    def info(original, self):
        found = original(self)
        return replace(found, free=found.free - sum(lost), allocated=found.allocated + sum(lost))


def _all_free(base):
    @patched(base.backend, "memory_info")
    def info(original, self):
        reach()
        found = original(self)
        return replace(found, free=found.total)


# -- graphs and flags --------------------------------------------------------------------------------------------------------


def _of_capture(side):
    def apply(base):
        from torch.utils._python_dispatch import _disable_current_modes

        pinned = []

        @patched(base.backend, "_empty_pinned")
        def empty(original, self, shape, dtype):
            pinned.append(original(self, shape, dtype))
            return pinned[-1]

        @patched(base.backend, "_copy_async")
        def copy(original, self, destination, source):
            host = (source, destination)[side]
            if self.program is None or all(host is not each for each in pinned):
                original(self, destination, source)
                return
            reach()
            if side:
                self._thread.stream.worker.put(lambda: destination.copy_(source))
                return
            with _disable_current_modes():
                source = source.clone()
            original(self, destination, source)

    return apply


def _one(tensor, context):
    return tensor.numel() == 1


def _output(tensor, context):
    return any(tensor.data_ptr() == output.data_ptr() for output in context.outputs.values())


def _frozen(which):
    def apply(base):
        @patched(base.backend, "_capture")
        def capture(original, self, name, fn, context, stream, pool):
            frozen = {key: each.clone() for key, each in context.inputs.items() if which(each, context)}
            if frozen:
                reach()
            changed = replace(context, inputs={**context.inputs, **frozen})
            return original(self, name, lambda _: fn(changed), context, stream, pool)

    return apply


def _one_pool(base):
    import outrider_threads.queueing as queueing
    import torch

    allocated, capture = queueing._allocated, threading.local()
    shared = {}

    def allocate(value):
        made = allocated(value)
        if not isinstance(value, torch.Tensor) or getattr(capture, "count", None) is None:
            return made
        capture.count += 1
        kept = shared.setdefault((capture.count, value.shape, value.dtype), made)
        if kept is not made:
            reach()
        return kept

    queueing._allocated = allocate

    @patched(base.backend, "_capture")
    def call(original, self, name, fn, context, stream, pool):
        capture.count = 0 if pool is None else None
        try:
            return original(self, name, fn, context, stream, pool)
        finally:
            capture.count = None


def _set_at_once(base):
    def raise_flag(self, stream):
        if stream._backend.program is not None:
            reach()
        stream.worker.put(self._flag.set)

    base.flag._set = raise_flag


def _set_once(base):
    def raise_flag(self, stream):
        done = []

        def act():
            if done and captured:
                reach()
                return
            done.append(0)
            self._flag.set()

        captured = stream._backend.program is not None
        stream.put(act)

    base.flag._set = raise_flag


def _waits_first(base):
    @patched(base.graph, "_run")
    def run(original, self):
        waits = [task for task in self.program if getattr(task, "__name__", "") == "wait"]
        if waits:
            reach()
        self.program = [*waits, *(task for task in self.program if task not in waits)]
        original(self)


def _rebinds(change):
    def apply(base):
        @patched(base.graph, "_update_params")
        def update(original, self, params, stream):
            original(self, change(self, dict(params)), stream)

    return apply


def _first_values(graph, params):
    old = {name: param.value for name, param in graph.context.params.items()}
    if any(len(values) > 1 for values in params.values()):
        reach()
    return {name: (values[0], *old[name][1:]) for name, values in params.items()}


def _first_names(graph, params):
    if len(params) > 1:
        reach()
    return dict([*params.items()][:1])


def _resets(graph, params):
    captured = graph.__dict__.setdefault("captured", {name: param.value for name, param in graph.context.params.items()})
    reach()
    return {**captured, **params}


def _first_issued(base):
    @patched(base.graph, "_update_params")
    def update(original, self, params, stream):
        old = {name: param.value for name, param in self.context.params.items()}
        self.backend.rebinding = old, set()
        original(self, params, stream)
        self.backend.rebinding = None

    def reissue(self, context, param, issue):
        old, issued = getattr(self, "rebinding", None) or ({}, set())
        again = param.name in issued
        issued.add(param.name)
        if again:
            reach()
        issue(old[param.name] if again else param.value)

    base.backend._reissue = reissue
