"""The HTTP server: starts the engine, listens, handles signals, and shuts everything down in order.

Its HTTP/1.1 protocol is uvicorn's with httptools, and limits for headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Callable, Generator
from typing import Any

import httptools
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.device import ConfigError, OutriderError
from outrider.registry.children import accepted_interruptions
from outrider.serve.api.prompt_builder import PromptBuilder
from outrider.serve.api.responses import ApiError
from outrider.serve.config import ServeConfig
from outrider.serve.connection.engine_client import EngineClient, EngineGone
from outrider.serve.connection.engine_messages import EngineInfo
from outrider.serve.http.app import create_app
from outrider.serve.http.request_middleware import LOGGER_NAME, RequestSpans

MAX_HEADERS = 256
"""Maximum number of a request's headers and trailers."""
MAX_HEADER_BYTES = 64 << 10
"""Maximum size of a request's path, headers and trailers, and of the pieces in which unfinished headers arrive."""
HEADER_TIMEOUT_S = 30.0
"""Time from a connection's start, or from a request's first byte, in which all headers of the request must arrive."""
LINGER_S = 30.0
"""Time that a client has to finish sending, and to read its response, on a connection that the server closes."""
_MAX_LINGER_HEADER_BYTES = 1 << 20
"""Maximum number of bytes that the server discards after it has refused a request's headers."""


class _Http11Parser(httptools.HttpRequestParser):
    """A parser that reads a request for another protocol (``Upgrade``) as a request of HTTP/1.1, with its body.

    RFC 9110, section 7.8, lets a server ignore ``Upgrade``. Java's HTTP client asks for HTTP/2 with its first requests.
    """

    def __init__(self, protocol: LimitedHttpProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own parser
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn passes bytes
        """Parse a piece of received bytes."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.get_method() == b"CONNECT":
                raise httptools.HttpParserError("CONNECT") from None
            self.feed_data(self._protocol.head_without_upgrade() + data[upgrade.args[0] :])


class LimitedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection. The server closes it before reading the API key if headers are too many, too long or too late."""

    header_timeout_s = HEADER_TIMEOUT_S
    linger_s = LINGER_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Http11Parser(self)
        self._served_app, self.app = self.app, self._run_app
        self._timer: asyncio.TimerHandle | None = None
        self._has_part_of_headers = False
        self._part_bytes = 0
        self._header_bytes = 0
        self._refusal: ApiError | None = None
        self._cycles: list[Any] = []
        """The requests that were open at the last request: one runs, the others were pipelined after it."""
        self._discardable: float | None = None
        """Number of bytes that a client may still send after its last response; None while requests are read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit of headers that haven't arrived, and tell every open request that the client has gone."""
        self._stop_timer()
        self._disconnect_cycles()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse a piece of received bytes, and refuse headers that are unfinished after :data:`MAX_HEADER_BYTES`."""
        if self._discardable is not None:
            self._discardable -= len(data)
            if self._discardable < 0:
                self.transport.close()
            return
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
        if self.parser.should_upgrade():
            return  # the parser reads the request again
        self._has_part_of_headers = False
        self._stop_timer()
        super().on_headers_complete()
        self._cycles = [*self._open_cycles(), self.cycle]

    def on_message_complete(self) -> None:
        """Tell the request that its body is complete."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def head_without_upgrade(self) -> bytes:
        """Return the request line and the headers of the last request as bytes, without ``Upgrade``."""
        version = self.parser.get_http_version().encode()
        headers = (b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(headers))

    def shutdown(self) -> None:
        """Close the connection once its response is complete."""
        if self._discardable is None:
            super().shutdown()
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Send the error of the limits or of the parser in OpenAI's format."""
        self._refuse(self._refusal or ApiError(400, msg, code="invalid_http"))

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = _too_large()
            raise ValueError(self._refusal.message)  # makes the parser stop

    def _open_cycles(self) -> list[Any]:
        return [each for each in self._cycles if not each.response_complete]

    def _disconnect_cycles(self) -> None:
        for cycle in self._open_cycles():  # uvicorn tells the last one alone
            cycle.disconnected = True
            cycle.message_event.set()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout_s, self._handle_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handle_timeout(self) -> None:
        self._timer = None
        if self._open_cycles():
            self._start_timer()  # a byte that came early must not end the response before it
            return
        text = f"the request's headers didn't arrive within {self.header_timeout_s:g} s"
        self._refuse(ApiError(408, text, code="header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Send ``error``, unless a response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if not any(each.response_started for each in self._open_cycles()):
            body = error.encode()
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self._linger(_MAX_LINGER_HEADER_BYTES)
        else:
            self.transport.close()

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the served app. A client of HTTP/1.0 gets a stream without chunks, which ends with the connection."""
        cycle: Any = send.__self__  # type: ignore[attr-defined]  # uvicorn passes a method of the request's cycle
        has_chunks, closes_after_body = scope["http_version"] == "1.1", False
        cycle.waiting_for_100_continue &= has_chunks

        async def send_in_version(message: Message) -> None:
            nonlocal closes_after_body
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                closes_after_body = not has_chunks and b"content-length" not in names
                cycle.chunked_encoding = False if closes_after_body else None
                lingers = False
            else:
                if closes_after_body:
                    cycle.expected_content_length = len(message.get("body", b""))
                lingers = cycle.more_body and not cycle.keep_alive and not message.get("more_body")
            cycle.keep_alive |= lingers  # or it would close the connection at once
            await send(message)
            if lingers and not self.transport.is_closing():
                self._linger(math.inf)

        await self._served_app(scope, receive, send_in_version)

    def _linger(self, max_bytes: float) -> None:
        """End the response and discard up to ``max_bytes`` bytes that the client still sends within :data:`LINGER_S`.

        To close at once would reset a connection with unread bytes, and the client would lose the response.
        """
        self._discardable = max_bytes
        self._disconnect_cycles()
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._timer = self.loop.call_later(self.linger_s, self.transport.close)
        self.flow.resume_reading()
        self.transport.write_eof()


def _too_large() -> ApiError:
    text = f"the request has more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES} bytes of them"
    return ApiError(431, text, code="headers_too_large")


_KEEP_ALIVE_S = 75
"""Time that an idle connection stays open. Clients and proxies close theirs earlier, so none sends into a closed one."""
_CLOSE_CONNECTIONS_TIMEOUT_S = 5.0
"""Time that connections have to close once all requests have ended."""
_DRAIN_AFTER_ENGINE_LOSS_S = 1.0


async def serve_http(
    engine: EngineClient,
    make_prompter: Callable[[EngineInfo], PromptBuilder],
    config: ServeConfig,
    *,
    port: int,
    host: str = "127.0.0.1",
    started: Callable[[str, int], None] | None = None,
    spans: RequestSpans | None = None,
) -> None:
    """Start the engine and serve on ``port`` until SIGTERM or SIGINT. Port 0 selects a free port.

    At the end, running requests have ``config.drain_s`` seconds to finish.

    A second signal ends the server at once. ``started`` is called with host and port once the server listens. The function
    closes ``engine`` and ``spans`` before it returns.

    Raises :class:`OutriderError` if the engine ends by itself, and the error of an engine that can't start.
    """
    log = logging.getLogger(LOGGER_NAME)
    loop = asyncio.get_running_loop()
    info = await engine.start()
    try:
        prompter = await loop.run_in_executor(None, make_prompter, info)
        app = create_app(engine, prompter, config, spans=spans)
        service = app.state.service
        options: dict[str, Any] = {
            "timeout_keep_alive": _KEEP_ALIVE_S,
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "ws": "none",
            "http": LimitedHttpProtocol,
        }
        server = HttpServer(uvicorn.Config(app, host=host, port=port, lifespan="off", backlog=2048, **options), started)
        shutdown_tasks: list[asyncio.Task[None]] = []

        async def shut_down(drain_s: float) -> None:
            """Drain the running requests for ``drain_s`` seconds, then close the port and all connections."""
            all_ended = await service.drain(drain_s)
            log.info("drained", extra={"fields": {"all_ended": all_ended}})
            server.should_exit = True
            await asyncio.sleep(_CLOSE_CONNECTIONS_TIMEOUT_S)
            server.force_exit = True

        def handle_signal(number: int) -> None:
            if shutdown_tasks:
                server.force_exit = server.should_exit = True
                return
            fields = {"signal": signal.Signals(number).name, "seconds": config.drain_s}
            log.info("draining", extra={"fields": fields})
            shutdown_tasks.append(loop.create_task(shut_down(config.drain_s)))

        def handle_engine_loss(error: EngineGone) -> None:
            log.error("engine lost", extra={"fields": {"error": str(error)}})
            if not shutdown_tasks:
                shutdown_tasks.append(loop.create_task(shut_down(_DRAIN_AFTER_ENGINE_LOSS_S)))

        engine.add_loss_listener(handle_engine_loss)
        if engine.error is not None:
            raise engine.error
        with _signals(loop, handle_signal):
            await server.serve()
        for task in shutdown_tasks:
            task.cancel()
        service.close()
        if engine.error is not None:
            raise OutriderError(f"the server has ended because its engine did: {engine.error}")
    finally:
        await engine.close()
        if spans is not None:
            await loop.run_in_executor(None, spans.close)


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: :func:`serve_http` handles the signals.

    ``on_started`` is called with host and port once the server listens.
    """

    def __init__(self, config: uvicorn.Config, on_started: Callable[[str, int], None] | None) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signal handlers unchanged."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        """Start to listen. Raises :class:`ConfigError` if the address can't be bound."""
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn has logged the reason
            where = f"{self.config.host}, port {self.config.port}"
            raise ConfigError(f"nothing can listen at {where}: the log has the reason; choose another") from None
        if self.started and self._on_started is not None:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_started(host, port)


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, handle: Callable[[int], None]) -> Generator[None]:
    """Call ``handle`` for SIGTERM and SIGINT in the scope, then restore the actions. An ignored signal stays ignored."""
    before = {number: signal.getsignal(number) for number in accepted_interruptions()}
    for number in before:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
