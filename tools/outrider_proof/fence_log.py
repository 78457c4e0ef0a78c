"""A log of the fences of an engine that can leave one fence out and name the fence that a race implies.

The log records where each fence is declared, as positions among the operations of its streams, whether or not the fence is
carried out. A finding (two accesses without an order) then implies the fences that would have ordered the accesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outrider.device import Fence, Stream

HOST = "host"


Half = Literal["wait", "record"]
"""The half of a fence that a log leaves out."""


@dataclass(frozen=True, slots=True)
class FenceEdge:
    """One wait of ``consumer`` for one record of ``producer`` by a fence, as an edge between positions of the two.

    Operations of ``producer`` before its position ``start`` precede operations of ``consumer`` from position ``end`` on.
    ``done`` is False if the log left the wait or the record out.
    """

    fence: str
    producer: str
    start: int
    consumer: str
    end: int
    done: bool


class FenceLog:
    """A log of each edge that an engine's fences declare. It leaves out the fence named ``drop``, if any.

    ``position(stream)`` returns the number of operations enqueued on the stream so far; for None, the number of steps of the
    calling thread. ``half="record"`` carries out the first record only, so that later waits are legal and wait for old work.
    ``consumer`` names the stream, or ``host``, whose waits ``half="wait"`` leaves out; None means every consumer.
    """

    def __init__(
        self,
        position: Callable[[Stream | None], int],
        *,
        drop: str | None = None,
        half: Half = "wait",
        consumer: str | None = None,
    ) -> None:
        self.position = position
        self.drop = drop
        self.half = half
        self.consumer = consumer
        self.left_out = 0
        """Number of waits or records left out; 0 at the end means that the engine does not use the fence."""
        self.edges: list[FenceEdge] = []
        self.streams: dict[str, Stream] = {}
        """Streams that carry a fence. Operations enqueued there after a host wait come after the producer's record, too."""

    def wrap(self, fence: Fence) -> Fence:
        """Return a recording fence around ``fence``; pass this method as the engine's ``wrap_fence``."""
        return _LoggedFence(fence, self)

    def implied(self, first: tuple[str, int], second: tuple[str, int]) -> tuple[str, ...]:
        """Return each fence that, if carried out, orders operation ``first`` (stream, index) before ``second``.

        Index -1 means an unknown position; any wait for a record after ``first`` then counts. Returns an empty tuple if the
        carried-out edges already order the two operations.
        """
        if self._orders("", first, second):
            return ()
        names = dict.fromkeys(edge.fence for edge in self.edges)
        return tuple(name for name in names if self._orders(name, first, second))

    @property
    def covered(self) -> bool:
        """True if carried-out edges or stream order already give every order that was left out."""
        return all(
            self._orders("", (edge.producer, edge.start - 1), (edge.consumer, edge.end))
            for edge in self.edges
            if not edge.done
        )

    def _orders(self, name: str, first: tuple[str, int], second: tuple[str, int]) -> bool:
        edges = [edge for edge in self.edges if edge.done or edge.fence == name]
        reached = {first[0]: first[1] + 1}
        grew = True
        while grew:
            grew = False
            for edge in edges:
                known = reached.get(edge.producer)
                if known is None or edge.start < known:
                    continue
                if edge.end < reached.get(edge.consumer, edge.end + 1):
                    reached[edge.consumer] = edge.end
                    grew = True
        if second[0] not in reached:
            return False
        return second[1] < 0 or reached[second[0]] <= second[1]


class _LoggedFence(Fence):
    """A fence that records each call in the log, and passes the call on to ``inner`` unless it is of the dropped half."""

    def __init__(self, inner: Fence, log: FenceLog) -> None:
        super().__init__(inner.name)
        self._inner = inner
        self._log = log
        self._name = inner.name.split("[")[0]
        self._dropped = log.half if log.drop == self._name else None
        self._declared: tuple[str, int] | None = None
        self._carried_out: tuple[str, int] | None = None

    @property
    def mechanism(self) -> str:
        """The mechanism of the logged fence."""
        return self._inner.mechanism

    def signal(self, stream: Stream) -> None:
        """Record the signal in the log and carry it out, unless records are dropped; the first record is
        always carried out.
        """
        self._log.streams[stream.name] = stream
        self._declared = (stream.name, self._log.position(stream))
        if self._dropped != "record" or self._carried_out is None:
            self._carried_out = self._declared
            self._inner.signal(stream)
        else:
            self._log.left_out += 1

    def wait(self, stream: Stream) -> None:
        """Record the stream's wait in the log, and carry it out unless waits are dropped."""
        self._log.streams[stream.name] = stream
        skipped = self._skips(stream.name)
        if not skipped:
            self._inner.wait(stream)
        self._note(stream.name, self._log.position(stream), skipped)

    def wait_host(self) -> None:
        """Record the host's wait in the log, and carry it out unless waits are dropped."""
        skipped = self._skips(HOST)
        if not skipped:
            self._inner.wait_host()
        self._note_host(skipped)

    def wait_host_within(self, seconds: float) -> bool:
        """Record the host's wait in the log, and carry it out unless waits are dropped; return the fence's answer."""
        skipped = self._skips(HOST)
        came = skipped or self._inner.wait_host_within(seconds)
        if came:
            self._note_host(skipped)
        return came

    def _note_host(self, skipped: bool) -> None:
        self._note(HOST, self._log.position(None), skipped)
        for name, stream in self._log.streams.items():
            self._note(name, self._log.position(stream), skipped)

    def _skips(self, consumer: str) -> bool:
        chosen = self._log.consumer
        if self._dropped != "wait" or (chosen is not None and chosen != consumer.split(".")[0]):
            return False
        self._log.left_out += 1
        return True

    def done(self) -> bool:
        """Return the fence's answer, or True if waits are dropped; record a wait of the host if the answer is True."""
        skipped = self._skips(HOST)
        came = skipped or self._inner.done()
        if came:
            self._note_host(skipped)
        return came

    def _note(self, consumer: str, end: int, skipped: bool) -> None:
        assert self._declared is not None  # the backend interface raises for a wait that comes before any record
        done = not skipped and self._dropped != "record"
        self._log.edges.append(FenceEdge(self._name, *self._declared, consumer, end, done))
        if self._dropped == "record" and self._carried_out is not None:
            self._log.edges.append(FenceEdge(f"stale {self._name}", *self._carried_out, consumer, end, True))
