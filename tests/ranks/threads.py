"""Ranks as threads of one process, on the host with gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore

from outrider import Engine
from outrider.engine.ranks.parallel import ParallelConfig
from outrider.engine.ranks.ranks import Ranks
from outrider_cpu.backend import CpuBackend


def run(parallel: ParallelConfig, make: Callable[[Ranks], Engine], lead: Callable[[Engine], Any]) -> Any:
    """What ``lead`` returns for the first rank's engine; ``make`` makes each rank's, the others follow.

    Raises what failed first.
    """
    store = HashStore()
    found: dict[int, Any] = {}
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        ranks = None
        try:
            ranks = Ranks(CpuBackend(), parallel, rank=rank, store=store)
            engine = make(ranks)
            if rank:
                engine.follow()
            else:
                found[rank] = lead(engine)
                engine.close()
        except BaseException as error:
            errors.append((rank, error))
        finally:
            if ranks is not None:
                ranks.close()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(parallel.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0][1]
    return found[0]
