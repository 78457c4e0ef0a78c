"""Heartbeats of the ranks of one engine, the first failure, and the end of a process whose ranks are lost."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import DeviceError
from outrider.engine.ranks.records import decode, encode

if TYPE_CHECKING:
    from outrider.engine.ranks.ranks import Ranks

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


class KeyValueStore:
    """Heartbeats of all ranks and the first failure, as text in the store that all ranks share."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def publish_heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """Publish a heartbeat of ``rank``."""
        self._store.set(f"{self._name}/beat/{rank}", encode(heartbeat, Heartbeat))

    def last_heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of ``rank``, or None before the first one."""
        text = self._get(f"{self._name}/beat/{rank}")
        heartbeat: Heartbeat | None = None if text is None else decode(text, Heartbeat)
        return heartbeat

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


_HEARTBEAT_PERIOD_S = 0.4
_MAX_MISSED_HEARTBEATS = 10
"""Own heartbeats without one of another rank after which the other rank counts as hung.

This takes 4 s, or longer on an overloaded machine, which delays this rank's heartbeats too.
"""
_MAX_MISSED_HEARTBEATS_AT_START = 100
"""The same limit before the rank's first decision, unless its process is stopped: imports block its threads for long."""
_GRACE_PERIOD_S = 2.0
"""Seconds that a rank has to end by itself after another rank has failed."""


class RankWatch:
    """A thread that publishes this rank's heartbeats and checks those of all others. After a loss it ends this process."""

    def __init__(self, ranks: Ranks, key_value_store: KeyValueStore, *, speaks: bool, starter: int | None = None) -> None:
        """Create the watch of this rank.

        ``key_value_store`` is a store on a separate connection, because another thread of this rank may block in the main
        one. ``speaks``: print the reason before the process ends. ``starter``: the process whose end also ends this one.
        """
        self._ranks = ranks
        self._key_value_store = key_value_store
        self._speaks = speaks
        self._starter = starter
        self._num_heartbeats = 0
        self._last_seen: dict[int, tuple[Heartbeat, int, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-ranks", daemon=True)

    def start(self) -> None:
        """Start the heartbeat thread of this rank."""
        self._thread.start()

    def stop(self, *, failed: bool = False) -> None:
        """Stop the heartbeat thread; this rank is about to end. Unless it has ``failed``, tell the other ranks so."""
        self._stopped.set()
        self._thread.join(2 * _MAX_MISSED_HEARTBEATS * _HEARTBEAT_PERIOD_S)
        if not failed:
            with suppress(RuntimeError):  # the process of the store may have ended
                self._key_value_store.publish_heartbeat(self._ranks.rank, Heartbeat(number=0))

    def _run(self) -> None:
        while True:
            self._num_heartbeats += 1
            try:
                self._key_value_store.publish_heartbeat(self._ranks.rank, self._ranks.heartbeat(self._num_heartbeats))
                failure = self._key_value_store.failure or self._check_starter() or self._check_heartbeats()
            except (RuntimeError, DeviceError) as error:
                failure = f"{STORE_LOST}: {error}; {self._ranks.progress}"
            if failure is not None and not self._stopped.wait(_GRACE_PERIOD_S):
                self._end_process(failure)
            if self._stopped.wait(_HEARTBEAT_PERIOD_S):
                return

    def _check_starter(self) -> str | None:
        if self._starter is None or os.getppid() == self._starter:
            return None
        return self._key_value_store.publish_failure(
            f"rank {self._ranks.rank} lost the process that started it; {self._ranks.progress}"
        )

    def _check_heartbeats(self) -> str | None:
        now = time.monotonic()
        for rank in range(self._ranks.config.world):
            if rank == self._ranks.rank:
                continue
            heartbeat = self._key_value_store.last_heartbeat(rank)
            if heartbeat is None:
                continue
            last_seen, own_count, since = self._last_seen.get(rank, (None, 0, now))
            if heartbeat != last_seen:
                self._last_seen[rank] = heartbeat, self._num_heartbeats, now
            elif heartbeat.number and self._num_heartbeats - own_count >= self._max_missed(heartbeat):
                return self._key_value_store.publish_failure(
                    f"rank {rank} hangs: no sign of life for {now - since:.0f} s; {heartbeat.progress}"
                )
        return None

    @staticmethod
    def _max_missed(heartbeat: Heartbeat) -> int:
        is_starting = not heartbeat.has_decided and not is_stopped_here(heartbeat.process)
        return _MAX_MISSED_HEARTBEATS_AT_START if is_starting else _MAX_MISSED_HEARTBEATS

    def _end_process(self, failure: str) -> None:
        if self._speaks or (self._starter is not None and first_rank_is_lost(failure)):
            with suppress(OSError):  # the process ends even if standard error is closed
                sys.stderr.write(f"outrider: {failure}\n")
                sys.stderr.flush()
        os._exit(1)


def first_rank_is_lost(failure: str) -> bool:
    """Return True if the first rank can't print ``failure``, because that rank or the store's process is lost."""
    return failure.startswith(("rank 0 hangs", "rank 0 lost", STORE_LOST))
