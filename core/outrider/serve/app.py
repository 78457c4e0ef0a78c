"""The application: routes, and what they answer."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

from outrider.serve.extra import require_serve

require_serve()

from fastapi import FastAPI, Request  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.middleware.cors import CORSMiddleware  # noqa: E402
from starlette.responses import JSONResponse, Response  # noqa: E402

from outrider.serve.answers import Writer  # noqa: E402
from outrider.serve.calls import Calls  # noqa: E402
from outrider.serve.client import EngineClient  # noqa: E402
from outrider.serve.config import ServeConfig  # noqa: E402
from outrider.serve.errors import ApiError, bad_request  # noqa: E402
from outrider.serve.fields import ChatRequest, CompletionRequest, Sampling  # noqa: E402
from outrider.serve.gate import NOTES, Gate  # noqa: E402
from outrider.serve.metrics import CONTENT_TYPE  # noqa: E402
from outrider.serve.page import add_page  # noqa: E402
from outrider.serve.params import check_unserved, format_guide, sampling_params  # noqa: E402
from outrider.serve.prompts import Prompt, Prompter, prompt_size  # noqa: E402
from outrider.serve.sending import Answer, EventStream  # noqa: E402
from outrider.serve.service import Service, State  # noqa: E402
from outrider.serve.tracing import Spans  # noqa: E402

_ERROR = {
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
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in {
        400: "The request can't be served as it is.",
        401: "No API key, or a wrong one.",
        404: "There is no such model.",
        408: "The body was too slow.",
        413: "The body is too large.",
        429: "The queue is full.",
        500: "An internal error.",
        503: "The server is about to end.",
        504: "The request took too long.",
    }.items()
}
_GENERATED: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    200: {
        "description": "The answer; a stream of events where it was asked for.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
}


def create_app(engine: EngineClient, prompter: Prompter, config: ServeConfig, *, spans: Spans | None = None) -> FastAPI:
    """The application over an engine that has started. Its service is ``app.state.service``. ``spans``: None makes none.

    Whoever makes it starts and closes the engine; :func:`outrider.serve.server.serve` does.
    """
    service = Service(engine, prompter, config)
    version = importlib.metadata.version("outrider")
    fingerprint = "outrider-" + hashlib.sha256(f"{version} {engine.info}".encode()).hexdigest()[:12]
    app = FastAPI(title="Outrider", version=version, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.state.service = service
    app.add_middleware(Gate, service=service, spans=spans)
    if config.allow_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(config.allow_origins), allow_methods=["*"], allow_headers=["*"])
    _add_errors(app)
    _add_states(app, service, version)
    _add_models(app, service)
    add_page(app)

    @app.post("/v1/completions", responses=_GENERATED, response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        _check(service, body)
        prompts = await service.prepare(lambda: prompter.completion(body.prompt), size=prompt_size(body.prompt))
        texts = [prompter.tokenizer.decode(prompt.tokens) for prompt in prompts] if body.echo else []
        echoed = [text for text in texts for _ in range(body.n or 1)]
        return await _generated(service, request, body, prompts, body.max_tokens or 16, fingerprint, echoed=echoed)

    @app.post("/v1/chat/completions", responses=_GENERATED, response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        _check(service, body)
        calls = Calls(body, prompter.response_template)
        prompt = await service.prepare(lambda: prompter.chat(body), size=None)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return await _generated(service, request, body, [prompt], most, fingerprint, calls=calls)

    app.openapi = functools.partial(_described, app, app.openapi)  # type: ignore[method-assign]
    return app


def _described(app: FastAPI, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The description of the API, without the framework's own form of errors, which isn't used."""
    if app.openapi_schema is None:
        made = make()
        for methods in made["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made.get("components", {}).get("schemas", {}).pop(name, None)
    return make()


def _check(service: Service, body: Sampling) -> None:
    service.check_open()
    service.check_model(body.model)
    check_unserved(body)


async def _generated(
    service: Service,
    request: Request,
    body: Sampling,
    prompts: list[Prompt],
    max_tokens: int | None,
    fingerprint: str,
    *,
    echoed: Sequence[str] = (),
    calls: Calls | None = None,
) -> Response:
    """Run a request that has been checked, and answer it. ``calls``: those of a chat."""
    info, config, n = service.engine.info, service.config, body.n or 1
    guide = calls.guide if calls is not None and calls.guide is not None else format_guide(body)
    rooms = [service.room_for(prompt, max_tokens) for prompt in prompts]
    made = [sampling_params(body, info, max_tokens=room, guide=guide) for room in rooms]
    if n > 1 and made[0].n == 1:  # greedy, so the same each time: the engine knows it as requests of their own
        prompts = [prompt for prompt in prompts for _ in range(n)]
        made = [each for each in made for _ in range(n)]
    choices = sum(each.n for each in made)
    readers = [] if calls is None else [calls.reader(prompts[0].text) for _ in range(choices)]
    special = calls is not None and calls.special_tokens
    drafted = body.stream_options is not None and body.stream_options.include_drafted
    urgency = body.priority or 0
    generation = await service.generate(prompts, made, priority=urgency, special_tokens=special, pieces=drafted)
    generation.notes = request.scope[NOTES]
    generation.notes["model"] = body.model
    writer = Writer(body, generation, service.prompter.tokenizer, fingerprint=fingerprint, readers=readers)
    if body.stream:
        return EventStream(lambda: writer.chunks(echoed), close=generation.close, write_s=config.write_timeout_s)
    return Answer(lambda: writer.whole(echoed), close=generation.close)


def _add_errors(app: FastAPI) -> None:
    """Errors of the framework, in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def told(request: Request, error: ApiError) -> Response:
        request.scope[NOTES]["error"] = error.message
        return Response(error.encoded(), error.status, error.headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await told(request, invalid_fields(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        text = {404: f"there is nothing at {path}", 405: f"{path} has no {request.method}"}.get(
            error.status_code, error.detail
        )
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return await told(request, ApiError(error.status_code, text, code=code, headers=error.headers))


def invalid_fields(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with the fields of a request."""
    first = error.errors()[0]
    kind, place = first["type"], [str(part) for part in first["loc"] if part != "body"]
    if kind == "json_invalid":
        return bad_request(f"the body isn't JSON: {first.get('ctx', {}).get('error', first['msg'])}", None, "invalid_json")
    # Members of a union are named in the place, too: they are no fields.
    fields = [part for part in place if part.isdigit() or (part.isidentifier() and part not in ("str", "int", "float"))]
    param = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in fields).lstrip(".") or None
    if kind == "extra_forbidden":
        return bad_request(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
    if kind == "missing":
        what = f"you must provide {param}" if param else "the body is missing; send a JSON object"
        return bad_request(f"{what}.", param, "missing_required_parameter")
    return bad_request(f"Invalid value for {param or 'the body'}: {first['msg']}.", param, "invalid_value")


def _add_states(app: FastAPI, service: Service, version: str) -> None:
    """What supervisors, routers and scrapers ask for."""

    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> Response:
        """Whether the engine works; also while the server drains."""
        lost = service.state is State.LOST
        reason = {"reason": str(service.engine.error)} if lost else {}
        return JSONResponse({"status": "lost" if lost else "ok", **reason}, 503 if lost else 200)

    @app.get("/ready", responses={503: _ERRORS[503]})
    async def ready() -> Response:
        """Whether new requests are taken."""
        return JSONResponse({"status": str(service.state)}, 200 if service.state is State.READY else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics, as Prometheus reads them."""
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @app.get("/version")
    async def shown_version() -> dict[str, str]:
        """Which Outrider it is."""
        return {"version": version}


def _add_models(app: FastAPI, service: Service) -> None:
    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "outrider",
            "root": service.config.names[0],
            "max_model_len": service.engine.info.longest_request,
            "chat_template": service.prompter.chats,
        }

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> dict[str, Any]:
        """The model, under each of its names."""
        return {"object": "list", "data": [model(name) for name in service.config.names]}

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def one_model(name: str) -> dict[str, Any]:
        """One model."""
        service.check_model(name)
        return model(name)
