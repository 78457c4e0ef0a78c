"""Heartbeats of the ranks of one engine, the first failure, and the state of the ranks' processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

STORE_LOST = "the process where the ranks meet has ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """One sign of life of a rank."""

    number: int
    """Number of the heartbeat, from 1; 0: the rank has ended normally."""
    has_decided: bool = True
    """False before the rank's first decision: imports and the loading of libraries may block its threads for long."""
    calls: int = 0
    """Collective calls that the rank has made in all its groups."""
    process: str = "-"
    """The rank's process, by :func:`process_name`."""
    progress: str = ""
    """The last decision and collective of the rank, for error messages."""

    def encode(self) -> str:
        """Return the heartbeat as text."""
        return f"{self.number} {int(self.has_decided)} {self.calls} {self.process} {self.progress}"

    @classmethod
    def decode(cls, text: str) -> Heartbeat:
        """Return the heartbeat that :meth:`encode` wrote."""
        number, has_decided, calls, process, progress = text.split(" ", 4)
        return cls(number=int(number), has_decided=has_decided == "1", calls=int(calls), process=process, progress=progress)


class KeyValueStore:
    """Heartbeats of all ranks and the first failure, as text in the store that all ranks share."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def publish_heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """Publish a heartbeat of ``rank``."""
        self._store.set(f"{self._name}/beat/{rank}", heartbeat.encode())

    def last_heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of ``rank``, or None before the first one."""
        text = self._get(f"{self._name}/beat/{rank}")
        return None if text is None else Heartbeat.decode(text)

    def last_progress(self, rank: int) -> str:
        """Return the progress in the last heartbeat of ``rank``, or a text that says that there was none."""
        heartbeat = self.last_heartbeat(rank)
        return "it had not begun" if heartbeat is None else heartbeat.progress

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

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def process_name() -> str:
    """Return a name of this process that processes of the same host can read; ``-`` on a system without ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getpid()}"
    except OSError:
        return "-"


def is_stopped(process: int) -> bool:
    """Return True if a signal has stopped the process with this number, such as SIGSTOP."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return state[:1] == ["T"]


def is_stopped_here(name: str) -> bool:
    """Return True if ``name`` (:func:`process_name`) is a process of this host and a signal has stopped it."""
    host, _, number = name.rpartition("/")
    return bool(host) and host == process_name().rpartition("/")[0] and is_stopped(int(number))


class StopDetector:
    """Finds a process that stays stopped. It counts checks, since a watcher may have been stopped together with it."""

    def __init__(self, checks: int) -> None:
        """Create a detector that reports a process after ``checks`` checks in a row have found it stopped."""
        self._checks = checks
        self._found: dict[int, int] = {}

    def find(self, processes: Iterable[int]) -> int | None:
        """Check the processes with these numbers. Return the position of one that stays stopped, or None."""
        for position, process in enumerate(processes):
            self._found[position] = self._found.get(position, 0) + 1 if is_stopped(process) else 0
            if self._found[position] >= self._checks:
                return position
        return None
