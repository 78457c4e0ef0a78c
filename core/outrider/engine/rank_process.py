"""The main module of a follower rank's process: it creates the rank's engine and follows the engine of the process that
started it.
"""

from __future__ import annotations

import os
import sys
import threading

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.engine.engine import Engine
from outrider.engine.ranks.heartbeats import Heartbeat, KeyValueStore, RankWatch
from outrider.engine.ranks.processes import RankWork
from outrider.engine.ranks.ranks import Ranks
from outrider.engine.ranks.records import decode
from outrider.registry import Registry
from outrider.registry.backends import BackendSpec


def main() -> None:
    """Read the :class:`RankWork` record from standard input, load the engine and follow the first rank. The process ends with
    the first rank, or once standard input closes because the starter has ended.
    """
    work: RankWork = decode(sys.stdin.buffer.readline(), RankWork)
    threading.Thread(target=_end_with_input, daemon=True).start()
    backend = Registry().create(BackendSpec(name=work.backend, ordinal=work.rank if work.has_device_numbers else 0))
    store, watched = (TCPStore("127.0.0.1", work.port, is_master=False, wait_for_workers=False) for _ in range(2))
    ranks = Ranks(backend, work.parallel, rank=work.rank, store=store)
    key_value_store = KeyValueStore(watched, ranks.name)
    watch = RankWatch(ranks, key_value_store, speaks=False)
    watch.start()
    Engine.from_checkpoint(work.model_dir, backend, ranks=ranks, **work.loading.arguments()).follow()
    watch.stop()
    key_value_store.publish_heartbeat(ranks.rank, Heartbeat(number=0))
    ranks.close()


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
