"""The engine's side of a server: commands in, events out, one batch of them for an iteration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from outrider.device import DeviceError, OutriderError
from outrider.engine.engine import Engine
from outrider.engine.requests.request import StepOutput
from outrider.serve.messages import Abort, Admitted, Command, Event, Output, Refused, Snapshot, Stop, Submit

_FAILURES = 8
"""Recoverable failures in a row after which the engine is given up."""
_COMPILERS = 2
_GLANCE_S = 0.01
"""So often an engine that only waits for guides looks for commands."""
_SNAPSHOT_S = 0.1
"""Between two snapshots, while the engine works."""


class Port(Protocol):
    """The engine's end of the line to its server."""

    def take(self, *, block: bool) -> Sequence[Command]:
        """The commands that have come, in order. ``block``: wait for one. A server that is gone says :class:`Stop`."""

    def send(self, events: Sequence[Event]) -> None:
        """Tell the server. What it doesn't read in time is kept for it."""


class EngineLoop:
    """Runs an engine for a server, in the thread that owns the engine.

    Recoverable failures of the device are retried: requests keep their tokens. Any other error ends the loop.
    """

    def __init__(self, engine: Engine, port: Port) -> None:
        self._engine = engine
        self._port = port
        self._place: dict[int, tuple[int, int]] = {}  # of an engine's request: its key and which sample it is
        self._ids: dict[int, list[int]] = {}  # of a key: the requests that haven't ended
        self._events: list[Event] = []
        self._step_s = 0.0
        self._told = float("-inf")  # when the last snapshot was sent
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="outrider-guides")
        self._compiling: dict[int, tuple[Submit, Future[None]]] = {}  # requests whose guides are being compiled

    def run(self) -> None:
        """Serve until the server says stop. Raises the error that ended the engine."""
        engine = self._engine
        failures = 0
        while True:
            idle = not engine.has_unfinished
            if idle and self._compiling:
                wait([future for _, future in self._compiling.values()], timeout=_GLANCE_S, return_when=FIRST_COMPLETED)
            elif idle:
                self._tell(idle=True)
            for command in self._port.take(block=idle and not self._compiling):
                if isinstance(command, Stop):
                    self._end()
                    return
                self._obey(command)
            self._admit_compiled()
            if engine.has_unfinished:
                began = time.perf_counter()
                try:
                    outputs = engine.step()
                    failures = 0
                except DeviceError as error:
                    failures += 1
                    if error.device_lost or failures >= _FAILURES:
                        raise
                    continue
                finally:
                    self._step_s += time.perf_counter() - began
                for output in outputs:
                    self._note(output)
            self._tell()

    def _tell(self, *, idle: bool = False) -> None:
        """Send what has happened; a snapshot with it where the last one is old, or the engine is about to wait."""
        now = time.perf_counter()
        if idle or now - self._told >= _SNAPSHOT_S:
            self._events.append(Snapshot(self._engine.stats, self._engine.load, self._step_s))
            self._told = now
        if self._events:
            self._port.send(self._events)
            self._events = []

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                guide = command.params.guide
                if guide is None:
                    self._admit(command)
                else:  # compiling takes up to seconds: requests that run don't wait for it
                    compiled = self._compilers.submit(self._engine.compile_guide, guide)
                    self._compiling[command.key] = (command, compiled)
            case Abort(key):
                self._compiling.pop(key, None)
                for request in self._ids.pop(key, ()):
                    del self._place[request]
                    self._engine.abort(request)

    def _admit(self, command: Submit) -> None:
        key, tokens, params, priority, media = command
        try:
            first = self._engine.add_request(tokens, params, priority=priority, media=media)
        except DeviceError:
            raise
        except OutriderError as error:
            self._events.append(Refused(key, str(error)))
            return
        ids = list(range(first, first + params.n))
        self._ids[key] = ids
        self._place.update({request: (key, sample) for sample, request in enumerate(ids)})
        self._events.append(Admitted(key))

    def _admit_compiled(self) -> None:
        """Admit the requests whose guides are ready, or refuse them."""
        for key, (command, compiled) in list(self._compiling.items()):
            if not compiled.done():
                continue
            del self._compiling[key]
            error = compiled.exception()
            if error is None:
                self._admit(command)
            else:
                self._events.append(Refused(key, str(error)))

    def _note(self, output: StepOutput) -> None:
        place = self._place.get(output.request_id)
        if place is None:
            return
        key, sample = place
        reason = output.finish_reason
        if reason is not None:
            del self._place[output.request_id]
            left = self._ids[key]
            left.remove(output.request_id)
            if not left:
                del self._ids[key]
        ended = None if reason is None else str(reason)
        said = (output.logprobs, output.text, output.error, output.drafted, output.proposed, output.refused)
        self._events.append(Output(key, sample, output.tokens, ended, *said))

    def _end(self) -> None:
        """Abort what runs, and leave the device at rest."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        for key in list(self._ids):
            self._obey(Abort(key))
        self._engine.drain()
        self._engine.step()
        self._tell(idle=True)
