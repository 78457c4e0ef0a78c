"""Records that the first rank publishes and follower ranks repeat: their text, the commands in them, and their log.

The text is JSON of :mod:`outrider.engine.requests.message_codec` with a version. A command is a call that changes an engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Decision, DeviceError
from outrider.engine.requests.hand_over import RequestState
from outrider.engine.requests.message_codec import MessageError, from_plain, to_plain
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import one_line, shown
from outrider.model import Media

VERSION = 2
"""The version of the format. It increases with each change that makes old text ambiguous."""
_VERSION, _RECORD = "version", "record"


class RecordError(DeviceError):
    """Invalid record text, or a value that a record can't hold. The message has the path of the wrong field.

    The error stops the engine, because the ranks can't agree any more.
    """

    device_lost = True


def encode(value: object, kind: Any) -> str:
    """Return ``value`` as text. Raises :class:`RecordError` if any part of it doesn't have the type ``kind``."""
    try:
        record = to_plain(value, kind)
    except MessageError as error:
        raise RecordError(str(error)) from error
    return json.dumps({_VERSION: VERSION, _RECORD: record}, allow_nan=False, separators=(",", ":"))


def decode(text: str | bytes, kind: Any) -> Any:
    """Return the value of type ``kind`` that :func:`encode` wrote.

    Raises :class:`RecordError` for text that isn't JSON, another version, unknown or missing fields, and wrong types.
    """
    try:
        envelope = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a record of another rank can't be read: {one_line(str(error))}; expected JSON") from None
    if not isinstance(envelope, dict) or envelope.get(_VERSION) != VERSION or type(envelope.get(_VERSION)) is not int:
        raise RecordError(
            f"a record of another rank has no version {VERSION}: {shown(envelope)}; start all ranks with the same software"
        )
    if envelope.keys() != {_VERSION, _RECORD}:
        raise RecordError(
            f"a record of another rank has the keys {shown(sorted(envelope))}; expected {_VERSION} and {_RECORD}"
        )
    try:
        return from_plain(envelope[_RECORD], kind)
    except MessageError as error:
        raise RecordError(str(error)) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key is there twice")
    return unique


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} isn't JSON")


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
    """Encoded calls that change the engine (:mod:`outrider.engine.ranks.records`), in the order of the calls."""
    act: RankAct
    """The next act: iterate, drain, go on (no iteration), or end."""
    decisions: Decisions | None = None
    """The decisions for an iteration, by name. Followers use the draft length and compare all others with their own."""


class RecordLog:
    """Numbered records in a store. One rank writes them, and each other rank reads them once, in order.

    Records are text (:mod:`outrider.engine.ranks.records`). A process that can write to the store controls what the ranks
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

        Raises :class:`~outrider.engine.ranks.records.RecordError` for an invalid record.
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


@dataclass(frozen=True, slots=True)
class AddCommand:
    """A command to queue one request of a caller."""

    tokens: tuple[int, ...]
    params: SamplingParams | None
    priority: int
    media: tuple[Media, ...]


@dataclass(frozen=True, slots=True)
class QueueCommand:
    """A command to queue the requests of one ``generate`` call."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams | tuple[SamplingParams | None, ...] | None
    """Parameters of all requests, or one entry for each prompt."""
    media: tuple[tuple[Media, ...], ...] | None
    """The media of each prompt."""


@dataclass(frozen=True, slots=True)
class AbortCommand:
    """A command to end the request with number ``request``."""

    request: int


@dataclass(frozen=True, slots=True)
class DropCommand:
    """A command to drop requests whose caller has disappeared."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandOverCommand:
    """A command to hand a request over to another engine of the same ranks."""

    request: int


@dataclass(frozen=True, slots=True)
class TakeOverCommand:
    """A command to continue a handed-over request. Each rank stores its part under ``key``."""

    key: str


@dataclass(frozen=True, slots=True)
class ResumeCommand:
    """A command to queue a request that another engine has started."""

    state: RequestState


@dataclass(frozen=True, slots=True)
class ExpectPagesCommand:
    """Reserve pages in a data-parallel group for a request that another engine lends."""

    state: RequestState
    group: int


@dataclass(frozen=True, slots=True)
class PagesArrivedCommand:
    """A command to continue an expected request whose pages have arrived."""

    request: int
    relay: Mapping[str, Tensor]
    """The proposer's relayed tensors; the first rank passes them to the rank that has the pages."""


@dataclass(frozen=True, slots=True)
class ReleasePagesCommand:
    """Release the pages of an expected request that won't arrive."""

    request: int


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """Request a vote from the component next to the engine of each follower rank."""

    number: int
    """The number of this request for a vote."""
    said: str
    """The text of the request."""


Command: TypeAlias = (
    AddCommand
    | QueueCommand
    | AbortCommand
    | DropCommand
    | HandOverCommand
    | TakeOverCommand
    | ResumeCommand
    | ExpectPagesCommand
    | PagesArrivedCommand
    | ReleasePagesCommand
    | VoteRequest
)
