"""An engine in a process of its own, over a pair of sockets that nobody else can reach."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from outrider.engine.engine import Engine
from outrider.registry.children import deaf_from_the_start, end_with_parent, stay_deaf
from outrider.serve.client import EngineClient, EngineGone
from outrider.serve.engine_loop import EngineLoop
from outrider.serve.messages import Command, EngineInfo, Event, Failed, Ready, Stop
from outrider.serve.wire import Frames, command_of_wire, command_to_wire, event_of_wire, event_to_wire, frame

_PIECE = 1 << 18
_BUFFER = 8 << 20
_PATIENCE_S = 10.0
"""So long the process may take to end once it was told to."""


class EngineProcess(EngineClient):
    """Runs an engine in a child process, which ends when this one does, whatever ends it.

    ``make`` returns the engine; it's pickled, and called in the child. The child takes no notice of SIGINT and SIGTERM, which
    come to a whole group of processes: its parent tells it to end.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        super().__init__()
        self._make = make
        self._process: Any = None
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, once it was started."""
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        """Tell the process to end, and wait for that; where it doesn't, kill it."""
        self._gone(EngineGone("the engine was closed"), expected=True)
        if self._process is None:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._send(Stop())
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._process.join, _PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            await loop.run_in_executor(None, self._process.join)
        if self._transport is not None:
            self._transport.close()

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(self._make, theirs), name="outrider-engine", daemon=True)
        # From this thread: the child ends with the thread that started it. That takes some milliseconds.
        with deaf_from_the_start():
            self._process.start()
        theirs.close()
        ours.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: _Line(self), sock=ours)
        self._transport = transport

    def _send(self, command: Command) -> None:
        assert self._transport is not None
        self._transport.write(frame(command_to_wire(command)))

    def _hung_up(self) -> None:
        """The child's end is closed: it has ended, or is about to."""
        if self.error is None:
            self._waiting = asyncio.get_running_loop().create_task(self._say_how_it_ended())

    async def _say_how_it_ended(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._process.join, 1.0)
        code = self._process.exitcode
        how = "hung up" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._gone(EngineGone(f"the engine's process {how}"))


class _Line(asyncio.Protocol):
    """Cuts what the child sends into frames."""

    def __init__(self, client: EngineProcess) -> None:
        self._client = client
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for events in self._frames.add(data):
            self._client._handle([event_of_wire(event) for event in events])

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._client._hung_up()


# -- in the child ------------------------------------------------------------------------------------------------------


class _ChildPort:
    """The engine's end of the line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._frames = Frames()

    def take(self, *, block: bool) -> Sequence[Command]:
        """See :class:`~outrider.serve.engine_loop.Port`."""
        taken: list[Command] = []
        while not taken:
            if not block and not select.select([self._line], [], [], 0)[0]:
                break
            piece = self._line.recv(_PIECE)
            if not piece:
                return [Stop()]
            taken.extend(command_of_wire(command) for command in self._frames.add(piece))
        return taken

    def send(self, events: Sequence[Event]) -> None:
        """See :class:`~outrider.serve.engine_loop.Port`."""
        self._line.sendall(frame([event_to_wire(event) for event in events]))


def _serve(make: Callable[[], Engine], line: socket.socket) -> None:
    """What the child runs."""
    stay_deaf()
    end_with_parent()
    port = _ChildPort(line)
    try:
        engine = make()
        port.send([Ready(EngineInfo.of(engine))])
        EngineLoop(engine, port).run()
        engine.close()  # other ranks end with it
    except (BrokenPipeError, ConnectionResetError):  # the server is gone
        os._exit(1)
    except BaseException as error:
        with suppress(OSError):
            port.send([Failed(f"{type(error).__name__}: {error}")])
        os._exit(1)  # what a lost device leaves behind can't be relied on to end by itself
