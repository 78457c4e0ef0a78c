"""An engine in a process of its own that is asked for one run after another, so that the runs of several can alternate."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

from outrider.device.errors import OutriderError
from outrider.registry.children import end_with_parent, kill_session, started
from outrider_bench.child import ChildFailed, how_it_ended
from outrider_bench.environment import with_variables
from outrider_bench.peers.measuring import Peer, Runs
from outrider_bench.peers.work import Work
from outrider_sanitizer.files import scratch_directory


class Session:
    """One child. Nothing runs in it between two answers."""

    def __init__(self, module: str, child: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.module = module
        self.about: Mapping[str, Any] = {}
        self._child = child
        self._errors = errors
        self._buffer = b""

    def ask(self, request: Mapping[str, object], *, limit_s: float) -> dict[str, Any]:
        """One run's result. Raises :class:`ChildFailed` where it failed, or the child with it."""
        assert self._child.stdin is not None
        if self._child.poll() is not None:
            self._fail()
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self.answer(limit_s=limit_s)

    def answer(self, *, limit_s: float) -> dict[str, Any]:
        """The next line of the child's. Raises :class:`ChildFailed`."""
        assert self._child.stdout is not None
        deadline = time.monotonic() + limit_s
        file = self._child.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([file], [], [], left)[0]:
                # A late answer must not be taken for the next run's, and the device is for the other engines.
                kill_session(self._child)
                self._child.wait()
                raise ChildFailed(f"{self.module} didn't answer within {limit_s:g} s; it was ended")
            more = os.read(file, 1 << 16)
            if not more:
                self._fail()
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise ChildFailed(str(found["failed"]))
        return found

    def _fail(self) -> None:
        code = self._child.wait()
        self._errors.seek(0)
        told = self._errors.read().decode(errors="replace").strip().splitlines()
        raise ChildFailed(how_it_ended(self.module, code, told))


@contextmanager
def session(
    module: str, work: Mapping[str, object], *, variables: Mapping[str, str], limit_s: float, log: Path | None = None
) -> Generator[Session]:
    """Start ``python -m module`` and wait until its engine is ready. Leaving the scope ends it and what it has started.

    Beside ``work`` it's given ``scratch``: a directory that is removed behind the scope. It couldn't remove one itself: it's
    killed. ``log``: a file for what it prints. Raises :class:`ChildFailed`.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        scratch_directory("outrider-peers-") as scratch,
        tempfile.TemporaryFile() if log is None else log.open("w+b") as errors,
        started(
            [sys.executable, "-m", module, json.dumps({**work, "scratch": str(scratch)})],
            environment=with_variables(variables),
            stderr=errors,
            **pipes,
        ) as child,
    ):
        found = Session(module, child, errors)
        found.about = found.answer(limit_s=limit_s)
        yield found


def serve(opened: Callable[[Work, str, Path], AbstractContextManager[Peer]]) -> None:
    """What such a child calls: open the engine, then answer each line of standard input with one line on standard output.

    ``opened`` gets the work, what it speculates with, and a directory for checkpoints. Whatever the engine itself prints
    goes to standard error.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(found: Mapping[str, object]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    given = json.loads(sys.argv[1])
    began = time.perf_counter()
    try:
        work = Work.of(given)
        with opened(work, given["speculate"], Path(work.keep or given["scratch"])) as peer:
            runs = Runs(peer, work)
            began += peer.tuned_s
            taken = {"start_s": time.perf_counter() - began, "tuned_s": peer.tuned_s}
            say({"version": peer.version, "settings": peer.settings, **taken})
            for line in sys.stdin:
                say(_run(runs, json.loads(line)))
    except OutriderError as error:
        say({"failed": str(error)})


def _run(runs: Runs, request: Mapping[str, Any]) -> dict[str, object]:
    """One run; where it fails as it may, the next one is asked for all the same."""
    try:
        return runs.run(request)
    except OutriderError as error:
        return {"failed": str(error)}
