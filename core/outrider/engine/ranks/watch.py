"""Watching ranks that are processes: each says now and then that it lives, and hears of the others."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from outrider.device import DeviceError
from outrider.engine.ranks.ranks import Ranks
from outrider.engine.ranks.room import GONE, Room

_BEAT_S = 0.4
_SILENT = 10
"""A rank that gives no sign of life while this one gives so many hangs: it's stopped, or in an operation that keeps all its
threads. That's 4 s; on a machine that has no time for either of them, longer.
"""
_SILENT_AT_START = 100
"""The same before it has decided anything: imports and libraries that are loaded keep all its threads for long."""
_GRACE_S = 2.0
"""So long a rank has to end by itself once another has failed: it may be waiting for what never comes."""


class Watch:
    """Says of this rank how far it is, hears how far the others are, and ends the process where one of them is lost.

    ``room``: of a connection of its own, since another thread of this rank may wait in the store. ``speaks``: this process
    tells people why it ends; elsewhere that's for whoever started the ranks. ``starter``: the process that started this one
    and must live as long; None: it may end.
    """

    def __init__(self, ranks: Ranks, room: Room, *, speaks: bool, starter: int | None = None) -> None:
        self._ranks = ranks
        self._room = room
        self._speaks = speaks
        self._starter = starter
        self._beats = 0
        self._seen: dict[int, tuple[str, int, float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-ranks", daemon=True)

    def start(self) -> None:
        """From now on the others know that this rank lives."""
        self._thread.start()

    def stop(self) -> None:
        """End: the rank is done, or on its way out."""
        self._over.set()
        self._thread.join(2 * _SILENT * _BEAT_S)

    def _run(self) -> None:
        while not self._over.wait(_BEAT_S):
            self._beats += 1
            try:
                self._room.beat(self._ranks.rank, f"{self._beats}{self._phase} {self._ranks.progress}")
                failure = self._room.failure or self._orphaned() or self._silent()
            except (RuntimeError, DeviceError) as error:
                failure = f"{GONE}: {error}; {self._ranks.progress}"
            if failure is not None and not self._over.wait(_GRACE_S):
                self._end(failure)

    def _orphaned(self) -> str | None:
        if self._starter is None or os.getppid() == self._starter:
            return None
        return self._room.fail(f"rank {self._ranks.rank} lost the process that started it; {self._ranks.progress}")

    def _silent(self) -> str | None:
        now = time.monotonic()
        for rank in range(self._ranks.config.world):
            if rank == self._ranks.rank:
                continue
            said = self._room.last_beat(rank)
            before, beat, since = self._seen.get(rank, ("", self._beats, now))
            if said != before:
                self._seen[rank] = said, self._beats, now
            elif said and said != Room.ENDED and self._beats - beat >= self._patience(said):
                last = said.partition(" ")[2] or "nothing is known of it"
                return self._room.fail(f"rank {rank} hangs: no sign of life for {now - since:.0f} s; {last}")
        return None

    @property
    def _phase(self) -> str:
        decided = any(group.last_decision is not None for group in self._ranks.groups)
        return "" if decided else Room.STARTS

    @staticmethod
    def _patience(said: str) -> int:
        starts = said.partition(" ")[0].endswith(Room.STARTS)
        return _SILENT_AT_START if starts else _SILENT

    def _end(self, failure: str) -> None:
        if self._speaks or (self._starter is not None and first_is_lost(failure)):
            with suppress(OSError):  # the process ends all the same
                sys.stderr.write(f"outrider: {failure}\n")
                sys.stderr.flush()
        os._exit(1)


def first_is_lost(failure: str) -> bool:
    """Whether the first rank can't tell people of a failure: it's lost, or so is the process where ranks leave word."""
    return failure.startswith(("rank 0 hangs", "rank 0 lost", GONE))


def end_with(descriptor: int) -> None:
    """End this process when the other end of the pipe at ``descriptor`` is closed: whoever started it is gone."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="outrider-starter", daemon=True).start()
