"""The key-value store in which ranks publish heartbeats and the first failure."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

STORE_LOST = "the process where the ranks meet has ended"


class KeyValueStore:
    """Heartbeats of all ranks and the first failure, as text in the store that all ranks share."""

    ENDED = "ended"
    """The last heartbeat of a rank that ended normally."""
    STARTING_SUFFIX = "+"
    """The suffix of a heartbeat's first word from a rank that hasn't made a decision yet."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def publish_heartbeat(self, rank: int, said: str) -> None:
        """Publish a heartbeat of ``rank`` with the text ``said``, its progress."""
        self._store.set(f"{self._name}/beat/{rank}", said)

    def last_heartbeat(self, rank: int) -> str:
        """Return the last heartbeat of ``rank``, or an empty string before the first one."""
        return self._get(f"{self._name}/beat/{rank}") or ""

    def publish_failure(self, said: str) -> str:
        """Publish the failure ``said`` unless another failure is published. Return the published failure."""
        first: bytes = self._store.compare_set(f"{self._name}/failed", "", said)
        return first.decode()

    @property
    def failure(self) -> str | None:
        """The published failure; None while all ranks work."""
        return self._get(f"{self._name}/failed")

    def announce_first_rank_prints(self) -> None:
        """Announce that the first rank prints the failure itself."""
        self._store.set(f"{self._name}/speaks", "yes")

    @property
    def first_rank_prints(self) -> bool:
        """Return True if the first rank has announced that it prints the failure."""
        return self._store.check([f"{self._name}/speaks"])

    def wait_for_failure(self, seconds: float) -> None:
        """Wait for a published failure. Raises RuntimeError if there is none within ``seconds``."""
        self._store.wait([f"{self._name}/failed"], timedelta(seconds=seconds))

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
