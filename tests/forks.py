"""Forked processes of this one, which runs without threads: several at a time, each with a mutant of its own."""

import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

RAISED = 70
"""Exit code of a fork whose function raised."""


class Fork:
    """A fork of this process that calls ``run`` with a pipe to write lines to, and exits with the code that ``run`` returns.

    Its output goes to the file ``output``.
    """

    def __init__(self, run, output=os.devnull):
        self._said = b""
        self._reader, writer = os.pipe()
        self.began = self._heard = time.monotonic()
        self._process = os.fork()
        if self._process == 0:
            _run_and_exit(run, writer, output)
        os.close(writer)

    @property
    def lines(self):
        """The lines that it has written."""
        return self._said.decode().splitlines()

    def exit_code(self):
        """Return the exit code, negative for a signal, and None while it runs."""
        done, status = os.waitpid(self._process, os.WNOHANG)
        while select.select([self._reader], [], [], 0)[0] and (piece := os.read(self._reader, 1 << 16)):
            self._said, self._heard = self._said + piece, time.monotonic()
        if not done:
            return None
        os.close(self._reader)
        return os.waitstatus_to_exitcode(status)

    def is_silent(self, seconds):
        """Return whether it has written nothing and waited for so long: a busy machine isn't silence."""
        states = []
        for file in Path(f"/proc/{self._process}/task").glob("*/stat"):
            with suppress(OSError):  # a thread that has ended meanwhile
                states.append(file.read_text().rpartition(") ")[2][:1])
        if "R" in states:
            self._heard = time.monotonic()
        return time.monotonic() - self._heard > seconds

    def kill(self):
        """Kill it. No other method may be called after this one, except ``lines``."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._reader)


def _run_and_exit(run, writer, output):
    code = RAISED
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        code = run(writer)
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_concurrently(jobs, at_a_time, seconds=1e9):
    """Start the ``jobs``, pairs (key, function), at most ``at_a_time`` at once; yield (key, outcome) as they end.

    A function starts a process and returns an object whose ``outcome()`` is None while the process runs. No job starts after
    ``seconds``. The calling process stays without threads, so that its children can be forks.
    """
    waiting, running, end = list(jobs), {}, time.monotonic() + seconds
    while waiting or running:
        if time.monotonic() > end:
            waiting.clear()
        while waiting and len(running) < at_a_time:
            key, start = waiting.pop(0)
            running[key] = start()
        for key, process in list(running.items()):
            outcome = process.outcome()
            if outcome is not None:
                del running[key]
                yield key, outcome
        time.sleep(0.02)
