"""Who accessed which bytes last: a map of disjoint intervals for one storage.

Each interval keeps the last writes and the reads since, as (point, access) pairs. A dense write that comes after
everything there replaces it: whoever conflicts with what was there conflicts with the write as well, so nothing is
missed and the map stays as small as the storage is divided. Accesses with holes, or whose rows aren't known, are kept
beside each other and never replace what they may not cover.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from outrider.device import Access
from outrider.sanitizer.clocks import Point
from outrider.sanitizer.regions import dense_parts, overlap

Record = tuple[Point, Access | None]
"""Who accessed it, and how; None is an allocation or release of the whole storage."""

Conflict = Callable[[Record, Point, Access | None], None]
Stale = Callable[[str, Record | None, Point, Access], None]

UNKNOWN_END = 1 << 62
_PARTS = 64
_KEPT = 48


class Interval:
    """Bytes [start, end) with one history. ``over`` says why their contents may no longer be read, if so."""

    __slots__ = ("end", "over", "reads", "start", "writes")

    def __init__(self, start: int, end: int, writes: list[Record], reads: list[Record], over: Over | None) -> None:
        self.start = start
        self.end = end
        self.writes = writes
        self.reads = reads
        self.over = over


Over = tuple[str, Record | None]


class IntervalMap:
    """The history of one storage."""

    __slots__ = ("forgotten", "intervals", "starts")

    def __init__(self, nbytes: int = UNKNOWN_END, origin: Record | None = None, over: Over | None = None) -> None:
        self.starts = [0]
        self.intervals = [Interval(0, nbytes or UNKNOWN_END, [origin] if origin else [], [], over)]
        self.forgotten = 0

    def touch(self, point: Point, access: Access, conflict: Conflict, stale: Stale, late: bool = False) -> None:
        """Check an access against the history, then add it.

        ``late``: the access is told after others that were enqueued after it, so it may also precede what is here.
        """
        record = (point, access)
        if access.shape is None and not access.by_rows:
            self._dense(access.start, access.end, record, conflict, stale, late)
            return
        parts = None if access.by_rows else dense_parts(access, _PARTS)
        if parts is None:
            self._scattered(record, access, conflict, stale, late)
            return
        for start, end in parts:
            self._dense(start, end, record, conflict, stale, late)

    def expire(self, start: int, end: int, over: Over) -> None:
        """Mark what the bytes hold as over."""
        first, last = self._cut(start, end)
        for interval in self.intervals[first:last]:
            interval.over = over

    def last_write(self, start: int, end: int) -> Record | None:
        """The latest write, in the order of the program, to any of the bytes."""
        first, last = self._find(start, end)
        best: Record | None = None
        for interval in self.intervals[first:last]:
            for record in interval.writes:
                if record[1] is not None and (best is None or record[0].sequence > best[0].sequence):
                    best = record
        return best

    def within(self, start: int, end: int) -> list[Interval]:
        """The intervals that share a byte with [start, end)."""
        first, last = self._find(start, end)
        return self.intervals[first:last]

    def records(self) -> list[Record]:
        """Everything that is remembered, each record once."""
        seen: dict[int, Record] = {}
        for interval in self.intervals:
            for record in (*interval.writes, *interval.reads):
                seen[id(record)] = record
        return list(seen.values())

    def _find(self, start: int, end: int) -> tuple[int, int]:
        first = bisect_right(self.starts, start) - 1
        last = first + 1
        intervals = self.intervals
        while last < len(intervals) and intervals[last].start < end:
            last += 1
        return first, last

    def _cut(self, start: int, end: int) -> tuple[int, int]:
        """Indices of the intervals that make up [start, end), cutting those at its ends."""
        starts, intervals = self.starts, self.intervals
        first = bisect_right(starts, start) - 1
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
        right = Interval(offset, interval.end, list(interval.writes), list(interval.reads), interval.over)
        interval.end = offset
        self.intervals.insert(at, right)
        self.starts.insert(at, offset)

    def _dense(self, start: int, end: int, record: Record, conflict: Conflict, stale: Stale, late: bool) -> None:
        if start >= end:
            return
        point, access = record
        assert access is not None
        if len(self.intervals) == 1 and start == 0 and self.intervals[0].end == end:
            first, last = 0, 1
        else:
            first, last = self._cut(start, end)
        intervals = self.intervals
        write = access.write
        told: set[int] = set()
        for at in range(first, last):
            interval = intervals[at]
            self._check(interval, point, access, conflict, stale, late, told)
            if not write:
                if interval.reads:
                    interval.reads = _unless_covered(interval.reads, point)
                interval.reads.append(record)
            elif late:
                self._write_late(interval, record)
        if not write or late:
            return
        only = intervals[first]
        only.end = end
        only.writes = [record]
        only.reads = []
        only.over = None
        if last - first > 1:
            del intervals[first + 1 : last]
            del self.starts[first + 1 : last]

    def _write_late(self, interval: Interval, record: Record) -> None:
        point = record[0]
        interval.over = None
        interval.reads = _unless_covered(interval.reads, point)
        interval.writes = [*_unless_covered(interval.writes, point), record]
        self._bound(interval)

    def _scattered(self, record: Record, access: Access, conflict: Conflict, stale: Stale, late: bool) -> None:
        point = record[0]
        first, last = self._cut(access.start, access.end)
        told: set[int] = set()
        for interval in self.intervals[first:last]:
            self._check(interval, point, access, conflict, None if access.by_rows else stale, late, told)
            same = interval.writes if access.write else interval.reads
            kept = [old for old in same if not (_same_region(old, access) and old[0].before(point))]
            kept.append(record)
            if access.write:
                interval.writes = kept
                interval.over = None
            else:
                interval.reads = kept
            self._bound(interval)

    def _check(
        self,
        interval: Interval,
        point: Point,
        access: Access,
        conflict: Conflict,
        stale: Stale | None,
        late: bool,
        told: set[int],
    ) -> None:
        clock = point.clock
        for old in interval.writes:
            before = old[0]
            if before.epoch > clock.get(before.number, 0):
                self._compare(old, point, access, conflict, late, told)
        if access.write:
            for old in interval.reads:
                before = old[0]
                if before.epoch > clock.get(before.number, 0):
                    self._compare(old, point, access, conflict, late, told)
        elif interval.over is not None and stale is not None and id(interval.over) not in told:
            told.add(id(interval.over))
            stale(interval.over[0], interval.over[1], point, access)

    def _compare(self, old: Record, point: Point, access: Access, conflict: Conflict, late: bool, told: set[int]) -> None:
        if id(old) in told:
            return
        if late and point.before(old[0]):
            return
        known = old[1]
        if known is not None:
            if known.by_rows and access.by_rows:
                return
            if not overlap(known, access):
                return
        told.add(id(old))
        conflict(old, point, access)

    def _bound(self, interval: Interval) -> None:
        for records in (interval.writes, interval.reads):
            while len(records) > _KEPT:
                records.pop(0)
                self.forgotten += 1


def _unless_covered(records: list[Record], point: Point) -> list[Record]:
    """The records that a new dense access doesn't stand for: those that aren't ordered before it."""
    clock = point.clock
    return [record for record in records if record[0].epoch > clock.get(record[0].number, 0)]


def _same_region(record: Record, access: Access) -> bool:
    old = record[1]
    return (
        old is not None
        and old.start == access.start
        and old.end == access.end
        and old.shape == access.shape
        and old.stride == access.stride
        and old.by_rows == access.by_rows
    )
