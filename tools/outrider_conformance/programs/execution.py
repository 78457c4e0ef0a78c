"""Run a program on a backend, and compare each value that the host reads with the values that the model allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.device import Backend, CaptureContext, Event, Flag, Graph, PinnedBuffer, Stream
from outrider_conformance.lab import Lab, run_concurrently
from outrider_conformance.programs import language as lang
from outrider_conformance.programs.language import DeviceProgram, ElementSpan, Path, Step
from outrider_conformance.programs.model import Expectation, Model

_EVENT_TIMEOUT_S = 60.0
_QUERY_TIMEOUT_S = 5.0


class WrongProgramValue(AssertionError):
    """Raised when the host read a value that the model does not allow."""

    def __init__(self, expectation: Expectation, found: Tensor | None, said: str) -> None:
        super().__init__(said)
        self.expectation = expectation
        self.found = found


class StepFailed(AssertionError):
    """Raised when a step raised an error although the contract allows the step."""

    def __init__(self, path: Path, step: Step, error: BaseException) -> None:
        super().__init__(f"step {path} {step!r} raised {type(error).__name__}: {error}")
        self.path = path
        self.step = step


class _Leave(Exception):
    """Raised by a program's step inside a scope, to leave the scope by an exception."""


class ProgramRun:
    """One execution of one random program on a backend."""

    def __init__(self, lab: Lab, program: DeviceProgram, expected: Mapping[Path, Expectation]) -> None:
        self.lab = lab
        self.backend: Backend = lab.backend
        self.program = program
        self.expected = expected
        backend = self.backend
        self.streams = lab.shared_streams(program.streams)
        self.events = [self._create_event(n) for n in range(program.events)]
        self.holds: list[Event] = [backend.create_event(f"held on s{n}") for n in range(program.streams)]
        self.flags: list[Flag] = [backend.create_flag(f"f{n}") for n in range(program.flags)]
        self.graphs: dict[int, Graph] = {}
        self.origins: dict[int, Stream] = {}  # the stream on which a graph's callable enqueues its work
        self.buffers: list[Tensor] = []
        self.slots: list[PinnedBuffer] = []
        for index, memory in enumerate(program.slots):
            slot = backend.empty_pinned(f"slot {index}", (memory.count,), lang.dtype_of(memory))
            slot.tensor.copy_(lang.pattern(index, memory.count, lang.dtype_of(memory)))
            self.slots.append(slot)
        for index, memory in enumerate(program.buffers):
            with backend.on(self.streams[memory.home]):
                made = torch.empty(memory.count, dtype=lang.dtype_of(memory), device=backend.device)
                made.copy_(lang.pattern(index, memory.count, made.dtype))
            self.buffers.append(made)
        backend.synchronize()

    def _create_event(self, number: int) -> Event:
        """Create an event, in the scope of a stream that may be another one than it's recorded on. Every second one measures
        time, where the backend can: it must order work all the same.
        """
        timing = self.backend.capabilities.event_timing and number % 2 == 1
        with self.backend.on(self.streams[number % len(self.streams)]):
            return self.backend.create_event(f"e{number}", timing=timing)

    def run_program(self) -> None:
        """Run all steps and check the final memory. Raises :class:`WrongProgramValue` or :class:`StepFailed`."""
        for index, step in enumerate(self.program.steps):
            self.step(step, (index,))
        path = (len(self.program.steps),)
        self._attempt(path, lang.Synchronize("device"), lambda: self.backend.synchronize())
        for index, buffer in enumerate(self.buffers):
            self._compare(self.expected[*path, 0, index], buffer.cpu(), f"buffer {index} at the end")
        for index in range(len(self.slots)):
            self._compare(self.expected[*path, 1, index], self._pinned(index), f"slot {index} at the end")
        self.backend.release_finished()

    def step(self, step: Step, path: Path) -> None:
        """Run one step on the calling thread."""
        self._attempt(path, step, lambda: _HANDLERS[type(step)](self, step, path))

    def _attempt(self, path: Path, step: Step, act: Callable[[], object]) -> None:
        try:
            act()
        except (WrongProgramValue, StepFailed, _Leave):
            raise
        except Exception as error:
            raise StepFailed(path, step, error) from error

    # -- values ----------------------------------------------------------------------------------------------------

    def _pinned(self, index: int) -> Tensor:
        memory = self.program.slots[index]
        found = torch.empty(memory.count, dtype=lang.dtype_of(memory))
        return found.copy_(self.slots[index].tensor)

    def _compare(self, expectation: Expectation, found: Tensor, what: str) -> None:
        wanted, mine = lang.bits(expectation.wanted), lang.bits(found)
        if torch.equal(mine, wanted):
            return
        places = (mine != wanted).nonzero().flatten().tolist()
        at = places[0]
        more = f", and {len(places) - 1} more of {found.numel()}" if len(places) > 1 else ""
        raise WrongProgramValue(
            expectation, found, f"{what}: element {at} is {mine[at].item()}, expected {wanted[at].item()} (as bits){more}"
        )

    def _view(self, span: ElementSpan, context: CaptureContext | None = None) -> Tensor:
        """Return the elements of a span, in a capture those of its inputs and outputs."""
        if context is not None:
            return {**context.inputs, **context.outputs}[f"b{span.of}"][span.view]
        return (self.slots[span.of].tensor if span.pinned else self.buffers[span.of])[span.view]

    # -- work of a stream ------------------------------------------------------------------------------------------

    def _slow(self, step: lang.Slow, path: Path) -> None:
        self.lab.slow(self.streams[step.stream])

    def _kernel(self, step: lang.WorkStep, stream: Stream, context: CaptureContext | None = None) -> None:
        to = self._view(step.to, context)
        source = to if step.source is None else self._view(step.source, context)
        frozen = 0 if context is None else context.scalars["k"]
        value = step.value if isinstance(step.value, int) else frozen
        if step.kind == "send":
            source = lang.pattern(int(value), step.to.count, to.dtype)
        with self.backend.on(stream):
            if step.kind == "fill":
                to.fill_(value)
            elif step.kind == "copy_async":
                self.backend.copy_async(to, source, stream=stream)
            elif step.kind in ("copy", "send"):
                to.copy_(source)
            elif step.value == "param" and context is not None:
                tripled = source * 3
                self.backend.reissue(context.params["n"], lambda values: _drop(torch.add(tripled, values[0], out=to)))
            else:
                temporary = source * 3
                temporary += value
                to.copy_(temporary)

    def _work(self, step: lang.WorkStep, path: Path) -> None:
        stream = self.streams[step.stream]
        if step.kind == "copy_async" and step.source is not None:
            self.backend.copy_async(self._view(step.to), self._view(step.source), stream=stream)
        else:
            self._kernel(step, stream)

    def _item(self, step: lang.Item, path: Path) -> None:
        expectation = self.expected[path]
        with self.backend.on(self.streams[step.stream]):
            found = self.buffers[step.of][step.index].item()
        wanted = expectation.wanted[step.index].item()
        if found != wanted:
            said = f"buffer {step.of}, read in a scope: element {step.index} is {found}, expected {wanted}"
            raise WrongProgramValue(expectation, None, said)

    def _lend(self, step: lang.Lend, path: Path) -> None:
        backend, maker, user = self.backend, self.streams[step.maker], self.streams[step.user]
        with backend.on(maker):
            given = self._view(step.source) * 3 + step.add
        maker.record(self.events[step.event])
        user.wait(self.events[step.event])
        self.lab.slow(user)
        with backend.on(user):
            self._view(step.to).copy_(given)
        hold = self.holds[step.user]
        user.record(hold)
        backend.keep_alive([given], until=hold)
        shape, dtype = given.shape, given.dtype
        del given
        backend.release_finished()
        with backend.on(maker):
            others = [torch.full(shape, -9 - n, dtype=dtype, device=backend.device) for n in range(step.churn)]
        del others

    def _churn(self, step: lang.Churn, path: Path) -> None:
        with self.backend.on(self.streams[step.stream]):
            for _ in range(step.times):
                torch.full((step.count,), 0x55, dtype=torch.uint8, device=self.backend.device)

    def _renew(self, step: lang.Renew, path: Path) -> None:
        memory = self.program.buffers[step.of]
        home = self.streams[memory.home]
        if step.held:
            home.record(self.holds[memory.home])
            self.backend.keep_alive([self.buffers[step.of]], until=self.holds[memory.home])
        self.buffers[step.of] = torch.empty(0)
        with self.backend.on(home):
            made = torch.full((memory.count,), step.value, dtype=lang.dtype_of(memory), device=self.backend.device)
        self.buffers[step.of] = made

    # -- order -----------------------------------------------------------------------------------------------------

    def _event(self, step: lang.EventStep, path: Path) -> None:
        stream, event = self.streams[step.stream], self.events[step.event]
        if step.verb == "record":
            stream.record(event)
        else:
            stream.wait(event)

    def _synchronize(self, step: lang.Synchronize, path: Path) -> None:
        if step.how == "device":
            self.backend.synchronize()
        elif step.how == "stream":
            self.streams[step.which].synchronize()
        elif step.how == "event":
            self.events[step.which].synchronize()
        elif not self.events[step.which].synchronize_within(_EVENT_TIMEOUT_S):
            raise TimeoutError(f"the generation hasn't completed within {_EVENT_TIMEOUT_S:g} s")

    def _query(self, step: lang.Query, path: Path) -> None:
        asked: Stream | Event = (self.events if step.what == "event" else self.streams)[step.which]
        expectation = self.expected[path]
        done = asked.query()
        if expectation.certain and not done:
            done = self._becomes_true(asked)
            if not done:
                raise WrongProgramValue(
                    expectation, None, f"query of {step.what} {step.which} stays False for what the host waited for"
                )
        if done and step.slot is not None:
            self._compare(expectation, self._pinned(step.slot), f"slot {step.slot}, after {step.what} {step.which} was done")

    def _becomes_true(self, asked: Stream | Event) -> bool:
        """Poll ``query`` briefly and return its answer: a stream may complete a moment later than its last recorded event."""
        if self.backend.control is not None:
            return False
        until = time.monotonic() + _QUERY_TIMEOUT_S
        while not (done := asked.query()) and time.monotonic() < until:
            time.sleep(1e-4)
        return done

    def _drop_resource(self, step: lang.DropStep, path: Path) -> None:
        if step.what == "event":
            self.events[step.number] = self._create_event(step.number)
        else:
            del self.graphs[step.number]

    def _signal(self, step: lang.Signal, path: Path) -> None:
        flag, event = self.flags[step.flag], self.events[step.event]
        setter, waiter = self.streams[step.setter], self.streams[step.waiter]

        def wait() -> None:
            flag.wait(waiter)
            self._kernel(step.after, waiter)
            flag.reset(waiter)
            waiter.record(event)

        if step.early:
            wait()
        self.lab.slow(setter)
        self._kernel(step.before, setter)
        flag.set(setter)
        if not step.early:
            wait()
        setter.wait(event)

    # -- the host --------------------------------------------------------------------------------------------------

    def _hostwrite(self, step: lang.HostWrite, path: Path) -> None:
        to = self.slots[step.slot.of].tensor[step.slot.view]
        to.copy_(lang.pattern(step.seed, step.slot.count, to.dtype))

    def _hostread(self, step: lang.HostRead, path: Path) -> None:
        self._compare(self.expected[path], self._pinned(step.slot), f"slot {step.slot}")

    def _scope(self, step: lang.ScopeStep, path: Path) -> None:
        with suppress(_Leave), self.backend.on(self.streams[step.stream]):
            self._inside(step.steps, (*path, 0))
            if step.raises:
                raise _Leave

    def _together(self, step: lang.ThreadsStep, path: Path) -> None:
        bodies = [partial(self._inside, steps, (*path, n)) for n, steps in enumerate((step.first, step.second)) if steps]
        control = self.backend.control
        if control is not None and len(bodies) > 1:
            control.run_threads(*bodies)
            return
        ready = threading.Barrier(max(len(bodies), 1))

        def begin_together(body: Callable[[], None]) -> None:
            ready.wait()
            body()

        failed = run_concurrently(*(partial(begin_together, body) for body in bodies))
        if failed:
            raise failed[0]

    def _inside(self, steps: Sequence[Step], path: Path) -> None:
        for number, within in enumerate(steps):
            self.step(within, (*path, number))

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _capture(self, step: lang.CaptureStep, path: Path) -> None:
        backend, stream = self.backend, self.streams[step.stream]
        written = sorted({work.to.of for work in step.work})
        read = sorted({work.source.of for work in step.work if work.source is not None} - set(written))
        edges = [backend.create_event(f"edge {n} of g{step.graph}") for n in range(2)]

        self.origins[step.graph] = stream

        def fn(context: CaptureContext) -> None:
            origin = self.origins[step.graph]
            for work in step.body:
                self._kernel(work, origin, context)
            if step.fork is not None:
                fork = self.streams[step.fork]
                origin.record(edges[0])
                fork.wait(edges[0])
                for work in step.branch:
                    self._kernel(work, fork, context)
                fork.record(edges[1])
                origin.wait(edges[1])
            for work in step.tail:
                self._kernel(work, origin, context)

        scalars: dict[str, bool | int | float] = {"k": step.scalar}
        params = {"n": [step.param]} if step.param is not None else None
        self.graphs[step.graph] = backend.capture(
            f"g{step.graph}",
            fn,
            stream=stream,
            inputs={f"b{index}": self.buffers[index] for index in read},
            outputs={f"b{index}": self.buffers[index] for index in written},
            scalars=scalars,
            params=params,
        )
        scalars["k"] = -step.scalar - 1
        if params is not None:
            params["n"][0] = -7
        stream.synchronize()
        for index in written:
            with backend.on(stream):
                self.buffers[index].fill_(step.value)

    def _replay(self, step: lang.ReplayStep, path: Path) -> None:
        stream = self.streams[step.stream]
        if not self.backend.capabilities.captures_graphs:
            self.origins[step.graph] = stream  # replay calls the callable, which names its stream
        for _ in range(step.times):
            self.graphs[step.graph].replay(stream)

    def _update(self, step: lang.Update, path: Path) -> None:
        values = [step.value]
        self.graphs[step.graph].update_params({"n": values}, stream=self.streams[step.stream])
        values[0] = -8


_HANDLERS = lang.handlers(ProgramRun)


def _drop(_: Any) -> None:
    """Discard the argument and return None, so that a lambda which enqueues an operation returns None."""


def run(lab: Lab, model: Model) -> None:
    """Run the model's program once. The device is drained also after an error."""
    try:
        ProgramRun(lab, model.program, model.state.expectations).run_program()
    except Exception:
        with suppress(Exception):
            lab.backend.synchronize()
        raise
