"""Random stream programs, and a brute-force oracle: the transitive closure of what orders what."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from outrider.device import Access, Operation
from outrider_sanitizer.detector.actors import Actor, Point
from outrider_sanitizer.detector.intervals import Listener
from outrider_sanitizer.detector.ordering import Ordering

SIZE = 12


class Named:
    """An event, a flag or a graph, as far as the detector looks at one."""

    context = SimpleNamespace(params={})

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True)
class Region:
    storage: int
    start: int
    count: int
    step: int  # 1: dense

    @property
    def bytes(self) -> frozenset[tuple[int, int]]:
        return frozenset((self.storage, self.start + i * self.step) for i in range(self.count))

    def access(self, write: bool) -> Access:
        end = self.start + (self.count - 1) * self.step + 1
        if self.step == 1:
            return Access(self.storage, self.start, end, write)
        return Access(self.storage, self.start, end, write, (self.count,), (self.step,))


@st.composite
def regions(draw: Any, storages: int = 2) -> Region:
    storage = draw(st.integers(1, storages))
    start = draw(st.integers(0, SIZE - 1))
    step = draw(st.sampled_from((1, 1, 1, 2, 3)))
    count = draw(st.integers(1, (SIZE - 1 - start) // step + 1))
    return Region(storage, start, count, step if count > 1 else 1)


accesses = st.lists(st.tuples(regions(), st.booleans()), min_size=1, max_size=2)
streams = st.integers(0, 2)
threads = st.integers(0, 1)
events = st.integers(0, 1)
graph_body = st.lists(
    st.one_of(
        st.tuples(st.just("op"), st.just(0), accesses),
        st.tuples(st.just("fork"), accesses, accesses, st.booleans()),
    ),
    min_size=1,
    max_size=3,
)
instruction = st.one_of(
    st.tuples(st.just("op"), threads, streams, accesses),
    st.tuples(st.just("op"), threads, streams, accesses),
    st.tuples(st.just("record"), threads, streams, events),
    st.tuples(st.just("wait"), threads, streams, events),
    st.tuples(st.just("sync_event"), threads, events),
    st.tuples(st.just("sync_stream"), threads, streams),
    st.tuples(st.just("host"), threads, accesses),
    st.tuples(st.just("replay"), threads, streams, st.integers(0, 1)),
    st.tuples(st.just("handover"), threads),
)
programs = st.tuples(st.tuples(graph_body, graph_body), st.lists(instruction, min_size=2, max_size=14))


@dataclass
class Oracle:
    """Nodes in the order of the program, each with the set of nodes before it."""

    before: list[int] = field(default_factory=list)
    touched: list[list[tuple[frozenset[tuple[int, int]], bool]]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    last_of: dict[str, int] = field(default_factory=dict)
    launched: list[int] = field(default_factory=list)
    """The host's node that launched each node; a host's node launched itself."""

    def node(
        self,
        actor: str | None,
        after: list[int | None],
        touched: Any = (),
        name: str = "",
        *,
        launch: int | None = None,
        waits_for: int | None = None,
    ) -> int:
        """Add a node after others, and after what ``waits_for`` has behind it that was launched before the node in every
        schedule.
        """
        me = len(self.before)
        mask = 0
        known = [*after, launch, self.last_of.get(actor) if actor else None]
        for other in known:
            if other is not None:
                mask |= self.before[other] | (1 << other)
        self.launched.append(me if launch is None else launch)
        if waits_for is not None:
            host = mask if launch is None else self.before[launch] | 1 << launch
            covered = self.before[waits_for] | 1 << waits_for
            mask |= sum(1 << n for n in range(me) if covered >> n & 1 and host >> self.launched[n] & 1)
        self.before.append(mask)
        self.touched.append([(region.bytes, write) for region, write in touched])
        if actor:
            self.last_of[actor] = me
        if name:
            self.names[name] = me
        return me

    def ordered(self, one: int, two: int) -> bool:
        return bool(self.before[two] >> one & 1)

    def races(self) -> set[tuple[int, int]]:
        found = set()
        for two in range(len(self.before)):
            for one in range(two):
                if not self.ordered(one, two) and self.racing_bytes(one, two):
                    found.add((one, two))
        return found

    def hidden(self, one: int, two: int, byte: tuple[int, int]) -> bool:
        """Return True if an access to ``byte`` comes after ``one``, by the order of a stream alone, and before ``two``."""
        between = (n for n in range(one + 1, two) if self.ordered(one, n) and self.ordered(n, two))
        return any(byte in region for n in between for region, _ in self.touched[n])

    def racing_bytes(self, one: int, two: int) -> set[tuple[int, int]]:
        shared: set[tuple[int, int]] = set()
        for mine, write in self.touched[one]:
            for theirs, other in self.touched[two]:
                if write or other:
                    shared |= mine & theirs
        return shared


class Recorder(Ordering):
    """The detector with threads chosen by the program, and findings by the names of operations."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        super().__init__(
            Listener(conflict=lambda old, new, how, shadow: self.found.add((point_name(old[0]), point_name(new))))
        )
        self.hosts: dict[int, Actor] = {}
        self.acting = 0

    def thread(self) -> Actor:
        if self.acting not in self.hosts:
            self.hosts[self.acting] = Actor(self._number(), f"thread {self.acting}", host=True)
            self._hosts.add(self.hosts[self.acting].number)
        return self.hosts[self.acting]


def run(program: Any) -> tuple[Recorder, Oracle]:
    """One program through the detector and the oracle."""
    bodies, instructions = program
    detector, oracle = Recorder(), Oracle()
    named = [Named("a"), Named("b")]
    generations = [0, 0]
    recorded: list[list[tuple[int, int]]] = [[], []]  # per event: the node of each record, and that of the host's call
    index = 0
    graphs = []
    for number, body in enumerate(bodies):
        graph: Any = Named(f"g{number}")
        detector.capture_began(graph, "main")
        for part, item in enumerate(body):
            capture(detector, item, f"g{number}p{part}", Named(f"fork{part}"), Named(f"join{part}"))
        detector.capture_ended(graph, False)
        graphs.append(graph)
    token = object()
    for at, (what, thread, *rest) in enumerate(instructions):
        detector.acting = thread
        host = f"host{thread}"
        if what in ("op", "record", "wait", "replay"):
            stream = f"s{rest[0]}"
            launch = oracle.node(host, [])
        if what == "op":
            index += 1
            name = f"op{at}"
            oracle.node(stream, [], rest[1], name, launch=launch)
            detector.launched(Operation(name, stream, index, tuple(r.access(w) for r, w in rest[1])))
        elif what == "record":
            record = oracle.node(None, [], launch=launch, waits_for=oracle.last_of.get(stream))
            oracle.node(stream, [], launch=launch)
            recorded[rest[1]].append((record, launch))
            generations[rest[1]] += 1
            detector.recorded(stream, named[rest[1]], generations[rest[1]])  # type: ignore[arg-type]
        elif what == "wait" and recorded[rest[1]]:
            oracle.node(stream, [covered(oracle, recorded[rest[1]], launch)], launch=launch)
            detector.waited(stream, named[rest[1]], generations[rest[1]])  # type: ignore[arg-type]
        elif what == "sync_event" and recorded[rest[0]]:
            oracle.node(host, [covered(oracle, recorded[rest[0]], oracle.node(host, []))])
            detector.event_synchronized(named[rest[0]], generations[rest[0]])  # type: ignore[arg-type]
        elif what == "sync_stream":
            oracle.node(host, [], waits_for=oracle.last_of.get(f"s{rest[0]}"))
            detector.stream_synchronized(f"s{rest[0]}")
        elif what == "host":
            for number, (region, write) in enumerate(rest[0]):
                oracle.node(host, [], [(region, write)], f"{host}:{at}.{number}")
                detector.host_accessed(region.access(write), "")
                detector_name(detector, f"{host}:{at}.{number}")
        elif what == "handover":
            detector.host_released(token)
            detector.acting = 1 - thread
            detector.host_acquired(token)
            oracle.node(f"host{1 - thread}", [oracle.node(host, [])])
            token = object()
        elif what == "replay":
            replay(oracle, bodies[rest[1]], stream, f"g{rest[1]}", at, launch)
            detector.replayed(graphs[rest[1]], stream, at + 1)
    return detector, oracle


def covered(oracle: Oracle, records: list[tuple[int, int]], host: int) -> int | None:
    """The newest record whose host call comes before the waiting host in every schedule."""
    return next((node for node, call in reversed(records) if oracle.ordered(call, host)), None)


def detector_name(detector: Recorder, name: str) -> None:
    """Host accesses have no operation; give the last point the oracle's name, in findings and in the history."""
    for shadow in detector.memory.shadows.values():
        for point, _ in shadow.records():
            if point.sequence == detector.sequence:
                detector.found = {
                    (one, name if two == point.name and two.startswith("host ") else two) for one, two in detector.found
                }
                point.name = name


def capture(detector: Recorder, item: Any, name: str, fork: Any, join: Any) -> None:
    if item[0] == "op":
        detector.launched(Operation(name, "main", 0, tuple(r.access(w) for r, w in item[2])))
        return
    _, one, two, joined = item
    detector.recorded("main", fork, 0)
    detector.waited("side", fork, 0)
    detector.launched(Operation(name + "side", "side", 0, tuple(r.access(w) for r, w in one)))
    detector.launched(Operation(name + "main", "main", 0, tuple(r.access(w) for r, w in two)))
    if joined:
        detector.recorded("side", join, 0)
        detector.waited("main", join, 0)


def replay(oracle: Oracle, body: Any, stream: str, graph: str, at: int, launch: int) -> None:
    side = f"{graph} side"
    # One name for all replays of a captured operation: only the last one is known by it, so names carry the replay.
    oracle.node(stream, [], launch=launch)
    for part, item in enumerate(body):
        name = f"{graph}p{part}"
        if item[0] == "op":
            oracle.node(stream, [], item[2], f"{name}@{at + 1}", launch=launch)
            continue
        _, one, two, joined = item
        fork = oracle.node(stream, [], launch=launch)
        oracle.node(side, [fork], one, f"{name}side@{at + 1}", launch=launch)
        oracle.node(stream, [], two, f"{name}main@{at + 1}", launch=launch)
        if joined:
            oracle.node(stream, [oracle.last_of[side]], launch=launch)
    oracle.node(stream, [oracle.last_of.get(side)], launch=launch)


def point_name(point: Point) -> str:
    return f"{point.name}@{point.replay.generation}" if point.replay else point.name
