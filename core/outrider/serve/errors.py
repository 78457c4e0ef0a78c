"""Errors as OpenAI's API writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import one_line

INVALID, SERVER, OVERLOADED = "invalid_request_error", "server_error", "rate_limit_error"
"""Values of an error's ``type``."""


class ApiError(Exception):
    """What a client gets instead of an answer. ``param``: the field at fault; ``code``: a word for programs."""

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
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The object that the client gets."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The same as JSON. ASCII alone: a message may quote half a character."""
        return json.dumps(self.body).encode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can't be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """The server can't serve it now, whatever it is."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind=SERVER, code=code, headers=headers)
