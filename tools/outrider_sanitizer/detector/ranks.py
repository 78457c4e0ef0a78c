"""Checks across ranks: matching of collectives, order between ranks, and decisions that all ranks must take alike.

Each rank's device has its own sanitizer; all sanitizers share one object of this module. A collective is one operation with a
part on each rank. Parts are matched by group and number, in the order in which the hosts issue them, so one run is valid for
every schedule. The check of two parts happens when the second is issued. The clocks of two ranks join where the part of one
rank needs the part of the other. The first decision in which the hosts differ is kept, and later findings name it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from outrider_sanitizer.detector.actors import Clock, Point
from outrider_sanitizer.report import AccessSite, Finding, FindingKind, Report

if TYPE_CHECKING:
    from outrider.device import Collective, Decision, Group
    from outrider_sanitizer.detector.memory import Shadow
    from outrider_sanitizer.detector.ordering import Ordering

Key = tuple[str, tuple[int, ...], int]
"""The key of a group: its name, its ranks, and its number among the groups with that name and those ranks."""

_MAX_MESSAGES = 64
"""Maximum number of messages between two ranks that are searched for a cycle of sends."""


def _rank_site(operation: str, rank: int, location: str = "", index: int = -1) -> AccessSite:
    return AccessSite(operation, f"rank {rank}", True, index, location, rank=rank)


_ALIKE_HINT = "then every rank makes the same calls in the same order, with the same operands"


@dataclass(eq=False, slots=True)
class WatchedCollectivePart:
    """One rank's part of a collective.

    ``clock`` is its stream's clock before the call, or None until the stream has reached the call.
    """

    index: int
    rank: int
    call: Collective
    location: str
    number: int
    collective: WatchedCollective
    before: dict[Key, int]
    clock: Clock | None = None
    alone: bool = False
    point: Point | None = None

    @property
    def needs(self) -> tuple[int, ...]:
        """Indices of the ranks whose contribution this part waits for."""
        if self.alone:
            return ()
        if self.call.kind == "broadcast":
            return () if self.index == self.call.root else (self.call.root or 0,)
        if self.call.kind == "send":
            return ()
        if self.call.kind == "receive":
            return (self.call.peer or 0,)
        return self.collective.members

    @property
    def ready(self) -> bool:
        """True if every part that this part waits for has been enqueued."""
        parts = self.collective.parts
        return all(index in parts and parts[index].clock is not None for index in self.needs)

    def clocks(self) -> list[Clock]:
        """Return the clocks of the ranks that this part waits for."""
        return [clock for index in self.needs if (clock := self.collective.parts[index].clock) is not None]

    def site(self, group: str) -> AccessSite:
        """Return the site of this part for a report."""
        how = " in a graph" if self.call.captured else ""
        call = replace(self.call, sequence=self.number)  # in a graph it was counted once, and is called again and again
        return _rank_site(f"{call}{how} of group {group!r}", self.rank, self.location)


@dataclass(eq=False, slots=True)
class WatchedCollective:
    """The parts of one collective, by the index of their rank."""

    members: tuple[int, ...]
    parts: dict[int, WatchedCollectivePart] = field(default_factory=dict)
    passed: int = 0
    """Number of parts whose streams have passed the collective."""

    @property
    def send(self) -> WatchedCollectivePart:
        """The sender's part of a message between two ranks."""
        return self.parts[self.members[0]]

    @property
    def receive(self) -> WatchedCollectivePart:
        """The receiver's part of a message between two ranks."""
        return self.parts[self.members[1]]


def _blocks(other: WatchedCollective, message: WatchedCollective) -> bool:
    """Return True if the send of ``other`` precedes the receive of ``message`` on the receiver's rank."""
    before, after = other.send.point, message.receive.point
    if other.send.rank != message.receive.rank or before is None or after is None:
        return False
    return before is not after and before.happened_before(after)


@dataclass(eq=False, slots=True)
class Decided:
    """A decision that a rank's host reported with ``Group.decide``."""

    name: str
    value: Decision
    location: str
    rank: int
    number: int

    def site(self, group: str) -> AccessSite:
        """Return the site of this decision for a report."""
        decision = f"decision {self.name} = {self.value!r} of group {group!r}"
        return _rank_site(decision, self.rank, self.location, self.number)

    def __str__(self) -> str:
        where = f" at {self.location}" if self.location else ""
        return f"{self.name} = {self.value!r} on rank {self.rank}{where}"


@dataclass(eq=False, slots=True)
class _GroupState:
    """The state of one group. ``has_diverged`` stops its checks, because its ranks already differ."""

    key: Key
    collectives: dict[tuple[tuple[int, int] | None, int], WatchedCollective] = field(default_factory=dict)
    counts: dict[tuple[int, tuple[int, int] | None], int] = field(default_factory=dict)
    decisions: dict[int, list[Decided]] = field(default_factory=dict)
    last: dict[int, WatchedCollectivePart] = field(default_factory=dict)
    points: dict[int, dict[int, tuple[Point, WatchedCollectivePart]]] = field(default_factory=dict)
    has_diverged: bool = False
    differs: bool = False

    @property
    def name(self) -> str:
        return self.key[0]


class RankClocks:
    """State that the sanitizers of all ranks share. Not thread-safe: callers hold ``lock`` around each call."""

    def __init__(self, *, alone: bool = False) -> None:
        """Create the shared state. ``alone`` means that only one rank is watched, so no part waits for another rank."""
        self.alone = alone
        self.lock = threading.RLock()
        self.report = Report()
        self.orderings: list[Ordering] = []
        self.broken = False  # the device passed collectives that some rank never issued: later operations are not ordered
        self.differing: str = ""  # the first decision in which ranks differ
        self.shadows: dict[int, Shadow] = {}
        self._messages: deque[tuple[_GroupState, WatchedCollective]] = deque(maxlen=_MAX_MESSAGES)
        self._numbers = itertools.count(1)
        self._states: dict[Key, _GroupState] = {}
        self._keys: WeakKeyDictionary[Group, Key] = WeakKeyDictionary()
        self._made: dict[tuple[str, tuple[int, ...], int], int] = {}
        self._progress = 0

    def number(self) -> int:
        """Return an actor number that is unique over all ranks."""
        return next(self._numbers)

    def _state(self, group: Group) -> _GroupState:
        key = self._keys.get(group)
        if key is None:
            of = (group.name, group.ranks, group.rank)
            count = self._made[of] = self._made.get(of, 0) + 1
            key = self._keys[group] = (group.name, group.ranks, count)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _GroupState(key)
        return state

    # -- collectives -------------------------------------------------------------------------------------------------

    def issue(self, group: Group, call: Collective, *, in_graph: bool, location: str) -> WatchedCollectivePart:
        """Match a call that the host of a rank issued, alone or (``in_graph``) in a replay, with the calls of the other
        ranks.
        """
        state = self._state(group)
        channel: tuple[int, int] | None = None
        if call.peer is not None:
            channel = (group.rank, call.peer) if call.kind == "send" else (call.peer, group.rank)
        count = state.counts[group.rank, channel] = state.counts.get((group.rank, channel), 0) + 1
        collective = state.collectives.get((channel, count))
        if collective is None:
            collective = state.collectives[channel, count] = WatchedCollective(channel or tuple(range(group.size)))
        issued = replace(call, captured=in_graph)
        part = WatchedCollectivePart(
            group.rank,
            group.ranks[group.rank],
            issued,
            location,
            count,
            collective,
            self._others_before(state, group),
        )
        for other in collective.parts.values():
            self._compare(state, other, part)
        collective.parts[group.rank] = part
        state.last[group.rank] = part
        if self.alone:
            collective.members = (group.rank,)
            part.alone = True
        self._progress += 1
        return part

    def _others_before(self, state: _GroupState, group: Group) -> dict[Key, int]:
        """Return the number of calls of this rank in each group that shares further ranks with this group."""
        mine = set(state.key[1])
        rank = group.ranks[group.rank]
        return {
            other.key: other.counts.get((other.key[1].index(rank), None), 0)
            for other in self._states.values()
            if other is not state and rank in other.key[1] and len(mine.intersection(other.key[1])) > 1
        }

    def _compare(self, state: _GroupState, one: WatchedCollectivePart, two: WatchedCollectivePart) -> None:
        if state.has_diverged:
            return
        different = one.call.difference(two.call)
        if different:
            state.has_diverged = True
            self._add_finding(
                FindingKind.COLLECTIVE,
                one.site(state.name),
                two.site(state.name),
                f"call number {two.number} of the group differs in {different}",
                f"let one rank decide which call it is, and the others read that; {_ALIKE_HINT}",
            )
            return
        for key, count in one.before.items():
            rank = two.before.get(key, 0 if two.rank in key[1] else count)
            if rank != count and not (self._states[key].has_diverged or state.has_diverged):
                state.has_diverged = True
                self._add_finding(
                    FindingKind.COLLECTIVE_ORDER,
                    one.site(state.name),
                    two.site(state.name),
                    f"rank {one.rank} had made {count} calls of group {key[0]!r} before it, rank {two.rank} {rank}: where "
                    "a device runs one of the two at a time, each rank waits for the other",
                    f"call groups {state.name!r} and {key[0]!r} in one order on every rank",
                )

    def arrived(self, group: Group, part: WatchedCollectivePart, point: Point) -> None:
        """Check that a rank's part, reached at ``point``, comes after every earlier call of overlapping groups."""
        self._progress += 1
        state = self._state(group)
        part.point = point
        arrived = sum(each.point is not None for each in part.collective.parts.values())
        if part.call.verb == "message" and arrived == len(part.collective.members) > 1:
            self._messages.append((state, part.collective))
            self._find_send_cycle(state, part.collective)
        mine = set(state.key[1])
        for other in self._states.values():
            if other is not state and len(mine.intersection(other.key[1])) < 2:
                continue
            for before, earlier in other.points.get(part.rank, {}).values():
                if earlier.call.verb == part.call.verb == "message":
                    continue  # each direction between two ranks is a communicator of its own
                if not before.happened_before(point) and not state.has_diverged:
                    self._unordered(state, other, (before, earlier), (point, part))
        state.points.setdefault(part.rank, {})[point.number] = (point, part)

    def _find_send_cycle(self, state: _GroupState, collective: WatchedCollective) -> None:
        """Report a cycle of sends, each of which precedes the receive of the one before it on its rank.

        Such sends end only as long as the library's buffers take them.
        """
        path: list[WatchedCollective] = [collective]
        seen = {id(collective)}
        while path:
            for _, other in self._messages:
                if not _blocks(other, path[-1]):
                    continue
                if other is collective and len(path) > 1:
                    first, second = path[1].send, collective.send
                    if not state.has_diverged:
                        state.has_diverged = True
                        self._add_finding(
                            FindingKind.SENDS,
                            first.site(state.name),
                            second.site(state.name),
                            "each rank sends before it receives: the sends end only while the library's buffers take them",
                            "let every second rank receive first, or issue the send and the receive of a rank as one group",
                        )
                    return
                if id(other) not in seen:
                    seen.add(id(other))
                    path.append(other)
                    break
            else:
                path.pop()

    def _unordered(
        self,
        state: _GroupState,
        other: _GroupState,
        one: tuple[Point, WatchedCollectivePart],
        two: tuple[Point, WatchedCollectivePart],
    ) -> None:
        first, then = repr(one[0].actor.name), repr(two[0].actor.name)
        self._add_finding(
            FindingKind.COLLECTIVE_UNORDERED,
            one[1].site(other.name),
            two[1].site(state.name),
            f"nothing orders streams {first} and {then}: ranks may begin the two in different order, and wait for each other",
            f"record an event on {first} after the first and make {then} wait for it before the second",
        )

    def passed(self, part: WatchedCollectivePart, group: Group) -> None:
        """Record that a stream has joined the clocks that its part waited for."""
        self._progress += 1
        part.collective.passed += 1
        if part.collective.passed == len(part.collective.members):
            collectives = self._state(group).collectives
            for key in [key for key, collective in collectives.items() if collective is part.collective]:
                del collectives[key]

    def resume(self) -> None:
        """Run the held steps of every rank that have become possible."""
        while True:
            before = self._progress
            for ordering in self.orderings:
                ordering.resume_held()
            if self._progress == before:
                return

    def passed_without(self) -> None:
        """Record that the device passed an incomplete collective, so later operations have no defined order."""
        self.broken = self.broken or any(
            len(collective.parts) < len(collective.members)
            for state in self._states.values()
            for collective in state.collectives.values()
        )

    # -- decisions ---------------------------------------------------------------------------------------------------

    def decided(self, group: Group, name: str, value: Decision, location: str) -> None:
        """Compare the next decision of a rank's host in the group with those of the other ranks."""
        state = self._state(group)
        log = state.decisions.setdefault(group.rank, [])
        rank = group.ranks[group.rank]
        mine = Decided(name, value, location, rank, len(log) + 1)
        log.append(mine)
        if state.differs:
            return
        for index, others in state.decisions.items():
            if index == group.rank or len(others) < len(log):
                continue
            theirs = others[len(log) - 1]
            if (theirs.name, theirs.value) != (name, value):
                self._differ(state, theirs, mine)
                return

    def _differ(self, state: _GroupState, one: Decided, two: Decided) -> None:
        state.differs = True
        agreed = (
            f"the {one.number - 1} decisions before it are the same on both" if one.number > 1 else "it's their first one"
        )
        text = f"the first decision in which ranks differ: {one}, {two}"
        self.differing = self.differing or text
        self._add_finding(
            FindingKind.DECISION,
            one.site(state.name),
            two.site(state.name),
            f"decision {one.number} of the group: {agreed}",
            f"decide {one.name!r} on one rank and send it to the others, or compute it from what is the same on every rank",
            named=False,
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Report the collectives that some rank has not issued by the end of the run."""
        self.resume()
        for state in self._states.values():
            if state.has_diverged:
                continue
            waiting = [m for m in state.collectives.values() if m.parts and len(m.parts) < len(m.members)]
            for collective in waiting[:1]:
                state.has_diverged = True
                part = next(iter(collective.parts.values()))
                missing = [index for index in collective.members if index not in collective.parts]
                self._shorter(state, part.index, missing)
                last = state.last.get(missing[0])
                who = " and ".join(f"rank {state.key[1][index]}" for index in missing)
                self._add_finding(
                    FindingKind.COLLECTIVE_MISSING,
                    last.site(state.name) if last is not None else None,
                    part.site(state.name),
                    f"{who} never made this call"
                    + ("; its last one of the group is the first above" if last is not None else ""),
                    f"make the call on every rank of the group, or on none; {_ALIKE_HINT}",
                )

    def _shorter(self, state: _GroupState, present: int, missing: list[int]) -> None:
        """Report a decision that a rank did not take as the first difference."""
        if state.differs:
            return
        mine = state.decisions.get(present, [])
        for index in missing:
            theirs = state.decisions.get(index, [])
            if len(theirs) < len(mine):
                extra = mine[len(theirs)]
                rank = state.key[1][index]
                site = theirs[-1].site(state.name) if theirs else _rank_site("no decision", rank)
                state.differs = True
                self.differing = self.differing or (
                    f"the first decision in which ranks differ: {extra}, and none on rank {rank}"
                )
                self._add_finding(
                    FindingKind.DECISION,
                    site,
                    extra.site(state.name),
                    f"rank {rank} never took decision {extra.number} of the group; its last one is the first above",
                    f"take decision {extra.name!r} on every rank",
                    named=False,
                )

    def _add_finding(
        self, kind: FindingKind, first: AccessSite | None, second: AccessSite, hint: str, missing: str, *, named: bool = True
    ) -> None:
        if named and self.differing:
            hint = f"{hint}; {self.differing}"
        self.report.add(Finding(kind=kind, first=first, second=second, missing=missing, hint=hint))
