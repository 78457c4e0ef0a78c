"""The model of the contract: the contents that a program may leave in memory.

Each step becomes *nodes*, one per action of a stream or of the host, with a vector clock of the completed earlier nodes.
Edges come only from the sentences of the interface: the order of a stream, a wait for a generation, a host wait, and a
launch after earlier host actions. Two accesses of one memory, of which one is a write, must be ordered by edges. The
model refuses an unordered step with :class:`Unordered`, so an accepted program has one outcome per read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from outrider_conformance.programs import language as lang
from outrider_conformance.programs.language import DeviceProgram, ElementSpan, Path, Step

Key = tuple[str, int]
"""The key of a resource that is read and written, such as ``("buffer", 2)``: memory, a graph, its host parameter
or a flag.
"""

ORDER, LAUNCH = "Stream", "launch"
"""Labels of the edges that every step has. Other edges are named by the verb that makes them."""


class Unordered(Exception):
    """Raised for a step that would race. ``earlier`` are the nodes that must precede the step and do not."""

    def __init__(self, earlier: Sequence[Node]) -> None:
        super().__init__(f"{len(earlier)} accesses aren't ordered")
        self.earlier = tuple(earlier)


class ForbiddenStep(Exception):
    """Raised for a step that the contract forbids, for example a wait for an event that was never recorded."""


@dataclass(eq=False, slots=True)
class Node:
    """One action of a stream or of a host thread. ``verb`` is the member of the backend interface that performs it."""

    actor: int
    clock: tuple[int, ...]
    causes: tuple[tuple[Node, str], ...]
    path: Path
    verb: str
    effect: Effect | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """A write: ``to`` of ``target`` becomes ``make(source)``. ``seen`` is the state of ``source`` at that time."""

    target: Key
    to: ElementSpan
    make: Callable[[Tensor | None], Tensor]
    source: Key | None = None
    span: ElementSpan | None = None
    seen: Cell | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """The current state of one memory: contents, last writer, readers since then, and the previous state ``before``."""

    data: Tensor | None
    writer: Node | None = None
    readers: tuple[Node, ...] = ()
    before: Cell | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """The contents that a host read must find. ``certain``: a query must return True."""

    reader: Node
    key: Key
    wanted: Tensor
    cell: Cell
    certain: bool = False


@dataclass(slots=True)
class ModelState:
    """The mutable state of the model. Lists are replaced or copied; contents are never written in place."""

    clocks: list[tuple[int, ...]]
    lasts: list[Node | None]
    events: list[Node | None]
    cells: dict[Key, Cell]
    graphs: dict[int, lang.CaptureStep] = field(default_factory=dict)
    params: dict[int, int] = field(default_factory=dict)
    host: int = 0
    expectations: dict[Path, Expectation] = field(default_factory=dict)

    def copy(self) -> ModelState:
        """Return a copy of the state, so that the model can undo a failed step."""
        return replace(
            self,
            clocks=list(self.clocks),
            lasts=list(self.lasts),
            events=list(self.events),
            cells=dict(self.cells),
            graphs=dict(self.graphs),
            params=dict(self.params),
            expectations=dict(self.expectations),
        )


def join(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the union of two clocks: the nodes that have completed for either."""
    return one if one is other else tuple(map(max, one, other))


class Model:
    """The state of a program's execution as far as the contract determines it."""

    def __init__(self, program: DeviceProgram) -> None:
        self.program = program
        count = program.streams + 3  # three host threads: the main thread, and two that run concurrently
        zero = (0,) * count
        cells: dict[Key, Cell] = {}
        for kind, memories in (("buffer", program.buffers), ("slot", program.slots)):
            for index, memory in enumerate(memories):
                cells[kind, index] = Cell(lang.pattern(index, memory.count, lang.dtype_of(memory)))
        self.state = ModelState([zero] * count, [None] * count, [None] * program.events, cells, host=program.streams)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def covers(self, clock: tuple[int, ...], node: Node) -> bool:
        """Return whether ``node`` has completed for an actor with this clock."""
        return clock[node.actor] >= node.clock[node.actor]

    def clock_of(self, stream: int) -> tuple[int, ...]:
        """Return the clock of the next operation that is enqueued on the stream."""
        return join(self.state.clocks[stream], self.state.clocks[self.state.host])

    @property
    def host_clock(self) -> tuple[int, ...]:
        """The clock of the current host thread."""
        return self.state.clocks[self.state.host]

    def _node(self, actor: int, path: Path, verb: str, causes: Sequence[tuple[Node | None, str]] = ()) -> Node:
        state = self.state
        edges = [(state.lasts[actor], ORDER), *causes]
        clock = state.clocks[actor]
        if actor < self.program.streams:
            edges.append((state.lasts[state.host], LAUNCH))
            clock = self.clock_of(actor)
        for cause, _ in causes:
            if cause is not None:
                clock = join(clock, cause.clock)
        clock = (*clock[:actor], clock[actor] + 1, *clock[actor + 1 :])
        node = Node(actor, clock, tuple((n, label) for n, label in edges if n is not None), path, verb)
        state.clocks[actor], state.lasts[actor] = clock, node
        return node

    # -- accesses --------------------------------------------------------------------------------------------------

    def _check(self, clock: tuple[int, ...], reads: Sequence[Key], writes: Sequence[Key]) -> None:
        missing: list[Node] = []
        for key in (*reads, *writes):
            cell = self.state.cells.get(key)
            if cell is None:
                continue
            missing += [cell.writer] if cell.writer is not None else []
            if key in writes:
                missing += cell.readers
        missing = [node for node in missing if not self.covers(clock, node)]
        if missing:
            raise Unordered(missing)

    def _read(self, node: Node, key: Key) -> None:
        cell = self.state.cells[key]
        self.state.cells[key] = replace(cell, readers=(*cell.readers, node))

    def _write(self, node: Node, effects: Sequence[Effect]) -> None:
        for effect in effects:
            cells = self.state.cells
            source = cells[effect.source] if effect.source is not None else None
            before = cells[effect.target]
            assert before.data is not None
            read = source.data if source is not None else None
            made = effect.make(read[effect.span.view] if read is not None and effect.span else None)
            node.effect = replace(effect, seen=source)
            if effect.source is not None:
                self._read(node, effect.source)
            cells[effect.target] = Cell(_patched(before.data, effect.to, made), node, before=before)

    def work(self, stream: int, path: Path, verb: str, effects: Sequence[Effect], *more: Key) -> Node:
        """Add an operation of a stream. Raises :class:`Unordered` if it races with an earlier access. ``more`` are written
        keys other than memory.
        """
        reads = [e.source for e in effects if e.source is not None]
        writes = [*(e.target for e in effects), *more]
        self._check(self.clock_of(stream), reads, writes)
        node = self._node(stream, path, verb)
        self._write(node, effects)
        for key in more:
            self.state.cells[key] = Cell(None, node)
        return node

    # -- steps -----------------------------------------------------------------------------------------------------

    def apply(self, step: Step, path: Path) -> None:
        """Apply a step. Raises :class:`Unordered` or :class:`ForbiddenStep`, without any change, for a race or a forbidden
        step.
        """
        before = self.state.copy()
        try:
            _HANDLERS[type(step)](self, step, path)
        except (Unordered, ForbiddenStep):
            self.state = before
            raise

    def finish(self) -> None:
        """Apply the end of the program: the device is synchronised, and all memory is read."""
        path = (len(self.program.steps),)
        self._synchronize(lang.Synchronize("device"), path)
        for key, cell in list(self.state.cells.items()):
            if cell.data is not None:
                self._expect((*path, ("buffer", "slot").index(key[0]), key[1]), key)

    def _expect(self, path: Path, key: Key, *, reader: Node | None = None, certain: bool = False) -> None:
        cell = self.state.cells[key]
        reader = reader or self._node(self.state.host, path, "read")
        assert cell.data is not None
        self.state.expectations[path] = Expectation(reader, key, cell.data, cell, certain)

    def _slow(self, step: lang.Slow, path: Path) -> None:
        self._node(step.stream, path, "Backend.delay")

    def _churn(self, step: lang.Churn, path: Path) -> None:
        self._node(step.stream, path, "Backend.on")

    def _work(self, step: lang.WorkStep, path: Path) -> None:
        self.work(step.stream, path, "Backend.copy_async" if step.kind == "copy_async" else "Backend.on", [self.effect(step)])

    def effect(self, step: lang.WorkStep, scalar: int = 0, param: int = 0) -> Effect:
        """Return the effect of a step: its target, its source and the function between them."""
        value = {"scalar": scalar, "param": param}[step.value] if isinstance(step.value, str) else step.value
        if step.source is not None:
            make = partial(_mixed, add=value) if step.kind == "mix" else _same
            return Effect(step.to.key, step.to, make, step.source.key, step.source)
        count, dtype = step.to.count, lang.dtype_of(self.program.buffers[step.to.of])
        if step.kind == "send":
            return Effect(step.to.key, step.to, lambda _: lang.pattern(value, count, dtype))
        return Effect(step.to.key, step.to, lambda _: torch.full((count,), value, dtype=torch.int64).to(dtype))

    def _item(self, step: lang.Item, path: Path) -> None:
        key: Key = ("buffer", step.of)
        self._check(self.clock_of(step.stream), (key,), ())
        node = self._node(step.stream, path, "Backend.on")
        self._read(node, key)
        # The contract does not promise that the value orders the host after other work.
        self._expect(path, key, reader=node)

    def _lend(self, step: lang.Lend, path: Path) -> None:
        if step.maker == step.user:
            raise ForbiddenStep("nothing is lent")
        source: Key = ("buffer", step.source.of)
        self._check(self.clock_of(step.maker), (source,), ())
        node = self._node(step.maker, path, "Backend.on")
        self._read(node, source)
        self._event(lang.EventStep("record", step.maker, step.event), path)
        self._event(lang.EventStep("wait", step.user, step.event), path)
        self._node(step.user, path, "Backend.delay")
        effect = Effect(("buffer", step.to.of), step.to, lambda x: _mixed(x, step.add), source, step.source)
        # The model reads `source` again instead of the temporary, which is the same unless this step writes `source`.
        if step.to.of == step.source.of:
            raise ForbiddenStep("the source changes")
        self.work(step.user, path, "Backend.keep_alive", [effect])
        self._node(step.maker, path, "Backend.on")

    def _renew(self, step: lang.Renew, path: Path) -> None:
        key, home = ("buffer", step.of), self.program.buffers[step.of].home
        if any(key[1] in _buffers(graph) for graph in self.state.graphs.values()):
            raise ForbiddenStep("a graph keeps it alive")
        clock = self.clock_of(home)
        cell = self.state.cells[key]
        self._check(clock, (), (key,))
        dtype, count = lang.dtype_of(self.program.buffers[step.of]), self.program.buffers[step.of].count
        node = self._node(home, path, "Backend.on")
        data = torch.full((count,), step.value, dtype=torch.int64).to(dtype)
        whole = ElementSpan(step.of, 0, count)
        node.effect = Effect(key, whole, lambda _: data)
        self.state.cells[key] = Cell(data, node, before=cell)

    # -- order -----------------------------------------------------------------------------------------------------

    def _event(self, step: lang.EventStep, path: Path) -> None:
        if step.verb == "record":
            self.state.events[step.event] = self._node(step.stream, path, "Stream.record")
        else:
            self._node(step.stream, path, "Stream.wait", [(self._recorded(step.event), "Stream.wait")])

    def _recorded(self, event: int) -> Node:
        found = self.state.events[event]
        if found is None:
            raise ForbiddenStep("the event was never recorded")
        return found

    def _synchronize(self, step: lang.Synchronize, path: Path) -> None:
        verb = lang.WAIT_VERBS[step.how]
        if step.how in ("event", "within"):
            causes = [(self._recorded(step.which), verb)]
        elif step.how == "stream":
            causes = [(node, verb) for node in self.state.lasts[step.which : step.which + 1] if node is not None]
        else:
            causes = [(node, verb) for node in self.state.lasts[: self.program.streams] if node is not None]
        self._node(self.state.host, path, verb, causes)

    def _query(self, step: lang.Query, path: Path) -> None:
        target = self._recorded(step.which) if step.what == "event" else self.state.lasts[step.which]
        certain = target is None or self.covers(self.host_clock, target)
        verb = "Event.query" if step.what == "event" else "Stream.query"
        key: Key = ("slot", step.slot or 0)
        cell = self.state.cells[key]
        clock = join(self.host_clock, target.clock) if target is not None else self.host_clock
        if step.slot is not None and cell.writer is not None and not self.covers(clock, cell.writer):
            raise ForbiddenStep("the answer doesn't speak of the slot")
        causes = ((target, verb),) if target is not None else ()
        reader = Node(self.state.host, clock, causes, path, verb)
        self._expect(path, key, reader=reader, certain=certain)

    def _drop_resource(self, step: lang.DropStep, path: Path) -> None:
        if step.what == "event":
            self.state.events[step.number] = None
        else:
            self._graph(step.number)
            del self.state.graphs[step.number]

    def _signal(self, step: lang.Signal, path: Path) -> None:
        if step.setter == step.waiter or step.before.stream != step.setter or step.after.stream != step.waiter:
            raise ForbiddenStep("a flag is between two streams")
        key: Key = ("flag", step.flag)
        for stream in (step.setter, step.waiter):  # after the reset of the previous round
            self._check(self.clock_of(stream), (), (key,))
        self.work(step.setter, path, "Backend.on", [self.effect(step.before)])
        risen = self._node(step.setter, path, "Flag.set")
        self._node(step.waiter, path, "Flag.wait", [(risen, "Flag.wait")])
        self.work(step.waiter, path, "Backend.on", [self.effect(step.after)])
        lowered = self._node(step.waiter, path, "Flag.reset")
        self.state.cells[key] = Cell(None, lowered)
        self._event(lang.EventStep("record", step.waiter, step.event), path)
        self._event(lang.EventStep("wait", step.setter, step.event), path)

    # -- the host --------------------------------------------------------------------------------------------------

    def _hostwrite(self, step: lang.HostWrite, path: Path) -> None:
        key: Key = ("slot", step.slot.of)
        self._check(self.host_clock, (), (key,))
        dtype = lang.dtype_of(self.program.slots[step.slot.of])
        node = self._node(self.state.host, path, "write")
        self._write(node, [Effect(key, step.slot, lambda _: lang.pattern(step.seed, step.slot.count, dtype))])

    def _hostread(self, step: lang.HostRead, path: Path) -> None:
        self._check(self.host_clock, (("slot", step.slot),), ())
        self._expect(path, ("slot", step.slot))

    def _scope(self, step: lang.ScopeStep, path: Path) -> None:
        for number, within in enumerate(step.steps):
            self.apply(within, (*path, 0, number))

    def _together(self, step: lang.ThreadsStep, path: Path) -> None:
        used = [_named_resources(steps) for steps in (step.first, step.second)]
        if all(used) and (used[0] & used[1] or ("device", 0) in used[0] | used[1]):
            raise ForbiddenStep("the two threads share something")
        state, home = self.state, self.state.host
        for number, steps in enumerate((step.first, step.second)):
            self.state.host = home + 1 + number
            self.state.clocks[self.state.host] = join(self.state.clocks[self.state.host], state.clocks[home])
            self._node(self.state.host, path, LAUNCH, [(self.state.lasts[home], LAUNCH)])
            for place, within in enumerate(steps):
                self.apply(within, (*path, number, place))
        self.state.host = home
        self._node(home, path, LAUNCH, [(self.state.lasts[home + 1 + number], LAUNCH) for number in range(2)])

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _capture(self, step: lang.CaptureStep, path: Path) -> None:
        if step.graph in self.state.graphs:
            raise ForbiddenStep("there is such a graph already")
        # A device may run the work to warm up: its accesses must be ordered, and its outputs are filled afterwards.
        reads, writes = _accessed(step)
        self._check(self.clock_of(step.stream), reads, writes)
        node = self._node(step.stream, path, "Backend.capture")
        for key in reads:
            self._read(node, key)
        self._node(self.state.host, path, "Stream.synchronize", [(node, "Stream.synchronize")])
        self.state.graphs[step.graph] = step
        if step.param is not None:
            self.state.params[step.graph] = step.param
        for what in ("graph", "param"):
            self.state.cells[what, step.graph] = Cell(None, node)
        for _, index in sorted(set(writes)):
            memory = self.program.buffers[index]
            fill = lang.WorkStep(step.stream, "fill", ElementSpan(index, 0, memory.count), value=step.value)
            self.work(step.stream, path, "Backend.on", [self.effect(fill)])

    def _replay(self, step: lang.ReplayStep, path: Path) -> None:
        graph = self._graph(step.graph)
        reads, writes = _accessed(graph)
        for _ in range(step.times):
            key: Key = ("graph", step.graph)
            self._check(self.clock_of(step.stream), (*reads, ("param", step.graph)), (*writes, key))
            node = self._node(step.stream, path, "Graph.replay")
            for work in graph.work:
                self._write(node, [self.effect(work, graph.scalar, self.state.params.get(step.graph, 0))])
            self._read(node, ("param", step.graph))
            self.state.cells[key] = Cell(None, node)

    def _graph(self, number: int) -> lang.CaptureStep:
        found = self.state.graphs.get(number)
        if found is None:
            raise ForbiddenStep("there is no such graph")
        return found

    def _update(self, step: lang.Update, path: Path) -> None:
        if self._graph(step.graph).param is None:
            raise ForbiddenStep("the graph has no host parameter")
        key: Key = ("param", step.graph)
        self._check(self.clock_of(step.stream), (), (key,))
        self.state.cells[key] = Cell(None, self._node(step.stream, path, "Graph.update_params"))
        self.state.params[step.graph] = step.value


_HANDLERS = lang.handlers(Model)


def run_on_model(program: DeviceProgram) -> Model:
    """Apply all steps of a program to a new model and return the model.

    Raises :class:`Unordered` or :class:`ForbiddenStep` for an invalid program.
    """
    model = Model(program)
    for index, step in enumerate(program.steps):
        model.apply(step, (index,))
    model.finish()
    return model


def _same(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _patched(tensor: Tensor, to: ElementSpan, made: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[to.view] = made
    return tensor


def _mixed(tensor: Tensor | None, add: int) -> Tensor:
    assert tensor is not None
    return tensor * 3 + add


def _buffers(graph: lang.CaptureStep) -> set[int]:
    return {key[1] for keys in _accessed(graph) for key in keys}


def _accessed(graph: lang.CaptureStep) -> tuple[list[Key], list[Key]]:
    """Return the buffers that a graph reads, and those that it writes."""
    reads: list[Key] = [("buffer", w.source.of) for w in graph.work if w.source is not None]
    return reads, [("buffer", w.to.of) for w in graph.work]


def _named_resources(steps: Sequence[Step]) -> set[tuple[str, int]]:
    """Return all resources that the steps name: streams, memory, events, graphs and flags."""
    found: set[tuple[str, int]] = set()
    for _, step in lang.walk(tuple(steps)):
        for name in step.__dataclass_fields__:
            value = getattr(step, name)
            if isinstance(value, ElementSpan):
                found.add(("slot", value.of) if name == "slot" else value.key)
            elif name in ("stream", "maker", "user", "fork", "setter", "waiter") and value is not None:
                found.add(("stream", value))
            elif name in ("event", "graph", "slot", "flag") and value is not None:
                found.add((name, value))
        if isinstance(step, lang.DropStep):
            found.add((step.what, step.number))
        if isinstance(step, lang.Synchronize | lang.Query):
            kind = step.how if isinstance(step, lang.Synchronize) else step.what
            found.add(("event" if kind == "within" else kind, step.which))
        if isinstance(step, lang.Item | lang.Renew):
            found.add(("buffer", step.of))
        if isinstance(step, lang.CaptureStep):
            found |= {key for keys in _accessed(step) for key in keys}
    return found
