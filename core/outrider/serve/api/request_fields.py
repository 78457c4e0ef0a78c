"""Fields of the API's requests, as pydantic models, and their conversion to sampling parameters and guides of the engine.

An unknown field is an error, as in OpenAI's API, unless its value is null or it belongs to an earlier answer of a server. The
models add sampling fields of other servers (``top_k``, ``min_p``, …). Validation of a list stops at the first wrong item,
because each error takes more memory than the item.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from outrider.device import ConfigError
from outrider.engine import Guide, JsonObject, JsonSchema
from outrider.engine.requests.sampling import MAX_LOGIT_BIAS, SamplingParams
from outrider.errors import shown
from outrider.model.media.chat_template import check_json
from outrider.serve.api.responses import bad_request
from outrider.serve.connection.engine_messages import EngineInfo

_MAX_INT32 = 2**31 - 1
_MAX_PROMPTS = 65536
MAX_MESSAGES = 4096
"""Maximum number of messages of a conversation: checking one takes some 30 microseconds on the event loop."""
_ShortText = Annotated[str, Field(max_length=4096)]
_StopString = Annotated[str, Field(max_length=1024)]  # the engine compares it with the text for each token
T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item ends the validation."""


NestedObject = Annotated[dict[str, Any], AfterValidator(check_json)]
"""A JSON object of any content."""


def _limited_biases(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIAS:
        raise ValueError(f"{len(biases)} tokens, {MAX_LOGIT_BIAS} at most")
    return biases


class StrictFields(BaseModel):
    """The base class of request bodies. An unknown field is an error, and the number of reported errors is bounded."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    answer_role: ClassVar[str | None] = None
    """Value of ``role`` that marks an earlier answer, whose unknown fields have no effect."""

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        """Drop fields that are null or have no effect, and all unknown fields but the first."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        known = {name: value for name, value in data.items() if value is not None and name in fields}
        is_answer = cls.answer_role is not None and data.get("role", cls.answer_role) == cls.answer_role
        if len(known) < len(data) and not is_answer:
            unknown = next((name for name, value in data.items() if value is not None and name not in known), None)
            return known if unknown is None else {**known, unknown: data[unknown]}
        return known


class StreamOptions(StrictFields):
    """The field ``stream_options``: what a streamed response contains in addition to the text."""

    include_usage: bool = Field(False, description="Send a last chunk that has the usage and no choices.")
    continuous_usage_stats: bool = Field(
        False,
        description="With include_usage: each chunk has the usage so far. A field of vLLM, which load generators send.",
    )
    include_obfuscation: bool | None = Field(None, description="Has no effect.")
    include_drafted: bool = Field(False, description="Each chunk marks the tokens that are accepted draft tokens.")


class SamplingFields(StrictFields):
    """The fields that completions and chat completions share."""

    model: _ShortText
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: _StopString | Annotated[ListOf[_StopString], Field(max_length=64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_limited_biases)] | None = None
    response_format: NestedObject | None = None

    # Fields of other servers
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = Field(None, description="0 or -1: all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[ListOf[int], Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=_MAX_INT32)] | None = Field(None, description="Higher goes first.")
    return_token_ids: bool | None = Field(None, description="Choices carry token_ids.")

    # Fields without effect
    user: _ShortText | None = None
    metadata: NestedObject | None = None
    store: bool | None = None
    service_tier: _ShortText | None = None
    prediction: NestedObject | None = None
    safety_identifier: _ShortText | None = None
    prompt_cache_key: _ShortText | None = None
    prompt_cache_options: NestedObject | None = None
    prompt_cache_retention: _ShortText | None = None


class CompletionRequest(SamplingFields):
    """The body of ``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[ListOf[str], Field(max_length=_MAX_PROMPTS)]
        | ListOf[int]
        | Annotated[ListOf[ListOf[int]], Field(max_length=_MAX_PROMPTS)]
    ) = Field("", description="Absent, null or empty: the start of a document.")
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT32)] | None = Field(
        None, description="Absent or null: 16, or as many as the context holds."
    )
    logprobs: Annotated[int, Field(ge=0, le=_MAX_INT32)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None


class FunctionCall(StrictFields):
    """The function name and the arguments (JSON text) of a tool call in an earlier message of the assistant."""

    answer_role = "assistant"
    name: _ShortText
    arguments: str


class ToolCall(StrictFields):
    """A tool call in an earlier message of the assistant."""

    answer_role = "assistant"
    id: _ShortText
    type: Literal["function"] = "function"
    function: FunctionCall


class ImageUrl(StrictFields):
    """The image of a message part, as a data URL."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = Field(None, description="Has no effect.")


class MessagePart(StrictFields):
    """One part of a chat message's content, such as a text or an image."""

    type: Literal["text", "image_url", "refusal", "input_audio", "file"]
    text: str | None = None
    image_url: ImageUrl | None = None
    refusal: str | None = None
    input_audio: NestedObject | None = None
    file: NestedObject | None = None
    prompt_cache_breakpoint: NestedObject | None = Field(None, description="Has no effect: prefixes are cached unasked.")
    cache_control: NestedObject | None = Field(None, exclude=True, description="Has no effect. A field of Anthropic's API.")


class ChatMessage(StrictFields):
    """One message of a conversation. An earlier answer may have further fields, as clients write it out."""

    answer_role = "assistant"
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[ListOf[MessagePart], Field(max_length=4096)] | None = None
    name: _ShortText | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: _ShortText | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    audio: NestedObject | None = None
    function_call: FunctionCall | None = None
    cache_control: NestedObject | None = Field(None, exclude=True, description="Has no effect. A field of Anthropic's API.")


class ToolFunction(StrictFields):
    """The name, description and parameters of a function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: NestedObject | None = None
    strict: bool | None = None


class Tool(StrictFields):
    """A tool that the client offers to the model."""

    type: Literal["function"]
    function: ToolFunction
    cache_control: NestedObject | None = Field(None, exclude=True, description="Has no effect. A field of Anthropic's API.")


class NamedFunction(StrictFields):
    """The name of the function that a ``tool_choice`` forces."""

    name: _ShortText


class NamedTool(StrictFields):
    """A ``tool_choice`` that makes the model call one tool."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictFields):
    """The list of a request's tools that the model may call this time, in ``tool_choice``."""

    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[NamedTool], Field(max_length=1024)]


class AllowedToolsChoice(StrictFields):
    """A ``tool_choice`` that selects some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(SamplingFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[ListOf[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_INT32)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_INT32)] | None = None
    tools: Annotated[ListOf[Tool], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: _ShortText | None = Field(
        None, description="A variable for the chat template. none also sets enable_thinking and thinking to false."
    )
    verbosity: _ShortText | None = None
    modalities: ListOf[_ShortText] | None = None
    audio: NestedObject | None = None
    web_search_options: NestedObject | None = None
    moderation: NestedObject | None = None
    chat_template_kwargs: NestedObject | None = None
    functions: ListOf[NestedObject] | None = None
    function_call: str | NestedObject | None = None

    @model_validator(mode="after")
    def _select_tools(self) -> ChatRequest:
        """Leave out the tools that ``tool_choice`` doesn't allow. Without tools, ``auto`` has no effect."""
        if isinstance(self.tool_choice, AllowedToolsChoice):
            allowed = self.tool_choice.allowed_tools
            names = {each.function.name for each in allowed.tools}
            if unknown := names - {tool.function.name for tool in self.tools or ()}:
                raise bad_request(f"tool_choice allows {min(unknown)!r}, which isn't among the tools", "tool_choice")
            self.tools = [tool for tool in self.tools or () if tool.function.name in names]
            self.tool_choice = allowed.mode
        if self.tool_choice == "auto" and not self.tools:
            self.tool_choice = None
        return self


def thinking_variables(enabled: bool) -> dict[str, bool]:
    """Return the chat-template variables that turn reasoning on (``enabled``) or off, under both names that templates use."""
    return {"enable_thinking": enabled, "thinking": enabled}


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

    Raises :class:`~outrider.serve.api.responses.ApiError` for values that the engine doesn't support.
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
    for name in ("logit_bias", "stop_token_ids"):
        wrong = next((token for token in fields[name] if not 0 <= token < info.vocab_size), None)
        if wrong is not None:
            raise bad_request(f"token {wrong} is outside the model's vocabulary of {info.vocab_size}", name)
    if fields["logprobs"] is not None and fields["logprobs"] > info.max_logprobs:
        name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        raise bad_request(f"{name} is {fields['logprobs']}; this server reports {info.max_logprobs} at most", name)
    try:
        return SamplingParams(**fields)
    except ConfigError as error:
        raise bad_request(str(error), str(error).partition(" ")[0]) from error


def format_guide(request: SamplingFields) -> Guide | None:
    """Return the guide for the request's ``response_format``, or None if the output is free text.

    Raises :class:`~outrider.serve.api.responses.ApiError` for an unknown format or a schema that can't be enforced.
    """
    response_format = request.response_format
    kind = None if response_format is None else response_format.get("type")
    if response_format is None:
        return None
    check_names(response_format, "response_format", ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    try:
        if kind == "json_object":
            return JsonObject()
        if kind == "json_schema":
            named = response_format.get("json_schema")
            if isinstance(named, dict):
                check_names(named, "response_format.json_schema", ("name", "description", "schema", "strict"))
            schema = named.get("schema") if isinstance(named, dict) else None
            if schema is None:
                raise bad_request("response_format has no json_schema.schema", "response_format.json_schema.schema")
            return JsonSchema(schema)
    except ConfigError as error:
        raise bad_request(str(error), "response_format") from error
    raise bad_request(
        f"response_format has the type {shown(kind)}; expected text, json_object or json_schema", "response_format.type"
    )


def check_names(fields: Mapping[str, Any], param: str, known: tuple[str, ...]) -> None:
    """Raise :class:`~outrider.serve.api.responses.ApiError` for a field that isn't ``known`` and isn't null."""
    unknown = next((name for name, value in fields.items() if value is not None and name not in known), None)
    if unknown is not None:
        raise bad_request(f"Unknown parameter: {f'{param}.{unknown}'!r}.", f"{param}.{unknown}", "unknown_parameter")


def check_supported(request: SamplingFields) -> None:
    """Raise :class:`~outrider.serve.api.responses.ApiError` if a field asks for a feature that this server doesn't have."""
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
        for name in ("audio", "web_search_options", "moderation", "functions", "function_call"):
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
