"""What the first rank tells the others: a log of small records, which they replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Decision, DeviceError
from outrider.engine.ranks.codec import decode, encode

_POLL_S = 300.0
_ANSWER_S, _HEAR_S = 120.0, 5.0
_KEPT = 256
"""Records that stay in the store behind the newest: no rank is further behind, as each iteration has collectives."""

Decisions: TypeAlias = Mapping[str, Decision]
Act: TypeAlias = Literal["iterate", "drain", "go on", "end"]


class RanksFailed(DeviceError):
    """Ranks of an engine lost each other, or one of them failed: none of them can go on. The text names the rank, its last
    decision and its last collective, as far as they're known.
    """

    device_lost = True


class RanksDiffer(RanksFailed):
    """Ranks that must do the same came to different decisions: one of them has other software, weights or options."""


@dataclass(frozen=True, slots=True)
class Record:
    """What ranks do next: first ``commands``, then ``act``: iterate, drain, go on, or end.

    ``commands``: calls that change the engine (:mod:`outrider.engine.ranks.commands`), each as text, as it was when the call
    came. ``decisions``: what was decided for the iteration, by name. Ranks that follow take the length of the draft from
    here, and check the rest against what they come to themselves.
    """

    commands: tuple[str, ...]
    act: Act
    decisions: Decisions | None = None


class RecordLog:
    """Numbered records in a store. One rank writes, the others read each of them once, in order.

    They are text (:mod:`outrider.engine.ranks.codec`). Still, whoever can write to the store decides what the ranks compute:
    it listens where the ranks are, and nowhere else.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._next = 0

    def publish(self, record: Record) -> None:
        """Write the next record."""
        self._store.set(self._key(self._next), encode(record, Record))
        self._next += 1
        if self._next > _KEPT:
            self._store.delete_key(self._key(self._next - _KEPT - 1))

    def next(self) -> Record:
        """Wait for the next record, for as long as it takes; whoever watches the ranks ends the wait.

        Raises :class:`~outrider.engine.ranks.codec.RecordError` for one that this rank doesn't understand.
        """
        key = self._key(self._next)
        while not came(self._store, key, _POLL_S):
            pass
        self._next += 1
        record: Record = decode(self._store.get(key), Record)
        return record

    def answer(self, number: int, rank: int, said: str) -> None:
        """Answer a question that came in a record."""
        self._store.set(self._answer(number, rank), said)

    def answer_of(self, number: int, rank: int, failure: Callable[[], str | None]) -> str:
        """Wait for a rank's answer. Raises :class:`RanksFailed` where none comes, or ``failure`` says why none will."""
        key, until = self._answer(number, rank), time.monotonic() + _ANSWER_S
        while not came(self._store, key, _HEAR_S):
            why = failure()
            if why is not None or time.monotonic() > until:
                raise RanksFailed(why or f"rank {rank} didn't answer within {_ANSWER_S:g} s")
        said: bytes = self._store.get(key)
        self._store.delete_key(key)
        return said.decode()

    def _key(self, number: int) -> str:
        return f"{self._name}/record/{number}"

    def _answer(self, number: int, rank: int) -> str:
        return f"{self._name}/answer/{number}/{rank}"


def came(store: Store, key: str, seconds: float) -> bool:
    """Whether ``key`` is there, within ``seconds``. Raises :class:`RanksFailed` where the store is gone."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError as error:
        # A store says in words alone that the time is over.
        if "timeout" in str(error).lower() or "timed out" in str(error).lower():
            return False
        raise RanksFailed(f"the store where the ranks meet is gone: {error}; its process has ended") from error
    return True
