"""From a request's fields to what the engine samples with."""

from __future__ import annotations

import secrets
from typing import Any

from outrider.device import ConfigError
from outrider.engine import Guide, JsonObject, JsonSchema
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import shown
from outrider.serve.errors import bad_request
from outrider.serve.fields import ChatRequest, CompletionRequest, Sampling
from outrider.serve.messages import EngineInfo

_COLD = 1e-5
"""Below this temperature the likeliest token is all that is left."""


def sampling_params(asked: Sampling, info: EngineInfo, *, max_tokens: int, guide: Guide | None = None) -> SamplingParams:
    """What a request asks for; what it leaves open is as in OpenAI's API: temperature 1, and a seed that is drawn. ``guide``:
    what its output must be. At temperature 0 all samples are the same, and ``n`` is 1.

    Raises :class:`~outrider.serve.errors.ApiError` for what the engine can't do.
    """
    temperature = 1.0 if asked.temperature is None else asked.temperature
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature if temperature >= _COLD else 0.0,
        "seed": secrets.randbits(62) if asked.seed is None else asked.seed,
        "top_p": _share(asked.top_p),
        "top_k": 0 if asked.top_k in (None, -1) else asked.top_k,
        "logprobs": _logprobs(asked),
        "logit_bias": _biases(asked.logit_bias),
        "stop": _stops(asked.stop),
        "stop_token_ids": tuple(asked.stop_token_ids or ()),
        "n": (asked.n or 1) if temperature >= _COLD else 1,
        "guide": guide,
    }
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos"):
        value = getattr(asked, name)
        if value is not None:
            given[name] = value
    if given["logprobs"] is not None and given["logprobs"] > info.max_logprobs:
        name = "top_logprobs" if isinstance(asked, ChatRequest) else "logprobs"
        raise bad_request(f"{name} is {given['logprobs']}; this server reports {info.max_logprobs} at most", name)
    try:
        return SamplingParams(**given)
    except ConfigError as error:
        raise bad_request(str(error), str(error).partition(" ")[0]) from error


def format_guide(asked: Sampling) -> Guide | None:
    """What ``response_format`` says that the output must be. Raises :class:`~outrider.serve.errors.ApiError`."""
    given = asked.response_format
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    try:
        if kind == "json_object":
            return JsonObject()
        if kind == "json_schema":
            named = given.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if schema is None:
                raise bad_request("response_format has no json_schema.schema", "response_format.json_schema.schema")
            return JsonSchema(schema)
    except ConfigError as error:
        raise bad_request(str(error), "response_format") from error
    raise bad_request(
        f"response_format has the type {shown(kind)}; expected text, json_object or json_schema", "response_format.type"
    )


def check_unserved(asked: Sampling) -> None:
    """Raises :class:`~outrider.serve.errors.ApiError` for fields that ask for what isn't served."""
    if asked.stream_options is not None and not asked.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    if isinstance(asked, CompletionRequest):
        if asked.suffix:
            raise bad_request("suffix isn't served: the model continues a text, it doesn't fill one in", "suffix")
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise bad_request(f"best_of is {asked.best_of}; this server takes it only equal to n", "best_of")
        if asked.echo and asked.logprobs is not None:
            raise bad_request("echo with logprobs isn't served: prompts have no log-probabilities here", "echo")
    if isinstance(asked, ChatRequest):
        if asked.modalities is not None and asked.modalities != ["text"]:
            raise bad_request("the model answers in text alone; leave modalities out", "modalities")
        for name in ("audio", "web_search_options", "functions", "function_call"):
            if getattr(asked, name) is not None:
                hint = "; use tools and tool_choice" if name.startswith("function") else ""
                raise bad_request(f"{name} isn't served{hint}", name)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")


def _share(top_p: float | None) -> float:
    """OpenAI takes 0, which leaves the likeliest token: the smallest share does the same."""
    return 1.0 if top_p is None else max(top_p, 1e-6)


def _logprobs(asked: Sampling) -> int | None:
    if isinstance(asked, ChatRequest):
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs if isinstance(asked, CompletionRequest) else None


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    """Keys are token ids, written as JSON writes keys."""
    biases: dict[int, float] = {}
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise bad_request(f"logit_bias has the key {key[:40]!r}; expected token ids", "logit_bias")
        if int(key) in biases:
            raise bad_request(f"logit_bias has token {int(key)} twice", "logit_bias")
        # OpenAI's -100 bans a token, whatever its logit.
        biases[int(key)] = float("-inf") if value == -100 else value
    return biases


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)
