"""ASGI middleware for every HTTP request: request id, API key, limits of the body, log, metrics and unexpected errors.

Also the server's log, as JSON or as text, and OpenTelemetry spans of its requests. A span needs the extra ``otel``.
OpenTelemetry's environment variables (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others) configure the export.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.device.errors import ConfigError
from outrider.serve.api.responses import SERVER, ApiError, ClientGone, send_error
from outrider.serve.api.service import LOG_FIELDS_KEY, Service

LOGGER_NAME = "outrider.serve"
"""Name of the server's logger. The attribute ``fields`` of a record has the values to log in addition to the message."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_REQUEST_ID_HEADERS = (b"x-request-id", b"request-id")
"""Response headers in which the clients of OpenAI and Anthropic look for the request id."""
_PROTECTED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
_MAX_BODY_VALUES = 1 << 19
"""Maximum number of the characters ``,:[{`` in a body, which bounds the number of its JSON values."""
_TRACE_HEADERS = ("traceparent", "tracestate")
_POLLED_PATHS = ("/health", "/ready", "/metrics")
"""Paths that supervisors request every few seconds. They are logged only if they fail."""


class RequestMiddleware:
    """The middleware around the application. It replaces no response of the application except an unexpected error."""

    def __init__(self, app: ASGIApp, *, service: Service, spans: RequestSpans | None = None) -> None:
        self._app = app
        self._spans = spans
        self._service = service
        self._log = logging.getLogger(LOGGER_NAME)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request: check it, call the application, and log and count the outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        client_id = _header(scope, b"x-request-id")
        has_valid_id = client_id is not None and _REQUEST_ID.fullmatch(client_id)
        request_id = str(client_id) if has_valid_id else f"req-{secrets.token_hex(12)}"
        notes: dict[str, Any] = {}
        scope[LOG_FIELDS_KEY] = notes
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name, request_id.encode()) for name in _REQUEST_ID_HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        outcome = None
        # A route that has GET has HEAD, too: the HTTP server leaves the body out.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            try:
                self._check_key(scope)
                await self._app(routed, await self._receive_body(scope, receive), send_with_id)
            except ApiError as error:
                notes["error"] = error.message
                await send_error(send_with_id, error, scope["path"])
        except ClientGone as gone:
            outcome = str(gone)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception:
            self._log.exception("internal error", extra={"fields": {"request_id": request_id, "path": scope["path"]}})
            outcome = "internal error"
            if status == 0:
                message = f"internal error; the server's log has it under {request_id}"
                await send_error(send_with_id, ApiError(500, message, kind=SERVER, code="internal_error"), scope["path"])
        finally:
            self._log_request(
                {**routed, "method": scope["method"]}, request_id, status, outcome, notes, time.perf_counter() - began
            )

    # -- steps -------------------------------------------------------------------------------------------------------

    def _check_key(self, scope: Scope) -> None:
        """Raise :class:`ApiError` if the request has none of the API keys.

        Every key is compared, each in constant time: the duration says nothing about the keys.
        """
        keys = self._service.config.api_keys
        if not keys or not scope["path"].startswith(_PROTECTED_PREFIXES) or scope["method"] == "OPTIONS":
            return
        scheme, _, key = (_header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            key = _header(scope, b"x-api-key") or ""  # as Anthropic's clients send it
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, _digest(each)) for each in keys]
        if not any(matches):
            reason = "Incorrect API key provided" if key else "You didn't provide an API key"
            message = f"{reason}; give it in the header Authorization, as Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _receive_body(self, scope: Scope, receive: Receive) -> Receive:
        """Receive the whole body and return a ``receive`` that gives it to the application in one message.

        Raises :class:`ApiError` for a body that is too large or arrives too slowly.
        """
        if scope["method"] not in ("POST", "PUT", "PATCH") or not scope["path"].startswith(_PROTECTED_PREFIXES):
            return receive
        max_bytes, timeout_s = self._service.config.max_body_bytes, self._service.config.body_timeout_s
        length = _header(scope, b"content-length")
        closing = {"Connection": "close"}  # the server doesn't read the remaining body
        text = f"the request's body has more than {max_bytes} bytes"
        too_large = ApiError(413, text, code="request_too_large", headers=closing)
        if length is not None and length.isdigit() and (len(length) > 15 or int(length) > max_bytes):
            raise too_large
        pieces: list[bytes] = []
        size = num_values = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("the client went away while it sent its request")
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > max_bytes:
                        raise too_large
                    num_values += sum(map(pieces[-1].count, (b",", b":", b"[", b"{")))
                    if num_values > _MAX_BODY_VALUES:
                        text = f"the request's body has more than {_MAX_BODY_VALUES} of the characters , : [ {{; split it"
                        raise ApiError(413, text, code="request_too_large", headers=closing)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"the request's body didn't arrive within {timeout_s:g} s"
            raise ApiError(408, text, code="body_timeout", headers=closing) from None
        body: list[bytes] = [b"".join(pieces)]

        async def replay() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            return await receive()

        return replay

    def _log_request(
        self, scope: Scope, request_id: str, status: int, outcome: str | None, notes: dict[str, Any], seconds: float
    ) -> None:
        """Count a finished request in the metrics, log it, and export its span. ``status`` is 0 if none was sent."""
        route = getattr(scope.get("route"), "path", None) or "none"
        self._service.metrics.count_response(route, status)
        if scope["path"] in _POLLED_PATHS and status == 200:
            return
        client = scope.get("client")
        fields = {
            "request_id": request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            "client": client[0] if client else None,
            **notes,
        }
        if outcome is not None:
            fields["outcome"] = outcome
        self._log.info("request", extra={"fields": fields})
        if self._spans is not None:
            headers = {name: value for name in _TRACE_HEADERS if (value := _header(scope, name.encode())) is not None}
            self._spans.record(f"{scope['method']} {route}", headers, seconds=seconds, now_ns=time.time_ns(), fields=fields)


def _header(scope: Scope, name: bytes) -> str | None:
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


_NAMES: Mapping[str, str] = {
    "request_id": "outrider.request_id",
    "status": "http.response.status_code",
    "method": "http.request.method",
    "path": "url.path",
    "client": "client.address",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "accepted_draft_tokens": "outrider.accepted_draft_tokens",
    "aborted": "outrider.aborted",
    "first_token_s": "outrider.first_token_s",
    "error": "error.message",
    "outcome": "outrider.outcome",
}
"""Span attribute of each field of the request log, named by OpenTelemetry's conventions if they have such a name."""


class RequestSpans:
    """An exporter of request spans. A background thread sends them in batches, by OTLP over HTTP or with ``exporter``.

    Raises :class:`ConfigError` if the extra isn't installed.
    """

    def __init__(self, exporter: Any = None) -> None:
        if any(find_spec(name) is None for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")):
            raise ConfigError("spans need OpenTelemetry, which isn't installed; run: pip install 'outrider[serve,otel]'")
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider.serve")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self, name: str, headers: Mapping[str, str], *, seconds: float, now_ns: int, fields: Mapping[str, Any]
    ) -> None:
        """Queue the span of a finished request, which ended at ``now_ns`` (Unix time) and took ``seconds``.

        ``headers`` are the request's trace headers: a ``traceparent`` names the parent span. ``fields`` are the fields of the
        request's log record.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = self._propagator.extract(dict(headers))
        began = now_ns - int(seconds * 1e9)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=began)
        span.set_attributes({_NAMES[key]: value for key, value in fields.items() if key in _NAMES and value is not None})
        if fields["status"] >= 500 or fields["status"] == 0:
            span.set_status(Status(StatusCode.ERROR, str(fields.get("error") or fields.get("outcome"))))
        span.end(now_ns)

    def close(self) -> None:
        """Export the queued spans, and stop the background thread."""
        self._provider.shutdown()


class LogFormatter(logging.Formatter):
    """A formatter of one line per record, with the record's ``fields``: text for people, or JSON in ASCII, in which data of a
    client can't forge a line.
    """

    def __init__(self, *, is_json: bool) -> None:
        super().__init__()
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line. In text, the traceback of an error has further lines."""
        fields, traceback = getattr(record, "fields", {}), self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            line = {"time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "event": record.getMessage()}
            return json.dumps({**line, **fields, **({"traceback": traceback} if traceback else {})}, default=str)
        shown = " ".join(f"{name}={value!r}" for name, value in fields.items())
        return f"outrider: {record.getMessage()} {shown}".rstrip() + (f"\n{traceback}" if traceback else "")


def log_to_stderr(form: str) -> None:
    """Write all log records to standard error, also Python's warnings. ``form`` is ``json`` or ``text``. Replaces the
    handlers of the root logger.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(is_json=form == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
