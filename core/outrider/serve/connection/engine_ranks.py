"""An engine on several ranks of this host, with one child process for each rank. The server talks to the first rank."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

from outrider.cli.options.rank_processes import Joined
from outrider.cli.terminal.environment import become_rank
from outrider.engine.engine import Engine
from outrider.registry.children import end_with_parent, ignore_interruptions, interruptions_blocked_in_children
from outrider.serve.connection.engine_client import EngineGone
from outrider.serve.connection.engine_process import EngineProcess, join_or_kill


def create_engine_client(make: Callable[..., Engine], *, tensor: int = 1, data: int = 1) -> EngineProcess:
    """Return a client of an engine in one child process, or of ``tensor`` x ``data`` ranks in one child process each."""
    return EngineProcess(make) if tensor * data == 1 else EngineRanks(make, tensor=tensor, data=data)


class EngineRanks(EngineProcess):
    """A client that runs ``tensor`` x ``data`` ranks of one engine in child processes, which end when this process ends.

    ``make`` is pickled and called in each child. It gets the ranks as the keyword argument ``joined``
    (:class:`~outrider.cli.options.rank_processes.Joined`) and returns the engine of its rank. If one rank ends, all ranks
    end.
    """

    def __init__(self, make: Callable[..., Engine], *, tensor: int = 1, data: int = 1) -> None:
        self._make_rank = make
        self._tensor, self._data = tensor, data
        self._store: Any = None
        self._followers: list[Any] = []
        super().__init__(make)
        self.add_loss_listener(self._lost)

    async def close(self) -> None:
        """Tell the ranks to end and wait until all have exited. Ranks that don't exit in time are killed."""
        await super().close()
        for process in self._followers:
            await join_or_kill(process)
        self._store = None

    async def _launch(self) -> None:
        # In a thread: the import of torch takes a second, which would block the event loop.
        self._store = await asyncio.get_running_loop().run_in_executor(None, _create_store)
        ranks = functools.partial(_Rank, self._make_rank, self._tensor, self._data, port=self._store.port)
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

    def __init__(self, make: Callable[..., Engine], tensor: int, data: int, *, rank: int, port: int) -> None:
        self._make, self._tensor, self._data, self._rank, self._port = make, tensor, data, rank, port

    def engine(self) -> Engine:
        """Create and return the engine of rank 0. The process group lasts until the process ends."""
        become_rank(rank=self._rank, world=self._tensor * self._data, port=self._port)
        return self._make(joined=Joined(self._tensor, self._data))

    def follow(self) -> None:
        """Create this rank's engine and repeat the decisions of rank 0 until rank 0 ends."""
        ignore_interruptions()
        end_with_parent()
        become_rank(rank=self._rank, world=self._tensor * self._data, port=self._port)
        with Joined(self._tensor, self._data) as joined:
            self._make(joined=joined).follow()


def _create_store() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
