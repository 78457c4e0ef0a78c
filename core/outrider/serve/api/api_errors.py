"""Error responses in the format of OpenAI's API, or of Anthropic's for its routes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
        return json.dumps(messages_error(self) if path.startswith(MESSAGES_PATH) else self.body).encode()


def messages_error(error: ApiError) -> dict[str, Any]:
    """Return the error object of Anthropic's API. It keeps ``param`` and ``code``."""
    kind = _MESSAGES_KINDS.get(error.status, INVALID)
    return {"type": "error", "error": {**error.body["error"], "type": kind}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 error: the request is invalid, and the client has to change it."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """Return a 503 error: the server accepts no request now. ``retry_after_s`` tells the client when to try again."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind=SERVER, code=code, headers=headers)
