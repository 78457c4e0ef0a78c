"""Records of ranks as JSON text: :mod:`outrider.engine.requests.message_codec` with a version."""

from __future__ import annotations

import json
from typing import Any

from outrider.device import DeviceError
from outrider.engine.requests.message_codec import MessageError, from_plain, to_plain
from outrider.errors import one_line, shown

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
