"""Responses: errors in the format of the API, one JSON object, or a stream of server-sent events.

Errors have the form of OpenAI's API, or of Anthropic's for its routes. A response cancels its work if the client disconnects.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.errors import one_line

INVALID, SERVER, OVERLOADED = "invalid_request_error", "server_error", "rate_limit_error"
"""Values of the field ``type`` of an error response."""
MESSAGES_PATH = "/v1/messages"
"""Path of Anthropic's API, whose errors have Anthropic's form."""
_MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Values of the field ``type`` in Anthropic's API, by status; other errors are ``invalid_request_error``."""


_OWN_PARAMS: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/responses": {
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        **dict.fromkeys(("prompt", "messages"), "input"),
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    },
    MESSAGES_PATH: {
        "stop": "stop_sequences",
        "prompt": "messages",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
    },
}
"""For each path, the request field that becomes a field of a chat request or a prompt, by the latter's name."""
_OWN_PARTS: Mapping[str, Mapping[str, str]] = {
    "/v1/responses": {".function.": ".", "json_schema.schema": "schema"},
    MESSAGES_PATH: {
        ".function.parameters": ".input_schema",
        ".function.": ".",
        ".image_url.url": ".source",
        "json_schema.schema": "schema",
    },
}
"""For each path, the spelling of parts of field names, by those of a chat request."""


class ApiError(Exception):
    """An error that the client gets as the response.

    ``status`` is the HTTP status and ``kind`` the error's ``type``. ``param`` names the request field that caused the error.
    ``code`` identifies the error for programs. ``headers`` are added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = one_line(message)
        self.kind = kind
        self.param = None if param is None else one_line(param)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object of the response body, as plain data for JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encode(self, path: str = "") -> bytes:
        """Return the error in the form of the API at ``path``, as JSON in ASCII: a message may quote half a character."""
        self._name_own_param(path)
        return json.dumps(messages_error(self) if path.startswith(MESSAGES_PATH) else self.body).encode()

    def _name_own_param(self, path: str) -> None:
        """Replace the name of a field of the chat request, or the prompt, by that of the field at ``path``."""
        is_unknown = self.code in ("unknown_parameter", "unsupported_parameter")
        if self.param is None or (is_unknown and "." not in self.param):  # the client's own name
            return
        path = re.sub(r"/(count|input)_tokens$", "", path)
        for part, own in _OWN_PARTS.get(path, {}).items():
            self.message, self.param = self.message.replace(part, own), self.param.replace(part, own)
        name = re.split(r"[.\[]", self.param)[0]
        own = _OWN_PARAMS.get(path, {}).get(name, name)
        if own == name:
            return
        if is_unknown:
            own += self.param[len(name) :]
        if name != "prompt":  # in messages a word of English
            self.message = self.message.replace(self.param, own)
        if "_" in name:
            self.message = self.message.replace(name, own)
        self.param = own


def messages_error(error: ApiError) -> dict[str, Any]:
    """Return the error object of Anthropic's API. It keeps ``param`` and ``code``, which is in ``details``, too: a client
    that is refused a thread by its code there goes on without one.
    """
    kind = _MESSAGES_KINDS.get(error.status, INVALID)
    details = {} if error.code is None else {"details": {"error_code": error.code}}
    return {"type": "error", "error": {**error.body["error"], "type": kind, **details}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 error: the request is invalid, and the client has to change it."""
    return ApiError(400, message, param=param, code=code)


def invalid_fields(errors: Sequence[Any]) -> ApiError:
    """Return the API error for the first invalid field of a request, whose validation by pydantic had ``errors``."""
    # The alternatives of a union have an error each: that of the alternative that fits furthest is the helpful one.
    begin = int(errors[0]["loc"][:1] in (("body",), ("query",)))  # a chat request made from another one has no such prefix
    alternatives = [each for each in errors if each["loc"][: begin + 1] == errors[0]["loc"][: begin + 1]]
    first = max(
        alternatives,
        key=lambda each: (
            each["type"] == "too_long",  # all items of the list have the alternative's type
            len(each["loc"]),
            [part for part in each["loc"] if isinstance(part, int)],
        ),
    )
    kind, location = first["type"], [str(part) for part in first["loc"][begin:]]
    if kind == "json_invalid":
        return bad_request(f"the body isn't JSON: {first.get('ctx', {}).get('error', first['msg'])}", None, "invalid_json")
    # The location also names the types of a union, which are no fields.
    types = [part for part in location[:-1] if part[:1].isupper()] + ["str", "int", "float"]
    fields = [part for part in location if part.isdigit() or (part.isidentifier() and part not in types)]
    param = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in fields).lstrip(".") or None
    if kind == "extra_forbidden":
        param = param or location[-1]  # the name may be any text
        return bad_request(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
    if kind == "model_attributes_type" and not location:
        return bad_request("the body is no JSON object; send one, with the header Content-Type: application/json")
    if kind == "missing":
        message = f"you must provide {param}" if param else "the body is missing; send a JSON object"
        return bad_request(f"{message}.", param, "missing_required_parameter")
    text = re.sub(r"valid dictionary( or (instance of \w+|object .*))?", "JSON object", first["msg"])  # no words of Python
    return bad_request(f"Invalid value for {param or 'the body'}: {text}.", param, "invalid_value")


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """Return a 503 error: the server accepts no request now. ``retry_after_s`` tells the client when to try again."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind=SERVER, code=code, headers=headers)


_JSON_CONTENT_TYPE = b"application/json"
_EVENTS_CONTENT_TYPE = b"text/event-stream; charset=utf-8"
DONE_EVENT = b"data: [DONE]\n\n"
"""The server-sent event that ends a stream of completions."""


def encode_event(data: Mapping[str, Any]) -> bytes:
    """Return ``data`` as JSON in one unnamed server-sent event, encoded."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def encode_named_event(data: Mapping[str, Any]) -> bytes:
    """Return ``data`` as JSON in one server-sent event whose name is the field ``type``, encoded."""
    return f"event: {data['type']}\n".encode() + encode_event(data)


def json_response(data: Any, status: int = 200) -> Response:
    """Return a response of ``data`` as JSON, in ASCII: a text of the client may have half a character."""
    return Response(json.dumps(data), status, media_type="application/json")


class ClientGone(Exception):
    """Raised when the client has closed its connection, or hasn't read for the allowed time."""


class ConnectedResponse(Response):
    """A response that ``work`` sends to a connected client.

    If the client disconnects first, ``work`` is cancelled. ``close`` is called once, after success, error or disconnection.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]], *, close: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run ``work``, or raise :class:`ClientGone`."""
        del scope
        try:
            await _run_while_connected(receive, self._work(send))
        finally:
            self._close()


async def send_json(send: Send, data: Any) -> None:
    """Send ``data`` as the whole response, in JSON."""
    await _send_whole(send, 200, json.dumps(data).encode(), {})


async def send_events(send: Send, events: AsyncIterator[bytes], *, write_s: float, end: bytes) -> None:
    """Send the encoded ``events``, then the event ``end``. An :class:`ApiError` is sent as an event.

    Raises :class:`ClientGone` if the client takes more than ``write_s`` seconds to read a piece.
    """

    async def write(piece: bytes) -> None:
        try:
            async with asyncio.timeout(write_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            raise ClientGone(f"the client hasn't read for {write_s:g} s") from None

    headers = [(b"content-type", _EVENTS_CONTENT_TYPE), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        async for piece in events:
            await write(piece)
    except ApiError as error:
        await write(b"data: " + error.encode() + b"\n\n")
    if end:
        await write(end)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """Send ``error`` as the whole response of ``path``: its status, its headers and its JSON body."""
    await _send_whole(send, error.status, error.encode(path), error.headers)


async def _send_whole(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    encoded += [(b"content-type", _JSON_CONTENT_TYPE), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def _run_while_connected(receive: Receive, work: Awaitable[Any]) -> Any:
    """Return the result of ``work``. If the client disconnects first, cancel ``work`` and raise :class:`ClientGone`."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client has closed its connection")
        return working.result()
    finally:
        for task in (working, disconnected):
            if not task.done():
                task.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
