"""The FastAPI application of the server: its routes, its web page, its error responses and its OpenAPI schema."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from outrider.serve.config import ServeConfig, require_serve

require_serve()

from fastapi import FastAPI, Request  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.middleware.cors import CORSMiddleware  # noqa: E402
from starlette.responses import HTMLResponse, Response  # noqa: E402

from outrider.serve.api.conversation import ObjectList, chat_request  # noqa: E402
from outrider.serve.api.messages_api import add_messages_routes  # noqa: E402
from outrider.serve.api.prompt_builder import PromptBuilder, listed_prompts, prompt_size  # noqa: E402
from outrider.serve.api.request_fields import (  # noqa: E402
    ChatRequest,
    CompletionRequest,
    ListOf,
    NestedObject,
    SamplingFields,
    StrictFields,
    check_supported,
)
from outrider.serve.api.response_writer import ChatWriter, CompletionWriter  # noqa: E402
from outrider.serve.api.responses import ApiError, bad_request, invalid_fields, json_response  # noqa: E402
from outrider.serve.api.responses_api import add_responses_routes  # noqa: E402
from outrider.serve.api.service import LOG_FIELDS_KEY, Service  # noqa: E402
from outrider.serve.connection.engine_client import EngineClient  # noqa: E402
from outrider.serve.http.metrics import PROMETHEUS_CONTENT_TYPE  # noqa: E402
from outrider.serve.http.request_middleware import RequestMiddleware, RequestSpans  # noqa: E402

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, text in {
        400: "The request is invalid.",
        401: "No API key, or a wrong one.",
        404: "There is no such model.",
        408: "The body didn't arrive in time.",
        413: "The body is too large.",
        429: "The queue is full, or too many schemas are being compiled.",
        431: "The headers are too many or too long.",
        500: "An internal error.",
        503: "The server is about to end.",
        504: "The request took too long.",
    }.items()
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    200: {
        "description": "The completion: a JSON object, or server-sent events if stream is true.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
}


def create_app(
    engine: EngineClient, prompter: PromptBuilder, config: ServeConfig, *, spans: RequestSpans | None = None
) -> FastAPI:
    """Create the application for an engine that has started. Its :class:`Service` is ``app.state.service``.

    The caller starts and closes the engine, as :func:`outrider.serve.http.server.serve_http` does. ``spans`` exports a span
    for each request; None exports none.
    """
    service = Service(engine, prompter, config)
    version = importlib.metadata.version("outrider")
    fingerprint = "outrider-" + hashlib.sha256(f"{version} {engine.info}".encode()).hexdigest()[:12]
    # A redirect to a path without a final slash would name http:// where a proxy does TLS, and the body would go there.
    options: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="Outrider", version=version, openapi_url="/openapi.json", **options)
    app.state.service = service
    app.add_middleware(RequestMiddleware, service=service, spans=spans)
    if config.allow_origins:
        exposed = ["x-request-id", "request-id", "retry-after"]
        allowed: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": exposed}
        app.add_middleware(CORSMiddleware, allow_origins=list(config.allow_origins), **allowed)
    _add_error_handlers(app)
    _add_status_routes(app, service, version)
    _add_model_routes(app, service)
    add_page(app)

    @app.post("/v1/completions", responses=_RESPONSES, response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Generate a continuation of each prompt."""
        _check(service, body)
        n = body.n or 1
        service.check_room(len(listed_prompts(body.prompt)) * n, "prompt" if n == 1 else "n")
        prompts = await service.build_prompts(lambda: prompter.completion_prompts(body.prompt), size=prompt_size(body.prompt))
        texts = prompter.prompt_texts(body.prompt) if body.echo else []
        echoed = [text for text in texts for _ in range(n)]
        generation = await service.start_generation(body, request, prompts, body.max_tokens)
        writer = CompletionWriter(body, generation, prompter.tokenizer, fingerprint=fingerprint, echoed=echoed)
        return writer.respond(service, stream=body.stream)

    @app.post("/v1/chat/completions", responses=_RESPONSES, response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        _check(service, body)
        generation = await service.start_chat(body, request)
        writer = ChatWriter(body, generation, prompter.tokenizer, fingerprint=fingerprint)
        return writer.respond(service, stream=body.stream)

    add_responses_routes(app, service, _RESPONSES)
    add_messages_routes(app, service, _RESPONSES)
    add_tokenize_routes(app, service, _ERRORS)
    app.openapi = functools.partial(_openapi_schema, app, app.openapi)  # type: ignore[method-assign]
    return app


def _openapi_schema(app: FastAPI, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the OpenAPI schema that ``make`` creates, without FastAPI's error format, which this server doesn't use."""
    if app.openapi_schema is None:
        schema = make()
        for methods in schema["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
    return make()


def _check(service: Service, body: SamplingFields) -> None:
    service.check_accepting()
    service.check_model(body.model)
    check_supported(body)


def _add_error_handlers(app: FastAPI) -> None:
    """Return the framework's errors to clients in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        request.scope[LOG_FIELDS_KEY]["error"] = error.message
        return Response(error.encode(request.url.path), error.status, error.headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return await api_error(request, invalid_fields(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        texts = {
            400: "the body can't be read as JSON; send it in UTF-8, without Content-Encoding, deep nesting and huge numbers",
            404: f"there is nothing at {path}",
            405: f"{path} has no {request.method}",
        }
        text = texts.get(error.status_code, error.detail)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return await api_error(request, ApiError(error.status_code, text, code=code, headers=error.headers))


def _add_status_routes(app: FastAPI, service: Service, version: str) -> None:
    """Add the routes for supervisors, routers and metrics scrapers."""

    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> Response:
        """Return 200 while the engine runs, also while the server drains. Return 503 once the engine is gone."""
        is_lost = service.state == "lost"
        reason = {"reason": str(service.engine.error)} if is_lost else {}
        return json_response({"status": "lost" if is_lost else "ok", **reason}, 503 if is_lost else 200)

    @app.get("/ready", responses={503: _ERRORS[503]})
    async def ready() -> Response:
        """Return 200 while the server accepts new requests, else 503."""
        return json_response({"status": service.state}, 200 if service.state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics of server and engine in Prometheus's text format."""
        return Response(service.metrics.text(), headers={"content-type": PROMETHEUS_CONTENT_TYPE})

    @app.get("/version")
    async def server_version() -> dict[str, str]:
        """Return the version of Outrider."""
        return {"version": version}


def _add_model_routes(app: FastAPI, service: Service) -> None:
    def model_entry(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": service.started,
            "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
            "owned_by": "outrider",
            "root": service.config.names[0],
            "max_model_len": service.engine.info.longest_request,
            "chat_template": service.prompter.has_chat_template,
        }

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> dict[str, Any]:
        """List the model once for each of its names."""
        names = service.config.names
        paging = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": [model_entry(name) for name in names], **paging}

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def one_model(name: str) -> dict[str, Any]:
        """Return the model's entry under one of its names."""
        service.check_model(name)
        return model_entry(name)


class TokenizeRequest(StrictFields):
    """The body of ``POST /tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: ObjectList | None = None
    tools: ObjectList | None = None
    chat_template_kwargs: NestedObject | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(StrictFields):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: ListOf[int]


def add_tokenize_routes(app: FastAPI, service: Service, responses: Mapping[int | str, dict[str, Any]]) -> None:
    """Add the routes to ``app``. ``responses`` describes the error responses for the API's schema."""
    prompter = service.prompter

    @app.post("/tokenize", responses=dict(responses))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the tokens of a prompt, or of the prompt that the chat template makes of messages."""
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("expected one of prompt and messages", "prompt")
        if body.add_special_tokens is False:
            message = "add_special_tokens false isn't served: the tokens are those that a completion gets"
            raise bad_request(message, "add_special_tokens")
        if body.model is not None:
            service.check_model(body.model)
        if body.messages is not None:
            fields = {"messages": body.messages, "tools": body.tools, "chat_template_kwargs": body.chat_template_kwargs}
            chat = chat_request({"model": service.config.names[0], **fields})
            prompt = await service.build_prompts(lambda: prompter.chat(chat), size=None)
        else:
            text = body.prompt or ""
            (prompt,) = await service.build_prompts(lambda: prompter.completion_prompts(text), size=len(text))
        tokens = list(prompt.tokens)
        texts = [prompter.tokenizer.bytes_of(token).decode(errors="replace") for token in tokens]
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": service.engine.info.longest_request,
                "tokens": tokens,
                "token_strs": texts if body.return_token_strs else None,
            }
        )

    @app.post("/detokenize", responses=dict(responses))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of the request's token ids."""
        if body.model is not None:
            service.check_model(body.model)
        prompter.check_tokens(body.tokens, "tokens")
        text = await service.build_prompts(lambda: prompter.tokenizer.decode(body.tokens), size=len(body.tokens))
        return json_response({"prompt": text})


def add_page(app: FastAPI) -> None:
    """Add the route of the page to ``app``. The page itself needs no API key; its requests to the API do."""
    text = resources.files("outrider.serve.http").joinpath("page.html").read_text("utf-8")
    headers = {
        "content-security-policy": content_security_policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        """Return the web page, with its content security policy."""
        return HTMLResponse(text, headers=headers)


def content_security_policy(text: str) -> str:
    """Return the content security policy of the page ``text``.

    It allows the page's inline script and style, by their hashes, and requests to the page's own server.
    """
    inline = [f"{tag}-src {_inline_hash(text, tag)}" for tag in ("script", "style")]
    others = ("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    return "; ".join(("default-src 'none'", *inline, *others))


def _inline_hash(text: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
