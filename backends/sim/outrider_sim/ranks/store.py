"""A torch.distributed store for ranks that are host threads of one process."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider_sim.machine.queue import Action

if TYPE_CHECKING:
    from outrider_sim.machine.host_scheduler import HostScheduler


class SimStore(Store):
    """A key-value store for ranks that are host threads. A wait for a key lets other threads run and has no time limit.

    Raises `DeadlockError` if a thread waits for a key and no thread or operation can run.
    """

    def __init__(self, scheduler: HostScheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`; a string is encoded as UTF-8."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value of `key`. Waits until another thread has set the key."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number under `key`, which is 0 at first; return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the bytes under `key`, which are empty at first."""
        self._values[key] = self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if it holds `expected`, or if it is missing and `expected` is empty; return its value."""
        before = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._values.get(key, b"") == before:
            self.set(key, desired)
        return self._values.get(key, before)

    def check(self, keys: list[str]) -> bool:
        """Return True if all of `keys` have values."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Let the other threads run until all keys have values."""
        del timeout
        scheduler = self._scheduler
        missing = ", ".join(key for key in keys if key not in self._values)
        if missing:
            scheduler.turns(
                scheduler.thread, Action("store"), lambda: self.check(keys), f"{missing} in the store of the ranks"
            )

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys; waits for each."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Store one value per key, in order."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Delete `key` from the store. Return True if it had a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys that have values in the store."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the time limit: the store has no clock."""

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are implemented."""
        return True
