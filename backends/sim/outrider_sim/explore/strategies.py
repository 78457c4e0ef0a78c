"""Scheduling strategies: each picks the actor that takes the next step.

The machine asks a strategy whenever more than one actor could take a step. Candidates are in program order: streams by
the age of their next operation, then host threads. A host thread is a candidate if its next action uses the device
(enqueue, query, access to pinned memory) and nothing blocks it. A strategy therefore decides how streams interleave and
how far the host runs ahead.

A strategy object serves one run; `strategies` of `explore` creates one for each run of an exploration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.device import ConfigError
from outrider_sim.explore.delay_schedule import Schedule, ScheduleStep

if TYPE_CHECKING:
    from outrider_sim.machine.queue import HostThread, StreamQueue


class Strategy:
    """The program-order strategy: each operation runs at once, before the host continues. Base class of
    the other strategies.
    """

    name = "program"
    host_first = False
    """The host runs on whenever it can, so the machine needn't ask while the only thread enqueues."""
    needs_accesses = False
    """Decisions look at what operations read and write."""
    sees_all = False
    """Asked also where there is one candidate alone."""

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Return the index of the candidate that takes the next step; there are at least two candidates."""
        del candidates
        return 0

    def begin(self) -> None:
        """Reset the strategy's state before a run."""

    def end(self) -> None:
        """Update the strategy's state after a run, also after a failed run."""


class HostFirst(Strategy):
    """Host-first strategy: streams run in program order, only while all host threads wait."""

    name = "lazy"
    host_first = True

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick the first host thread, or the oldest operation if none is ready."""
        for i, actor in enumerate(candidates):
            if actor.label.startswith("host"):
                return i
        return 0


class Slowest(Strategy):
    """Slow-stream strategy: one stream runs only when no other stream or host thread can."""

    name = "slowest"

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick the first stream or host thread other than the slow stream."""
        return 1 if candidates[0].label == self.stream else 0


class Fastest(Strategy):
    """Fast-stream strategy: one stream runs whenever possible, the others only while all host threads wait."""

    name = "fastest"

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick the fast stream, else a host thread, else the oldest operation."""
        host = 0
        for i, actor in enumerate(candidates):
            if actor.label == self.stream:
                return i
            if not host and actor.label.startswith("host"):
                host = i
        return host


class Random(Strategy):
    """Random strategy. The host's weight is sampled once per run, so that some runs have short queues and some deep ones."""

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
    """Probabilistic concurrency testing: random priorities, lowered at `depth` - 1 random steps.

    A bug that needs `depth` orderings among `n` actors and `steps` decisions is found in one run with probability at
    least 1 / (n * steps ** (depth - 1)). `steps` should be about the number of decisions of a run.
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
    """The replay strategy: program order, except where a delay of the schedule blocks a step."""

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
        """Return whether a delay of the schedule still blocks the step."""
        after = self._after.get(step)
        return after is not None and self._done.get(after.actor, 0) <= after.number

    def note(self, label: str, done: int) -> None:
        """Record that `actor` has taken `done` steps, so that delays for its steps end."""
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


def _exhaustive(_: Options, __: int) -> Strategy:
    from outrider_sim.explore.exhaustive import Exhaustive  # imports this module

    return Exhaustive()


def _mixed(options: Options, seed: int) -> Strategy:
    # Extremes first, since they find most shallow bugs at once; then PCT and random in turn.
    if seed == 0:
        return Strategy()
    if seed == 1:
        return HostFirst()
    return Random(seed) if seed % 2 else PriorityStrategy(seed, integer(options, "d", 2, 1), integer(options, "k", 200, 1))


MAKERS: Mapping[str, Callable[[Options, int], Strategy]] = {
    "program": lambda _, __: Strategy(),
    "lazy": lambda _, __: HostFirst(),
    "slowest": lambda o, _: Slowest(_stream(o)),
    "fastest": lambda o, _: Fastest(_stream(o)),
    "random": lambda _, seed: Random(seed),
    "pct": lambda o, seed: PriorityStrategy(seed, integer(o, "d", 3, 1), integer(o, "k", 200, 1)),
    "exhaustive": _exhaustive,
    "replay": lambda o, _: ReplaySchedule(Schedule.parse(o.get("schedule", ""))),
    "mixed": _mixed,
}
"""Strategy name → maker from options and seed."""

OPTIONS: Mapping[str, str] = {
    "stream": "stream of the strategies slowest and fastest",
    "d": "bug depth of pct",
    "k": "decisions that pct expects in a run",
    "schedule": "delays of the strategy replay",
}
"""Options that strategies take."""


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
    """Parse strategy text such as `pct:d=3,k=60` into name and options. The text after `replay:` is one schedule."""
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
