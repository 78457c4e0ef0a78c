"""Scheduling strategies: each picks the actor that takes the next step, or replays a schedule.

The machine asks a strategy whenever more than one actor could take a step. Candidates are in program order: streams by
the age of their next operation, then host threads. A host thread is a candidate if its next action uses the device
(enqueue, query, access to pinned memory) and nothing blocks it. A strategy therefore decides how streams interleave and
how far the host runs ahead.

A strategy object serves one run; `strategies` of `explore` creates one for each run of an exploration.

By default, the machine runs each operation as soon as possible, in program order, before the host continues. A schedule
is a list of *delays* of the form "step X not before step Y is done". A step is `(actor, number)`. An actor is a stream
(by name) or a host thread (`host0`, `host1`, …); the number counts that actor's steps since the last reset. In
`forward.5@plan.3/host0.2@copy.1`, operation 5 of stream `forward` waits until operation 3 of `plan` has run, and step 2
of `host0` waits for operation 1 of `copy`. `-` is program order.

A delay names operations and not positions in a log, so the string keeps its meaning while a schedule is shrunk. The
delays that remain after shrinking are the ordering that causes the failure.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.device import ConfigError
from outrider_sim.machine.queue import EventGeneration, HostThread, OperationKind, StreamQueue

if TYPE_CHECKING:
    from outrider_sim.machine.host_scheduler import HostScheduler


PROGRAM = "-"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+~-]")


class ScheduleStep(NamedTuple):
    """One step of a stream or host thread, identified by the actor's name and the step's number."""

    actor: str
    number: int

    def __str__(self) -> str:
        return f"{self.actor}.{self.number}"


class Delay(NamedTuple):
    """A constraint: `step` doesn't run before `after` has run."""

    step: ScheduleStep
    after: ScheduleStep

    def __str__(self) -> str:
        return f"{self.step}@{self.after}"


def safe_name(name: str) -> str:
    """Return the actor name of a stream: only letters, digits and `_.+~-`, so that a schedule needs no quoting."""
    return _UNSAFE.sub("-", name)


class Schedule:
    """An immutable list of delays, at most one for each step."""

    __slots__ = ("_after",)

    def __init__(self, delays: Iterable[Delay] = ()) -> None:
        self._after: dict[ScheduleStep, ScheduleStep] = {}
        for delay in delays:
            self._after[delay.step] = delay.after

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule from the text that `str` returns. Raises `ConfigError` for other text."""
        text = text.strip()
        if text in ("", PROGRAM):
            return cls()
        delays = []
        for part in text.split("/"):
            step, at, after = part.partition("@")
            if not at:
                raise ConfigError(
                    f"schedule: {part!r} is not a delay; expected actor.index@actor.index, joined by '/', as "
                    "printed by a failing run"
                )
            delays.append(Delay(_parse_step(step, part), _parse_step(after, part)))
        return cls(delays)

    def __iter__(self) -> Iterator[Delay]:
        return (Delay(step, after) for step, after in self._after.items())

    def __len__(self) -> int:
        return len(self._after)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._after == other._after

    def __hash__(self) -> int:
        return hash(frozenset(self._after.items()))

    def __str__(self) -> str:
        return "/".join(str(delay) for delay in self) or PROGRAM

    def __repr__(self) -> str:
        return f"Schedule({str(self)!r})"

    @property
    def after(self) -> Mapping[ScheduleStep, ScheduleStep]:
        """The delays as a mapping from each delayed step to the step that it waits for."""
        return self._after


def _parse_step(text: str, part: str) -> ScheduleStep:
    actor, dot, index = text.rpartition(".")
    if not dot or not actor or not index.isdigit():
        raise ConfigError(f"schedule: {text!r} in {part!r} is not a step; expected actor.index, such as forward.5")
    return ScheduleStep(actor, int(index))


class Strategy:
    """The program-order strategy: each operation runs at once, before the host continues. Base class of
    the other strategies.
    """

    name = "program"
    host_first = False
    """True if the strategy always picks a ready host thread, so that the machine needs no call while the only thread
    enqueues.
    """
    needs_accesses = False
    """True if the strategy compares what operations read and write, so that the machine records it."""
    sees_all = False
    """True if the strategy is also called with a single candidate."""

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Return the index of the candidate that takes the next step; there are at least two candidates."""
        del candidates
        return 0

    def begin(self) -> None:
        """Reset the strategy's state. The scheduler calls this before each run."""

    def end(self) -> None:
        """Update the strategy's state after a run, also after a failed run."""


class FixedRanking(Strategy):
    """A strategy with fixed ranks: it picks the candidate of the lowest rank, and among equals the oldest operation.

    ``rank`` is a function of the name of a stream or host thread.
    """

    def __init__(self, name: str, rank: Callable[[str], int], *, host_first: bool = False) -> None:
        self.name, self.host_first = name, host_first
        self._rank = rank

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick the first candidate of the lowest rank."""
        ranks = [self._rank(actor.label) for actor in candidates]
        return ranks.index(min(ranks))


def host_first() -> Strategy:
    """Return the strategy in which streams run only while all host threads wait."""
    return FixedRanking("lazy", lambda label: not label.startswith("host"), host_first=True)


def slowest(stream: str) -> Strategy:
    """Return the strategy in which ``stream`` runs only when no other stream or host thread can."""
    return FixedRanking("slowest", lambda label: label == stream)


def fastest(stream: str) -> Strategy:
    """Return the strategy in which ``stream`` runs whenever possible, and other streams only while all host threads wait."""
    return FixedRanking("fastest", lambda label: 0 if label == stream else 1 if label.startswith("host") else 2)


class Random(Strategy):
    """A strategy of random picks. The host's weight is random per run, so that some runs have short queues and some deep
    ones.
    """

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._host_weight = self._random.choice((1, 1, 4, 16))

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick a stream or host thread at random; host threads have the run's weight."""
        weights = [self._host_weight if a.label.startswith("host") else 1 for a in candidates]
        point = self._random.randrange(sum(weights))
        for i, weight in enumerate(weights):
            point -= weight
            if point < 0:
                return i
        return 0


class PriorityStrategy(Strategy):
    """A strategy of probabilistic concurrency testing: random priorities, lowered at `depth` - 1 random steps.

    A bug that needs `depth` orderings among `n` actors and `steps` decisions is found in one run with probability at least 1
    / (n * steps ** (depth - 1)). `steps` should be about the number of decisions of a run.
    """

    name = "pct"

    def __init__(self, seed: int, depth: int = 3, steps: int = 200) -> None:
        self._random = random.Random(seed)
        self._priority: dict[str, float] = {}
        self._changes = sorted(self._random.randrange(max(1, steps)) for _ in range(depth - 1))
        self._low = 0.0
        self._count = 0

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick the stream or host thread of the highest priority."""
        priority = self._priority
        best = 0
        highest = float("-inf")
        for i, actor in enumerate(candidates):
            value = priority.get(actor.label)
            if value is None:
                value = priority[actor.label] = 1.0 + self._random.random()
            if value > highest:
                best, highest = i, value
        self._count += 1
        while self._changes and self._changes[0] < self._count:
            self._changes.pop(0)
            self._low -= 1.0
            priority[candidates[best].label] = self._low
        return best


class ReplaySchedule(Strategy):
    """A strategy that replays a schedule: program order, except where a delay of the schedule blocks a step."""

    name = "replay"

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._after = schedule.after
        self._done: dict[str, int] = {}

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick the first candidate that no delay blocks, or the first one if all are blocked (another program's schedule)."""
        for i, actor in enumerate(candidates):
            if not self.held(ScheduleStep(actor.label, actor.step)):
                return i
        return 0

    def held(self, step: ScheduleStep) -> bool:
        """Return True if a delay of the schedule still blocks `step`."""
        after = self._after.get(step)
        return after is not None and self._done.get(after.actor, 0) <= after.number

    def note(self, label: str, done: int) -> None:
        """Record that the actor named `label` has taken `done` steps, so that delays which wait for these steps end."""
        self._done[label] = done


Options = Mapping[str, str]


def _stream(options: Options) -> str:
    if "stream" not in options:
        raise ConfigError("strategy: 'slowest' and 'fastest' need stream=NAME")
    return options["stream"]


def integer(options: Options, key: str, default: int, minimum: int = 0) -> int:
    """Parse an integer option of a strategy. Raises `ConfigError` if the value is less than `minimum`."""
    text = options.get(key, str(default))
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise ConfigError(f"option {key}={text!r}: expected an integer of at least {minimum}")
    return value


def _mixed(options: Options, seed: int) -> Strategy:
    # Extremes first, since they find most shallow bugs at once; then PCT and random in turn.
    if seed == 0:
        return Strategy()
    if seed == 1:
        return host_first()
    return Random(seed) if seed % 2 else PriorityStrategy(seed, integer(options, "d", 2, 1), integer(options, "k", 200, 1))


MAKERS: Mapping[str, Callable[[Options, int], Strategy]] = {
    "program": lambda _, __: Strategy(),
    "lazy": lambda _, __: host_first(),
    "slowest": lambda o, _: slowest(_stream(o)),
    "fastest": lambda o, _: fastest(_stream(o)),
    "random": lambda _, seed: Random(seed),
    "pct": lambda o, seed: PriorityStrategy(seed, integer(o, "d", 3, 1), integer(o, "k", 200, 1)),
    "exhaustive": lambda _, __: Exhaustive(),
    "replay": lambda o, _: ReplaySchedule(Schedule.parse(o.get("schedule", ""))),
    "mixed": _mixed,
}
"""The function that makes a strategy from its options and a seed, by strategy name."""

OPTIONS: Mapping[str, str] = {
    "stream": "stream of the strategies slowest and fastest",
    "d": "bug depth of pct",
    "k": "decisions that pct expects in a run",
    "schedule": "delays of the strategy replay",
}
"""Explanation of each option of the strategies, by option name."""


def make_strategy(name: str, seed: int = 0, options: Options | None = None) -> Strategy:
    """Create the strategy `name` for the run numbered `seed`. Raises `ConfigError` for an unknown name or option."""
    if name not in MAKERS:
        raise ConfigError(f"strategy {name!r} doesn't exist; known: {', '.join(sorted(MAKERS))}")
    chosen = options or {}
    for key in chosen:
        if key not in OPTIONS:
            raise ConfigError(f"strategy {name!r} has no option {key!r}; known: {', '.join(sorted(OPTIONS))}")
    return MAKERS[name](chosen, seed)


def parse_strategy(spec: str) -> tuple[str, dict[str, str]]:
    """Parse strategy text such as `pct:d=3,k=60` into name and options. The text after `replay:` is one schedule.

    Raises `ConfigError` for an option without `=`.
    """
    name, _, rest = spec.partition(":")
    if name == "replay" and not rest.startswith("schedule="):
        return name, {"schedule": rest}
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"strategy {spec!r}: {part!r} is not key=value")
        options[key] = value
    return name, options


class Pruned(BaseException):
    """Raised to abort a run that can only repeat the result of an earlier run. Not an `Exception`, so programs don't catch
    it.
    """


class StepAccesses(NamedTuple):
    """Memory and objects that one step may access. A span is (first address, end, writes). With ``all``, the step conflicts
    with every other step.
    """

    actor: str
    host: bool
    spans: tuple[tuple[int, int, bool], ...] = ()
    flag: Any = None
    completes: Any = None  # the generation that a record completes
    asks: Any = None  # what a host query looks at: a generation, or a stream
    all: bool = False


@dataclass(eq=False, slots=True)
class _Frame:
    touches: dict[str, StepAccesses]
    todo: list[str]
    sleep: dict[str, StepAccesses]
    current: str = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.todo[0]


class Exhaustive(Strategy):
    """A strategy that runs every schedule: each run takes the next path of one search tree. `exhausted` is set after the last
    path.
    """

    name = "exhaustive"
    needs_accesses = True
    sees_all = True  # also where there is no choice: a sleeping step may have to wake up

    def __init__(self) -> None:
        self.exhausted = False
        self.floors: dict[int, int] = {}  # rank → where addresses start in every run, so that runs can be compared
        self._stack: list[_Frame] = []
        self._depth = 0
        self._sleep: dict[str, StepAccesses] = {}
        self._no_queries = True
        self._scheduler: HostScheduler | None = None

    def bind(self, scheduler: HostScheduler) -> None:
        """Store the scheduler, whose records of memory accesses the search compares."""
        self._scheduler = scheduler

    def begin(self) -> None:
        """Return to the root of the search tree before a run."""
        self._depth = 0
        self._sleep = {}

    def end(self) -> None:
        """Advance to the next unexplored path of the search tree."""
        assert self._scheduler is not None
        if self._scheduler.queries and self._no_queries:
            # The search treated records as unobserved, but the program queried an event: restart without that assumption.
            self._no_queries = False
            self._stack.clear()
            return
        while self._stack:
            frame = self._stack[-1]
            frame.sleep[frame.current] = frame.touches[frame.current]
            frame.todo.pop(0)
            if frame.todo:
                frame.current = frame.todo[0]
                return
            self._stack.pop()
        self.exhausted = True

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick the next step of this run's path. Raises `Pruned` if only repetitions remain."""
        if self._depth < len(self._stack):
            frame = self._stack[self._depth]
        else:
            frame = self._open(candidates)
            self._stack.append(frame)
        self._depth += 1
        taken = frame.touches[frame.current]
        self._sleep = {label: touch for label, touch in frame.sleep.items() if are_independent(touch, taken)}
        for index, actor in enumerate(candidates):
            if actor.label == frame.current:
                return index
        raise Pruned("the program took another path on the same decisions: it isn't deterministic")

    def _open(self, candidates: Sequence[StreamQueue | HostThread]) -> _Frame:
        assert self._scheduler is not None
        touches = {actor.label: self._step_accesses(actor) for actor in candidates}
        hosts = sum(touch.host for touch in touches.values())
        free = next((t.actor for t in touches.values() if self._touches_nothing(t, hosts)), None)
        todo = [free] if free is not None else list(touches)
        todo = [label for label in todo if label not in self._sleep]
        if not todo:
            raise Pruned("every step from here was explored from an equivalent point")
        return _Frame(touches, todo, dict(self._sleep))

    def _touches_nothing(self, touch: StepAccesses, hosts: int) -> bool:
        assert self._scheduler is not None
        if touch.host and (hosts > 1 or len(self._scheduler.threads) > 1):
            return False
        if touch.completes is not None and not self._no_queries:
            return False
        return not touch.spans and touch.flag is None and touch.asks is None and not touch.all

    def _step_accesses(self, actor: StreamQueue | HostThread) -> StepAccesses:
        assert self._scheduler is not None
        bases = self._scheduler.bases
        if isinstance(actor, HostThread):
            action = actor.action
            spans = tuple((bases[a.storage] + a.start, bases[a.storage] + a.end, a.write) for a in action.accesses)
            return StepAccesses(actor.label, True, spans, asks=action.target if action.what == "query" else None)
        op = actor.queue[0]
        if op.kind < OperationKind.RECORD:
            spans = tuple((bases[a.storage] + a.start, bases[a.storage] + a.end, a.write) for a in op.accesses)
            # An operation that says nothing about its memory may touch any.
            return StepAccesses(actor.label, False, spans, all=not spans)
        if op.kind in (OperationKind.FLAG_SET, OperationKind.FLAG_WAIT, OperationKind.FLAG_RESET):
            return StepAccesses(actor.label, False, flag=op.target)
        if op.kind == OperationKind.RECORD:
            return StepAccesses(actor.label, False, completes=op.target)
        if op.kind == OperationKind.COLLECTIVE_START:
            return StepAccesses(actor.label, False, flag=op.target.member.machine)  # places on the device are few
        return StepAccesses(actor.label, False, all=op.fn is not None or op.kind == OperationKind.COLLECTIVE)


def are_independent(one: StepAccesses, other: StepAccesses) -> bool:
    """Return whether exchanging two adjacent steps of different actors leaves the program's result unchanged."""
    if one.host and other.host:
        return False
    if one.all or other.all:
        return one.host or other.host
    if one.flag is not None and one.flag is other.flag:
        return False
    if _is_queried(one, other) or _is_queried(other, one):
        return False
    return not any(a[0] < b[1] and b[0] < a[1] and (a[2] or b[2]) for a in one.spans for b in other.spans)


def _is_queried(query: StepAccesses, step: StepAccesses) -> bool:
    if query.asks is None:
        return False
    if isinstance(query.asks, EventGeneration):
        # Generations are made anew in each run: compare what they are.
        done = step.completes
        return done is not None and (done.event.id, done.number) == (query.asks.event.id, query.asks.number)
    return isinstance(query.asks, StreamQueue) and query.asks.label == step.actor
