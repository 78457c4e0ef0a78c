"""Room: where ranks leave word for each other, in a store."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

GONE = "the process where the ranks meet has ended"


class Room:
    """What ranks say of themselves: signs of life, and who failed first. All of it is text."""

    ENDED = "ended"
    """The last sign of a rank that ended as it should."""
    STARTS = "+"
    """Ends the first word of the signs of a rank that hasn't decided anything."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def beat(self, rank: int, said: str) -> None:
        """``rank`` lives, and ``said`` how far it is."""
        self._store.set(f"{self._name}/beat/{rank}", said)

    def last_beat(self, rank: int) -> str:
        """What ``rank`` said last; empty: nothing yet."""
        return self._get(f"{self._name}/beat/{rank}") or ""

    def fail(self, said: str) -> str:
        """Say why the ranks can't go on, unless somebody has; returns what was said first."""
        first: bytes = self._store.compare_set(f"{self._name}/failed", "", said)
        return first.decode()

    @property
    def failure(self) -> str | None:
        """Why the ranks can't go on."""
        return self._get(f"{self._name}/failed")

    def speaks(self) -> None:
        """The first rank tells people itself what went wrong."""
        self._store.set(f"{self._name}/speaks", "yes")

    @property
    def spoken(self) -> bool:
        """Whether the first rank tells people itself."""
        return self._store.check([f"{self._name}/speaks"])

    def hear(self, seconds: float) -> None:
        """Wait until a rank has said that it failed; raises RuntimeError where none does within ``seconds``."""
        self._store.wait([f"{self._name}/failed"], timedelta(seconds=seconds))

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
