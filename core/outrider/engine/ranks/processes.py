"""The other ranks of an engine that Python code makes, as child processes of this host."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Backend, ConfigError
from outrider.engine.config import DecidedConfig, EngineConfig
from outrider.engine.ranks.codec import encode
from outrider.engine.ranks.parallel import ParallelConfig
from outrider.engine.ranks.ranks import Ranks

_END_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Arguments of :meth:`Engine.from_checkpoint` that all ranks have alike."""

    draft_dir: Path | None
    speculate: str
    config: EngineConfig | DecidedConfig | None
    through_transformers: bool
    trust_remote_code: bool
    quantized: str = "kernels"
    draft_output_head: str | None = None
    draft_vocabulary: Path | int | None = None

    def arguments(self) -> dict[str, Any]:
        """By name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a child process is to do: be ``rank`` on a backend called ``backend``, with an engine of a checkpoint.

    ``numbered``: the backend's devices have numbers, and each rank takes its own.
    """

    rank: int
    parallel: ParallelConfig
    port: int
    backend: str
    numbered: bool
    model_dir: Path
    loading: Loading


class RankProcesses:
    """Processes that follow the engine of this one. They end with it, and with :meth:`close`."""

    def __init__(self, backend: Backend, parallel: ParallelConfig, model_dir: Path, loading: Loading) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, parallel.world):
                child = subprocess.Popen(
                    [sys.executable, "-m", "outrider.engine.rank_process"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
                self._children.append(child)
                index: int | None = backend.device.index  # torch types it as a number, and the host has none
                work = Work(
                    rank=rank,
                    parallel=parallel,
                    port=store.port,
                    backend=backend.name,
                    numbered=index is not None,
                    model_dir=Path(model_dir).resolve(),
                    loading=loading,
                )
                assert child.stdin is not None
                # It stays open: a child ends when it's closed, however this process ends.
                child.stdin.write(encode(work, Work).encode() + b"\n")
                child.stdin.flush()
            self.ranks = Ranks(backend, parallel, rank=0, store=store)
            self.ranks.who_ended = self._who_ended
        except BaseException:
            self.close()
            raise

    def _who_ended(self) -> str | None:
        for rank, child in enumerate(self._children, start=1):
            code = child.poll()
            if code is not None and code < 0:
                return f"rank {rank} was ended by {signal.Signals(-code).name}"
            if code:
                return f"rank {rank} ended with exit code {code}"
        return None

    def close(self) -> None:
        """Wait until they have ended, as they do behind the engine's end; those that don't are ended. Allowed twice."""
        for child in self._children:
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdin is not None and not child.stdin.closed:
                child.stdin.close()


def check_one_rank(parallel: ParallelConfig | None) -> None:
    """Raise :class:`ConfigError` for several ranks, where a model is there already."""
    if parallel is not None and parallel.world > 1:
        raise ConfigError(
            f"parallel is {parallel}, and the model is loaded here already, whole; other ranks read their own parts: use "
            "Engine.from_checkpoint(..., parallel=...), or make an engine on each rank and give it ranks="
        )


def start_ranks(
    backend: Backend,
    parallel: ParallelConfig,
    model_dir: Path,
    loading: Loading,
    *,
    given: Ranks | None,
    builders: object,
) -> RankProcesses:
    """Start the others. Raises :class:`ConfigError` for what other processes can't be told."""
    if given is not None:
        raise ConfigError("ranks and parallel are both given; parallel starts ranks, and these are there already")
    if builders:
        raise ConfigError(
            "builders are objects of this process, which other ranks don't have; install the proposer as a plugin"
        )
    if backend.device.index:
        raise ConfigError(f"{backend.label} isn't the first device, and ranks take the devices in order; give the first one")
    return RankProcesses(backend, parallel, model_dir, loading)
