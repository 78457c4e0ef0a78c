"""StateCheckpoints: copies of recurrent states at the end of cached prefixes, by page key. It touches no tensor."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from outrider.engine.requests.pages import PageKey


@dataclass(slots=True)
class DecodedState:
    """The checkpoint that decoding gives to one request: its newest one, and a copy that may become the next.

    An iteration decides on the device how many tokens it accepts. The host therefore enqueues a copy where the request's
    length may be a multiple of the interval, and keeps the copy if the results say that the length was.
    """

    row: int = 0
    """The row that the next copy goes to; 0 if the request has none."""
    length: int = 0
    """The length that the last copy must have; 0 if there is no copy to decide about."""
    awaited: int = 0
    """Number of results after which the host knows the length of the copy."""
    is_exact: bool = False
    """True if the copy has the expected length. It is published once the pages before it are registered."""
    key: PageKey | None = None
    """The prefix of the newest checkpoint."""
    has_evicted: bool = False
    """True if the request has taken the row of another prefix. It does so once at most, since text is decoded for long."""


class StateCheckpoints:
    """The rows of states that no request has, and the prefixes whose states they hold.

    A recurrent state can't be cut to a shorter prefix, so a prefix hits only where a checkpoint was taken: at a multiple of
    ``interval`` tokens at which a chunk of a prompt or an iteration of decoding ended. All copies are on one stream, in the
    order in which the scheduler decides them, so a row may be given to another prefix while a copy from it is enqueued.
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
        row = self._row_of[key] = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
        return row

    def provide_row(self, decoded: DecodedState) -> bool:
        """Give a decoding request a row for a copy of its state, if it has none. Return False if there is no row for it."""
        if not decoded.row and self._free:
            decoded.row = self._free.pop()
        elif not decoded.row and self._row_of and not decoded.has_evicted:
            decoded.row, decoded.has_evicted = self._row_of.popitem(last=False)[1], True
        return decoded.row > 0

    def publish(self, decoded: DecodedState, key: PageKey) -> None:
        """Make the copy of a decoding request the checkpoint after the page ``key``, in place of the request's last one."""
        decoded.length, decoded.is_exact = 0, False
        if key in self._row_of:
            return
        self._row_of[key] = decoded.row
        decoded.row = 0 if decoded.key is None else self._row_of.pop(decoded.key, 0)
        decoded.key = key

    def release(self, decoded: DecodedState) -> None:
        """Free the row of a request that ends. Its checkpoint stays."""
        if decoded.row:
            self._free.append(decoded.row)

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
