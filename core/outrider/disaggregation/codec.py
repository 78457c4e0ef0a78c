"""Conversion of requests, outputs and tensors to message bodies and back. The decoders check every field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from outrider.device import ConfigError
from outrider.disaggregation.wire import WireError
from outrider.engine.engine import Engine
from outrider.engine.requests.guides import GUIDES, Guide
from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.request_state import RequestState
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import RequestError, shown
from outrider.model import Media
from outrider.model.media import digest_of
from outrider.model.mrope import MediaGrid

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}
_COUNT_FIELDS = {each.name for each in fields(StepOutput) if each.type == "int" and each.name != "request_id"}
"""Names of the integer fields of an output, except the request id."""
_JSON_SCALARS = (bool, int, float, str, type(None))
_GUIDES_BY_NAME = {kind.__name__: kind for kind in GUIDES}
_MAX_TENSOR_DIMS = 8


def encode_state(state: RequestState) -> tuple[dict[str, Any], list[bytes]]:
    """Return the message body and the blobs of a request. Raises :class:`RequestError` for an option that can't be sent."""
    blobs: list[bytes] = []
    body = {
        "prompt": list(state.prompt),
        "params": _params_to(state.params),
        "output": list(state.output),
        "priority": state.priority,
        "media": [
            {"grid": asdict(each.grid), "pixels": encode_tensor(each.pixels, blobs), "digest": each.digest.hex()}
            for each in state.media
        ],
        "logprobs": encode_logprobs(state.logprobs),
        "iterations": state.iterations,
        "verified_tokens": state.verified_tokens,
    }
    return body, blobs


def decode_state(body: Any, blobs: Sequence[bytes]) -> RequestState:
    """Return the request that :func:`encode_state` encoded. Raises :class:`WireError` for a body of another form.

    The function doesn't check whether the engine can serve the request.
    """
    with DecodingContext("a request"):
        return RequestState(
            prompt=_tokens(body["prompt"]),
            params=_params_from(body["params"]),
            output=_tokens(body["output"]),
            priority=decode_int(body["priority"]),
            media=tuple(_media_from(each, blobs) for each in body["media"]),
            logprobs=decode_logprobs(body["logprobs"]),
            iterations=decode_int(body["iterations"]),
            verified_tokens=decode_int(body["verified_tokens"]),
        )


def state_after(state: RequestState, output: StepOutput) -> RequestState:
    """Return ``state`` with the tokens and log-probabilities of ``output`` appended to its output."""
    return replace(state, output=(*state.output, *output.tokens), logprobs=(*state.logprobs, *output.logprobs))


def encode_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[Any]:
    """Return log-probabilities as nested lists: [token, log-probability, [[token, log-probability], ...]]."""
    return [[each.token, each.logprob, [list(pair) for pair in each.top]] for each in logprobs]


def decode_logprobs(encoded: Any) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities that :func:`encode_logprobs` encoded. Raises :class:`WireError`."""
    with DecodingContext("log-probabilities"):
        return tuple(
            TokenLogprobs(decode_int(token), _number(value), tuple((decode_int(t), _number(v)) for t, v in top))
            for token, value, top in encoded
        )


def encode_output(output: StepOutput) -> dict[str, Any]:
    """Return the message body of an engine's output, without its request id."""
    return {
        "tokens": list(output.tokens),
        "finish_reason": output.finish_reason,
        "logprobs": encode_logprobs(output.logprobs),
        "text": output.text,
        "error": output.error,
        "refused": output.refused,
        "stopped_by": output.stopped_by,
        "counts": {each.name: getattr(output, each.name) for each in fields(output) if each.name in _COUNT_FIELDS},
    }


def decode_output(body: Any, request_id: int) -> StepOutput:
    """Return the output that :func:`encode_output` encoded, with the receiver's ``request_id``. Raises :class:`WireError`."""
    with DecodingContext("an output"):
        reason = body["finish_reason"]
        if not set(body["counts"]) <= _COUNT_FIELDS:
            raise WireError("an output has counts that this version doesn't know; run one version on both sides")
        return StepOutput(
            request_id,
            _tokens(body["tokens"]),
            None if reason is None else FinishReason(reason),
            decode_logprobs(body["logprobs"]),
            _text(body["text"]),
            _text(body["error"]),
            refused=body["refused"] is True,
            stopped_by=stop if isinstance(stop := body["stopped_by"], int) else _text(stop),
            **{name: decode_int(value) for name, value in body["counts"].items()},
        )


def encode_relay(relay: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[bytes]]:
    """Return the message body and the blobs of a proposer's relayed draft state."""
    blobs: list[bytes] = []
    return {name: encode_tensor(value, blobs) for name, value in relay.items()}, blobs


def decode_relay(body: Any, blobs: Sequence[bytes]) -> dict[str, Tensor]:
    """Return the draft state that :func:`encode_relay` encoded, as new host tensors. Raises :class:`WireError`."""
    with DecodingContext("draft state"):
        return {str(name): decode_tensor(value, blobs) for name, value in body.items()}


def encode_tensor(tensor: Tensor, blobs: list[bytes]) -> dict[str, Any]:
    """Append the bytes of ``tensor`` to ``blobs``. Return its dtype, its shape and the index of its blob."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    host.copy_(tensor)
    blobs.append(host.view(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b"")
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "blob": len(blobs) - 1}


def decode_tensor(encoded: Any, blobs: Sequence[bytes]) -> Tensor:
    """Return the tensor that :func:`encode_tensor` encoded, on the host. Raises :class:`WireError` if shape and size
    differ.
    """
    with DecodingContext("a tensor"):
        dtype, shape = _DTYPES[encoded["dtype"]], [decode_int(size) for size in encoded["shape"]]
        blob = blobs[decode_int(encoded["blob"])]
        count = 1
        for size in shape:
            count *= size
        if count * dtype.itemsize != len(blob) or len(shape) > _MAX_TENSOR_DIMS:
            raise WireError(f"a tensor of shape {shape} came with {len(blob)} bytes")
        tensor = torch.empty(shape, dtype=dtype)
        if blob:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        return tensor


def engine_fit(engine: Engine) -> dict[str, Any]:
    """Return the properties, as text by name, that must be equal for one engine to continue the other's requests."""
    config, proposer, ranks = engine.model.config, engine.proposer, engine.model.ranks
    if ranks is not None:  # with tensor parallelism, the config has the size of this rank's part of an MLP
        config = replace(config, intermediate_size=config.intermediate_size * ranks.shards.mlp.size)
    shapes = [[list(cache.shape[1:]), str(cache.dtype)] for cache in proposer.caches]
    relay = {spec.name: [list(spec.shape), str(spec.dtype)] for spec in proposer.relay}
    of_model = {f"model.{each.name}": repr(getattr(config, each.name)) for each in fields(config)}
    return of_model | {
        "dtype": str(engine.model.dtype),
        "kv_dtype": str(engine.model.cache_dtype),
        "page_size": repr(engine.config.page_size),
        "proposer": proposer.name,
        "proposer.caches": repr(shapes),
        "proposer.relay": repr(relay),
    }


def check_fit(ours: Mapping[str, Any], theirs: Any) -> None:
    """Raise :class:`ConfigError` that names the differing properties of this engine and the other side's engine."""
    if not isinstance(theirs, dict):
        raise WireError("the other side doesn't say what engine it has")
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if differing:
        listed = "; ".join(f"{name}: {theirs.get(name)} there, {ours.get(name)} here" for name in differing)
        raise ConfigError(f"the other side's engine doesn't fit this one's: {listed}"[:2000])


def _params_to(params: SamplingParams) -> dict[str, Any]:
    encoded = {}
    for each in fields(params):
        value = getattr(params, each.name)
        if isinstance(value, Guide) and type(value).__name__ in _GUIDES_BY_NAME:
            value = {type(value).__name__: {part.name: getattr(value, part.name) for part in fields(value)}}
        elif not _is_json_value(value):
            raise RequestError(f"a request with {each.name} can't go to another process")
        encoded[each.name] = value
    return encoded


def _is_json_value(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_json_value(each) for each in value)
    return isinstance(value, _JSON_SCALARS)


def _params_from(encoded: Any) -> SamplingParams:
    known = {each.name for each in fields(SamplingParams)}
    if not isinstance(encoded, dict) or not set(encoded) <= known:
        raise WireError("the request has sampling parameters that this version doesn't know; run one version on both sides")
    try:
        return SamplingParams(**{name: _param_from(value) for name, value in encoded.items()})
    except ConfigError as error:
        raise RequestError(str(error)) from None


def _param_from(value: Any) -> Any:
    """Return the value of a sampling parameter. A guide is constructed again, which checks its parts."""
    if not isinstance(value, dict):
        return _with_tuples(value)
    ((name, parts),) = value.items()
    kind = _GUIDES_BY_NAME.get(name)
    if kind is None or set(parts) != {each.name for each in fields(kind)}:
        raise WireError(
            f"the request has a guide {shown(name)} that this version doesn't know; run one version on both sides"
        )
    return kind(**{part: _with_tuples(part_value) for part, part_value in parts.items()})


def _with_tuples(value: Any) -> Any:
    return tuple(_with_tuples(each) for each in value) if isinstance(value, list) else value


def _media_from(encoded: Any, blobs: Sequence[bytes]) -> Media:
    grid_fields = encoded["grid"]
    if not isinstance(grid_fields, dict) or set(grid_fields) != {each.name for each in fields(MediaGrid)}:
        raise WireError("a medium has another grid than this version knows")
    grid, pixels = MediaGrid(**grid_fields), decode_tensor(encoded["pixels"], blobs)
    # Requests with equal digests share KV pages. A false digest in a message would give a request another request's image.
    return Media(grid, pixels, digest_of(grid, pixels))


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise WireError("tokens are a list of whole numbers")
    return tuple(value)


def decode_int(value: Any) -> int:
    """Return ``value`` if it is an integer below 2**62. Raises :class:`WireError`."""
    if type(value) is not int or not 0 <= abs(value) < 1 << 62:
        raise WireError("expected a whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise WireError("expected a number")
    return float(value)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise WireError("expected a text")
    return value


class DecodingContext:
    """A context that turns errors in decoding received data into :class:`WireError`. ``what`` names the data."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | IndexError | AttributeError | RuntimeError):
            raise WireError(f"{self._what} can't be read: {type(error).__name__}: {error}") from None
