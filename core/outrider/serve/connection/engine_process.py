"""An engine in a child process, or on several ranks of this host with a child process for each.

Server and first child communicate over a socket pair, which no other process can open.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from outrider.cli.options.rank_processes import Joined, check_expert_parallel
from outrider.cli.terminal.environment import become_rank
from outrider.engine.engine import Engine
from outrider.registry.children import end_with_parent, ignore_interruptions, interruptions_blocked_in_children
from outrider.serve.connection.engine_client import EngineClient, EngineGone
from outrider.serve.connection.engine_loop import EngineLoop
from outrider.serve.connection.engine_messages import (
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineInfo,
    EngineReady,
    FrameDecoder,
    StopEngine,
    command_of_wire,
    command_to_wire,
    event_of_wire,
    event_to_wire,
    frame,
)

_RECEIVE_BYTES = 1 << 18
_SOCKET_BUFFER_BYTES = 8 << 20
_EXIT_TIMEOUT_S = 10.0
"""Seconds that a child process has to exit after it was told to end. Then it is killed."""


async def join_or_kill(process: Any) -> None:
    """Wait for a ``multiprocessing`` child to exit, and kill it after ``_EXIT_TIMEOUT_S`` seconds."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, process.join, _EXIT_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        await loop.run_in_executor(None, process.join)


class EngineProcess(EngineClient):
    """A client that runs the engine in a child process. The child ends when this process ends, even if it is killed.

    ``make`` is pickled, and called in the child, where it returns the engine. The child ignores SIGINT and SIGTERM, which a
    terminal sends to the whole process group: only :meth:`close` ends the child.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        super().__init__()
        self._make = make
        self._process: Any = None
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before the start."""
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        """Send :class:`StopEngine` to the child and wait until it has exited. A child that doesn't exit in time is killed."""
        self._gone(EngineGone("the engine was closed"), expected=True)
        if self._process is None:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._send(StopEngine())
        await join_or_kill(self._process)
        if self._transport is not None:
            self._transport.close()

    async def _launch(self) -> None:
        server_end, child_end = socket.socketpair()
        for end in (server_end, child_end):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(self._make, child_end), name="outrider-engine", daemon=True)
        # Not in an executor: the kernel ends the child when the thread that started it ends. The call takes milliseconds.
        with interruptions_blocked_in_children():
            self._process.start()
        child_end.close()
        server_end.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: _EventProtocol(self), sock=server_end)
        self._transport = transport

    def _send(self, command: EngineCommand) -> None:
        assert self._transport is not None
        self._transport.write(frame(command_to_wire(command)))

    def _handle_disconnect(self) -> None:
        if self.error is None:
            self._waiting = asyncio.get_running_loop().create_task(self._report_exit())

    async def _report_exit(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._process.join, 1.0)
        code = self._process.exitcode
        how = "hung up" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._gone(EngineGone(f"the engine's process {how}"))


class _EventProtocol(asyncio.Protocol):
    """The server's end of the socket pair: an asyncio protocol that decodes the child's frames and passes the events to the
    client.
    """

    def __init__(self, client: EngineProcess) -> None:
        self._client = client
        self._frames = FrameDecoder()

    def data_received(self, data: bytes) -> None:
        for events in self._frames.add(data):
            self._client._handle([event_of_wire(event) for event in events])

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._client._handle_disconnect()


# -- in the child ------------------------------------------------------------------------------------------------------


class _ChildPort:
    """The engine's end of the socket pair, an :class:`EnginePort` in the child process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameDecoder()

    def receive_commands(self, *, block: bool) -> Sequence[EngineCommand]:
        """Return the commands that the socket has received; with ``block`` wait for one. A closed connection returns
        :class:`StopEngine`.
        """
        commands: list[EngineCommand] = []
        while not commands:
            if not block and not select.select([self._socket], [], [], 0)[0]:
                break
            piece = self._socket.recv(_RECEIVE_BYTES)
            if not piece:
                return [StopEngine()]
            commands.extend(command_of_wire(command) for command in self._frames.add(piece))
        return commands

    def send(self, events: Sequence[EngineEvent]) -> None:
        """Send ``events`` in one frame. Blocks while the socket's buffers are full."""
        self._socket.sendall(frame([event_to_wire(event) for event in events]))


def _serve(make: Callable[[], Engine], sock: socket.socket) -> None:
    """Run the engine in the child: the target of :class:`EngineProcess`."""
    ignore_interruptions()
    end_with_parent()
    port = _ChildPort(sock)
    try:
        engine = make()
        port.send([EngineReady(EngineInfo.from_engine(engine))])
        EngineLoop(engine, port).serve_until_stopped()
        engine.close()  # ends the other ranks
    except (BrokenPipeError, ConnectionResetError):  # the server is gone
        os._exit(1)
    except BaseException as error:
        with suppress(OSError):
            port.send([EngineFailed(f"{type(error).__name__}: {error}")])
        os._exit(1)  # after a lost device, the vendor runtime's exit handlers may hang


def create_engine_client(
    make: Callable[..., Engine], *, tensor: int = 1, data: int = 1, expert: bool = False
) -> EngineProcess:
    """Return a client of an engine in one child process, or of ``tensor`` x ``data`` ranks in one child process each."""
    check_expert_parallel(expert, tensor, data)
    return EngineProcess(make) if tensor * data == 1 else EngineRanks(make, tensor=tensor, data=data, expert=expert)


class EngineRanks(EngineProcess):
    """A client that runs ``tensor`` x ``data`` ranks of one engine in child processes, which end when this process ends.

    ``make`` is pickled and called in each child. It gets the ranks as the keyword argument ``joined``
    (:class:`~outrider.cli.options.rank_processes.Joined`) and returns the engine of its rank. If one rank ends, all ranks
    end. ``expert``: the ranks divide a mixture's experts.
    """

    def __init__(self, make: Callable[..., Engine], *, tensor: int = 1, data: int = 1, expert: bool = False) -> None:
        self._make_rank = make
        self._tensor, self._data, self._expert = tensor, data, expert
        self._store: Any = None
        self._followers: list[Any] = []
        super().__init__(make)
        self.add_loss_listener(self._lost)

    async def close(self) -> None:
        """Send :class:`StopEngine` to rank 0, and wait until all ranks have exited. A rank that does not exit in time is
        killed.
        """
        await super().close()
        for process in self._followers:
            await join_or_kill(process)
        self._store = None

    async def _launch(self) -> None:
        # In a thread: the import of torch takes a second, which would block the event loop.
        self._store = await asyncio.get_running_loop().run_in_executor(None, _create_store)
        ranks = functools.partial(
            _Rank, self._make_rank, self._tensor, self._data, expert=self._expert, port=self._store.port
        )
        context = multiprocessing.get_context("spawn")
        for rank in range(1, self._tensor * self._data):
            process = context.Process(target=ranks(rank=rank).follow, name=f"outrider-rank-{rank}", daemon=True)
            with interruptions_blocked_in_children():
                process.start()
            self._followers.append(process)
        self._make = ranks(rank=0).engine
        await super()._launch()

    def _lost(self, error: EngineGone) -> None:
        del error
        for process in self._followers:
            process.kill()


class _Rank:
    """A picklable description of one rank. Its process calls :meth:`engine` (rank 0) or :meth:`follow`."""

    def __init__(self, make: Callable[..., Engine], tensor: int, data: int, *, expert: bool, rank: int, port: int) -> None:
        self._make, self._tensor, self._data, self._rank, self._port = make, tensor, data, rank, port
        self._expert = expert

    def engine(self) -> Engine:
        """Create and return the engine of rank 0. The process group lasts until the process ends."""
        become_rank(rank=self._rank, world=self._tensor * self._data, port=self._port)
        return self._make(joined=Joined(self._tensor, self._data, expert=self._expert))

    def follow(self) -> None:
        """Create this rank's engine and repeat the decisions of rank 0 until rank 0 ends."""
        ignore_interruptions()
        end_with_parent()
        become_rank(rank=self._rank, world=self._tensor * self._data, port=self._port)
        with Joined(self._tensor, self._data, expert=self._expert) as joined:
            self._make(joined=joined).follow()


def _create_store() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
