"""Running the application: the port, the signals, and the order in which everything ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from outrider.device import ConfigError, OutriderError
from outrider.registry.interruptions import accepted_interruptions
from outrider.serve.client import EngineClient, EngineGone
from outrider.serve.config import ServeConfig
from outrider.serve.gate import LOG
from outrider.serve.messages import EngineInfo
from outrider.serve.prompts import Prompter
from outrider.serve.tracing import Spans

_KEEP_ALIVE_S = 75
"""So long an idle connection stays open: longer than clients and proxies keep theirs. Or it might close as it's used."""
_CONNECTIONS_S = 5.0
"""So long connections may take to close once all requests have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where the server listens. Port 0: one that is free."""

    host: str = "127.0.0.1"
    port: int = 8000


class ServerLost(OutriderError):
    """The server has ended because its engine had."""


async def serve(
    engine: EngineClient,
    make_prompter: Callable[[EngineInfo], Prompter],
    config: ServeConfig,
    address: Address,
    *,
    started: Callable[[str, int], None] | None = None,
    spans: Spans | None = None,
) -> None:
    """Start the engine and serve until SIGTERM or SIGINT; a second signal ends it at once. ``started`` is told host and port;
    ``spans`` is closed in the end.

    Raises :class:`ServerLost` where the engine ended by itself, and what starting it raised.
    """
    import uvicorn

    from outrider.serve.app import create_app

    log = logging.getLogger(LOG)
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
        }
        server = _Server(uvicorn.Config(app, host=address.host, port=address.port, lifespan="off", backlog=2048, **options))
        ending: list[asyncio.Task[None]] = []

        async def end(seconds: float) -> None:
            """Let running requests end, then close the port."""
            all_ended = await service.drain(seconds)
            log.info("drained", extra={"fields": {"all_ended": all_ended}})
            server.should_exit = True
            await asyncio.sleep(_CONNECTIONS_S)
            server.force_exit = True

        def asked_to_end(number: int) -> None:
            if ending:
                server.force_exit = server.should_exit = True
                return
            fields = {"signal": signal.Signals(number).name, "seconds": config.drain_s}
            log.info("draining", extra={"fields": fields})
            ending.append(loop.create_task(end(config.drain_s)))

        def lost(error: EngineGone) -> None:
            log.error("engine lost", extra={"fields": {"error": str(error)}})
            if not ending:
                ending.append(loop.create_task(end(1.0)))

        engine.on_gone(lost)
        if engine.error is not None:
            raise engine.error
        server.on_started = started
        with _signals(loop, asked_to_end):
            await server.serve()
        for task in ending:
            task.cancel()
        service.close()
        if engine.error is not None:
            raise ServerLost(f"the server has ended because its engine did: {engine.error}")
    finally:
        await engine.close()
        if spans is not None:
            await loop.run_in_executor(None, spans.close)


def _server_class() -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's server, but for its signals, which :func:`serve` handles."""

        on_started: Callable[[str, int], None] | None = None

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            """Leave the signals alone."""
            yield

        async def startup(self, sockets: Any = None) -> None:
            """Say where it listens. Raises :class:`ConfigError` where it can't."""
            try:
                await super().startup(sockets)
            except SystemExit:  # uvicorn has logged why
                where = f"{self.config.host}, port {self.config.port}"
                raise ConfigError(f"nothing can listen at {where}: the log has the reason; choose another") from None
            if self.started and self.on_started is not None:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                self.on_started(host, port)

    return Server


def _Server(config: Any) -> Any:  # noqa: N802
    return _server_class()(config)


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
