"""Watch: heartbeats between rank processes, and the end of this process if another rank is lost."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from outrider.device import DeviceError
from outrider.engine.ranks.heartbeats import STORE_LOST, Heartbeat, KeyValueStore, is_stopped_here
from outrider.engine.ranks.ranks import Ranks

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

    def stop(self) -> None:
        """Stop the heartbeat thread; this rank is about to end."""
        self._stopped.set()
        self._thread.join(2 * _MAX_MISSED_HEARTBEATS * _HEARTBEAT_PERIOD_S)

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


def end_with_pipe(descriptor: int) -> None:
    """End this process once the other end of the pipe at ``descriptor`` is closed: the starter has ended."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="outrider-starter", daemon=True).start()
