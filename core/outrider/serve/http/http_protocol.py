"""The HTTP/1.1 protocol of the server's connections: uvicorn's with httptools, and limits for headers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.serve.api.api_errors import ApiError

MAX_HEADERS = 256
"""Maximum number of a request's headers and trailers."""
MAX_HEADER_BYTES = 64 << 10
"""Maximum size of a request's path, headers and trailers, and of the pieces in which unfinished headers arrive."""
HEADER_TIMEOUT_S = 30.0
"""Time from a connection's start, or from a request's first byte, in which all headers of the request must arrive."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection. The server closes it before reading the API key if headers are too many, too long or too late."""

    header_timeout_s = HEADER_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._has_part_of_headers = False
        self._part_bytes = 0
        self._header_bytes = 0
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit of headers that haven't arrived."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse a piece of received bytes, and refuse headers that are unfinished after :data:`MAX_HEADER_BYTES`."""
        if self.cycle is None or not self.cycle.more_body:
            self._start_timer()
        if self._has_part_of_headers:
            self._part_bytes += len(data)
        super().data_received(data)
        if self._has_part_of_headers and self._part_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        """Start to count the headers of a new request from 0."""
        super().on_message_begin()
        self._has_part_of_headers = True
        self._part_bytes = self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Add the path and the query to the size of the request's headers."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add the size of a header or trailer to the request's total, which is limited."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time limit of the headers, and pass the request on."""
        self._has_part_of_headers = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Send the error of the limits or of the parser in OpenAI's format."""
        self._refuse(self._refusal or ApiError(400, msg, code="invalid_http"))

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = _too_large()
            raise ValueError(self._refusal.message)  # makes the parser stop

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout_s, self._handle_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handle_timeout(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # a byte that came early must not end the response before it
            return
        text = f"the request's headers didn't arrive within {self.header_timeout_s:g} s"
        self._refuse(ApiError(408, text, code="header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Send ``error``, unless a response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error.encode()
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def _too_large() -> ApiError:
    text = f"the request has more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES} bytes of them"
    return ApiError(431, text, code="headers_too_large")
