"""Collectives between simulated devices: a rendezvous with one part on each rank.

A part is identified by its group, its channel (all ranks of the group, or the two of a send) and its number in the channel.
Parts of equal number form a rendezvous. Their calls are compared when they are issued. A part is two operations of its
stream. The first occupies one of the device's resident places, which the option `resident` limits. The second runs when every
rank's first operation has run. The module does not depend on torch: the group's function computes the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider_sim.machine.queue import Action, HostThread, OperationKind, StreamQueue, reason

if TYPE_CHECKING:
    from outrider.device import Collective
    from outrider_sim.machine.host_scheduler import HostScheduler
    from outrider_sim.machine.stream_machine import StreamMachine

STUCK = "nothing that is queued can run"

Channel = tuple[int, int] | None
"""The direction (source, destination) of messages between two ranks; None for collectives of all ranks of the group."""


class IssuedCollective(NamedTuple):
    """One rank's collective call."""

    collective: Collective  # as it was reported to tools
    channel: Channel
    line: str
    compute: Callable[[CollectiveRendezvous], None]
    read: Any  # the host tensor over simulated memory that `compute` reads of this part, or None
    write: Any  # the one that it writes


@dataclass(eq=False, repr=False, slots=True)
class CollectivePart:
    """One rank's part of a collective: two operations of its stream, the start and the end."""

    member: Member
    issued: IssuedCollective
    number: int
    rendezvous: CollectiveRendezvous
    captured: Any = None
    """The call in a graph that this is one replay of; a rebinding changes its operands."""
    started: bool = False
    resident: bool = False
    failed: str | None = None
    results: Any = None
    stream: StreamQueue | None = None

    @property
    def call(self) -> IssuedCollective:
        """The issued call, or the current version of a call captured in a graph."""
        if self.captured is None:
            return self.issued
        now: IssuedCollective = self.captured.call
        return now

    def __str__(self) -> str:
        where = f" at {self.call.line}" if self.call.line else ""
        return f"{self.call.collective.kind} #{self.number} of group {self.member.group.name!r}{where}"

    @property
    def can_start(self) -> bool:
        """Return whether the device can hold another resident collective."""
        most = self.member.machine.options.resident
        return most == 0 or self.member.machine.resident < most or self.failed is not None

    @property
    def can_end(self) -> bool:
        """Return whether every rank's part has started or this part has failed."""
        return self.failed is not None or self.rendezvous.begun or self._is_buffered

    @property
    def _is_buffered(self) -> bool:
        """True for a send that fits into the buffers of its channel, which the option `eager_sends` counts."""
        most, channel = self.member.machine.options.eager_sends, self.call.channel
        if not most or channel is None or self.member.index != channel[0] or not self.started:
            return False
        rendezvous = self.member.group.rendezvous.items()
        return sum(at == channel and n <= self.number and not m.begun for (at, n), m in rendezvous) <= most

    def start(self, now: float) -> None:
        """Occupy a resident place on the device and mark this rank's part as started."""
        self.started = True
        if self.failed is None:
            self.resident = True
            self.member.machine.resident += 1
        self.rendezvous.time = max(self.rendezvous.time, now)

    def release(self) -> None:
        """Free the resident place. The first part that ends computes the results of all ranks; a failed part raises."""
        if self.resident:
            self.resident = False
            self.member.machine.resident -= 1
        rendezvous = self.rendezvous
        if self.failed is not None:
            raise self.member.error(self.failed, self)
        if not rendezvous.begun:  # a buffered send: the receiver gets the values of now
            self.issued, self.captured = self.call._replace(read=self.call.read.clone()), None
            return
        if not rendezvous.done:
            rendezvous.done = True
            self.call.compute(rendezvous)
        self.member.group.rendezvous.pop(rendezvous.key, None)


@dataclass(eq=False, repr=False, slots=True)
class CollectiveRendezvous:
    """The parts of one collective, by rank index."""

    key: tuple[Channel, int]
    members: tuple[int, ...]
    parts: dict[int, CollectivePart] = field(default_factory=dict)
    done: bool = False
    time: float = 0.0

    @property
    def begun(self) -> bool:
        """True once every rank's part has started."""
        return self.done or (len(self.parts) == len(self.members) and all(part.started for part in self.parts.values()))

    @property
    def missing(self) -> tuple[int, ...]:
        """The indices of the ranks that haven't issued their part of the collective."""
        return tuple(index for index in self.members if index not in self.parts)


class Member:
    """One rank's membership in a group. `error` creates the exception that an abandoned part raises."""

    def __init__(self, group: RankGroup, index: int, machine: StreamMachine, thread: HostThread) -> None:
        self.group = group
        self.index = index
        self.machine = machine
        self.thread = thread  # that made it, or that used it last
        self.closed = False
        self.counts: dict[Channel, int] = {}
        self.last: CollectivePart | None = None
        self.error: Callable[[str, CollectivePart], Exception] = lambda reason, part: RuntimeError(f"{part}: {reason}")

    def issue(self, call: IssuedCollective) -> CollectivePart:
        """Create this rank's next part in the channel of `call`, and compare it with the parts of the other ranks.

        Raises the exception that `error` creates if another rank issued a different collective.
        """
        group = self.group
        number = self.counts.get(call.channel, 0) + 1
        self.counts[call.channel] = number
        self.thread = self.machine.scheduler.thread
        key = (call.channel, number)
        rendezvous = group.rendezvous.get(key)
        if rendezvous is None:
            rendezvous = group.rendezvous[key] = CollectiveRendezvous(key, call.channel or tuple(range(group.size)))
        part = rendezvous.parts[self.index] = self.last = CollectivePart(self, call, number, rendezvous)
        if group.broken:
            part.failed = group.broken
        for other in rendezvous.parts.values():
            difference = other.call.collective.difference(call.collective)
            if difference:
                group.give_up(f"rank {other.member.index} asks for {other}, rank {self.index} for {part}: {difference}")
                raise self.error(str(part.failed), part)
        return part

    @property
    def gone(self) -> str:
        """The reason why this rank will issue no further collective, or an empty string if it may."""
        if self.closed:
            return "has closed the group"
        if self.machine.lost is not None:
            return "has lost its device"
        return f"has ended ({self.thread})" if self.thread.finished else ""


class RankGroup:
    """The ranks of one group. `broken` is the reason why the group is unusable, or empty."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.members: dict[int, Member] = {}
        self.rendezvous: dict[tuple[Channel, int], CollectiveRendezvous] = {}
        self.broken = ""

    def give_up(self, reason: str) -> None:
        """Fail all parts that wait for another rank, and all parts issued later, with `reason`."""
        self.broken = self.broken or reason
        for rendezvous in self.rendezvous.values():
            if not rendezvous.begun:
                for part in rendezvous.parts.values():
                    part.failed = part.failed or self.broken


class Exchange:
    """All collective groups between the devices of one scheduler."""

    def __init__(self, scheduler: HostScheduler) -> None:
        self._scheduler = scheduler
        self._groups: dict[tuple[str, tuple[int, ...]], list[RankGroup]] = {}

    def start_over(self) -> None:
        """Mark all groups as broken and remove them, because a new run begins."""
        for group in self._all():
            group.broken = group.broken or "the device was reset"
        self._groups.clear()

    def _all(self) -> Iterable[RankGroup]:
        return (group for groups in self._groups.values() for group in groups)

    def join(self, name: str, ranks: tuple[int, ...], index: int, machine: StreamMachine) -> Member | str:
        """Join rank `index` to a new group and block until every rank has joined.

        Returns the rank's membership, or the reason why the group is unusable.
        """
        groups = self._groups.setdefault((name, ranks), [])
        group = next((each for each in groups if index not in each.members and not each.broken), None)
        if group is None:
            group = RankGroup(name, ranks)
            groups.append(group)
        scheduler = self._scheduler
        me = scheduler.thread
        member = group.members[index] = Member(group, index, machine, me)
        found = group
        scheduler.turns(
            me, Action("join"), lambda: len(found.members) == found.size or bool(found.broken), f"the ranks of group {name!r}"
        )
        return member if not group.broken else group.broken

    # -- when nothing can run ----------------------------------------------------------------------------------------

    def give_up_waiting(self) -> bool:
        """Fail all collectives that wait for another rank, because no operation can run. Returns whether any waited."""
        graph: str | None = None
        found = False
        for group in self._all():
            if group.broken:
                continue
            waiting = [m for m in group.rendezvous.values() if m.parts and not m.begun]
            if len(group.members) < group.size:
                missing = [group.ranks[i] for i in range(group.size) if i not in group.members]
                group.give_up(f"rank {', '.join(map(str, missing))} of the world didn't join")
                found = True
            elif any(self._held(part) for rendezvous in waiting for part in rendezvous.parts.values()):
                graph = graph or self.graph()
                group.give_up(graph)
                found = True
        return found

    @staticmethod
    def _held(part: CollectivePart) -> bool:
        queue = part.stream.queue if part.stream is not None else None
        return bool(queue) and queue[0].target is part  # type: ignore[index,unused-ignore]  # some mypy forgets the check

    def graph(self) -> str:
        """Return the wait-for graph of the ranks as text, with its cycle if it has one."""
        lines: list[str] = []
        edges: dict[int, set[int]] = {}
        for machine in self._scheduler.machines:
            for stream in machine.streams:
                if not stream.queue:
                    continue
                op = stream.queue[0]
                why = reason(op)
                if op.kind in (OperationKind.COLLECTIVE_START, OperationKind.COLLECTIVE):
                    why = f"{op.target}, {self._waiting_reason(op.target, edges)}"
                lines.append(f"rank {machine.rank}: stream {stream.label!r} is held at operation {stream.done}: {why}")
        lines += [
            f"{thread} waits for {thread.waits_for}"
            for thread in self._scheduler.threads
            if not thread.finished and thread.ready
        ]
        circle = _circle(edges)
        if circle:
            lines.append("who waits for whom: " + " → ".join(f"rank {rank}" for rank in circle))
        return f"{STUCK}:\n  " + "\n  ".join(lines)

    def _waiting_reason(self, part: CollectivePart, edges: dict[int, set[int]]) -> str:
        machine = part.member.machine
        mine = edges.setdefault(machine.rank, set())
        group = part.member.group
        if not part.started:
            taken = [
                other
                for each in self._all()
                for rendezvous in each.rendezvous.values()
                for other in rendezvous.parts.values()
                if other.resident and other.member.machine is machine
            ]
            for other in taken:
                members = other.member.group.members
                mine.update(members[index].machine.rank for index in self._late_indexes(other))
            most = machine.options.resident
            return f"which needs a place on the device (resident={most}); {', '.join(map(str, taken))} has it"
        reasons = []
        for index in self._late_indexes(part):
            member = group.members[index]
            mine.add(member.machine.rank)
            issued = part.rendezvous.parts.get(index)
            if issued is not None:
                text = "issued it, and it hasn't started"
            elif member.gone:
                text = member.gone
            else:
                text = "hasn't issued it"
            last = f"; its last there: {member.last}" if member.last is not None and issued is None else ""
            reasons.append(f"rank {member.machine.rank}, which {text}{last}")
        return "and waits for " + " and ".join(reasons)

    @staticmethod
    def _late_indexes(part: CollectivePart) -> list[int]:
        return [i for i in part.rendezvous.members if i not in part.rendezvous.parts or not part.rendezvous.parts[i].started]


def _circle(edges: dict[int, set[int]]) -> list[int]:
    """Return ranks that wait for each other in a cycle, with the first rank repeated at the end, or an empty list."""

    def walk(path: list[int]) -> list[int]:
        for following in sorted(edges.get(path[-1], ())):
            if following in path:
                return [*path[path.index(following) :], following]
            found = walk([*path, following])
            if found:
                return found
        return []

    for rank in sorted(edges):
        found = walk([rank])
        if found:
            return found
    return []
