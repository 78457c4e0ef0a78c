"""Records that the first rank publishes and follower ranks repeat: their text, the calls in them, and their log.

The text is JSON of :mod:`outrider.engine.requests.message_codec` with a version.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Decision, DeviceError
from outrider.engine.requests.hand_over import RequestState
from outrider.engine.requests.message_codec import MessageError, from_plain, to_plain
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import one_line, shown
from outrider.model import Media

VERSION = 3
"""The version of the format. It increases with each change that makes old text ambiguous."""
_VERSION, _RECORD = "version", "record"


class RecordError(DeviceError):
    """Invalid record text, or a value that a record can't hold. The message has the path of the wrong field.

    The error stops the engine, because the ranks can't agree any more.
    """

    device_lost = True


CALLS: Mapping[str, Any] = MappingProxyType(
    {
        # prompt, parameters, priority, media
        "add_request": tuple[tuple[int, ...], SamplingParams | None, int, tuple[Media, ...]],
        # prompts, parameters of all requests or one entry for each prompt, media of each prompt
        "generate": tuple[
            tuple[tuple[int, ...], ...],
            SamplingParams | tuple[SamplingParams | None, ...] | None,
            tuple[tuple[Media, ...], ...] | None,
        ],
        "abort": tuple[int],
        # requests whose caller has disappeared
        "drop": tuple[tuple[int, ...]],
        "hand_over": tuple[int],
        # the key under which each rank stores its part of a handed-over request
        "take_over": tuple[str],
        "resume": tuple[RequestState],
        # a request that another engine lends, and the data-parallel group whose pages it gets
        "expect_pages": tuple[RequestState, int],
        # an expected request, and the proposer's relayed tensors: the first rank passes them to the rank that has the pages
        "pages_arrived": tuple[int, Mapping[str, Tensor]],
        # an expected request that won't arrive
        "release_pages": tuple[int],
        # number and text of a request for a vote of the component next to each follower rank's engine
        "vote": tuple[int, str],
    }
)
"""The calls that change an engine and that follower ranks repeat, with the types of their arguments. Numbers are request ids,
unless a comment says otherwise.
"""


def encode(value: object, kind: Any) -> str:
    """Return ``value`` as text. Raises :class:`RecordError` if any part of it doesn't have the type ``kind``."""
    return _as_text(_converted(to_plain, value, kind))


def decode(text: str | bytes, kind: Any) -> Any:
    """Return the value of type ``kind`` that :func:`encode` wrote.

    Raises :class:`RecordError` for text that isn't JSON, another version, unknown or missing fields, and wrong types.
    """
    return _converted(from_plain, _record_in(text), kind)


def encode_call(name: str, arguments: Sequence[object]) -> str:
    """Return a call of :data:`CALLS` as text. Raises :class:`RecordError` for arguments that a record can't hold."""
    return _as_text({name: _converted(to_plain, arguments, CALLS[name])})


def decode_call(text: str | bytes) -> tuple[str, tuple[Any, ...]]:
    """Return name and arguments of the call that :func:`encode_call` wrote. Raises :class:`RecordError` as :func:`decode`."""
    record = _record_in(text)
    name = next(iter(record), "") if isinstance(record, dict) else ""
    if name not in CALLS or len(record) != 1:
        raise RecordError(f"a call of another rank is {shown(record)}; expected one of {', '.join(CALLS)}")
    return name, _converted(from_plain, record[name], CALLS[name])


def _converted(convert: Callable[[Any, Any], Any], value: Any, kind: Any) -> Any:
    try:
        return convert(value, kind)
    except MessageError as error:
        raise RecordError(str(error)) from error


def _as_text(record: Any) -> str:
    return json.dumps({_VERSION: VERSION, _RECORD: record}, allow_nan=False, separators=(",", ":"))


def _record_in(text: str | bytes) -> Any:
    """Return the plain data in the text of a record, whose version is checked."""
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
    return envelope[_RECORD]


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
    """One entry of the decision log. Every rank makes the calls and then performs the act."""

    calls: tuple[str, ...]
    """Encoded calls that change the engine (:data:`CALLS`), in their order."""
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
