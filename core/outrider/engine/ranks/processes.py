"""RankProcesses: child processes on this host that run the follower ranks of an engine."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Backend, ConfigError
from outrider.engine.ranks.heartbeats import StopDetector, is_stopped
from outrider.engine.ranks.ranks import ParallelConfig, Ranks
from outrider.engine.ranks.records import encode
from outrider.engine.setup.loading import LoadingArguments

_EXIT_TIMEOUT_S = 5.0
_STOPPED_CHECKS = 4
"""Checks in a row, at most a second apart, after which a stopped child counts as lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """The work of a child process: its rank, and the checkpoint that its engine loads."""

    rank: int
    parallel: ParallelConfig
    port: int
    """The port of the parent's store on this host."""
    backend: str
    """The name of the backend."""
    has_device_numbers: bool
    """True if the backend's devices have numbers. Rank i then uses device i."""
    model_dir: Path
    loading: LoadingArguments


class RankProcesses:
    """The child processes of the follower ranks. They end if this process ends, at the latest in :meth:`close`."""

    def __init__(self, backend: Backend, parallel: ParallelConfig, model_dir: Path, loading: LoadingArguments) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._children: list[subprocess.Popen[bytes]] = []
        self._stop_detector = StopDetector(_STOPPED_CHECKS)
        self._joined: Ranks | None = None
        try:
            for rank in range(1, parallel.world):
                child = subprocess.Popen(
                    [sys.executable, "-m", "outrider.engine.rank_process"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
                self._children.append(child)
                index: int | None = backend.device.index  # torch annotates int, but the host device has None
                work = RankWork(
                    rank=rank,
                    parallel=parallel,
                    port=store.port,
                    backend=backend.name,
                    has_device_numbers=index is not None,
                    model_dir=Path(model_dir).resolve(),
                    loading=loading,
                )
                assert child.stdin is not None
                # The pipe stays open. A child ends once its pipe is closed, for example by the end of this process.
                with suppress(BrokenPipeError):  # the child has ended; joining the ranks reports it
                    child.stdin.write(encode(work, RankWork).encode() + b"\n")
                    child.stdin.flush()
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
        for rank, child in enumerate(self._children, start=1):
            code = child.poll()
            if code is not None and code < 0:
                return f"rank {rank} was ended by {signal.Signals(-code).name}"
            if code:
                return f"rank {rank} ended with exit code {code}"
        stopped = self._stop_detector.find(child.pid for child in self._children)
        return None if stopped is None else f"rank {stopped + 1} hangs: a signal has stopped its process"

    def close(self) -> None:
        """Release the graphs and close the groups of this rank, after the engine has ended; then wait for all children.

        Children that are stopped, or that still run after 5 seconds, are killed. Further calls do nothing.
        """
        try:
            if self._joined is not None:  # the other ranks' libraries wait for this one's
                self._joined.close()
        finally:
            self._end_children()

    def _end_children(self) -> None:
        for child in self._children:
            try:
                child.wait(0 if is_stopped(child.pid) else _EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdin is not None:
                with suppress(BrokenPipeError):
                    child.stdin.close()


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
    model_dir: Path,
    loading: LoadingArguments,
    *,
    given: Ranks | None,
    builders: object,
) -> RankProcesses:
    """Start the follower ranks. Raises :class:`ConfigError` for arguments that other processes can't receive."""
    if given is not None:
        raise ConfigError("ranks and parallel are both given; parallel starts ranks, and these are there already")
    if builders:
        raise ConfigError(
            "builders are objects of this process, which other ranks don't have; install the proposer as a plugin"
        )
    if backend.device.index:
        raise ConfigError(f"{backend.label} isn't the first device, and ranks take the devices in order; give the first one")
    return RankProcesses(backend, parallel, model_dir, loading)
