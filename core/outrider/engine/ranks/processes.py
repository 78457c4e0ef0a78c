"""Child processes on this host that run ranks, and those that run the follower ranks of an engine."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Backend, ConfigError
from outrider.engine.ranks.heartbeats import Heartbeat, KeyValueStore, RankWatch, is_stopped
from outrider.engine.ranks.ranks import ParallelConfig, Ranks
from outrider.registry import Registry
from outrider.registry.backends import BackendSpec
from outrider.registry.children import start_call

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

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            process.kill()

    def wait_or_kill(self, timeout_s: float = 0.0) -> None:
        """Wait until all processes have ended. Those that are stopped, or that run after ``timeout_s``, are killed."""
        until = time.monotonic() + timeout_s
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0 if is_stopped(process.pid) else max(0.0, until - time.monotonic()))
        self.kill()
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()


class RankProcesses:
    """The child processes of the follower ranks. They end if this process ends, at the latest in :meth:`close`."""

    def __init__(self, backend: Backend, parallel: ParallelConfig, load_engine: Callable[..., Any]) -> None:
        """Start the processes and join them. ``load_engine`` is pickled, and returns the engine of ``backend`` and ``ranks``
        in each process.
        """
        store = create_rank_store()
        self._children = ChildRanks()
        self._joined: Ranks | None = None
        try:
            spec = BackendSpec(name=backend.name)
            index: int | None = backend.device.index  # torch annotates int, but the host device has None
            for rank in range(1, parallel.world):
                own = spec if index is None else replace(spec, ordinal=rank)
                call = partial(_follow_first_rank, load_engine, own, parallel, rank, store.port)
                self._children.processes.append(start_call(call, stdout=subprocess.DEVNULL))
            self._joined = Ranks(backend, parallel, rank=0, store=store, find_lost_process=self._find_lost)
        except BaseException:
            self.close()
            raise

    @property
    def ranks(self) -> Ranks:
        """The first rank, in this process."""
        assert self._joined is not None, "the constructor joins the ranks or raises"
        return self._joined

    def _find_lost(self) -> str | None:
        lost = self._children.find_lost()
        return None if lost is None else lost[1]

    def close(self) -> None:
        """Release the graphs and close the groups of this rank, after the engine has ended; then wait for all children.

        Children that are stopped, or that still run after 5 seconds, are killed. Further calls do nothing.
        """
        try:
            if self._joined is not None:  # the other ranks' libraries wait for this one's
                self._joined.close()
        finally:
            self._children.wait_or_kill(_EXIT_TIMEOUT_S)


def _follow_first_rank(
    load_engine: Callable[..., Any], backend_spec: BackendSpec, parallel: ParallelConfig, rank: int, port: int
) -> None:
    """Load the engine of a follower rank in its process, and follow the first rank until it ends."""
    backend = Registry().create(backend_spec)
    store, watched = (TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(2))
    ranks = Ranks(backend, parallel, rank=rank, store=store)
    key_value_store = KeyValueStore(watched, ranks.name)
    watch = RankWatch(ranks, key_value_store, speaks=False)
    watch.start()
    load_engine(backend=backend, ranks=ranks).follow()
    watch.stop()
    key_value_store.publish_heartbeat(rank, Heartbeat(number=0))
    ranks.close()


def check_one_rank(parallel: ParallelConfig | None) -> None:
    """Raise :class:`ConfigError` if ``parallel`` has several ranks, for an engine whose model is already loaded."""
    if parallel is not None and parallel.world > 1:
        raise ConfigError(
            f"parallel is {parallel}, and the model is loaded here already, whole; other ranks read their own parts: use "
            "Engine.from_checkpoint(..., parallel=...), or make an engine on each rank and give it ranks="
        )


def start_ranks(
    backend: Backend,
    parallel: ParallelConfig,
    load_engine: Callable[..., Any],
    *,
    given: Ranks | None,
    builders: object,
) -> RankProcesses:
    """Start the follower ranks, which call ``load_engine``. Raises :class:`ConfigError` for arguments that other processes
    can't receive.
    """
    if given is not None:
        raise ConfigError("ranks and parallel are both given; parallel starts ranks, and these are there already")
    if builders:
        raise ConfigError(
            "builders are objects of this process, which other ranks don't have; install the proposer as a plugin"
        )
    if backend.device.index:
        raise ConfigError(f"{backend.label} isn't the first device, and ranks take the devices in order; give the first one")
    return RankProcesses(backend, parallel, load_engine)
