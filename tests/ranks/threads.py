"""Ranks as threads of one process, on the host with gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore

from outrider import Engine
from outrider.engine.ranks.ranks import ParallelConfig, Ranks
from outrider_cpu.backend import CpuBackend

_LIMIT_S = 120


def run(parallel: ParallelConfig, make: Callable[[Ranks], Engine], lead: Callable[[Engine], Any]) -> Any:
    """What ``lead`` returns for the first rank's engine; ``make`` makes each rank's, the others follow."""

    def body(ranks: Ranks) -> Any:
        engine = make(ranks)
        if engine.follows:
            engine.follow()
            return None
        found = lead(engine)
        engine.close()
        return found

    return run_bodies(parallel, body)[0]


def run_bodies(parallel: ParallelConfig, body: Callable[[Ranks], Any]) -> list[Any]:
    """What ``body`` returns on each rank. Raises what the first of them raised that failed, behind the others."""
    found, errors = failing(parallel, body)
    if errors:
        raise errors[min(errors)]
    return [found[rank] for rank in range(parallel.world)]


def failing(parallel: ParallelConfig, body: Callable[[Ranks], Any]) -> tuple[dict[int, Any], dict[int, BaseException]]:
    """What ``body`` returns and what it raises, by rank."""
    store = HashStore()
    found: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run_one(rank: int) -> None:
        ranks = None
        try:
            ranks = Ranks(CpuBackend(), parallel, rank=rank, store=store)
            found[rank] = body(ranks)
        except BaseException as error:
            errors[rank] = error
        finally:
            if ranks is not None:
                ranks.close()

    threads = [
        threading.Thread(target=run_one, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(parallel.world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
        if thread.is_alive():
            raise AssertionError(f"{thread.name} hangs") from next(iter(errors.values()), None)
    return found, errors
