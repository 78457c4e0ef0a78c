"""Records that the first rank publishes and follower ranks repeat: their text, and the calls in them.

The text is JSON of :mod:`outrider.engine.requests.message_codec` with a version.
"""

from __future__ import annotations

import json
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
        envelope = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a record of another rank can't be read: {one_line(str(error))}; expected JSON") from None
    if not isinstance(envelope, dict) or envelope.keys() != {_VERSION, _RECORD} or envelope[_VERSION] != VERSION:
        raise RecordError(
            f"a record of another rank isn't of version {VERSION}: {shown(envelope)}; start all ranks with the same software"
        )
    return envelope[_RECORD]


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
