"""The decision log of the ranks of one engine.

The first rank publishes its decisions. Follower ranks read them and check that they come to the same decisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from outrider.device import ConfigError, DeviceError
from outrider.engine.ranks.ranks import Ranks
from outrider.engine.ranks.records import (
    DecisionRecord,
    Decisions,
    RankAct,
    RanksDiffer,
    RanksFailed,
    decode,
    decode_call,
    encode,
    encode_call,
    wait_for_key,
)
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.draft_length import DraftLengthPolicy, RequestAcceptance
from outrider.engine.requests.hand_over import HandOver


class DecisionLog:
    """The decision log of an engine of one rank: no other rank reads its decisions, so nothing is published.

    :class:`RankedDecisionLog` has the log of several ranks.
    """

    leads = True
    """True if the engine takes calls and makes the decisions."""
    can_repeat = True
    """True if this rank can repeat work that failed."""
    groups, own_group = 1, 0
    """Number of data-parallel groups, and the number of this rank's."""
    has_page_parts = False
    """True if each page is shared out among ranks."""

    def check_leads_or_replays(self) -> None:
        """Raise :class:`ConfigError` if a caller uses a follower rank's engine, which only records may change."""

    @property
    def compile_limit_s(self) -> float | None:
        """The time limit for compiling a guide; None on ranks that accept every guide."""
        return math.inf

    def replicate(self, policy: DraftLengthPolicy) -> DraftLengthPolicy:
        """Return the policy that chooses the draft lengths that the leading rank chooses with ``policy``."""
        return policy

    def wait_limit(self, timeout_s: float | None) -> float | None:
        """Return the time limit in seconds of each host wait, for an engine whose limit is ``timeout_s``: here unchanged.

        The engine calls this after the warm-up, because a compilation may take longer than the limit.
        """
        return timeout_s

    def append_call(self, name: str, *arguments: object) -> None:
        """Add a call of :data:`~outrider.engine.ranks.records.CALLS` to the next record of the leading rank, so that follower
        ranks repeat it.
        """

    def publish_or_check(
        self, name: RankAct, decisions: Decisions | None = None, then: Callable[[], Decisions] | None = None
    ) -> None:
        """Publish the next act on the leading rank; compare the decisions with the record on a follower rank.

        ``then``: returns the decisions that depend on ``decisions``. A follower calls it after it has checked ``decisions``.
        Raises :class:`RanksDiffer` for a difference.
        """

    def publish_batch(self, batch: Batch | None, shape: Callable[[Batch | None], Decisions]) -> None:
        """Publish or check the decisions about an iteration, with its ``shape`` on the device."""

    def decide_accepted(self, accepted: Sequence[int]) -> None:
        """Report the numbers of accepted tokens, which must be equal on all ranks."""

    def request_votes(self, said: str) -> tuple[str, ...]:
        """Request a vote from every follower rank, on the leading rank. Wait for the votes and return them in rank order."""
        raise ConfigError(f"this engine is alone: it has no other ranks to ask {said!r}")

    def keep_handed_over(self, handed: HandOver) -> HandOver:
        """Keep this rank's part of a request that leaves the engine, and return it with its key."""
        return handed

    def check_handed_over(self, handed: HandOver) -> None:
        """Raise :class:`ConfigError` if the request comes from other ranks or was already taken over."""
        if handed.key is not None:
            raise ConfigError(FROM_OTHER_RANKS)

    def drop_handed_over(self, handed: HandOver) -> None:
        """Drop this rank's part of a request that this engine has taken over."""

    def report_failure(self, error: BaseException) -> DeviceError:
        """Report ``error`` to the other ranks, and return the error that stops this rank."""
        assert isinstance(error, DeviceError), "a single rank stops for errors of its device alone"
        return error

    def end_followers(self) -> None:
        """Publish the last record on the leading rank, so that followers end. Further calls do nothing."""


_RECORD_POLL_S = 300.0
_VOTE_TIMEOUT_S, _VOTE_POLL_S = 120.0, 5.0
_MAX_STORED_RECORDS = 256
"""Number of newest records that stay in the store. No rank lags further, because each iteration has collectives."""
FROM_OTHER_RANKS = "the request comes from an engine of other ranks, or was taken over already: it goes on where its state is"


class RankedDecisionLog(DecisionLog):
    """The decision log of one engine of several ranks.

    The leading rank publishes each decision before its effect, as a numbered record in the ranks' store. A follower rank
    reads each record once, in order. A process that can write to the store controls what the ranks compute, so the store must
    be reachable from the ranks only.
    """

    can_repeat = False  # the other ranks go on, or wait inside the work

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.leads = ranks.leads
        self.groups, self.own_group = ranks.config.data, ranks.data_rank
        self.has_page_parts = ranks.config.tensor > 1
        self._store, self._name = ranks.store, ranks.new_log_name()
        self._num_records = 0
        self._calls: list[str] = []
        self._record: DecisionRecord | None = None
        self._vote_requests = 0
        self.has_ended = False
        """True once the last record is published."""

    def check_leads_or_replays(self) -> None:
        """Raise :class:`ConfigError` if a caller uses a follower rank's engine, which only records may change."""
        if not self.leads and self._record is None:
            raise ConfigError("this engine follows that of rank 0, which takes all calls; call follow() here")

    @property
    def compile_limit_s(self) -> float | None:
        """The time limit for compiling a guide. None on follower ranks, which accept every guide that rank 0 accepts.

        The leading rank waits while follower ranks compile, so its limit is a quarter of the rank timeout.
        """
        return self.ranks.config.timeout_s / 4 if self.leads else None

    def append_call(self, name: str, *arguments: object) -> None:
        """On the leading rank: add a call of the engine to the next record. Followers ignore it.

        Raises :class:`~outrider.engine.ranks.records.RecordError` for an argument that a record can't hold.
        """
        if self.leads:
            self._calls.append(encode_call(name, arguments))

    def publish_or_check(
        self, name: RankAct, decisions: Decisions | None = None, then: Callable[[], Decisions] | None = None
    ) -> None:
        """Publish the next act on the leading rank; compare the decisions with the record on a follower rank.

        ``then``: returns the decisions that depend on ``decisions``. A follower calls it after it has checked ``decisions``.
        Raises :class:`RanksDiffer` for a difference.
        """
        if self.leads:
            published = decisions if then is None else {**(decisions or {}), **then()}
            if not self.has_ended:
                self._publish(DecisionRecord(tuple(self._calls), name, published))
                self._calls.clear()
            self._pass_to_groups(published)
            return
        self._pass_to_groups(decisions)
        self._check(decisions)
        if then is not None:
            dependent = then()
            self._pass_to_groups(dependent)
            self._check(dependent)

    def publish_batch(self, batch: Batch | None, shape: Callable[[Batch | None], Decisions]) -> None:
        """Publish or check the decisions about an iteration, with its ``shape`` on the device."""
        self.publish_or_check("iterate", decisions_of(batch), then=lambda: shape(batch))

    def decide_accepted(self, accepted: Sequence[int]) -> None:
        """Report the numbers of accepted tokens to each group."""
        self.ranks.decide("accepted", tuple(accepted))

    def replicate(self, policy: DraftLengthPolicy) -> DraftLengthPolicy:
        """Return ``policy`` on the leading rank, and the policy that repeats its choices on a follower."""
        return policy if self.leads else ReplicatedLength(policy, self)

    def wait_limit(self, timeout_s: float | None) -> float | None:
        """Return the time limit in seconds of each host wait: the smaller of ``timeout_s`` and the ranks' time limit, after
        which a rank counts as lost.
        """
        return min(timeout_s or self.ranks.config.timeout_s, self.ranks.config.timeout_s)

    def keep_handed_over(self, handed: HandOver) -> HandOver:
        """Store this rank's part of a request that leaves, and return it with a key that is equal on all ranks."""
        key = f"request {next(self.ranks.handed_over_numbers)}"
        self.ranks.handed_over[key] = replace(handed, key=key)
        return self.ranks.handed_over[key]

    def check_handed_over(self, handed: HandOver) -> None:
        """Raise :class:`ConfigError` if the request comes from other ranks or was already taken over."""
        if handed.key not in self.ranks.handed_over:
            raise ConfigError(FROM_OTHER_RANKS)

    def drop_handed_over(self, handed: HandOver) -> None:
        """Drop this rank's part of a request that this engine has taken over."""
        del self.ranks.handed_over[str(handed.key)]

    def report_failure(self, error: BaseException) -> DeviceError:
        """Report ``error`` to the other ranks, and return the error that stops this rank: that of the rank that failed
        first.
        """
        first_report = self.ranks.report_failure(error)
        if not first_report.startswith(f"rank {self.ranks.rank} "):
            return RanksFailed(first_report)
        return error if isinstance(error, DeviceError) else RanksFailed(f"{type(error).__name__}: {error}")

    def request_votes(self, said: str) -> tuple[str, ...]:
        """Request a vote from every follower rank, on the leading rank. Wait for the votes and return them in rank order."""
        number, self._vote_requests = self._vote_requests, self._vote_requests + 1
        self.append_call("vote", number, said)
        self.publish_or_check("go on")
        return tuple(self._wait_for_vote(number, rank) for rank in range(1, self.ranks.config.world))

    def publish_vote(self, number: int, said: str) -> None:
        """Publish this follower rank's vote for request ``number``."""
        self._store.set(self._vote_key(number, self.ranks.rank), said)

    def end_followers(self) -> None:
        """Publish the last record on the leading rank, so that followers end. Further calls do nothing."""
        if self.leads and not self.has_ended:
            self._calls.clear()
            self.publish_or_check("end")
        self.has_ended = True

    def next(self) -> DecisionRecord:
        """Wait for the next decision record of the first rank, on a follower rank, and return it. There is no time limit: if
        the first rank is lost, :class:`~outrider.engine.ranks.heartbeats.RankWatch` ends this process.

        Raises :class:`~outrider.engine.ranks.records.RecordError` for an invalid record.
        """
        key = self._record_key(self._num_records)
        while not wait_for_key(self._store, key, _RECORD_POLL_S):
            pass
        self._num_records += 1
        record: DecisionRecord = decode(self._store.get(key), DecisionRecord)
        self._record = record
        return record

    @property
    def calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Name and arguments of each call of the current record, on a follower rank."""
        for text in () if self._record is None else self._record.calls:
            yield decode_call(text)

    @property
    def drafted(self) -> tuple[int | None, tuple[int, ...]]:
        """The draft length of the current record, on a follower rank (None if the record has none), and those of each request
        (empty if the record has none).
        """
        decisions = (None if self._record is None else self._record.decisions) or {}
        drafted, lengths = decisions.get("drafted"), decisions.get("draft_lengths")
        return drafted if isinstance(drafted, int) else None, lengths if isinstance(lengths, tuple) else ()

    def _publish(self, record: DecisionRecord) -> None:
        """Write the next record and delete the oldest stored one."""
        self._store.set(self._record_key(self._num_records), encode(record, DecisionRecord))
        self._num_records += 1
        if self._num_records > _MAX_STORED_RECORDS:
            self._store.delete_key(self._record_key(self._num_records - _MAX_STORED_RECORDS - 1))

    def _wait_for_vote(self, number: int, rank: int) -> str:
        """Return the vote of ``rank`` for request ``number``. Raises :class:`RanksFailed` after 120 s, or once a rank has
        failed.
        """
        key, until = self._vote_key(number, rank), time.monotonic() + _VOTE_TIMEOUT_S
        while not wait_for_key(self._store, key, _VOTE_POLL_S):
            reason = self.ranks.key_value_store.failure
            if reason is not None or time.monotonic() > until:
                raise RanksFailed(reason or f"rank {rank} didn't answer within {_VOTE_TIMEOUT_S:g} s")
        vote: bytes = self._store.get(key)
        self._store.delete_key(key)
        return vote.decode()

    def _record_key(self, number: int) -> str:
        return f"{self._name}/record/{number}"

    def _vote_key(self, number: int, rank: int) -> str:
        return f"{self._name}/answer/{number}/{rank}"

    def _pass_to_groups(self, decisions: Decisions | None) -> None:
        for name, value in (decisions or {}).items():
            self.ranks.decide(name, value)

    def _check(self, decisions: Decisions | None) -> None:
        if self._record is None:
            return
        published = self._record.decisions or {}
        for name, value in (decisions or {}).items():
            if value != published.get(name):
                raise RanksDiffer(
                    f"rank {self.ranks.rank} comes to {name} = {value!r}, and rank 0 decided {published.get(name)!r}: "
                    f"{self.ranks.progress}; start all ranks with the same options, files and software"
                )


def decisions_of(batch: Batch | None) -> Decisions:
    """Return the host decisions of an iteration in all data-parallel groups, by name."""
    batches = () if batch is None else batch.group_batches
    return {
        "admitted": tuple(request.id for each in batches for request in each.admitted),
        "preempted": tuple(request.preemptions for each in batches for request in each.requests),
        "prefill": tuple(
            number for each in batches for chunk in each.prefill for number in (chunk.request.id, chunk.start, chunk.end)
        ),
        "decode": tuple(request.id for each in batches for request in each.decode),
        "pages": tuple(number for each in batches for update in each.table_updates for number in update),
        "states": tuple(row for each in batches for copy in (*each.restored_states, *each.saved_states) for row in copy),
        "drafted": 0 if batch is None else batch.drafted,
        "draft_lengths": () if batch is None else batch.draft_lengths,
    }


class ReplicatedLength(DraftLengthPolicy):
    """The draft-length policy of follower ranks: the lengths that the decision log records."""

    needs_acceptance = reads_load = False

    def __init__(self, policy: DraftLengthPolicy, decision_log: RankedDecisionLog) -> None:
        super().__init__(policy.lengths)
        self.widths = policy.widths
        self._decision_log = decision_log

    def choose(self, requests: int, cached: int, repeats: Sequence[int] = ()) -> int:
        """Return the length that the current record has, or the longest one if it has none."""
        del requests, cached, repeats
        drafted, _ = self._decision_log.drafted
        return self.lengths[-1] if drafted is None else drafted

    def choose_each(self, requests: Sequence[RequestAcceptance], cached: int) -> tuple[int, tuple[int, ...]]:
        """Return the lengths that the current record has."""
        return self.choose(len(requests), cached), self._decision_log.drafted[1]
