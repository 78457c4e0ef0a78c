"""Connections of a server to its engine: in a thread, in a child process, or on several ranks with a child process each.

:class:`EngineLoop` runs it in each case: it receives commands before each iteration and sends events after it. Server and
first child communicate over a socket pair, which no other process can open.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue

from outrider.cli.options.rank_processes import check_expert_parallel, first_rank
from outrider.device import DeviceError, OutriderError
from outrider.disaggregation.connections import MessageDecoder
from outrider.engine.engine import Engine
from outrider.engine.guides.grammars import GuideCompilers
from outrider.engine.ranks.processes import ChildRanks
from outrider.engine.requests.request import StepOutput
from outrider.errors import BusyError
from outrider.registry.children import end_with_parent, start_call
from outrider.serve.connection.engine_client import EngineClient, EngineGone
from outrider.serve.connection.engine_messages import (
    AbortRequest,
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineInfo,
    EngineSnapshot,
    RequestAdmitted,
    RequestRefused,
    SampleOutput,
    StopEngine,
    SubmitRequest,
    decode_messages,
    encode_messages,
)

_GUIDE_POLL_INTERVAL_S = 0.01
"""Seconds between two checks for commands while all requests of the loop wait for their guides."""
_SNAPSHOT_INTERVAL_S = 0.1
"""Minimum seconds between two snapshots while the engine has requests."""


class EngineLoop:
    """The loop of an engine that serves, in the thread that owns the engine.

    The loop retries recoverable device failures, and requests keep their tokens. Any other error ends the loop. ``port`` is
    the engine's end of the connection.
    """

    def __init__(self, engine: Engine, port: EngineThread | _ChildPort) -> None:
        self._engine = engine
        self._port = port
        self._sample_of: dict[int, tuple[int, int]] = {}
        """Request key and sample number of each engine request that hasn't ended, by request id."""
        self._request_ids: dict[int, list[int]] = {}
        """Ids of the engine requests that haven't ended, by key."""
        self._events: list[EngineEvent] = []
        self._step_s = 0.0
        self._snapshot_time = float("-inf")
        self._compilers = GuideCompilers(engine.compile_guide)

    def serve_until_stopped(self) -> None:
        """Serve until the server sends :class:`StopEngine`. Raises the error that ended the engine."""
        engine = self._engine
        while True:
            is_idle = not engine.has_unfinished
            if is_idle and self._compilers.has_waiting:
                self._compilers.wait(_GUIDE_POLL_INTERVAL_S)
            elif is_idle:
                self._send_events(is_idle=True)
            for command in self._port.receive_commands(block=is_idle and not self._compilers.has_waiting):
                if isinstance(command, StopEngine):
                    self._stop()
                    return
                self._execute(command)
            self._compilers.admit_compiled()
            if engine.has_unfinished:
                began = time.perf_counter()
                outputs = engine.step_or_retry()
                self._step_s += time.perf_counter() - began
                for output in outputs:
                    self._queue_output(output)
            self._send_events()

    def _send_events(self, *, is_idle: bool = False) -> None:
        """Send the queued events, and a snapshot if the last one is old or the engine is about to wait for commands."""
        now = time.perf_counter()
        if is_idle or now - self._snapshot_time >= _SNAPSHOT_INTERVAL_S:
            self._events.append(EngineSnapshot(self._engine.stats, self._engine.load, self._step_s))
            self._snapshot_time = now
        if self._events:
            self._port.send(self._events)
            self._events = []

    def _execute(self, command: EngineCommand) -> None:
        match command:
            case SubmitRequest():
                # Compilation takes up to seconds; a thread compiles while other requests run.
                if not self._compilers.delay(command.key, command.params, functools.partial(self._admit, command)):
                    self._admit(command, None)
            case AbortRequest(key):
                self._compilers.drop(key)
                for request in self._request_ids.pop(key, ()):
                    del self._sample_of[request]
                    self._engine.abort(request)

    def _admit(self, command: SubmitRequest, error: BaseException | None) -> None:
        """Add a request to the engine, or refuse it with the ``error`` of its guide."""
        key, tokens, params, priority, media = command
        if error is not None:
            self._events.append(RequestRefused(key, str(error), isinstance(error, BusyError)))
            return
        try:
            first = self._engine.add_request(tokens, params, priority=priority, media=media)
        except DeviceError:
            raise
        except OutriderError as refused:
            self._events.append(RequestRefused(key, str(refused)))
            return
        ids = list(range(first, first + params.n))
        self._request_ids[key] = ids
        self._sample_of.update({request: (key, sample) for sample, request in enumerate(ids)})
        self._events.append(RequestAdmitted(key))

    def _queue_output(self, output: StepOutput) -> None:
        key_and_sample = self._sample_of.get(output.request_id)
        if key_and_sample is None:  # the request was aborted
            return
        key, sample = key_and_sample
        reason = output.finish_reason
        if reason is not None:
            del self._sample_of[output.request_id]
            running = self._request_ids[key]
            running.remove(output.request_id)
            if not running:
                del self._request_ids[key]
        self._events.append(SampleOutput(key, sample, output))

    def _stop(self) -> None:
        """Abort all requests, wait until the device is idle, and send the last events."""
        self._compilers.close()
        for key in list(self._request_ids):
            self._execute(AbortRequest(key))
        self._engine.drain()
        self._engine.step()
        self._send_events(is_idle=True)


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
        self._end_open_requests(EngineGone("the engine was closed"), expected=True)
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
            self.send([EngineInfo.from_engine(engine)])
            EngineLoop(engine, self).serve_until_stopped()
        except BaseException as error:
            self.send([EngineFailed(f"{type(error).__name__}: {error}")])


_RECEIVE_BYTES = 1 << 18
_MAX_FRAME_BYTES = 1 << 40
"""Maximum bytes of text and blobs of a message. Images are blobs of any size: both ends are the same program."""
_SOCKET_BUFFER_BYTES = 8 << 20
_EXIT_TIMEOUT_S = 10.0
"""Seconds that a child process has to exit after it was told to end. Then it is killed."""


class EngineProcess(EngineClient, asyncio.Protocol):
    """A client that runs the engine in a child process, whose children run the other ones of ``tensor`` x ``data`` ranks. All
    end when this process ends, even if it is killed.

    ``make`` is pickled, and loads the engine of a rank, as for :func:`~outrider.cli.options.rank_processes.first_rank`.
    ``expert``: the ranks divide a mixture's experts. The children ignore SIGINT and SIGTERM, which a terminal sends to the
    whole process group: only :meth:`close` ends them. The client is the asyncio protocol of the server's end of the socket
    pair.
    """

    def __init__(self, make: Callable[..., Engine], *, tensor: int = 1, data: int = 1, expert: bool = False) -> None:
        check_expert_parallel(expert, tensor, data)
        super().__init__()
        self._open_engine = functools.partial(first_rank, make, tensor, data, expert=expert)
        self._first = ChildRanks(first=0)
        self._frames = MessageDecoder(_MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child that runs rank 0; None before the start."""
        return next((process.pid for process in self._first.processes), None)

    async def close(self) -> None:
        """Send :class:`StopEngine` to rank 0, and wait until its process has exited. If it doesn't in time, it is killed."""
        self._end_open_requests(EngineGone("the engine was closed"), expected=True)
        if self._transport is not None and not self._transport.is_closing():
            self._send(StopEngine())
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._first.wait_or_kill, _EXIT_TIMEOUT_S)
        if self._transport is not None:
            self._transport.close()

    async def _launch(self) -> None:
        server_end, child_end = socket.socketpair()
        for end in (server_end, child_end):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        # Not in an executor: the kernel ends the child when the thread that started it ends. The call takes milliseconds.
        descriptor = child_end.fileno()
        call = functools.partial(_serve, self._open_engine, descriptor)
        self._first.processes.append(start_call(call, pass_fds=(descriptor,)))
        child_end.close()
        server_end.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=server_end)
        self._transport = transport

    def _send(self, command: EngineCommand) -> None:
        assert self._transport is not None
        self._transport.write(encode_messages([command]))

    def data_received(self, data: bytes) -> None:
        """Handle the events of the child's complete frames. Called by asyncio."""
        for frame in self._frames.feed(data):
            self._handle(decode_messages(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the child's exit. Called by asyncio."""
        del exc
        if self.error is None:
            self._waiting = asyncio.get_running_loop().create_task(self._report_exit())

    async def _report_exit(self) -> None:
        (process,) = self._first.processes
        with suppress(subprocess.TimeoutExpired):
            await asyncio.get_running_loop().run_in_executor(None, process.wait, 1.0)
        code = process.returncode
        how = "hung up" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._end_open_requests(EngineGone(f"the engine's process {how}"))


# -- in the child ------------------------------------------------------------------------------------------------------


class _ChildPort:
    """The engine's end of the socket pair, in the child process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = MessageDecoder(_MAX_FRAME_BYTES)

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
            for frame in self._frames.feed(piece):
                commands += decode_messages(frame)
        return commands

    def send(self, events: Sequence[EngineEvent]) -> None:
        """Send ``events`` in one frame. Blocks while the socket's buffers are full."""
        self._socket.sendall(encode_messages(events))


def _serve(open_engine: Callable[[], AbstractContextManager[Engine]], descriptor: int) -> None:
    """Run the engine in the child: the target of :class:`EngineProcess`. ``descriptor``: the child's end of the socket."""
    end_with_parent()
    port = _ChildPort(socket.socket(fileno=descriptor))
    try:
        with open_engine() as engine:
            try:
                port.send([EngineInfo.from_engine(engine)])
                EngineLoop(engine, port).serve_until_stopped()
            except BaseException as error:
                _report_and_exit(port, error)
    except BaseException as error:
        _report_and_exit(port, error)


def _report_and_exit(port: _ChildPort, error: BaseException) -> None:
    """Send the ``error``, unless the server is gone, and end the process, whose children end with it.

    After a lost device or rank, the exit handlers of the vendor's runtime and the end of the ranks' groups may hang.
    """
    with suppress(OSError):
        port.send([EngineFailed(f"{type(error).__name__}: {error}")])
    os._exit(1)
