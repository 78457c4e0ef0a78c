"""The HTTP server: starts the engine, listens, handles signals, and shuts everything down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from outrider.device import ConfigError, OutriderError
from outrider.registry.children import accepted_interruptions
from outrider.serve.api.prompt_builder import PromptBuilder
from outrider.serve.config import ServeConfig
from outrider.serve.connection.engine_client import EngineClient, EngineGone
from outrider.serve.connection.engine_messages import EngineInfo
from outrider.serve.http.request_middleware import LOGGER_NAME
from outrider.serve.monitoring.tracing import RequestSpans

_KEEP_ALIVE_S = 75
"""Time that an idle connection stays open. Clients and proxies close theirs earlier, so none sends into a closed one."""
_CLOSE_CONNECTIONS_TIMEOUT_S = 5.0
"""Time that connections have to close once all requests have ended."""
_DRAIN_AFTER_ENGINE_LOSS_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAddress:
    """The address on which the server listens. Port 0 selects a free port."""

    host: str = "127.0.0.1"
    port: int = 8000


class ServerLost(OutriderError):
    """Raised when the server has ended because its engine ended."""


async def serve_http(
    engine: EngineClient,
    make_prompter: Callable[[EngineInfo], PromptBuilder],
    config: ServeConfig,
    address: HttpAddress,
    *,
    started: Callable[[str, int], None] | None = None,
    spans: RequestSpans | None = None,
) -> None:
    """Start the engine and serve until SIGTERM or SIGINT. Running requests then have ``config.drain_s`` seconds to finish.

    A second signal ends the server at once. ``started`` is called with host and port once the server listens. The function
    closes ``engine`` and ``spans`` before it returns.

    Raises :class:`ServerLost` if the engine ends by itself, and the error of an engine that can't start.
    """
    import uvicorn

    from outrider.serve.http.app import create_app
    from outrider.serve.http.http_protocol import LimitedHttpProtocol

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
        server = _make_uvicorn_server(
            uvicorn.Config(app, host=address.host, port=address.port, lifespan="off", backlog=2048, **options), started
        )
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
            raise ServerLost(f"the server has ended because its engine did: {engine.error}")
    finally:
        await engine.close()
        if spans is not None:
            await loop.run_in_executor(None, spans.close)


def _make_uvicorn_server(config: Any, on_started: Callable[[str, int], None] | None) -> Any:
    import uvicorn

    class HttpServer(uvicorn.Server):
        """uvicorn's server without its signal handlers: :func:`serve_http` handles the signals."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            """Leave the signal handlers unchanged."""
            yield

        async def startup(self, sockets: Any = None) -> None:
            """Start to listen, then call ``on_started``. Raises :class:`ConfigError` if the address can't be bound."""
            try:
                await super().startup(sockets)
            except SystemExit:  # uvicorn has logged the reason
                where = f"{self.config.host}, port {self.config.port}"
                raise ConfigError(f"nothing can listen at {where}: the log has the reason; choose another") from None
            if self.started and on_started is not None:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                on_started(host, port)

    return HttpServer(config)


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
