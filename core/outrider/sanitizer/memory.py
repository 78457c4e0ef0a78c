"""The shadow of all memory: a history for each storage, from its allocation to the reuse of its addresses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from outrider.sanitizer.clocks import Actor, Point
from outrider.sanitizer.intervals import IntervalMap, Record

_GRAVES = 512
"""Freed storages that are remembered for the reuse of their addresses."""
_LOOSE = 1024
"""Releases on one stream that are remembered until that stream allocates again."""


class Shadow:
    """What is known of one storage.

    ``aged`` is set while views of it can become stale: it's written by graph replays. ``label`` says whose it is.
    """

    __slots__ = ("aged", "history", "label", "location", "nbytes", "storage", "stream")

    def __init__(self, storage: int, nbytes: int, stream: str, location: str, history: IntervalMap) -> None:
        self.storage = storage
        self.nbytes = nbytes
        self.stream = stream
        self.location = location
        self.history = history
        self.label = ""
        self.aged: list[tuple[int, int, object]] | None = None

    @property
    def described(self) -> str:
        """For reports: what it is and where it comes from."""
        what = self.label or ("pinned host memory" if self.stream == "host" else "device memory")
        size = f" of {self.nbytes} bytes" if self.nbytes else ""
        origin = f", allocated on {self.stream!r}" if self.stream else ""
        return f"{what}{size}{origin}{f' at {self.location}' if self.location else ''}"


Reused = Callable[[Shadow, Record, Point, str], None]
"""A freed storage, its unordered access, the new allocation, and where it was freed."""


class Memory:
    """Shadows by storage, and what waits for its addresses to be reused."""

    def __init__(self, reused: Reused) -> None:
        self.shadows: dict[int, Shadow] = {}
        self._reused = reused
        self._graves: OrderedDict[int, Shadow] = OrderedDict()
        self._loose: dict[str, list[tuple[Shadow, list[Record], str]]] = {}

    def shadow(self, storage: int) -> Shadow:
        """The shadow of a storage; one that was allocated before anybody looked starts empty."""
        shadow = self.shadows.get(storage)
        if shadow is None:
            shadow = self.shadows[storage] = Shadow(storage, 0, "", "", IntervalMap())
        return shadow

    def allocate(self, storage: int, nbytes: int, stream: str, location: str, point: Point | None, defined: bool) -> None:
        """Memory was handed out at ``point`` (None inside a capture)."""
        origin: Record | None = None if point is None else (point, None)
        over = None if defined else ("", origin)
        self.shadows[storage] = Shadow(storage, nbytes, stream, location, IntervalMap(nbytes, origin, over))
        if point is not None and stream in self._loose:
            for shadow, records, freed in self._loose.pop(stream):
                for record in records:
                    if not record[0].before(point):
                        self._reused(shadow, record, point, freed)

    def free(self, storage: int, stream: str, releaser: Actor, location: Callable[[], str]) -> None:
        """Memory went back to the order of ``stream``.

        Work that isn't ordered before the release is a fault only if the stream hands the memory out again before it's
        ordered; the next allocation there tells. Which block the allocator would take is luck, so any allocation counts.
        """
        shadow = self.shadows.pop(storage, None)
        if shadow is None:
            return
        clock = releaser.clock
        loose = [
            record
            for record in shadow.history.records()
            if record[1] is not None and record[0].epoch > clock.get(record[0].number, 0) and record[0].actor is not releaser
        ]
        if loose:
            waiting = self._loose.setdefault(stream, [])
            waiting.append((shadow, loose, location()))
            del waiting[:-_LOOSE]
        self._graves[storage] = shadow
        if len(self._graves) > _GRAVES:
            self._graves.popitem(last=False)

    def reuse(self, previous: int, point: Point | None) -> None:
        """The memory that ``point`` was handed lies where ``previous`` lay."""
        old = self._graves.pop(previous, None) or self.shadows.get(previous)
        if old is None or point is None:
            return
        for record in old.history.records():
            if record[1] is not None and not record[0].before(point):
                self._reused(old, record, point, "")
