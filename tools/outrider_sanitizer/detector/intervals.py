"""The last accesses of each byte of one storage, as a map of disjoint intervals.

Each interval keeps the last writes and the reads since then, as (point, access) pairs. A dense write that is ordered after
all records of an interval replaces them: a later access that conflicts with a replaced record also conflicts with the write.
So no conflict is lost, and the map has no more intervals than the accesses need. Accesses with many holes, or with unknown
rows, do not split intervals. They are in a separate list. Such an access is dropped when a later access covers it, or when
all future operations are ordered after it.

An access is an interval, or a strided set of runs inside an interval. Intervals are enough to find candidates. The exact test
for a shared byte runs only for two accesses that conflict by their intervals, so that disjoint columns of one matrix raise no
alarm.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.device import Access
from outrider_sanitizer.detector.actors import NOTHING, Clock, Point

if TYPE_CHECKING:
    from outrider_sanitizer.detector.memory import Shadow


_MAX_ENUMERATED_RUNS = 1 << 16
"""Maximum number of runs that the exact test enumerates; two regions that both have more runs count as overlapping."""


class ByteRuns(NamedTuple):
    """A strided region as equal runs of bytes: ``count`` indices at ``stride`` for each dimension, largest stride first."""

    start: int
    length: int
    dims: tuple[tuple[int, int], ...]

    @property
    def number(self) -> int:
        """The number of runs of the region."""
        return prod(count for count, _ in self.dims)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the start offsets of the region's runs, in bytes."""
        return self._starts(self.start, 0)

    def _starts(self, base: int, dim: int) -> Iterator[int]:
        if dim == len(self.dims):
            yield base
            return
        count, stride = self.dims[dim]
        for i in range(count):
            yield from self._starts(base + i * stride, dim + 1)


def byte_runs(access: Access) -> ByteRuns:
    """Return the runs of an access; contiguous dimensions are merged."""
    if access.shape is None or access.stride is None:
        return ByteRuns(access.start, access.end - access.start, ())
    pairs = [(n, abs(s)) for n, s in zip(access.shape, access.stride, strict=True) if n > 1 and s != 0]
    length = access.end - access.start - sum((n - 1) * s for n, s in pairs)
    dims: list[tuple[int, int]] = []
    for count, stride in sorted(pairs, key=lambda pair: pair[1]):
        if not dims and stride <= length:
            length += (count - 1) * stride
        elif dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * count, dims[-1][1])
        else:
            dims.append((count, stride))
    return ByteRuns(access.start, length, tuple(reversed(dims)))


def overlap(one: Access, other: Access) -> bool:
    """Return True if two accesses of one storage share a byte."""
    if one.start >= other.end or other.start >= one.end:
        return False
    if one.shape is None and other.shape is None:
        return True
    a, b = byte_runs(one), byte_runs(other)
    if a.number > b.number:
        a, b = b, a
    if a.number > _MAX_ENUMERATED_RUNS:
        return True
    return any(_hits(b, b.start, 0, start, start + a.length) for start in a)


def _hits(region: ByteRuns, base: int, dim: int, low: int, high: int) -> bool:
    """Return True if the runs of ``region`` from dimension ``dim`` on, based at ``base``, have a byte in [low, high)."""
    if dim == len(region.dims):
        return base < high and low < base + region.length
    count, stride = region.dims[dim]
    inner = region.length + sum((n - 1) * s for n, s in region.dims[dim + 1 :])
    first = max(0, -((base + inner - 1 - low) // stride) if base + inner <= low else 0)
    last = min(count - 1, (high - 1 - base) // stride)
    return any(_hits(region, base + i * stride, dim + 1, low, high) for i in range(first, last + 1))


def dense_parts(access: Access, most: int) -> tuple[tuple[int, int], ...] | None:
    """Return the access as at most ``most`` intervals, or None if it has more runs."""
    if access.shape is None:
        return ((access.start, access.end),)
    region = byte_runs(access)
    if region.number > most:
        return None
    return tuple((start, start + region.length) for start in region)


@dataclass
class Listener:
    """Callbacks of the ordering detector; the default of each does nothing.

    ``conflict`` and ``stale`` also get the owner of the history: the shadow of a storage, or the name of a graph.

    ``steps`` returns the name of a stream in schedules and the number of its steps so far, or None.
    """

    conflict: Callable[[Record, Point, Access | None, Any], None] = lambda *_: None
    settled: Callable[[], Clock] = lambda: NOTHING
    steps: Callable[[str], tuple[str, int] | None] = lambda _: None
    reused: Callable[[Shadow, Record, Point, str], None] = lambda *_: None
    stale: Callable[[StaleMark, Point, Access, Any], None] = lambda *_: None
    read: Callable[[Point, Access, Shadow], None] | None = None
    dead: Callable[[Shadow, Point, str], None] = lambda *_: None
    flag: Callable[[str, str, Point | None, Point], None] = lambda *_: None
    rebind: Callable[[Record, Point, Access | None, str], None] = lambda *_: None
    waited: Callable[[str, str, int, str, bool], None] = lambda *_: None


Record = tuple[Point, Access | None]
"""An access of a storage: its point, and the access; None instead of an access is an allocation or release of the whole
storage.
"""

Records = tuple[Record, ...]


class StaleMark(NamedTuple):
    """Why contents may not be read."""

    reason: str
    """Empty if the contents were never written."""
    origin: Record | None
    """The access since which the contents are stale, or None."""
    sequence: int
    """Position in the trace from which on the contents are stale."""


UNKNOWN_END = 1 << 62
UNWRITTEN = StaleMark("", None, -1)
_MAX_DENSE_PARTS = 64
_MAX_SPLIT_PARTS = 8
"""Maximum number of runs of an access that splits intervals; up to ``_MAX_DENSE_PARTS`` if some bytes are
unwritten or stale.
"""
_MAX_HOLED_RECORDS = 512
"""Maximum number of accesses with holes that are kept; older accesses are forgotten."""
_MIN_HOLED_LIMIT = 32
"""Minimum number of accesses with holes before ordered ones are dropped."""
_MERGE_ABOVE_INTERVALS = 4
"""Number of intervals above which a read over them tries to merge them."""


@dataclass(eq=False, slots=True)
class Interval:
    """Bytes [start, end) with one history. ``stale`` says why their contents may not be read; None: they may."""

    start: int
    end: int
    writes: Records
    reads: Records
    stale: StaleMark | None


class IntervalMap:
    """The history of one storage. The map passes ``owner`` (by default itself) to the sink with each conflict."""

    __slots__ = ("forgotten", "holed", "intervals", "limit", "owner")

    def __init__(
        self, nbytes: int = UNKNOWN_END, origin: Record | None = None, stale: StaleMark | None = None, owner: object = None
    ) -> None:
        self.owner = owner  # None: itself, without the cycle
        self.intervals = [Interval(0, nbytes or UNKNOWN_END, () if origin is None else (origin,), (), stale)]
        self.holed: list[Record] = []
        """The accesses that have holes, or of whose rows only the range is known, the oldest first."""
        self.limit = _MIN_HOLED_LIMIT
        self.forgotten = 0

    def touch(self, point: Point, access: Access, sink: Listener, late: bool = False) -> None:
        """Check an access against the history, then add the access to the history.

        ``late``: the access is reported after accesses of later operations, so it may also precede records of the history.
        """
        record = (point, access)
        if access.shape is None and not access.by_rows:
            self._dense(access.start, access.end, record, sink, late)
            if self.holed:
                self._check_holes(point, access, sink, late)
            return
        parts = None
        if not access.by_rows:
            exact = any(interval.stale is not None for interval in self.intervals)
            parts = dense_parts(access, _MAX_DENSE_PARTS if exact else _MAX_SPLIT_PARTS)
        if parts is None:
            self._scattered(record, access, sink, late)
            return
        for start, end in parts:
            self._dense(start, end, record, sink, late)
        if self.holed:
            self._check_holes(point, access, sink, late)

    def mark_stale(self, start: int, end: int, mark: StaleMark) -> None:
        """Mark the contents of the bytes [start, end) as stale."""
        first, last = self._split_at(start, end)
        for interval in self.intervals[first:last]:
            interval.stale = mark

    def writes(self, start: int, end: int) -> Iterator[tuple[int, int, Point, Access]]:
        """Yield (first byte, end, point, access) for each recorded write to [start, end): the bytes that this write may have
        written last.
        """
        for interval in self.within(start, end):
            for point, access in interval.writes:
                if access is not None:
                    yield max(interval.start, start), min(interval.end, end), point, access
        for point, access in self.holed:
            if access is not None and access.write and access.start < end and start < access.end:
                yield max(access.start, start), min(access.end, end), point, access

    def last_write(self, start: int, end: int) -> tuple[Point, Access] | None:
        """Return the latest write to any of the bytes, in program order."""
        found = ((point, access) for _, _, point, access in self.writes(start, end))
        return max(found, key=lambda write: write[0].sequence, default=None)

    def within(self, start: int, end: int) -> list[Interval]:
        """Return the intervals that share a byte with [start, end)."""
        first = self._index(start)
        last = first + 1
        intervals = self.intervals
        while last < len(intervals) and intervals[last].start < end:
            last += 1
        return intervals[first:last]

    def records(self) -> list[Record]:
        """Return every record of the storage's history, each once."""
        if len(self.intervals) == 1:
            return [*self.intervals[0].writes, *self.intervals[0].reads, *self.holed]
        seen: dict[int, Record] = {}
        for interval in self.intervals:
            for record in (*interval.writes, *interval.reads):
                seen[id(record)] = record
        return [*seen.values(), *self.holed]

    def _index(self, offset: int) -> int:
        """Return the index of the interval that contains ``offset``."""
        intervals = self.intervals
        return bisect_right(intervals, offset, key=_start) - 1 if len(intervals) > 1 else 0

    def _split_at(self, start: int, end: int) -> tuple[int, int]:
        """Return the index range of the intervals in [start, end); splits the intervals at both ends."""
        intervals = self.intervals
        first = self._index(start)
        interval = intervals[first]
        if interval.start < start:
            first += 1
            self._split(first, interval, start)
        last = first
        while intervals[last].end < end:
            if last + 1 == len(intervals):  # a storage that is larger than was told
                intervals[last].end = end
                break
            last += 1
        if intervals[last].end > end:
            self._split(last + 1, intervals[last], end)
        return first, last + 1

    def _split(self, at: int, interval: Interval, offset: int) -> None:
        right = Interval(offset, interval.end, interval.writes, interval.reads, interval.stale)
        interval.end = offset
        self.intervals.insert(at, right)

    def _dense(self, start: int, end: int, record: Record, sink: Listener, late: bool) -> None:
        if start >= end:
            return
        point, access = record
        assert access is not None
        first, last = self._split_at(start, end)
        intervals = self.intervals
        write = access.write
        # What was held, and is told now, may come before a mark that is here already.
        late = late or any(each.stale is not None and _is_later(each.stale, point) for each in intervals[first:last])
        reported: set[int] = set()
        for at in range(first, last):
            interval = intervals[at]
            self._check(interval, point, access, sink, late, reported)
            if not write:
                interval.reads = (*_unless_covered(interval.reads, point), record) if interval.reads else (record,)
            elif late:
                if interval.stale is not None and not _is_later(interval.stale, point):
                    interval.stale = None
                interval.reads = _unless_covered(interval.reads, point)
                interval.writes = (*_unless_covered(interval.writes, point), record)
        if write and not late:
            intervals[first:last] = [Interval(start, end, (record,), (), None)]
        elif not write and last - first > _MERGE_ABOVE_INTERVALS:
            self._merge(first, last, sink.settled())

    def _merge(self, first: int, last: int, settled: Clock) -> None:
        """Join neighbouring intervals with equal histories, after dropping accesses that precede all future operations.

        Without this, a pool whose rows were written one by one stays divided into rows, and each read of it visits all of
        them.
        """
        intervals = self.intervals
        kept: list[Interval] = []
        for interval in intervals[first:last]:
            if interval.writes:
                interval.writes = tuple([w for w in interval.writes if w[0].epoch > settled.get(w[0].number, 0)])
            left = kept[-1] if kept else None
            if (
                left is not None
                and left.stale is interval.stale
                and _same(left.writes, interval.writes)
                and _same(left.reads, interval.reads)
            ):
                left.end = interval.end
            else:
                kept.append(interval)
        if len(kept) < last - first:
            intervals[first:last] = kept

    def _scattered(self, record: Record, access: Access, sink: Listener, late: bool) -> None:
        point = record[0]
        reported: set[int] = set()
        met = self.within(access.start, access.end)
        for interval in met:
            self._check(interval, point, access, sink, late, reported)
        if access.write and any(interval.stale is not None for interval in met):
            first, last = self._split_at(access.start, access.end)
            for interval in self.intervals[first:last]:
                if interval.stale is not None and not _is_later(interval.stale, point):
                    interval.stale = None
        if self.holed:
            self._check_holes(point, access, sink, late)
        self.holed.append(record)
        if len(self.holed) > self.limit:
            settled = sink.settled()
            kept = [old for old in self.holed if old[0].epoch > settled.get(old[0].number, 0)]
            self.forgotten += max(0, len(kept) - _MAX_HOLED_RECORDS)
            self.holed = kept[-_MAX_HOLED_RECORDS:]
            self.limit = max(_MIN_HOLED_LIMIT, 2 * len(self.holed))

    def _check_holes(self, point: Point, access: Access, sink: Listener, late: bool) -> None:
        """Check an access against the accesses with holes, and drop those that it covers."""
        clock = point.clock
        reported: set[int] = set()
        kept: list[Record] = []
        for old in self.holed:
            known = old[1]
            assert known is not None
            before = old[0]
            if before.epoch > clock.get(before.number, 0):
                if access.write or known.write:
                    self._compare(old, point, access, sink, late, reported)
            elif (access.write or not known.write) and _covers(access, known):
                continue
            kept.append(old)
        self.holed = kept

    def _check(
        self, interval: Interval, point: Point, access: Access, sink: Listener, late: bool, reported: set[int]
    ) -> None:
        clock = point.clock
        for old in interval.writes:
            before = old[0]
            if before.epoch > clock.get(before.number, 0):
                self._compare(old, point, access, sink, late, reported)
        if access.write:
            for old in interval.reads:
                before = old[0]
                if before.epoch > clock.get(before.number, 0):
                    self._compare(old, point, access, sink, late, reported)
        elif interval.stale is not None and not access.by_rows and id(interval.stale) not in reported:
            if _is_later(interval.stale, point):
                return  # it was read, in the order of the program, before it was marked as stale
            reported.add(id(interval.stale))
            sink.stale(interval.stale, point, access, self.owner or self)

    def _compare(self, old: Record, point: Point, access: Access, sink: Listener, late: bool, reported: set[int]) -> None:
        if id(old) in reported or (late and point.happened_before(old[0])):
            return
        known = old[1]
        if known is not None and ((known.by_rows and access.by_rows) or not overlap(known, access)):
            return
        reported.add(id(old))
        old[0].conflicts = point.conflicts = True
        sink.conflict(old, point, access, self.owner or self)


def _is_later(mark: StaleMark, point: Point) -> bool:
    return mark.sequence >= point.sequence


def _same(one: Records, other: Records) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _start(interval: Interval) -> int:
    return interval.start


def _unless_covered(records: Records, point: Point) -> Records:
    """Return the records that a new dense access cannot replace, because they are not ordered before it."""
    clock = point.clock
    return tuple([record for record in records if record[0].epoch > clock.get(record[0].number, 0)])


def _covers(access: Access, old: Access) -> bool:
    """Return True if each access that conflicts with the bytes of ``old`` also conflicts with ``access``."""
    if access.by_rows and not old.by_rows:
        return False
    if access.start > old.start or old.end > access.end:
        return False
    if access.shape is None or old.shape is None or access.stride is None:
        return access.shape is None
    if access.start != old.start or access.stride != old.stride:
        return False
    return all(now >= then for now, then in zip(access.shape, old.shape, strict=True))
