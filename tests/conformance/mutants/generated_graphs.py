"""Faults of graphs, flags, errors and fences."""

from __future__ import annotations

import threading
import time
import weakref

from conformance.mutants.catalogue import patch, patched
from conformance.mutants.faults_verbs import _method
from conformance.mutants.generated import reach
from conformance.mutants.generated_copies import engine
from conformance.mutants.generated_waits import any_generation

# -- graphs ------------------------------------------------------------------------------------------------------------


def shared_scratch(base):
    """Temporaries of a capture lie in memory that all graphs share, by shape."""
    from outrider_threads import queueing

    shared: dict = {}
    capturing = threading.local()

    @patched(base.backend, "_capture")
    def captured(original, self, *arguments):
        capturing.count = {}
        try:
            return original(self, *arguments)
        finally:
            capturing.count = None

    def allocated(original):
        def made(value):
            import torch

            found = original(value)
            count = getattr(capturing, "count", None)
            if count is None or not isinstance(found, torch.Tensor):
                return found
            key = (tuple(found.shape), found.dtype)
            count[key] = count.get(key, 0) + 1
            reach()
            return shared.setdefault((*key, count[key]), found)

        return made

    queueing._allocated = allocated(queueing._allocated)


def weak_replay(base):
    def replay(self, stream):
        alive = weakref.ref(self)

        def run():
            graph = alive()
            if graph is None:
                reach()
            else:
                graph._run()

        stream.put(run)

    base.graph._replay = replay


def inputs_at_call(base):
    @patched(base.graph, "_replay")
    def replay(original, self, stream):
        kept = {name: tensor.clone() for name, tensor in self.inputs.items()}
        inputs = dict(self.inputs)

        def run():
            now = {name: tensor.clone() for name, tensor in inputs.items()}
            for name, tensor in inputs.items():
                tensor.copy_(kept[name])
            self._run()
            for name, tensor in inputs.items():
                if name not in self.outputs:
                    tensor.copy_(now[name])

        reach()
        stream.put(run)


def replay_early(base):
    @patched(base.graph, "_replay")
    def replay(original, self, stream):
        before, stream.worker = stream.worker, stream.backend.__dict__.setdefault("engine", engine(stream))
        try:
            reach()
            original(self, stream)
            mark = stream.worker.mark()
        finally:
            stream.worker = before
        stream.worker.put(mark.wait)


def replay_async(base):
    @patched(base.graph, "_replay")
    def replay(original, self, stream):
        mark = stream.worker.mark()
        beside = stream.backend.__dict__.setdefault("engine", engine(stream))
        beside.put(mark.wait)
        beside.put(self._run)
        reach()


def replay_short(base):
    @patched(base.graph, "_replay")
    def replay(original, self, stream):
        self.times = getattr(self, "times", 0) + 1
        if self.times < 10:
            return original(self, stream)
        reach()
        program = self.program[:-1]
        return stream.put(lambda: [task() for task in program])


def replay_without(name):
    def apply(base):
        @patched(base.backend, "_capture")
        def capture(original, self, *arguments):
            graph = original(self, *arguments)
            kept = [task for task in graph.program if name not in str(operator(task))]
            if len(kept) != len(graph.program):
                reach()
            graph.program[:] = kept
            return graph

    return apply


def operator(task):
    cells = dict(zip(task.__code__.co_freevars, task.__closure__ or (), strict=True)) if hasattr(task, "__code__") else {}
    return cells["func"].cell_contents if "func" in cells else task


def replay_swallows(base):
    def run(self):
        for task in self.program:
            try:
                task()
            except Exception:
                reach()
                return

    base.graph._run = run


def replay_last(base):
    latest: list = []

    @patched(base.backend, "_capture")
    def captured(original, self, *arguments):
        graph = original(self, *arguments)
        latest[:] = [graph]
        return graph

    @patched(base.graph, "_replay")
    def replayed(original, self, stream):
        graph = latest[0] if latest and latest[0].backend is self.backend else self
        if graph is not self:
            reach()
        original(graph, stream)


def replay_twice(base):
    @patched(base.graph, "_replay")
    def replay(original, self, stream):
        original(self, stream)
        if stream.worker._enqueued - stream.worker._state.finished > 2:
            reach()
            original(self, stream)


def capture_most(most):
    def apply(base):
        @patched(base.backend, "_capture")
        def capture(original, self, *arguments):
            graph = original(self, *arguments)
            if len(graph.program) > most:
                reach()
            del graph.program[most:]
            return graph

    return apply


# -- flags -------------------------------------------------------------------------------------------------------------


def flag_gives_up(base):
    base.flag._wait = lambda self, stream: stream.put(lambda: None if self._flag.wait(0.01) else reach())


def flag_wakes_one(base):
    def wait(self, stream):
        def held():
            waiting = self.__dict__.setdefault("waiting", [])
            me = object()
            waiting.append(me)
            until = time.perf_counter() + 3.0
            self._flag.wait()
            while waiting and waiting[0] is not me and time.perf_counter() < until:
                reach()
                time.sleep(0.001)

        stream.put(held)

    base.flag._wait = wait
    patch(
        base.flag,
        "_reset",
        lambda original: lambda self, stream: (self.__dict__.pop("waiting", None), original(self, stream))[1],
    )


def flag_reset_early(base):
    base.flag._reset = lambda self, stream: (reach(), self._flag.clear())[1]


def flag_reset_once(base):
    @patched(base.flag, "_reset")
    def reset(original, self, stream):
        if getattr(self, "was_reset", False):
            reach()
            return
        self.was_reset = True
        original(self, stream)


def flag_shared(base):
    made: dict = {}

    @patched(base.backend, "_create_flag")
    def create(original, self, name):
        flag = original(self, name)
        mine = made.setdefault(id(self), [])
        mine.append(flag)
        if len(mine) % 3 == 0:
            reach()
            flag._flag = mine[0]._flag
        return flag


# -- errors ------------------------------------------------------------------------------------------------------------


def swallowed(verb):
    def apply(base):
        from outrider.device import DeviceError

        owner, name = _method(base, verb)

        @patched(owner, name)
        def swallows(original, self, *arguments):
            try:
                return original(self, *arguments)
            except DeviceError:
                reach()

    return apply


def sticky_error(base):
    from outrider_threads.worker import Failures

    def take(self):
        if self._errors:
            reach()
        return self._errors[0] if self._errors else None

    Failures.take = take


def untyped_error(base):
    @patched(base.stream, "_synchronize")
    def synchronize(original, self):
        from outrider.device import DeviceError

        try:
            original(self)
        except DeviceError as error:
            reach()
            raise RuntimeError(str(error)) from None


def other_errors_early(base):
    """An error belongs to the device, but a wait that doesn't cover what failed has nothing to say of it."""

    @patched(base.stream, "_synchronize")
    def synchronize(original, self):
        for stream in self.backend.streams:
            if stream is not self and not stream.worker.idle:
                reach()
                stream.worker.mark().wait()
        original(self)


def dead_after_error(base):
    from outrider_threads.worker import Failures

    dead = []

    def add(original):
        return lambda self, error: (dead.append(True), original(self, error))[1]

    @patched(base.stream, "put")
    def put(original, self, task):
        if dead:
            reach()
            return
        original(self, task)

    patch(Failures, "add", add)


# -- fences ------------------------------------------------------------------------------------------------------------


def fences():
    from outrider.device import EventFence

    return EventFence


def fence_any(base):
    any_generation(base)


def fence_second(base):
    @patched(fences(), "done")
    def done(original, self):
        found = original(self)
        key = (self, self.event.generation)
        again = getattr(self, "asked", None) == key
        self.asked = key
        if again and not found:
            reach()
        return found or again


def fence_gives_up(base):
    fences().wait_host = lambda self: None if self.event.synchronize_within(0.01) else reach()


def fence_within(answer):
    return lambda base: setattr(fences(), "wait_host_within", lambda self, seconds: (reach(), answer)[1])


def fence_names(base):
    @patched(base.sync, "create_fence")
    def create(original, self, name):
        fence = original(self, name)
        made = self.__dict__.setdefault("made", {})
        if name in made:
            reach()
            fence.event = made[name]
        made[name] = fence.event
        return fence
