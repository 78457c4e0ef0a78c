"""Encoding of the messages between the processes: frames of JSON and bytes. Received data is never executed or unpickled.

A frame has five parts: ``ORPD``, the length of the text (4 bytes, little-endian), the total length of the blobs (8 bytes,
little-endian), the text and the blobs. The text is a JSON object: ``kind``, ``body`` and ``blobs``, the length of each blob.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.device import OutriderError

VERSION = 3
"""Version of the messages. It rises when an older process could misunderstand a message."""
_MAGIC = b"ORPD"
_FRAME = struct.Struct("<4sIQ")
_MAX_TEXT_BYTES = 64 << 20
KIND, BODY, BLOBS = "kind", "body", "blobs"


class WireError(OutriderError):
    """Raised for a received message that isn't of this version, or is too long. The receiver closes the connection."""


@dataclass(frozen=True, slots=True)
class WireMessage:
    """A message between a prefill server, a decode server or a client: a kind, fields and binary data."""

    kind: str
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the message, as plain data for JSON, which refers to blobs by their indices."""
    blobs: tuple[bytes, ...] = field(default=(), repr=False)

    def encode(self) -> bytes:
        """Return the message as the bytes of one frame."""
        text = json.dumps({KIND: self.kind, BODY: self.body, BLOBS: [len(blob) for blob in self.blobs]}).encode()
        return b"".join((_FRAME.pack(_MAGIC, len(text), sum(map(len, self.blobs))), text, *self.blobs))


class MessageDecoder:
    """An incremental decoder of frames.

    ``limit`` is the maximum number of bytes of text and blobs of a message. It may be changed between two messages.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterable[WireMessage]:
        """Append ``data`` to the received bytes and yield each message that is now complete.

        Raises :class:`WireError` for an invalid frame. The decoder can't be used afterwards.
        """
        self._received += data
        while len(self._received) >= _FRAME.size:
            magic, text_bytes, blob_bytes = _FRAME.unpack_from(self._received)
            if magic != _MAGIC:
                raise WireError("the other side speaks another protocol: expected the first bytes of a message")
            if text_bytes > min(self.limit, _MAX_TEXT_BYTES) or text_bytes + blob_bytes > self.limit:
                raise WireError(f"a message of {text_bytes + blob_bytes} bytes is too long; expected at most {self.limit}")
            end = _FRAME.size + text_bytes + blob_bytes
            if len(self._received) < end:
                return
            frame = bytes(self._received[_FRAME.size : end])
            del self._received[:end]
            yield _decode(frame[:text_bytes], frame[text_bytes:])


def _decode(text: bytes, blobs: bytes) -> WireMessage:
    try:
        fields = json.loads(text)
        kind, body, lengths = fields[KIND], fields[BODY], fields[BLOBS]
        if not isinstance(kind, str) or not isinstance(body, dict) or not isinstance(lengths, list):
            raise ValueError("a part has the wrong type")
        if not all(type(length) is int and length >= 0 for length in lengths) or sum(lengths) != len(blobs):
            raise ValueError("the lengths don't add up")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a message can't be read: {error}") from None
    return WireMessage(kind, body, tuple(_split(blobs, lengths)))


def _split(data: bytes, lengths: Sequence[int]) -> Iterable[bytes]:
    start = 0
    for length in lengths:
        yield data[start : start + length]
        start += length
