"""Data-parallel ranks of a decode server: the first is the server's own process, the others are children of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from outrider.cli.rank_processes import Joined, Place
from outrider.registry.children import deaf_from_the_start, end_with_parent, stay_deaf

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

_PATIENCE_S = 10.0
"""So long the others may take to end once the first one has."""


class DecodeRanks:
    """Ranks of one engine, as a scope that ends them.

    ``start`` makes a rank's engine; it travels to each child, and is given the ranks as ``joined``. ``transport``: what each
    rank opens its links by. Where a rank ends by itself, all do.
    """

    def __init__(self, start: Callable[..., Engine], transport: str, data: int) -> None:
        self._start, self._transport, self._data = start, transport, data
        self._stack = ExitStack()
        self._store: Any = None

    def __enter__(self) -> DecodeRanks:
        return self

    def engine(self) -> Engine:
        """The first rank's, or the only one."""
        if self._data == 1:
            return self._start()
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(1, self._data):
            given = (self._start, self._transport, _place(rank, self._data, self._store.port))
            process = context.Process(target=follow, args=given, name=f"outrider-rank-{rank}", daemon=True)
            with deaf_from_the_start():
                process.start()
            self._stack.callback(_end, process)
        joined = self._stack.enter_context(Joined(1, self._data, _place(0, self._data, self._store.port)))
        engine = self._start(joined=joined)
        self._stack.callback(engine.close)
        return engine

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        self._store = None


def follow(start: Callable[..., Engine], transport: str, place: Place) -> None:
    """Another rank: does what the first one does, until that ends."""
    from outrider.apart.landing import RankPages
    from outrider.registry.transports import get_transport

    stay_deaf()
    end_with_parent()
    with Joined(1, place.world, place) as joined:
        engine = start(joined=joined)
        pages = RankPages(engine, get_transport(transport), rank=place.rank)
        try:
            engine.follow(pages.answer)
        finally:
            pages.close()


def _place(rank: int, world: int, port: int) -> Place:
    return Place(rank=rank, world=world, local=rank, address="127.0.0.1", port=port, store_is_elsewhere=True, pipe=None)


def _end(process: Any) -> None:
    process.join(_PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()
