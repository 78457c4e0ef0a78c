"""Generate random programs that the model accepts, with sequences that often expose driver faults.

Steps are generated one by one. If the model reports a race, the generator inserts an ordering step before the new step: a
wait for an event that covers the earlier access, or a host wait. Programs are therefore free of races, and ordered no
more than necessary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import TypeVar

from outrider.device import Capabilities
from outrider_conformance.programs import language as lang
from outrider_conformance.programs.language import DeviceProgram, ElementSpan, ProgramMemory, Step
from outrider_conformance.programs.model import ForbiddenStep, Model, Node, Unordered

_INTEGER_DTYPES = ("int32", "int16", "uint8", "bool")


COMMON: Mapping[str, int] = MappingProxyType(
    {"slow": 4, "fill": 3, "mix": 6, "copy": 4, "upload": 2, "download": 4, "host_write": 2, "host_read": 3, "record": 4}
    | {"wait": 2, "synchronize": 2, "query": 2, "forget": 1, "elsewhere": 1, "scope": 1, "item": 1, "send": 1}
)
FAMILIES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "order": {"mix": 10, "record": 8, "wait": 6, "query": 4, "forget": 3, "synchronize": 3, "pile": 2, "relay": 8},
        "copies": {
            "copy": 10,
            "upload": 8,
            "download": 10,
            "send": 4,
            "host_write": 5,
            "host_read": 4,
            "item": 2,
            "relay": 2,
        },
        "memory": {"lend": 6, "renew": 5, "churn": 4, "mix": 10},
        "threads": {"elsewhere": 8, "together": 4, "scope": 6, "record": 6, "relay": 12},
        "graphs": {"capture": 5, "replay": 12, "drop_graph": 2, "churn": 2, "together": 1, "beside": 6, "relay": 2},
        "bound": {"capture": 5, "replay": 12, "update": 8, "signal": 8, "drop_graph": 1},
    }
)
"""Additional weights of the kinds of steps in each family of programs."""


_T = TypeVar("_T")
_WHOLE = "int64"
_MAX_GRAPHS, _MAX_DELAYS = 3, 6
_HOST_STEPS = ("host_read", "host_write", "query", "item", "send")


def random_program(random: Random, declared: Capabilities, family: str) -> Model:
    """Return a program of ``family`` for a backend that declares these capabilities, applied to the model."""
    return _ProgramDraft(random, declared, family).program()


class _ProgramDraft:
    """A random program under construction, and the model after its steps so far."""

    def __init__(self, random: Random, declared: Capabilities, family: str) -> None:
        self._random = random
        self._declared = declared
        # Without graphs, a replay calls the callable, which may fork and reads the parameters at that time.
        self._forks = declared.forks_in_capture or not declared.captures_graphs
        self._params = declared.updates_graph_params or not declared.captures_graphs
        weights = {**COMMON, **FAMILIES[family]}
        if not declared.flags:
            weights.pop("signal", None)
        if not self._params:
            weights.pop("update", None)
        self.kinds = [name for name, weight in weights.items() for _ in range(weight)]
        self.inner = [name for name in self.kinds if name not in ("elsewhere", "scope", "together", "relay", "beside")]
        self.family = family
        self.steps: list[Step] = []
        self.slows = 0
        self.seed = 10
        head = self._head()
        self.model = Model(head)
        self.streams = list(range(head.streams))
        self.events = list(range(head.events))
        self.buffers = list(range(len(head.buffers)))
        self.slots = list(range(len(head.slots)))
        self.graphs = list(range(_MAX_GRAPHS))

    # -- draws -----------------------------------------------------------------------------------------------------

    def number(self, least: int, most: int) -> int:
        """Return a random integer from ``least`` to ``most``."""
        return self._random.randint(least, most)

    def pick(self, among: Sequence[_T]) -> _T:
        """Return a random element of the sequence."""
        return among[0] if len(among) == 1 else among[self.number(0, len(among) - 1)]

    def chance(self, percent: int) -> bool:
        """Return True with a probability of ``percent``."""
        return self.number(0, 99) >= 100 - percent

    def fresh(self) -> int:
        """Return a number that no earlier step of the program uses: a fill value, or the seed of a pattern."""
        self.seed += 1
        return self.seed

    def _head(self) -> DeviceProgram:
        streams = self.number(2, 4)
        small = self.number(1, 64) if self.family != "graphs" or self.chance(70) else 9001
        floats = sorted(str(dtype).removeprefix("torch.") for dtype in self._declared.dtypes)
        other = self.pick((*floats, *_INTEGER_DTYPES))
        sizes = [1, 3, 17, 64, 257, 1023, 4099, 65_537]
        large = self.pick(sizes)
        if self.family in ("copies", "graphs") and self.chance(8):
            large = 700_001  # several MiB in every dtype
        homes = [self.number(0, streams - 1) for _ in range(5)]
        return DeviceProgram(
            streams=streams,
            buffers=(
                *(ProgramMemory(_WHOLE, small, homes[n]) for n in range(3)),
                *(ProgramMemory(other, large, homes[n]) for n in range(3, 5)),
            ),
            slots=(
                ProgramMemory(_WHOLE, small),
                ProgramMemory(_WHOLE, small),
                ProgramMemory(other, large),
                ProgramMemory(other, large),
            ),
            events=self.number(2, 4),
            flags=1 if self._declared.flags else 0,
            steps=(),
        )

    # -- making one ------------------------------------------------------------------------------------------------

    def program(self) -> Model:
        """Generate the steps, and return the model after the whole program."""
        for _ in range(self.number(6, 26)):
            self.one(self.pick(self.kinds))
        self.model.program = replace(self.model.program, steps=tuple(self.steps))
        self.model.finish()
        return self.model

    def one(self, kind: str) -> None:
        """Add one random step of the given kind to the program, with the steps that must precede it."""
        step = getattr(self, "_" + kind)()
        if step is not None:
            self.emit(step)
            if self.family != "copies" and self.chance(25) and hasattr(step, "stream"):
                self.emit(lang.EventStep("record", step.stream, self.pick(self.events)))

    def emit(self, step: Step) -> None:
        """Add ``step`` to the program, preceded by steps that order it. A step that the contract forbids is left out."""
        for _ in range(8):
            try:
                self.model.apply(step, (len(self.steps),))
            except Unordered as race:
                self.order(step, race.earlier[0])
            except ForbiddenStep:
                return
            else:
                self.steps.append(step)
                return

    def order(self, step: Step, earlier: Node) -> None:
        """Add a step that orders ``step`` after the node ``earlier``: a wait for an event, or a host wait."""
        state, model = self.model.state, self.model
        stream = getattr(step, "stream", None)
        covering = [
            event for event in self.events if (node := state.events[event]) is not None and model.covers(node.clock, earlier)
        ]
        known = earlier.actor < model.program.streams
        if known and not covering:
            covering = [self.pick(self.events)]
            self.emit(lang.EventStep("record", earlier.actor, covering[0]))
        if not covering:
            self.emit(lang.Synchronize("device"))
        elif stream is not None and self.chance(75):
            self.emit(lang.EventStep("wait", stream, self.pick(covering)))
        else:
            way = self.pick(
                ("event", "within", "stream", "device") if len(self.streams) == model.program.streams else ("event",)
            )
            which = earlier.actor if way == "stream" else self.pick(covering)
            self.emit(lang.Synchronize(way if known else "event", which if way != "device" else 0))

    # -- spans -----------------------------------------------------------------------------------------------------

    def span(self, of: int, length: int, count: int, *, dense: bool = False) -> ElementSpan:
        """Return a random span of ``count`` elements within the ``length`` elements of buffer ``of``; without gaps if
        ``dense``.
        """
        most = (length - 1) // (count - 1) if count > 1 else 1
        stride = 1 if dense or most < 2 or self.chance(60) else self.number(2, min(most, 5))
        last = length - ((count - 1) * stride + 1 if count else 0)
        return ElementSpan(of, self.number(0, last) if last and self.chance(70) else 0, count, stride)

    def count(self, length: int) -> int:
        """Return a random number of elements from 0 to ``length``, often all, none or one."""
        how = self.number(0, 9)
        if how < 4:
            return length
        return 0 if how == 4 else min(1, length) if how == 5 else self.number(1, length)

    def two(self, *, whole: bool = False) -> tuple[ElementSpan, ElementSpan] | None:
        """Return random spans of two buffers of one dtype, as destination and source of a copy; None without such buffers.
        ``whole``: only buffers of integers.
        """
        memories = self.model.program.buffers
        usable = [n for n in self.buffers if not whole or memories[n].dtype == _WHOLE]
        pairs = [(a, b) for a in usable for b in usable if a != b and memories[a].dtype == memories[b].dtype]
        if not pairs:
            return None
        to, source = self.pick(pairs)
        length = memories[to].count
        count = self.count(length)
        return self.span(to, length, count), self.span(source, length, count)

    def crossing(self) -> tuple[ElementSpan, ElementSpan] | None:
        """Return dense random spans of a buffer and of a pinned slot of one dtype; None without such memory."""
        program = self.model.program
        pairs = [(b, s) for b in self.buffers for s in self.slots if program.buffers[b].dtype == program.slots[s].dtype]
        if not pairs:
            return None
        buffer, slot = self.pick(pairs)
        length = program.buffers[buffer].count
        count = self.count(length)
        pinned = replace(self.span(slot, length, count, dense=True), pinned=True)
        return self.span(buffer, length, count, dense=True), pinned

    # -- kinds -----------------------------------------------------------------------------------------------------

    def _slow(self) -> Step | None:
        self.slows += 1
        return lang.Slow(self.pick(self.streams)) if self.slows <= _MAX_DELAYS else None

    def _fill(self) -> Step:
        of = self.pick(self.buffers)
        length = self.model.program.buffers[of].count
        return lang.WorkStep(
            self.pick(self.streams), "fill", self.span(of, length, self.count(length)), value=self.fresh() % 100
        )

    def _mix(self) -> Step | None:
        found = self.two(whole=True)
        return lang.WorkStep(self.pick(self.streams), "mix", *found, self.fresh()) if found else None

    def _copy(self) -> Step | None:
        found = self.two()
        return lang.copy_step(self.pick(self.streams), *found, self.chance(60)) if found else None

    def _upload(self) -> Step | None:
        found = self.crossing()
        return lang.copy_step(self.pick(self.streams), *found, True) if found else None

    def _download(self) -> Step | None:
        found = self.crossing()
        return lang.copy_step(self.pick(self.streams), found[1], found[0], True) if found else None

    def _send(self) -> Step:
        of = self.pick(self.buffers)
        length = self.model.program.buffers[of].count
        return lang.WorkStep(self.pick(self.streams), "send", self.span(of, length, self.count(length)), value=self.fresh())

    def _item(self) -> Step | None:
        whole = [n for n in self.buffers if self.model.program.buffers[n].dtype == _WHOLE]
        if not whole:
            return None
        of = self.pick(whole)
        return lang.Item(self.pick(self.streams), of, self.number(0, self.model.program.buffers[of].count - 1))

    def _lend(self) -> Step | None:
        found = self.two(whole=True)
        maker, user = self.pick(self.streams), self.pick(self.streams)
        if found is None or maker == user or self.slows >= _MAX_DELAYS:
            return None
        self.slows += 1
        return lang.Lend(maker, user, self.pick(self.events), *found, self.fresh(), self.number(1, 6))

    def _churn(self) -> Step:
        count = 8 * self.model.program.buffers[0].count
        return lang.Churn(self.pick(self.streams), self.pick((count, 1, 512, 4096)), self.number(1, 4))

    def _renew(self) -> Step:
        return lang.Renew(self.pick(self.buffers), self.fresh() % 100, self.chance(40))

    def _record(self) -> Step:
        return lang.EventStep("record", self.pick(self.streams), self.pick(self.events))

    def _wait(self) -> Step:
        return lang.EventStep("wait", self.pick(self.streams), self.pick(self.events))

    def _pile(self) -> None:
        """Add 21 to 25 waits of one stream, each for a further generation of one event, after slow work; the last wait orders
        a read.
        """
        a, b = self.pick(self.streams), self.pick(self.streams)
        found = self.two(whole=True)
        if a == b or found is None:
            return
        event = self.pick(self.events)
        to, source = found
        self.emit(lang.Slow(a))
        for _ in range(self.number(20, 24)):
            self.emit(lang.EventStep("record", a, event))
            self.emit(lang.EventStep("wait", b, event))
        self.emit(lang.WorkStep(a, "mix", source, to, self.fresh()))
        self.emit(lang.EventStep("record", a, event))
        self.emit(lang.EventStep("wait", b, event))
        self.emit(lang.copy_step(b, to, source, True))

    def _perhaps_elsewhere(self, *steps: Step) -> None:
        """Add the steps to the program, sometimes on another host thread."""
        if self.chance(50 if self.family == "threads" else 15):
            self.emit(lang.ThreadsStep(steps))
        else:
            for step in steps:
                self.emit(step)

    def _relay(self) -> None:
        """Add a late write, a record, and at once the wait of another stream or of the host."""
        a, b = self.pick(self.streams), self.pick(self.streams)
        event, crossing, found = self.pick(self.events), self.crossing(), self.two()
        if a == b or crossing is None or found is None or self.slows >= _MAX_DELAYS:
            return
        self.slows += 1
        self._record_early(a, event)
        if self.chance(50):
            self.emit(lang.Slow(a))
            to = found[0]
            length = self.model.program.buffers[to.of].count
            self.emit(lang.WorkStep(a, "fill", ElementSpan(to.of, 0, length), value=self.fresh() % 100))
            self._perhaps_elsewhere(lang.EventStep("record", a, event))
            self._perhaps_elsewhere(lang.EventStep("wait", b, event))
            self.emit(lang.copy_step(b, found[1], to, self.chance(50)))
            return
        buffer, slot = crossing
        if not buffer.count:
            return
        self.emit(lang.WorkStep(a, "fill", buffer, value=self.fresh() % 100))
        self.emit(lang.Slow(a))
        self.emit(lang.copy_step(a, slot, buffer, True))
        self._perhaps_elsewhere(lang.EventStep("record", a, event))
        if self.chance(30):  # pinned memory is read when the copy runs, not when it is enqueued
            self.emit(lang.EventStep("wait", b, event))
            self.emit(lang.copy_step(b, buffer, slot, True))
            return
        if self.chance(50):
            self._perhaps_elsewhere(lang.Query(*self.pick((("event", event), ("stream", a))), slot.of))
        how = self.pick(("event", "within", "event", "stream"))
        self._perhaps_elsewhere(lang.Synchronize(how, a if how == "stream" else event), lang.HostRead(slot.of))

    def _record_early(self, stream: int, event: int) -> None:
        """Add, in 60 % of the cases, a record of the event; in half of these, the host then waits until the record is
        complete.
        """
        if self.chance(60):
            self.emit(lang.EventStep("record", stream, event))
            if self.chance(50):
                self.emit(lang.Synchronize("event", event))

    def _synchronize(self) -> Step:
        all_streams = len(self.streams) == self.model.program.streams
        how = self.pick(("event", "within", "stream", "device") if all_streams else ("event", "within", "stream"))
        which = self.pick(self.streams) if how == "stream" else self.pick(self.events) if how != "device" else 0
        return lang.Synchronize(how, which)

    def _query(self) -> Step:
        what = self.pick(("event", "stream"))
        which = self.pick(self.events if what == "event" else self.streams)
        return lang.Query(what, which, self.pick(self.slots) if self.slots and self.chance(70) else None)

    def _forget(self) -> Step:
        return lang.DropStep("event", self.pick(self.events))

    def _host_write(self) -> Step | None:
        if not self.slots:
            return None
        length = self.model.program.slots[of := self.pick(self.slots)].count
        return lang.HostWrite(self.span(of, length, self.count(length), dense=True), self.fresh())

    def _host_read(self) -> Step | None:
        return lang.HostRead(self.pick(self.slots)) if self.slots else None

    def _signal(self) -> Step | None:
        first, second = self.two(whole=True), self.two(whole=True)
        setter, waiter = self.pick(self.streams), self.pick(self.streams)
        if first is None or second is None or setter == waiter or self.slows >= _MAX_DELAYS:
            return None
        self.slows += 1
        before = lang.WorkStep(setter, "mix", *first, self.fresh())
        after = lang.copy_step(waiter, second[0], second[1], self.chance(50))
        if self.chance(60):  # the waiter reads the memory that the setter wrote
            after = lang.copy_step(waiter, replace(first[0], of=first[1].of), first[0], False)
        steps: list[Step] = [lang.WorkStep(setter, "fill", first[0], value=value) for value in range(self.number(13, 20))]
        for step in (lang.Slow(setter), *steps) if self.chance(30) else ():  # the set comes after many pending operations
            self.emit(step)
        return lang.Signal(0, self.pick(self.events), setter, waiter, before, after, self.chance(60))

    # -- several ---------------------------------------------------------------------------------------------------

    def several(self, most: int, kinds: Sequence[str]) -> tuple[Step, ...]:
        """Return a few steps for the inside of another step, without changing the model."""
        state, steps = self.model.state, self.steps
        self.model.state, self.steps = state.copy(), []
        try:
            for _ in range(self.number(1, most)):
                self.one(self.pick(kinds))
            return tuple(self.steps)
        finally:
            self.model.state, self.steps = state, steps

    def _elsewhere(self) -> Step | None:
        found = self.several(3, self.inner)
        return lang.ThreadsStep(found) if found else None

    def _scope(self) -> Step | None:
        # On a device that computes in host memory, host accesses inside a scope are work of the stream.
        found = self.several(3, [kind for kind in self.inner if kind not in _HOST_STEPS])
        return lang.ScopeStep(self.pick(self.streams), found, self.chance(30)) if found else None

    def _together(self) -> Step | None:
        if self.chance(70):
            self.emit(lang.Synchronize("device"))
        kept = self.streams, self.events, self.buffers, self.slots, self.graphs
        bodies = []
        try:
            for half in range(2):
                self.streams, self.events, self.buffers, self.slots, self.graphs = (part[half::2] for part in kept)
                # The first thread gets two integer buffers, the second one. Each gets one buffer of the other dtype.
                self.buffers = [0, 2, 3] if half == 0 else [1, 4]
                if not self.streams or not self.events:
                    return None
                with suppress(ForbiddenStep, Unordered):
                    bodies.append(self.several(4, [kind for kind in self.inner if kind not in ("item", "lend", "signal")]))
        finally:
            self.streams, self.events, self.buffers, self.slots, self.graphs = kept
        return lang.ThreadsStep(bodies[0], bodies[1]) if len(bodies) == 2 and all(bodies) else None

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _capture(self) -> Step | None:
        free = [graph for graph in self.graphs if graph not in self.model.state.graphs]
        whole = [n for n in self.buffers if self.model.program.buffers[n].dtype == _WHOLE]
        if not free or len(whole) < 2 or len(self.streams) < 1:
            return None
        stream = self.pick(self.streams)
        param = self.fresh() if self._params and self.chance(60) else None
        body = self._kernels(stream, 1, 5, param is not None)
        others = [other for other in self.streams if other != stream]
        forks = self._forks and others and self.chance(35)
        return lang.CaptureStep(
            graph=self.pick(free),
            stream=stream,
            body=body,
            scalar=self.fresh(),
            value=self.fresh(),
            fork=self.pick(others) if forks else None,
            branch=self._kernels(stream, 1, 2, False) if forks else (),
            tail=self._kernels(stream, 1, 2, False) if forks else (),
            param=param,
        )

    def _kernels(self, stream: int, least: int, most: int, param: bool) -> tuple[lang.WorkStep, ...]:
        made: list[lang.WorkStep] = []
        for number in range(self.number(least, most)):
            found = self.two(whole=self.chance(80) or bool(param and not number))
            if found is None:
                break
            to, source = found
            mixable = self.model.program.buffers[to.of].dtype == _WHOLE
            if mixable and (self.chance(80) or (param and not number)):
                # The host parameter is read by one operation of each graph.
                add: int | str = "param" if param and not number else "scalar" if self.chance(50) else self.fresh()
                made.append(lang.WorkStep(stream, "mix", to, source, add))
            elif self.chance(70):
                made.append(lang.copy_step(stream, to, source, self.chance(40)))
            else:
                made.append(lang.WorkStep(stream, "fill", to, value=self.fresh() % 100))
        return tuple(made)

    def _beside(self) -> None:
        """Add two graphs that write different memory and are replayed concurrently on two streams: they must not share
        temporaries.
        """
        whole = [n for n in self.buffers if self.model.program.buffers[n].dtype == _WHOLE]
        if len(self.streams) < 2 or len(whole) < 3 or self.slows >= _MAX_DELAYS - 1:
            return
        self.slows += 2
        for graph in self.graphs[:2]:
            if graph in self.model.state.graphs:
                self.emit(lang.DropStep("graph", graph))
        number = self.number(0, len(self.streams) - 1)
        streams = (self.streams[number], self.streams[number - 1])
        source, *targets = whole
        length = self.model.program.buffers[source].count
        work, together = self.number(1, 5), self.chance(50)
        for graph, stream, target in zip(self.graphs, streams, targets, strict=False):
            to, first = ElementSpan(target, 0, length), ElementSpan(source, 0, length)
            body = tuple(lang.WorkStep(stream, "mix", to, to if n else first, self.fresh()) for n in range(work))
            self.emit(lang.CaptureStep(graph, streams[0] if together else stream, body, self.fresh(), self.fresh()))
        self.emit(lang.Synchronize("device"))
        event = self.pick(self.events)
        self.emit(lang.Slow(streams[0]))
        self.emit(lang.EventStep("record", streams[0], event))
        self.emit(lang.EventStep("wait", streams[1], event))  # so that both begin at one moment
        times = self.pick((1, 3, 10, 24))
        for graph, stream in zip(self.graphs, streams, strict=False):
            if graph in self.model.state.graphs:
                self.emit(lang.ReplayStep(graph, stream, times))

    def _alive(self) -> list[int]:
        return [graph for graph in self.graphs if graph in self.model.state.graphs]

    def _replay(self) -> Step | None:
        alive = self._alive()
        if not alive:
            return self._capture()
        times = self.pick((1, 1, 1, 2, 3, 24))
        return lang.ReplayStep(self.pick(alive), self.pick(self.streams), times)

    def _update(self) -> Step | None:
        alive = [graph for graph in self._alive() if self.model.state.graphs[graph].param is not None]
        return lang.Update(self.pick(alive), self.pick(self.streams), self.fresh()) if alive else self._capture()

    def _drop_graph(self) -> Step | None:
        alive = self._alive()
        return lang.DropStep("graph", self.pick(alive)) if alive else None
