"""Encoding of the messages between a server and its engine's process: a length of 4 bytes (big-endian), then JSON.

Both ends are the same program, but messages contain data of clients. So nothing is unpickled: the decoder creates only the
records of :mod:`outrider.serve.engine_messages`.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from outrider.engine.ranks.codec import from_json, to_json
from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.stats import EngineLoad, EngineStats
from outrider.model import Media, MediaGrid
from outrider.serve.engine_messages import (
    AbortRequest,
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineSnapshot,
    RequestAdmitted,
    RequestRefused,
    SampleOutput,
    StopEngine,
    SubmitRequest,
)

_LENGTH = struct.Struct("!I")


class FrameDecoder:
    """An incremental decoder of frames."""

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


def command_to_wire(command: EngineCommand) -> list[Any]:
    """Return a command as plain data for JSON."""
    match command:
        case SubmitRequest(key, tokens, params, priority, media):
            return ["submit", key, list(tokens), to_json(params, SamplingParams), priority, [*map(_media_to_wire, media)]]
        case AbortRequest(key):
            return ["abort", key]
        case StopEngine():
            return ["stop"]


def command_of_wire(encoded: Sequence[Any]) -> EngineCommand:
    """Return the command that :func:`command_to_wire` encoded."""
    match encoded:
        case ["submit", key, tokens, params, priority, media]:
            return SubmitRequest(key, tokens, from_json(params, SamplingParams), priority, [*map(_media_of_wire, media)])
        case ["abort", key]:
            return AbortRequest(key)
    return StopEngine()


def event_to_wire(event: EngineEvent) -> list[Any]:
    """Return an event as plain data for JSON.

    An output is a flat list that starts with 0: it is by far the most frequent event.
    """
    if type(event) is SampleOutput:
        entries = [(entry.token, entry.logprob, entry.top) for entry in event.logprobs] if event.logprobs else ()
        return [0, *event[:4], entries, *event[5:]]
    match event:
        case EngineSnapshot(stats, load, step_s):
            return ["snapshot", asdict(stats), asdict(load), step_s]
        case EngineReady(info):
            return ["ready", asdict(info)]
        case RequestAdmitted(key):
            return ["admitted", key]
        case RequestRefused(key, message):
            return ["refused", key, message]
        case EngineFailed(message):
            return ["failed", message]
    raise AssertionError(f"{type(event).__name__} isn't an event")


def event_of_wire(encoded: Sequence[Any]) -> EngineEvent:
    """Return the event that :func:`event_to_wire` encoded."""
    if encoded[0] == 0:
        _, key, sample, tokens, reason, entries, *details = encoded
        logprobs = tuple(TokenLogprobs(token, logprob, tuple(map(tuple, top))) for token, logprob, top in entries)
        return SampleOutput(key, sample, tuple(tokens), reason, logprobs, *details)
    match encoded:
        case ["snapshot", stats, load, step_s]:
            return EngineSnapshot(EngineStats(**stats), EngineLoad(**load), step_s)
        case ["ready", info]:
            return EngineReady(EngineInfo(**info | {"eos_token_ids": tuple(info["eos_token_ids"])}))
        case ["admitted", key]:
            return RequestAdmitted(key)
        case ["refused", key, message]:
            return RequestRefused(key, message)
    return EngineFailed(encoded[1])


def _media_to_wire(media: Media) -> dict[str, Any]:
    pixels = media.pixels.contiguous()
    return {
        "grid": asdict(media.grid),
        "shape": list(pixels.shape),
        "pixels": base64.b64encode(pixels.numpy().tobytes()).decode(),
        "digest": media.digest.hex(),
    }


def _media_of_wire(encoded: dict[str, Any]) -> Media:
    values = np.frombuffer(bytearray(base64.b64decode(encoded["pixels"])), dtype=np.float32)
    pixels = torch.from_numpy(values).view(encoded["shape"])
    return Media(MediaGrid(**encoded["grid"]), pixels, bytes.fromhex(encoded["digest"]))
