"""Encoding of the messages between a server and its engine's process: a length of 4 bytes (big-endian), then JSON.

Both ends are the same program, but messages contain data of clients. So nothing is unpickled: the decoder creates only the
records of :mod:`outrider.serve.connection.engine_messages`, by :mod:`outrider.engine.requests.message_codec`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from outrider.engine.requests.message_codec import from_plain, to_plain
from outrider.engine.requests.sampling import TokenLogprobs
from outrider.serve.connection.engine_messages import EngineCommand, EngineEvent, SampleOutput

_LENGTH = struct.Struct("!I")


class FrameDecoder:
    """An incremental decoder of length-prefixed frames from received bytes."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, piece: bytes) -> Iterator[Any]:
        """Append ``piece`` to the received bytes and yield the content of each frame that is now complete."""
        received = self._received
        received += piece
        start = 0
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            end = start + _LENGTH.size + length
            if end > len(received):
                break
            yield json.loads(received[start + _LENGTH.size : end])
            start = end
        del received[:start]


def frame(item: Any) -> bytes:
    """Return ``item``, plain data for JSON, encoded as one frame."""
    data = json.dumps(item, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


def command_to_wire(command: EngineCommand) -> Any:
    """Return a command as plain data for JSON."""
    return to_plain(command, EngineCommand)


def command_of_wire(plain: Any) -> EngineCommand:
    """Return the command that :func:`command_to_wire` encoded."""
    command: EngineCommand = from_plain(plain, EngineCommand)
    return command


def event_to_wire(event: EngineEvent) -> Any:
    """Return an event as plain data for JSON.

    An output is a flat list, without the codec: it is by far the most frequent event.
    """
    if type(event) is not SampleOutput:
        return to_plain(event, EngineEvent)
    entries = [(entry.token, entry.logprob, entry.top) for entry in event.logprobs] if event.logprobs else ()
    return [*event[:4], entries, *event[5:]]


def event_of_wire(plain: Any) -> EngineEvent:
    """Return the event that :func:`event_to_wire` encoded."""
    if type(plain) is not list:
        event: EngineEvent = from_plain(plain, EngineEvent)
        return event
    key, sample, tokens, reason, entries, *details = plain
    logprobs = tuple(TokenLogprobs(token, logprob, tuple(map(tuple, top))) for token, logprob, top in entries)
    return SampleOutput(key, sample, tuple(tokens), reason, logprobs, *details)
