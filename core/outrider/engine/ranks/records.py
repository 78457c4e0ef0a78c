"""RecordLog: the numbered records that the first rank publishes and follower ranks repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Decision, DeviceError
from outrider.engine.ranks.record_text import decode, encode

_RECORD_POLL_S = 300.0
_VOTE_TIMEOUT_S, _VOTE_POLL_S = 120.0, 5.0
_MAX_STORED_RECORDS = 256
"""Number of newest records that stay in the store. No rank lags further, because each iteration has collectives."""

Decisions: TypeAlias = Mapping[str, Decision]
RankAct: TypeAlias = Literal["iterate", "drain", "go on", "end"]


class RanksFailed(DeviceError):
    """A rank of an engine failed, or ranks lost each other, so that no rank can continue.

    The message names the rank and, if known, its last decision and its last collective.
    """

    device_lost = True


class RanksDiffer(RanksFailed):
    """Two ranks made different decisions: one of them has other software, weights or options."""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One entry of the decision log. Every rank applies the commands and then performs the act."""

    commands: tuple[str, ...]
    """Encoded calls that change the engine (:mod:`outrider.engine.ranks.commands`), in the order of the calls."""
    act: RankAct
    """The next act: iterate, drain, go on (no iteration), or end."""
    decisions: Decisions | None = None
    """The decisions for an iteration, by name. Followers use the draft length and compare all others with their own."""


class RecordLog:
    """Numbered records in a store. One rank writes them, and each other rank reads them once, in order.

    Records are text (:mod:`outrider.engine.ranks.record_text`). A process that can write to the store controls what the ranks
    compute, so the store must be reachable from the ranks only.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._next = 0

    def publish(self, record: DecisionRecord) -> None:
        """Write the next record and delete the oldest stored one."""
        self._store.set(self._record_key(self._next), encode(record, DecisionRecord))
        self._next += 1
        if self._next > _MAX_STORED_RECORDS:
            self._store.delete_key(self._record_key(self._next - _MAX_STORED_RECORDS - 1))

    def next(self) -> DecisionRecord:
        """Wait for the next record without a time limit. If the leading rank is lost, ``Watch`` ends this process.

        Raises :class:`~outrider.engine.ranks.record_text.RecordError` for an invalid record.
        """
        key = self._record_key(self._next)
        while not wait_for_key(self._store, key, _RECORD_POLL_S):
            pass
        self._next += 1
        record: DecisionRecord = decode(self._store.get(key), DecisionRecord)
        return record

    def publish_vote(self, number: int, rank: int, said: str) -> None:
        """Write the vote ``said`` of ``rank`` for request ``number``."""
        self._store.set(self._vote_key(number, rank), said)

    def wait_for_vote(self, number: int, rank: int, failure: Callable[[], str | None]) -> str:
        """Wait for the vote of ``rank``. Raises :class:`RanksFailed` after 120 s, or if ``failure`` returns a reason."""
        key, until = self._vote_key(number, rank), time.monotonic() + _VOTE_TIMEOUT_S
        while not wait_for_key(self._store, key, _VOTE_POLL_S):
            reason = failure()
            if reason is not None or time.monotonic() > until:
                raise RanksFailed(reason or f"rank {rank} didn't answer within {_VOTE_TIMEOUT_S:g} s")
        vote: bytes = self._store.get(key)
        self._store.delete_key(key)
        return vote.decode()

    def _record_key(self, number: int) -> str:
        return f"{self._name}/record/{number}"

    def _vote_key(self, number: int, rank: int) -> str:
        return f"{self._name}/answer/{number}/{rank}"


def wait_for_key(store: Store, key: str, seconds: float) -> bool:
    """Wait up to ``seconds`` for ``key`` and return True if the store has it. Raises :class:`RanksFailed` without a store."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError as error:
        # A store reports a timeout in the message only.
        if "timeout" in str(error).lower() or "timed out" in str(error).lower():
            return False
        raise RanksFailed(f"the store where the ranks meet is gone: {error}; its process has ended") from error
    return True
