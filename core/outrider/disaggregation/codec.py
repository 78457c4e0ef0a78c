"""Conversion of requests, outputs and tensors to message bodies and back. The decoders check every field."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.device import ConfigError
from outrider.disaggregation.connections import WireError
from outrider.engine.engine import Engine
from outrider.engine.requests.hand_over import RequestState, engine_fit
from outrider.engine.requests.message_codec import MessageError, from_plain, to_plain
from outrider.engine.requests.request import StepOutput
from outrider.errors import RequestError
from outrider.model import Media, Shards
from outrider.model.media.vision import digest_of


def encode_state(state: RequestState) -> tuple[dict[str, Any], list[bytes]]:
    """Return the message body and the blobs of a request. Raises :class:`RequestError` for an option that can't be sent."""
    blobs: list[bytes] = []
    try:
        return to_plain(state, RequestState, blobs), blobs
    except MessageError as error:
        raise RequestError(f"the request can't go to another process: {error}") from None


def decode_state(body: Any, blobs: Sequence[bytes]) -> RequestState:
    """Return the request that :func:`encode_state` encoded. Raises :class:`WireError` for a body of another form, and
    :class:`RequestError` for invalid parameters.

    The function doesn't check whether the engine can serve the request.
    """
    state: RequestState = _decode(body, RequestState, blobs)
    # Requests with equal digests share KV pages. A false digest in a message would give a request another request's image.
    media = (Media(each.grid, each.pixels, digest_of(each.grid, each.pixels)) for each in state.media)
    return replace(state, media=tuple(media))


def state_after(state: RequestState, output: StepOutput) -> RequestState:
    """Return ``state`` with the tokens and log-probabilities of ``output`` appended to its output."""
    return replace(state, output=(*state.output, *output.tokens), logprobs=(*state.logprobs, *output.logprobs))


def encode_output(output: StepOutput) -> Any:
    """Return an engine's output as plain data for JSON, without its transcript, which stays where it is decoded."""
    return to_plain(replace(output, transcript=None, index=0), StepOutput)


def decode_output(body: Any, request_id: int) -> StepOutput:
    """Return the output that :func:`encode_output` encoded, with the receiver's ``request_id``. Raises :class:`WireError`."""
    output: StepOutput = _decode(body, StepOutput)
    return replace(output, request_id=request_id)


def encode_relay(relay: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[bytes]]:
    """Return the message body and the blobs of a proposer's relayed draft state."""
    blobs: list[bytes] = []
    return to_plain(relay, Mapping[str, Tensor], blobs), blobs


def decode_relay(body: Any, blobs: Sequence[bytes]) -> dict[str, Tensor]:
    """Return the draft state that :func:`encode_relay` encoded, as new host tensors. Raises :class:`WireError`."""
    relay: dict[str, Tensor] = _decode(body, Mapping[str, Tensor], blobs)
    return relay


def _decode(body: Any, kind: Any, blobs: Sequence[bytes] = ()) -> Any:
    try:
        return from_plain(body, kind, blobs)
    except MessageError as error:
        if isinstance(error.__cause__, ConfigError):
            raise RequestError(str(error.__cause__)) from None
        raise WireError(f"a message can't be read: {error}; run one version on both sides") from None


def server_fit(engine: Engine, shards: Shards | None = None) -> dict[str, str]:
    """Return the properties of :func:`~outrider.engine.requests.hand_over.engine_fit` of a server's engine, with the page
    size.
    """
    return engine_fit(engine.model, engine.proposer, shards) | {"page_size": repr(engine.config.page_size)}


def decode_int(value: Any) -> int:
    """Return ``value`` if it is an integer below 2**62. Raises :class:`WireError`."""
    if type(value) is not int or not 0 <= abs(value) < 1 << 62:
        raise WireError("expected a whole number")
    return value


@contextmanager
def decoding(what: str) -> Generator[None]:
    """Turn errors in decoding received data into :class:`WireError` within the scope. ``what`` names the data."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise WireError(f"{what} can't be read: {type(error).__name__}: {error}") from None
