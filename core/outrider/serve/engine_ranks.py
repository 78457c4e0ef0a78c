"""An engine on several ranks of this host: each a process of its own, the first of which serves."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

from outrider.cli.environment import become_rank
from outrider.cli.rank_processes import Joined
from outrider.engine.engine import Engine
from outrider.registry.children import deaf_from_the_start, end_with_parent, stay_deaf
from outrider.serve.client import EngineGone
from outrider.serve.engine_process import EngineProcess

_PATIENCE_S = 10.0
"""So long ranks may take to end once the first one has."""


def engine_process(make: Callable[..., Engine], *, tensor: int = 1, data: int = 1) -> EngineProcess:
    """An engine in a process, or on several ranks with a process each."""
    return EngineProcess(make) if tensor * data == 1 else EngineRanks(make, tensor=tensor, data=data)


class EngineRanks(EngineProcess):
    """Runs ``tensor`` times ``data`` ranks of one engine in child processes, which end when this one does.

    ``make`` returns a rank's engine; it's pickled, called in each child, and given the ranks as ``joined``
    (:class:`~outrider.cli.rank_processes.Joined`). Where one rank ends by itself, all do, and the engine is gone.
    """

    def __init__(self, make: Callable[..., Engine], *, tensor: int = 1, data: int = 1) -> None:
        self._every = make
        self._tensor, self._data = tensor, data
        self._store: Any = None
        self._followers: list[Any] = []
        super().__init__(make)
        self.on_gone(self._lost)

    async def close(self) -> None:
        """Tell the ranks to end, and wait for that; kill those that don't."""
        await super().close()
        loop = asyncio.get_running_loop()
        for process in self._followers:
            await loop.run_in_executor(None, process.join, _PATIENCE_S)
            if process.is_alive():
                process.kill()
                await loop.run_in_executor(None, process.join)
        self._store = None

    async def _launch(self) -> None:
        # Importing torch takes a second, in which the event loop shouldn't stand still.
        self._store = await asyncio.get_running_loop().run_in_executor(None, _meeting_place)
        ranks = functools.partial(_Rank, self._every, self._tensor, self._data, port=self._store.port)
        context = multiprocessing.get_context("spawn")
        for rank in range(1, self._tensor * self._data):
            process = context.Process(target=ranks(rank=rank).follow, name=f"outrider-rank-{rank}", daemon=True)
            with deaf_from_the_start():
                process.start()
            self._followers.append(process)
        self._make = ranks(rank=0).engine
        await super()._launch()

    def _lost(self, error: EngineGone) -> None:
        del error
        for process in self._followers:
            process.kill()


class _Rank:
    """One rank, as its process makes it. Before that, it's what travels there."""

    def __init__(self, make: Callable[..., Engine], tensor: int, data: int, *, rank: int, port: int) -> None:
        self._make, self._tensor, self._data, self._rank, self._port = make, tensor, data, rank, port

    def engine(self) -> Engine:
        """The engine of the first rank. The ranks part when the process ends."""
        become_rank(rank=self._rank, world=self._tensor * self._data, port=self._port)
        return self._make(joined=Joined(self._tensor, self._data))

    def follow(self) -> None:
        """Do what the first rank does, until that ends."""
        stay_deaf()
        end_with_parent()
        become_rank(rank=self._rank, world=self._tensor * self._data, port=self._port)
        with Joined(self._tensor, self._data) as joined:
            self._make(joined=joined).follow()


def _meeting_place() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
