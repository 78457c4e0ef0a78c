"""Conversion of a request's fields to sampling parameters and guides of the engine."""

from __future__ import annotations

import secrets
from typing import Any

from outrider.device import ConfigError
from outrider.engine import Guide, JsonObject, JsonSchema
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import shown
from outrider.serve.api.api_errors import bad_request
from outrider.serve.api.request_fields import ChatRequest, CompletionRequest, SamplingFields
from outrider.serve.connection.engine_messages import EngineInfo

_MIN_SAMPLING_TEMPERATURE = 1e-5
"""Below this temperature the engine decodes greedily: only the likeliest token has a probability above 0."""


def sampling_params(
    request: SamplingFields,
    info: EngineInfo,
    *,
    max_tokens: int,
    guide: Guide | None = None,
    spelled_tokens: tuple[int, ...] = (),
) -> SamplingParams:
    """Return the engine's sampling parameters for a request.

    Absent fields have the defaults of OpenAI's API: temperature 1 and a random seed. ``guide`` constrains the output.
    ``spelled_tokens`` are special tokens that have text. At temperature 0 all samples are equal, so ``n`` is 1.

    Raises :class:`~outrider.serve.api.api_errors.ApiError` for values that the engine doesn't support.
    """
    temperature = 1.0 if request.temperature is None else request.temperature
    is_greedy = temperature < _MIN_SAMPLING_TEMPERATURE
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0 if is_greedy else temperature,
        "seed": secrets.randbits(62) if request.seed is None else request.seed,
        "top_p": _top_p(request.top_p),
        "top_k": 0 if request.top_k in (None, -1) else request.top_k,
        "logprobs": _num_logprobs(request),
        "logit_bias": _logit_biases(request.logit_bias),
        "stop": _stop_strings(request.stop),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "n": 1 if is_greedy else (request.n or 1),
        "guide": guide,
        "spelled_tokens": spelled_tokens,
    }
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos"):
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if fields["logprobs"] is not None and fields["logprobs"] > info.max_logprobs:
        name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        raise bad_request(f"{name} is {fields['logprobs']}; this server reports {info.max_logprobs} at most", name)
    try:
        return SamplingParams(**fields)
    except ConfigError as error:
        raise bad_request(str(error), str(error).partition(" ")[0]) from error


def format_guide(request: SamplingFields) -> Guide | None:
    """Return the guide for the request's ``response_format``, or None if the output is free text.

    Raises :class:`~outrider.serve.api.api_errors.ApiError` for an unknown format or a schema that can't be enforced.
    """
    response_format = request.response_format
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    try:
        if kind == "json_object":
            return JsonObject()
        if kind == "json_schema":
            named = response_format.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if schema is None:
                raise bad_request("response_format has no json_schema.schema", "response_format.json_schema.schema")
            return JsonSchema(schema)
    except ConfigError as error:
        raise bad_request(str(error), "response_format") from error
    raise bad_request(
        f"response_format has the type {shown(kind)}; expected text, json_object or json_schema", "response_format.type"
    )


def check_supported(request: SamplingFields) -> None:
    """Raise :class:`~outrider.serve.api.api_errors.ApiError` if a field asks for a feature that this server doesn't have."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    if isinstance(request, CompletionRequest):
        if request.suffix:
            raise bad_request("suffix isn't served: the model continues a text, it doesn't fill one in", "suffix")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise bad_request(f"best_of is {request.best_of}; this server takes it only equal to n", "best_of")
        if request.echo and request.logprobs is not None:
            raise bad_request("echo with logprobs isn't served: prompts have no log-probabilities here", "echo")
    if isinstance(request, ChatRequest):
        if request.modalities is not None and request.modalities != ["text"]:
            raise bad_request("the model answers in text alone; leave modalities out", "modalities")
        for name in ("audio", "web_search_options", "functions", "function_call"):
            if getattr(request, name) is not None:
                hint = "; use tools and tool_choice" if name.startswith("function") else ""
                raise bad_request(f"{name} isn't served{hint}", name)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")


def _top_p(top_p: float | None) -> float:
    """Return ``top_p`` for the engine, which requires a value above 0: 1 for None, and 1e-6 for OpenAI's 0, which selects the
    likeliest token.
    """
    return 1.0 if top_p is None else max(top_p, 1e-6)


def _num_logprobs(request: SamplingFields) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


def _logit_biases(by_key: dict[str, float] | None) -> dict[int, float]:
    """Return the bias of each token id. In the request the ids are strings, because JSON has no other keys."""
    biases: dict[int, float] = {}
    for key, value in (by_key or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise bad_request(f"logit_bias has the key {key[:40]!r}; expected token ids", "logit_bias")
        if int(key) in biases:
            raise bad_request(f"logit_bias has token {int(key)} twice", "logit_bias")
        # In OpenAI's API, the bias -100 excludes a token for every logit.
        biases[int(key)] = float("-inf") if value == -100 else value
    return biases


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
