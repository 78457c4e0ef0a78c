"""The shadow of all memory: a history for each storage, from its allocation to the reuse of its addresses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from outrider_sanitizer.detector.actors import Actor, Clock, Point
from outrider_sanitizer.detector.intervals import UNWRITTEN, IntervalMap, Record, StaleMark

_MAX_FREED_STORAGES = 256
"""Maximum number of freed storages that are remembered for the reuse of their addresses."""
_MAX_EARLY_RELEASES = 1024
"""Maximum number of releases on one stream that are remembered until that stream allocates again."""


class Shadow(IntervalMap):
    """The shadow state of one storage: its access history and its origin.

    ``aged`` is not None while views of the storage can become stale, because graph replays write it. ``label`` names the
    owner in reports. ``promised`` counts launched operations that write the storage and have not yet reported which bytes.
    """

    __slots__ = ("aged", "label", "location", "nbytes", "promised", "shared", "storage", "stream")

    def __init__(
        self,
        storage: int,
        nbytes: int,
        stream: str,
        location: str,
        origin: Record | None = None,
        stale: StaleMark | None = None,
    ) -> None:
        super().__init__(nbytes, origin, stale)
        self.storage = storage
        self.nbytes = nbytes
        self.stream = stream
        self.location = location
        self.label = ""
        self.promised = 0
        self.aged: list[tuple[int, int, object]] | None = None
        self.shared: tuple[str, ...] = ()  # streams that the allocator waits for, in addition to the storage's stream

    @property
    def described(self) -> str:
        """The label and origin of the storage, for reports."""
        what = self.label or ("pinned host memory" if self.stream == "host" else "device memory")
        size = f" of {self.nbytes} bytes" if self.nbytes else ""
        origin = f", allocated on {self.stream!r}" if self.stream else ""
        return f"{what}{size}{origin}{f' at {self.location}' if self.location else ''}"


EarlyRelease = tuple["Shadow", list[Record], Point]
"""A storage that was freed too early: its shadow, its accesses that weren't ordered before the release, and the release."""

Reused = Callable[[Shadow, Record, Point, str], None]
"""The function that is called for the reuse of freed memory: with the freed storage, its unordered access, the new
allocation, and the location of the release.
"""


class ShadowMemory:
    """Shadows by storage, and freed storages whose addresses may be reused."""

    def __init__(self, reused: Reused, strict: bool = False) -> None:
        """Create the shadows. ``strict``: the device overwrites memory at its release, so an order that a later wait
        makes before the next allocation comes too late.
        """
        self.shadows: dict[int, Shadow] = {}
        self._reused = reused
        self._strict = strict
        self._freed: OrderedDict[int, Shadow] = OrderedDict()
        self._early_releases: dict[str, list[EarlyRelease]] = {}

    def shadow(self, storage: int) -> Shadow:
        """Return the shadow of a storage; a storage allocated before the watched run starts with an empty history."""
        shadow = self.shadows.get(storage)
        if shadow is None:
            shadow = self.shadows[storage] = Shadow(storage, 0, "", "")
        return shadow

    def allocate(self, storage: int, nbytes: int, stream: str, location: str, point: Point | None, defined: bool) -> None:
        """Add the shadow of memory that was allocated at ``point`` (None inside a capture). Without ``defined``, its bytes
        count as unwritten, so that reading them is a finding.
        """
        origin: Record | None = None if point is None else (point, None)
        stale = None if defined else UNWRITTEN
        self.shadows[storage] = Shadow(storage, nbytes, stream, location, origin, stale)
        waiting = self._early_releases.pop(stream, None) if point is not None else None
        if waiting and point is not None:
            self._unordered(waiting, point)

    def share(self, storage: int, stream: str) -> None:
        """Note that the allocator waits for ``stream`` before it reuses the storage's memory."""
        shadow = self.shadow(storage)
        if stream not in shadow.shared:
            shadow.shared = (*shadow.shared, stream)

    def waits_for(self, stream: str) -> bool:
        """Return True if the next allocation of ``stream`` may reuse memory that was released too early."""
        return stream in self._early_releases

    def _unordered(self, waiting: list[EarlyRelease], point: Point) -> None:
        for shadow, records, freed in waiting:
            for record in records:
                if not record[0].happened_before(point):
                    self._reused(shadow, record, point, freed.location)
                elif self._strict:
                    self._reused(shadow, record, freed, freed.location)

    def finish(self, last: int) -> None:
        """Report each release before step ``last`` that came too early and that no later allocation of its stream has
        decided, on a device that overwrites released memory.

        An access that is already part of a finding is not reported again.
        """
        for waiting in self._early_releases.values() if self._strict else ():
            for shadow, records, freed in waiting:
                for record in records if freed.sequence <= last else ():
                    if not record[0].conflicts:
                        self._reused(shadow, record, freed, freed.location)
        self._early_releases.clear()

    def free(
        self, storage: int, stream: str, releaser: Actor, release: Callable[[Actor], Point], then: Clock | None = None
    ) -> None:
        """Return the memory of ``storage`` to the allocator's pool of ``stream``.

        An access that is not ordered before the release is a fault if the stream reuses the memory before that order
        exists. The next allocation of the stream decides. The allocator may choose any block, so every allocation counts.
        ``release`` makes the point of the release; ``then`` is the clock of ``releaser`` at that time, by default its present
        one.
        """
        shadow = self.shadows.pop(storage, None)
        if shadow is None:
            return
        clock = releaser.clock if then is None else then
        unordered = [
            record
            for record in shadow.records()
            if record[0].epoch > clock.get(record[0].number, 0)
            and record[1] is not None
            and record[0].actor is not releaser
            and record[0].actor.name not in shadow.shared
        ]
        if unordered:
            waiting = self._early_releases.setdefault(stream, [])
            waiting.append((shadow, unordered, release(releaser)))
            del waiting[:-_MAX_EARLY_RELEASES]
        self._freed[storage] = shadow
        if len(self._freed) > _MAX_FREED_STORAGES:
            self._freed.popitem(last=False)

    def same_place(self, storage: int, previous: int) -> None:
        """Join the histories of ``storage`` and ``previous``, which have one address in a graph pool during a capture.

        Graphs that share the pool are thus compared by address.
        """
        old = self.shadows.get(previous)
        if old is not None:
            self.shadows[storage] = old

    def reuse(self, previous: int, point: Point | None) -> None:
        """Check the reuse of the addresses of ``previous`` by the allocation at ``point``."""
        old = self._freed.pop(previous, None) or self.shadows.get(previous)
        if old is None or point is None or old.stream == point.actor.name:
            return  # what is unordered in the stream's own order was told by the allocation
        for record in old.records():
            if record[1] is not None and not record[0].happened_before(point) and record[0].actor.name not in old.shared:
                self._reused(old, record, point, "")
