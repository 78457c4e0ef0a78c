"""An engine in a thread of the server's process, for programs that embed the server and for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from outrider.engine.engine import Engine
from outrider.serve.connection.engine_client import EngineClient, EngineGone
from outrider.serve.connection.engine_loop import EngineLoop
from outrider.serve.connection.engine_messages import (
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineInfo,
    EngineReady,
    StopEngine,
)


class EngineThread(EngineClient):
    """A client that runs the engine in a thread.

    ``make`` is an engine, or a function that returns one; the thread calls the function. The thread adopts an existing
    engine: the thread that created the engine must not use it afterwards.

    The thread shares Python's global interpreter lock with the event loop. Under load, use
    :class:`~outrider.serve.connection.engine_process.EngineProcess`.
    """

    def __init__(self, make: Engine | Callable[[], Engine]) -> None:
        super().__init__()
        self._make: Callable[[], Engine] = (lambda: make) if isinstance(make, Engine) else make
        self._commands: SimpleQueue[EngineCommand] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    async def close(self) -> None:
        """Send :class:`StopEngine` to the thread and wait until it has ended."""
        self._gone(EngineGone("the engine was closed"), expected=True)
        if self._thread.ident is not None:
            self._commands.put(StopEngine())
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def _launch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def _send(self, command: EngineCommand) -> None:
        self._commands.put(command)

    # -- the port, called in the engine's thread ---------------------------------------------------------------------

    def receive_commands(self, *, block: bool) -> Sequence[EngineCommand]:
        """Return the commands that the server has queued; with ``block`` wait for one. Called in the engine's thread."""
        commands: list[EngineCommand] = []
        with suppress(Empty):
            commands.append(self._commands.get(block=block))
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def send(self, events: Sequence[EngineEvent]) -> None:
        """Schedule the handling of ``events`` on the event loop. Called in the engine's thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop was closed, so no caller waits for the events
            self._loop.call_soon_threadsafe(self._handle, events)

    def _run(self) -> None:
        try:
            engine = self._make()
            engine.adopt()
            self.send([EngineReady(EngineInfo.from_engine(engine))])
            EngineLoop(engine, self).serve_until_stopped()
        except BaseException as error:
            self.send([EngineFailed(f"{type(error).__name__}: {error}")])
