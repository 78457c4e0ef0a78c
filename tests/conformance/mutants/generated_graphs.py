"""Faults of graphs, flags, errors and fences."""

from __future__ import annotations

import threading
import time
import weakref

from conformance.mutants.catalogue import patch
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

    def capture(original):
        def captured(self, *arguments):
            capturing.count = {}
            try:
                return original(self, *arguments)
            finally:
                capturing.count = None

        return captured

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

    patch(base.backend, "_capture", capture)
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
    def make(original):
        def replay(self, stream):
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

        return replay

    patch(base.graph, "_replay", make)


def replay_early(base):
    def make(original):
        def replay(self, stream):
            before, stream.worker = stream.worker, stream.backend.__dict__.setdefault("engine", engine(stream))
            try:
                reach()
                original(self, stream)
                mark = stream.worker.mark()
            finally:
                stream.worker = before
            stream.worker.put(mark.wait)

        return replay

    patch(base.graph, "_replay", make)


def replay_async(base):
    def make(original):
        def replay(self, stream):
            mark = stream.worker.mark()
            beside = stream.backend.__dict__.setdefault("engine", engine(stream))
            beside.put(mark.wait)
            beside.put(self._run)
            reach()

        return replay

    patch(base.graph, "_replay", make)


def replay_short(base):
    def make(original):
        def replay(self, stream):
            self.times = getattr(self, "times", 0) + 1
            if self.times < 10:
                return original(self, stream)
            reach()
            program = self.program[:-1]
            return stream.put(lambda: [task() for task in program])

        return replay

    patch(base.graph, "_replay", make)


def replay_without(name):
    def apply(base):
        def make(original):
            def capture(self, *arguments):
                graph = original(self, *arguments)
                kept = [task for task in graph.program if name not in str(operator(task))]
                if len(kept) != len(graph.program):
                    reach()
                graph.program[:] = kept
                return graph

            return capture

        patch(base.backend, "_capture", make)

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

    def capture(original):
        def captured(self, *arguments):
            graph = original(self, *arguments)
            latest[:] = [graph]
            return graph

        return captured

    def replay(original):
        def replayed(self, stream):
            graph = latest[0] if latest and latest[0].backend is self.backend else self
            if graph is not self:
                reach()
            original(graph, stream)

        return replayed

    patch(base.backend, "_capture", capture)
    patch(base.graph, "_replay", replay)


def replay_twice(base):
    def make(original):
        def replay(self, stream):
            original(self, stream)
            if stream.worker._enqueued - stream.worker._state.finished > 2:
                reach()
                original(self, stream)

        return replay

    patch(base.graph, "_replay", make)


def capture_most(most):
    def apply(base):
        def make(original):
            def capture(self, *arguments):
                graph = original(self, *arguments)
                if len(graph.program) > most:
                    reach()
                del graph.program[most:]
                return graph

            return capture

        patch(base.backend, "_capture", make)

    return apply


# -- flags -------------------------------------------------------------------------------------------------------------


def flag_consumed(base):
    base.flag._wait = lambda self, stream: stream.put(lambda: (self._flag.wait(), reach(), self._flag.clear()))


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
    def make(original):
        def reset(self, stream):
            if getattr(self, "was_reset", False):
                reach()
                return
            self.was_reset = True
            original(self, stream)

        return reset

    patch(base.flag, "_reset", make)


def flag_shared(base):
    def make(original):
        made: dict = {}

        def create(self, name):
            flag = original(self, name)
            mine = made.setdefault(id(self), [])
            mine.append(flag)
            if len(mine) % 3 == 0:
                reach()
                flag._flag = mine[0]._flag
            return flag

        return create

    patch(base.backend, "_create_flag", make)


# -- errors ------------------------------------------------------------------------------------------------------------


def swallowed(verb):
    def apply(base):
        from outrider.device import DeviceError

        owner, name = _method(base, verb)

        def make(original):
            def swallows(self, *arguments):
                try:
                    return original(self, *arguments)
                except DeviceError:
                    reach()

            return swallows

        patch(owner, name, make)

    return apply


def sticky_error(base):
    from outrider_threads.worker import Failures

    def take(self):
        if self._errors:
            reach()
        return self._errors[0] if self._errors else None

    Failures.take = take


def untyped_error(base):
    def make(original):
        def synchronize(self):
            from outrider.device import DeviceError

            try:
                original(self)
            except DeviceError as error:
                reach()
                raise RuntimeError(str(error)) from None

        return synchronize

    patch(base.stream, "_synchronize", make)


def other_errors_early(base):
    """An error belongs to the device, but a wait that doesn't cover what failed has nothing to say of it."""

    def make(original):
        def synchronize(self):
            for stream in self.backend.streams:
                if stream is not self and not stream.worker.idle:
                    reach()
                    stream.worker.mark().wait()
            original(self)

        return synchronize

    patch(base.stream, "_synchronize", make)


def dead_after_error(base):
    from outrider_threads.worker import Failures

    dead = []

    def add(original):
        return lambda self, error: (dead.append(True), original(self, error))[1]

    def put(original):
        def put(self, task):
            if dead:
                reach()
                return
            original(self, task)

        return put

    patch(Failures, "add", add)
    patch(base.stream, "put", put)


# -- fences ------------------------------------------------------------------------------------------------------------


def fences():
    from outrider.device import EventFence

    return EventFence


def fence_any(base):
    any_generation(base)


def fence_second(base):
    def make(original):
        def done(self):
            found = original(self)
            key = (self, self.event.generation)
            again = getattr(self, "asked", None) == key
            self.asked = key
            if again and not found:
                reach()
            return found or again

        return done

    patch(fences(), "done", make)


def fence_gives_up(base):
    fences().wait_host = lambda self: None if self.event.synchronize_within(0.01) else reach()


def fence_within(answer):
    return lambda base: setattr(fences(), "wait_host_within", lambda self, seconds: (reach(), answer)[1])


def fence_blocks(base):
    def make(original):
        def wait(self, stream):
            if stream.backend.active_capture is None:
                reach()
                self.event.synchronize()
            original(self, stream)

        return wait

    patch(fences(), "wait", make)


def fence_names(base):
    def make(original):
        def create(self, name):
            fence = original(self, name)
            made = self.__dict__.setdefault("made", {})
            if name in made:
                reach()
                fence.event = made[name]
            made[name] = fence.event
            return fence

        return create

    patch(base.sync, "create_fence", make)


def fence_signalled(base):
    def make(original):
        def create(self, name):
            fence = original(self, name)
            reach()
            fence.done = lambda: True if fence.event.generation == 0 else fences().done(fence)
            return fence

        return create

    patch(base.sync, "create_fence", make)
