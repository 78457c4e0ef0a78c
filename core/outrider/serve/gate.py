"""What every request passes: its id, the API key, limits of its body, the log, and errors that nobody expected."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import SERVER, ApiError
from outrider.serve.sending import ClientGone, send_error
from outrider.serve.service import Service
from outrider.serve.tracing import Spans

LOG = "outrider.serve"
"""The logger of requests. A record's ``fields`` are what a line of JSON has besides the message."""
NOTES = "outrider"
"""Key of a scope: what a route wants in the log about the request, as a dict."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PROTECTED = "/v1/"
_CALLER = ("traceparent", "tracestate")
_QUIET = ("/health", "/ready", "/metrics")
"""Asked for every few seconds: logged only where they fail."""


class Gate:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, *, service: Service, spans: Spans | None = None) -> None:
        self._app = app
        self._spans = spans
        self._service = service
        self._log = logging.getLogger(LOG)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        given = _header(scope, b"x-request-id")
        request_id = given if given is not None and _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        notes: dict[str, Any] = {}
        scope[NOTES] = notes
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        outcome = None
        try:
            try:
                self._check_key(scope)
                await self._app(scope, await self._with_body(scope, receive), answer)
            except ApiError as error:
                notes["error"] = error.message
                await send_error(answer, error)
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
                await send_error(answer, ApiError(500, message, kind=SERVER, code="internal_error"))
        finally:
            self._note(scope, request_id, status, outcome, notes, time.perf_counter() - began)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _check_key(self, scope: Scope) -> None:
        """Raises :class:`ApiError` without one of the keys. Takes as long for a wrong key as for a right one."""
        keys = self._service.config.api_keys
        if not keys or not scope["path"].startswith(_PROTECTED) or scope["method"] == "OPTIONS":
            return
        given = _header(scope, b"authorization") or ""
        kind, _, key = given.partition(" ")
        found = _digest(key.strip())
        right = [hmac.compare_digest(found, _digest(each)) for each in keys]
        if kind.lower() != "bearer" or not any(right):
            said = "Incorrect API key provided" if key else "You didn't provide an API key"
            message = f"{said}; give it in the header Authorization, as Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive:
        """``receive`` with the whole body read. Raises :class:`ApiError` for one that is too large, or too slow."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        most, limit = self._service.config.max_body_bytes, self._service.config.body_timeout_s
        length = _header(scope, b"content-length")
        closing = {"Connection": "close"}  # the rest of the body isn't read
        too_large = ApiError(413, f"the request's body has more than {most} bytes", code="request_too_large", headers=closing)
        if length is not None and length.isdigit() and (len(length) > 15 or int(length) > most):
            raise too_large
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(limit):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("the client went away while it sent its request")
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"the request's body didn't arrive within {limit:g} s"
            raise ApiError(408, text, code="body_timeout", headers=closing) from None
        body: list[bytes] = [b"".join(pieces)]

        async def replay() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            return await receive()

        return replay

    def _note(
        self, scope: Scope, request_id: str, status: int, outcome: str | None, notes: dict[str, Any], seconds: float
    ) -> None:
        """Count and log a request that is over."""
        route = getattr(scope.get("route"), "path", None) or "none"
        self._service.metrics.answered(route, status)
        if scope["path"] in _QUIET and status == 200:
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
            caller = {name: value for name in _CALLER if (value := _header(scope, name.encode())) is not None}
            self._spans.record(f"{scope['method']} {route}", caller, seconds=seconds, now_ns=time.time_ns(), fields=fields)


def _header(scope: Scope, name: bytes) -> str | None:
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
