"""StateCheckpoints: copies of recurrent states at the end of cached prefixes, by page key. It touches no tensor."""

from __future__ import annotations

from collections import OrderedDict

from outrider.engine.requests.pages import PageKey


class StateCheckpoints:
    """The rows of states that no request has, and the prefixes whose states they hold.

    A recurrent state can't be cut to a shorter prefix, so a prefix hits only where a checkpoint was taken: at a multiple of
    ``interval`` tokens at which a chunk of a prompt ended. All copies are on one stream, in the order in which the scheduler
    decides them, so a row may be given to another prefix while a copy from it is enqueued.
    """

    def __init__(self, *, first_row: int, count: int, interval: int) -> None:
        """Create ``count`` free rows, of which ``first_row`` is the first. ``interval`` is a multiple of the page size."""
        self.interval = interval
        self.count = count
        self._free = list(range(first_row + count - 1, first_row - 1, -1))
        self._row_of: OrderedDict[PageKey, int] = OrderedDict()

    @property
    def held(self) -> int:
        """Number of prefixes with a checkpoint."""
        return len(self._row_of)

    def row_of(self, key: PageKey) -> int | None:
        """Return the row of the state after the page ``key``, or None. The checkpoint counts as used most recently."""
        row = self._row_of.get(key)
        if row is not None:
            self._row_of.move_to_end(key)
        return row

    def has(self, key: PageKey) -> bool:
        """Return True if there is a checkpoint after the page ``key``."""
        return key in self._row_of

    def allocate_row(self, key: PageKey) -> int | None:
        """Return the row for a new checkpoint after the page ``key``: a free one, or that of the least recently used prefix.

        Returns None if there are no rows, or if the prefix has a checkpoint.
        """
        if not self.count or key in self._row_of:
            return None
        row = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
        self._row_of[key] = row
        return row

    def drop(self, key: PageKey) -> None:
        """Free the row of a prefix whose last page is no longer cached, if it has one."""
        row = self._row_of.pop(key, None)
        if row is not None:
            self._free.append(row)

    def clear(self) -> None:
        """Drop every checkpoint, for example after a fault that may have corrupted states."""
        self._free.extend(self._row_of.values())
        self._row_of.clear()

    def chunk_end(self, start: int, end: int, length: int) -> int:
        """Return where a chunk of a prompt of ``length`` tokens ends that could span ``start`` to ``end``.

        It ends at the last multiple of the interval inside, from which kernels continue with the same bits, and after which
        there is at least one token left to compute. A chunk without such a multiple keeps its end.
        """
        if end == length and not self.count:
            return end
        last = (end - (end == length)) // self.interval * self.interval
        return last if last > start else end
