"""Child processes on this host that run ranks."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Backend, ConfigError
from outrider.engine.ranks.heartbeats import KeyValueStore, RankWatch, is_stopped
from outrider.engine.ranks.ranks import ParallelConfig, Ranks
from outrider.registry import Registry
from outrider.registry.backends import BackendSpec, parse_spec
from outrider.registry.children import end_with_parent, start_call

_EXIT_TIMEOUT_S = 5.0
_STOPPED_CHECKS = 4
"""Checks in a row, at most a second apart, after which a stopped child counts as lost."""


def create_rank_store() -> TCPStore:
    """Create the key-value store of child ranks in this process, on a free port of this host."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class ChildRanks:
    """Child processes that run ranks of this host, in the order of the ranks."""

    def __init__(self, *, first: int = 1, stopped_checks: int = _STOPPED_CHECKS) -> None:
        """Create an object without processes. ``first``: the rank of the first process. ``stopped_checks``: calls of
        :meth:`find_lost` in a row after which a stopped process counts as lost.
        """
        self.processes: list[subprocess.Popen[bytes]] = []
        self._first = first
        self._stopped_checks = stopped_checks
        self._found_stopped: Counter[int] = Counter()
        """Checks in a row that found a rank's process stopped. A time would count the stops of this process too."""

    def find_lost(self) -> tuple[int, str] | None:
        """Return a rank whose process has failed or stays stopped, with a message; None while there is none."""
        for rank, process in enumerate(self.processes, self._first):
            code = process.poll()
            if code:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return rank, f"rank {rank} {how}"
        for rank, process in enumerate(self.processes, self._first):
            self._found_stopped[rank] = self._found_stopped[rank] + 1 if is_stopped(process.pid) else 0
            if self._found_stopped[rank] >= self._stopped_checks:
                return rank, f"rank {rank} hangs: a signal has stopped its process"
        return None

    def find_loss(self) -> str | None:
        """Return the message of :meth:`find_lost`."""
        lost = self.find_lost()
        return None if lost is None else lost[1]

    def wait_or_kill(self, timeout_s: float = 0.0) -> None:
        """Wait until all processes have ended. Those that are stopped, or that run after ``timeout_s``, are killed."""
        until = time.monotonic() + timeout_s
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0 if is_stopped(process.pid) else max(0.0, until - time.monotonic()))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()


def start_ranks(
    stack: ExitStack,
    backend: Backend,
    parallel: ParallelConfig,
    load_engine: Callable[[Ranks], Any],
    *,
    follow: Callable[[Any, int], None] | None = None,
    ends_process: bool = False,
) -> Ranks:
    """Start the follower ranks as child processes, and return the first rank, which uses ``backend`` in this process.

    The children end with this process, at the latest when ``stack`` is closed after the engine: those that are stopped, or
    still run after 5 seconds, are killed.

    ``load_engine`` is pickled, and returns the engine of a rank in each child. ``follow``, which is pickled too, runs the
    engine of the rank with this number until rank 0 ends; by default the engine follows. ``ends_process``: a lost rank ends
    this process also between two calls of the engine, and the children end with the thread that started them.
    Raises :class:`ConfigError` for a backend that isn't the first device.
    """
    index: int | None = backend.device.index  # torch annotates int, but the host device has None
    if index:
        raise ConfigError(f"{backend.label} isn't the first device, and ranks take devices in order; give the first one")
    spec, store, children = parse_spec(backend.spec), create_rank_store(), ChildRanks()
    with ExitStack() as scope:
        scope.callback(children.wait_or_kill, _EXIT_TIMEOUT_S)
        for rank in range(1, parallel.world):
            own = spec if index is None else replace(spec, ordinal=rank)
            call = partial(_follow_first_rank, load_engine, own, parallel, rank, store.port, follow, ends_process)
            children.processes.append(start_call(call, stdout=subprocess.DEVNULL))
        ranks = Ranks(backend, parallel, rank=0, store=store, find_lost_process=children.find_loss)
        scope.callback(ranks.close)  # before the wait: the other ranks' libraries wait for this one's
        if ends_process:
            watch = _start_watch(ranks, store.port, speaks=True)
            scope.callback(watch.stop)
        stack.enter_context(scope.pop_all())
    return ranks


def _connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _start_watch(ranks: Ranks, port: int, *, speaks: bool) -> RankWatch:
    watch = RankWatch(ranks, KeyValueStore(_connect(port), ranks.name), speaks=speaks)
    watch.start()
    return watch


def _follow_first_rank(
    load_engine: Callable[[Ranks], Any],
    backend_spec: BackendSpec,
    parallel: ParallelConfig,
    rank: int,
    port: int,
    follow: Callable[[Any, int], None] | None,
    ends_with_thread: bool,
) -> None:
    """Load the engine of a follower rank in its process, and follow the first rank until it ends."""
    if ends_with_thread:
        end_with_parent()
    ranks = Ranks(Registry().create(backend_spec), parallel, rank=rank, store=_connect(port))
    watch = _start_watch(ranks, port, speaks=False)
    engine = load_engine(ranks)
    if follow is None:
        engine.follow()
    else:
        follow(engine, rank)
    watch.stop()
    ranks.close()
