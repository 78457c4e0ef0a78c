"""Numbers for KV pages and request rows: free lists whose entry 0 is reserved for padding."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.device import SeamError


class FreeList:
    """Numbers 1..count-1, handed out lowest first after a start, most recently freed first later.

    Freeing a number twice, or 0, raises: a page that two requests own is the worst bug that a cache can have.
    """

    def __init__(self, what: str, count: int) -> None:
        self.what = what
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def available(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self) -> int:
        """One free number."""
        if not self._free:
            raise SeamError(f"no {self.what} left: all {self.count - 1} are taken")
        number = self._free.pop()
        self._taken.add(number)
        return number

    def give_back(self, numbers: Iterable[int]) -> None:
        """Return numbers that were taken."""
        for number in numbers:
            if number not in self._taken:
                raise SeamError(f"{self.what} {number} was given back but isn't taken")
            self._taken.remove(number)
            self._free.append(number)
