"""Messages between the processes: frames of JSON and bytes. Nothing that is received is ever executed or unpickled.

A frame: ``ORPD``, the length of the text (4 bytes, little-endian) and of the bytes behind it (8 bytes), the text, the bytes.
The text is a JSON object: ``kind``, ``body``, and ``blobs``, the lengths of the pieces that the bytes consist of.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.device import OutriderError

VERSION = 2
"""Of the messages. It rises when a message that was right could be misunderstood."""
_MAGIC = b"ORPD"
_FRAME = struct.Struct("<4sIQ")
_TEXT_BYTES = 64 << 20
KIND, BODY, BLOBS = "kind", "body", "blobs"


class WireError(OutriderError):
    """What came over the wire isn't a message of this version, or too large. The connection ends."""


@dataclass(frozen=True, slots=True)
class Message:
    """``body``: what JSON can hold; ``blobs``: bytes that it refers to by their numbers."""

    kind: str
    body: Mapping[str, Any] = field(default_factory=dict)
    blobs: tuple[bytes, ...] = field(default=(), repr=False)

    def encode(self) -> bytes:
        """The frame."""
        text = json.dumps({KIND: self.kind, BODY: self.body, BLOBS: [len(blob) for blob in self.blobs]}).encode()
        return b"".join((_FRAME.pack(_MAGIC, len(text), sum(map(len, self.blobs))), text, *self.blobs))


class Decoder:
    """Takes bytes as they come, and gives messages. ``limit``: bytes of a message; it may be changed between two."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterable[Message]:
        """The messages that are complete now. Raises :class:`WireError`; the connection is of no use then."""
        self._held += data
        while len(self._held) >= _FRAME.size:
            magic, text, rest = _FRAME.unpack_from(self._held)
            if magic != _MAGIC:
                raise WireError("the other side speaks another protocol: expected the first bytes of a message")
            if text > min(self.limit, _TEXT_BYTES) or text + rest > self.limit:
                raise WireError(f"a message of {text + rest} bytes is too long; expected at most {self.limit}")
            end = _FRAME.size + text + rest
            if len(self._held) < end:
                return
            frame = bytes(self._held[_FRAME.size : end])
            del self._held[:end]
            yield _read(frame[:text], frame[text:])


def _read(text: bytes, rest: bytes) -> Message:
    try:
        read = json.loads(text)
        kind, body, lengths = read[KIND], read[BODY], read[BLOBS]
        if not isinstance(kind, str) or not isinstance(body, dict) or not isinstance(lengths, list):
            raise ValueError("a part has the wrong type")
        if not all(type(length) is int and length >= 0 for length in lengths) or sum(lengths) != len(rest):
            raise ValueError("the lengths don't add up")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a message can't be read: {error}") from None
    return Message(kind, body, tuple(_cut(rest, lengths)))


def _cut(rest: bytes, lengths: Sequence[int]) -> Iterable[bytes]:
    start = 0
    for length in lengths:
        yield rest[start : start + length]
        start += length
