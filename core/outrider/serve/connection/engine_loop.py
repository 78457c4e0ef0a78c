"""The loop that runs an engine for a server: it receives commands before each iteration and sends events after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from outrider.device import DeviceError, OutriderError
from outrider.engine.engine import Engine
from outrider.engine.guides.grammars import GuideCompilers
from outrider.engine.requests.request import StepOutput
from outrider.serve.connection.engine_messages import (
    AbortRequest,
    EngineCommand,
    EngineEvent,
    EngineSnapshot,
    RequestAdmitted,
    RequestRefused,
    SampleOutput,
    StopEngine,
    SubmitRequest,
)

_MAX_CONSECUTIVE_FAILURES = 8
"""Number of consecutive recoverable device failures after which the loop raises the error."""
_GUIDE_POLL_INTERVAL_S = 0.01
"""Seconds between two checks for commands while all requests of the loop wait for their guides."""
_SNAPSHOT_INTERVAL_S = 0.1
"""Minimum seconds between two snapshots while the engine has requests."""


class EnginePort(Protocol):
    """The engine's end of the connection to its server."""

    def receive_commands(self, *, block: bool) -> Sequence[EngineCommand]:
        """Return the commands received since the last call, in order. With ``block`` wait for at least one.

        If the server is gone, the port returns :class:`StopEngine`.
        """

    def send(self, events: Sequence[EngineEvent]) -> None:
        """Send ``events`` to the server. Events that the server hasn't read yet are queued."""


class EngineLoop:
    """The loop of an engine that serves, in the thread that owns the engine.

    The loop retries recoverable device failures, and requests keep their tokens. Any other error ends the loop.
    """

    def __init__(self, engine: Engine, port: EnginePort) -> None:
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
        self._compiling: dict[int, tuple[SubmitRequest, Future[None]]] = {}
        """Requests whose guides are being compiled, by key."""

    def serve_until_stopped(self) -> None:
        """Serve until the server sends :class:`StopEngine`. Raises the error that ended the engine."""
        engine = self._engine
        failures = 0
        while True:
            is_idle = not engine.has_unfinished
            if is_idle and self._compiling:
                futures = [future for _, future in self._compiling.values()]
                wait(futures, timeout=_GUIDE_POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
            elif is_idle:
                self._send_events(is_idle=True)
            for command in self._port.receive_commands(block=is_idle and not self._compiling):
                if isinstance(command, StopEngine):
                    self._stop()
                    return
                self._execute(command)
            self._admit_compiled()
            if engine.has_unfinished:
                began = time.perf_counter()
                try:
                    outputs = engine.step()
                    failures = 0
                except DeviceError as error:
                    failures += 1
                    if error.device_lost or failures >= _MAX_CONSECUTIVE_FAILURES:
                        raise
                    continue
                finally:
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
                compiled = self._compilers.start_compilation(command.params)
                if compiled is None:
                    self._admit(command)
                else:
                    self._compiling[command.key] = (command, compiled)
            case AbortRequest(key):
                self._compiling.pop(key, None)
                for request in self._request_ids.pop(key, ()):
                    del self._sample_of[request]
                    self._engine.abort(request)

    def _admit(self, command: SubmitRequest) -> None:
        key, tokens, params, priority, media = command
        try:
            first = self._engine.add_request(tokens, params, priority=priority, media=media)
        except DeviceError:
            raise
        except OutriderError as error:
            self._events.append(RequestRefused(key, str(error)))
            return
        ids = list(range(first, first + params.n))
        self._request_ids[key] = ids
        self._sample_of.update({request: (key, sample) for sample, request in enumerate(ids)})
        self._events.append(RequestAdmitted(key))

    def _admit_compiled(self) -> None:
        """Admit each request whose guide has been compiled, and refuse each request whose guide can't be compiled."""
        for key, (command, compiled) in list(self._compiling.items()):
            if not compiled.done():
                continue
            del self._compiling[key]
            error = compiled.exception()
            if error is None:
                self._admit(command)
            else:
                self._events.append(RequestRefused(key, str(error)))

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
        self._events.append(SampleOutput.from_step(key, sample, output))

    def _stop(self) -> None:
        """Abort all requests, wait until the device is idle, and send the last events."""
        self._compilers.close()
        for key in list(self._request_ids):
            self._execute(AbortRequest(key))
        self._engine.drain()
        self._engine.step()
        self._send_events(is_idle=True)
