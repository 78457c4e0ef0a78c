"""Requests as messages have them: every field by name, checked when it's read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from outrider.apart.wire import WireError
from outrider.device import ConfigError
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
_COUNTS = {each.name for each in fields(StepOutput) if each.type == "int" and each.name != "request_id"}
"""Fields of an output that are numbers."""
_PLAIN = (bool, int, float, str, type(None))
_GUIDES = {kind.__name__: kind for kind in GUIDES}


def state_to(state: RequestState) -> tuple[dict[str, Any], list[bytes]]:
    """The body and the blobs of a request. Raises :class:`RequestError` for one with an option that can't travel."""
    blobs: list[bytes] = []
    body = {
        "prompt": list(state.prompt),
        "params": _params_to(state.params),
        "output": list(state.output),
        "priority": state.priority,
        "media": [
            {"grid": asdict(each.grid), "pixels": tensor_to(each.pixels, blobs), "digest": each.digest.hex()}
            for each in state.media
        ],
        "logprobs": logprobs_to(state.logprobs),
        "iterations": state.iterations,
        "verified_tokens": state.verified_tokens,
    }
    return body, blobs


def state_from(body: Any, blobs: Sequence[bytes]) -> RequestState:
    """The request of a body. Raises :class:`WireError` for one that isn't of this form; whether it can be served is for the
    engine to say.
    """
    with Reading("a request"):
        return RequestState(
            prompt=_tokens(body["prompt"]),
            params=_params_from(body["params"]),
            output=_tokens(body["output"]),
            priority=whole(body["priority"]),
            media=tuple(_media_from(each, blobs) for each in body["media"]),
            logprobs=logprobs_from(body["logprobs"]),
            iterations=whole(body["iterations"]),
            verified_tokens=whole(body["verified_tokens"]),
        )


def logprobs_to(logprobs: Sequence[TokenLogprobs]) -> list[Any]:
    """Log-probabilities as lists."""
    return [[each.token, each.logprob, [list(pair) for pair in each.top]] for each in logprobs]


def logprobs_from(given: Any) -> tuple[TokenLogprobs, ...]:
    """And back. Raises :class:`WireError`."""
    with Reading("log-probabilities"):
        return tuple(
            TokenLogprobs(whole(token), _number(value), tuple((whole(t), _number(v)) for t, v in top))
            for token, value, top in given
        )


def output_to(output: StepOutput) -> dict[str, Any]:
    """An engine's output."""
    return {
        "tokens": list(output.tokens),
        "finish_reason": output.finish_reason,
        "logprobs": logprobs_to(output.logprobs),
        "text": output.text,
        "error": output.error,
        "refused": output.refused,
        "counts": {each.name: getattr(output, each.name) for each in fields(output) if each.name in _COUNTS},
    }


def output_from(body: Any, request_id: int) -> StepOutput:
    """And back, with the id that the request has here. Raises :class:`WireError`."""
    with Reading("an output"):
        reason = body["finish_reason"]
        if not set(body["counts"]) <= _COUNTS:
            raise WireError("an output has counts that this version doesn't know; run one version on both sides")
        return StepOutput(
            request_id,
            _tokens(body["tokens"]),
            None if reason is None else FinishReason(reason),
            logprobs_from(body["logprobs"]),
            _text(body["text"]),
            _text(body["error"]),
            refused=body["refused"] is True,
            **{name: whole(value) for name, value in body["counts"].items()},
        )


def relay_to(relay: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[bytes]]:
    """The body and the blobs of what a proposer relays."""
    blobs: list[bytes] = []
    return {name: tensor_to(value, blobs) for name, value in relay.items()}, blobs


def relay_from(body: Any, blobs: Sequence[bytes]) -> dict[str, Tensor]:
    """And back: host tensors of their own. Raises :class:`WireError`."""
    with Reading("draft state"):
        return {str(name): tensor_from(value, blobs) for name, value in body.items()}


def tensor_to(tensor: Tensor, blobs: list[bytes]) -> dict[str, Any]:
    """Dtype, shape and the number of its blob, which is appended."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor)
    blobs.append(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "blob": len(blobs) - 1}


def tensor_from(given: Any, blobs: Sequence[bytes]) -> Tensor:
    """A host tensor. Raises :class:`WireError` where shape and bytes don't fit."""
    with Reading("a tensor"):
        dtype, shape, blob = _DTYPES[given["dtype"]], [whole(size) for size in given["shape"]], blobs[whole(given["blob"])]
        count = 1
        for size in shape:
            count *= size
        if count * dtype.itemsize != len(blob) or len(shape) > 8:
            raise WireError(f"a tensor of shape {shape} came with {len(blob)} bytes")
        made = torch.empty(shape, dtype=dtype)
        if blob:
            made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        return made


def fit_of(engine: Engine) -> dict[str, Any]:
    """What two engines must have in common to go on with each other's requests, as text by name."""
    config, proposer, ranks = engine.model.config, engine.proposer, engine.model.ranks
    if ranks is not None:  # a rank has its own part of each MLP
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
    """Raise :class:`ConfigError` that names what differs."""
    if not isinstance(theirs, dict):
        raise WireError("the other side doesn't say what engine it has")
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if differing:
        listed = "; ".join(f"{name}: {theirs.get(name)} there, {ours.get(name)} here" for name in differing)
        raise ConfigError(f"the other side's engine doesn't fit this one's: {listed}"[:2000])


def _params_to(params: SamplingParams) -> dict[str, Any]:
    found = {}
    for each in fields(params):
        value = getattr(params, each.name)
        if isinstance(value, Guide) and type(value).__name__ in _GUIDES:
            value = {type(value).__name__: {of.name: getattr(value, of.name) for of in fields(value)}}
        elif not _travels(value):
            raise RequestError(f"a request with {each.name} can't go to another process")
        found[each.name] = value
    return found


def _travels(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_travels(each) for each in value)
    return isinstance(value, _PLAIN)


def _params_from(given: Any) -> SamplingParams:
    known = {each.name for each in fields(SamplingParams)}
    if not isinstance(given, dict) or not set(given) <= known:
        raise WireError("the request has sampling parameters that this version doesn't know; run one version on both sides")
    try:
        return SamplingParams(**{name: _guide_or(value) for name, value in given.items()})
    except ConfigError as error:
        raise RequestError(str(error)) from None


def _guide_or(value: Any) -> Any:
    """What a guide consists of goes through its own checks again; other values as they are."""
    if not isinstance(value, dict):
        return _frozen(value)
    ((name, parts),) = value.items()
    kind = _GUIDES.get(name)
    if kind is None or set(parts) != {each.name for each in fields(kind)}:
        raise WireError(
            f"the request has a guide {shown(name)} that this version doesn't know; run one version on both sides"
        )
    return kind(**{part: _frozen(given) for part, given in parts.items()})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def _media_from(given: Any, blobs: Sequence[bytes]) -> Media:
    grid = given["grid"]
    if not isinstance(grid, dict) or set(grid) != {each.name for each in fields(MediaGrid)}:
        raise WireError("a medium has another grid than this version knows")
    made, pixels = MediaGrid(**grid), tensor_from(given["pixels"], blobs)
    # Requests share pages where digests are equal: a digest that is only claimed would give one request another one's image.
    return Media(made, pixels, digest_of(made, pixels))


def _tokens(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise WireError("tokens are a list of whole numbers")
    return tuple(given)


def whole(given: Any) -> int:
    """A whole number, of reasonable size. Raises :class:`WireError`."""
    if type(given) is not int or not 0 <= abs(given) < 1 << 62:
        raise WireError("expected a whole number")
    return given


def _number(given: Any) -> float:
    if type(given) not in (int, float):
        raise WireError("expected a number")
    return float(given)


def _text(given: Any) -> str | None:
    if given is not None and not isinstance(given, str):
        raise WireError("expected a text")
    return given


class Reading:
    """Turns what goes wrong in reading what somebody sent into :class:`WireError`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | IndexError | AttributeError | RuntimeError):
            raise WireError(f"{self._what} can't be read: {type(error).__name__}: {error}") from None
