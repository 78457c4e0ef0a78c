"""Ranks as host threads, each with its own torch.distributed state and current device, and with state that a tool adds.

A script that was written for one process per rank runs as a host thread here. Its process-wide state is saved while another
rank runs, and restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it
from torch.distributed import distributed_c10d as c10d

from outrider.device import CapabilityError, ConfigError, ProcessView
from outrider_sim.machine.host_scheduler import AttributeView
from outrider_sim.machine.queue import Action
from outrider_sim.ranks.distributed import NAME, SimProcessGroup, functional_collectives
from outrider_sim.torch_device.torch_slot import registered

if TYPE_CHECKING:
    from outrider_sim.backend import SimBackend
    from outrider_sim.machine.host_scheduler import HostScheduler


class SimStore(Store):
    """A key-value store for ranks that are host threads. A wait for a key lets other threads run and has no time limit.

    Raises `DeadlockError` if a thread waits for a key and no thread or operation can run.
    """

    def __init__(self, scheduler: HostScheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`; a string is encoded as UTF-8."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value of `key`. Waits until another thread has set the key."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number under `key`, which is 0 at first; return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the bytes under `key`, which are empty at first."""
        self._values[key] = self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if it holds `expected`, or if it is missing and `expected` is empty; return its value."""
        before = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._values.get(key, b"") == before:
            self.set(key, desired)
        return self._values.get(key, before)

    def check(self, keys: list[str]) -> bool:
        """Return True if all of `keys` have values."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Let the other threads run until all keys have values."""
        del timeout
        scheduler = self._scheduler
        missing = ", ".join(key for key in keys if key not in self._values)
        if missing:
            scheduler.turns(
                scheduler.thread, Action("store"), lambda: self.check(keys), f"{missing} in the store of the ranks"
            )

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys; waits for each."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Store one value per key, in order."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Delete `key` from the store. Return True if it had a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys that have values in the store."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the time limit: the store has no clock."""

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are implemented."""
        return True


_EVERYWHERE = f"cpu:{NAME},sim:{NAME}"


def _fresh_world() -> Any:
    """Return torch.distributed's state before it creates the first group."""
    return SimpleNamespace(
        default_pg=None,
        pg_map={},
        pg_names={},
        pg_group_ranks={},
        pg_backend_config={},
        group_count=0,
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        comms=[],
        pg_config_info=[],
    )


def run_ranks(scheduler: HostScheduler, bodies: Sequence[Callable[[], None]], views: Sequence[ProcessView]) -> None:
    """Run body r as rank r. Raises the error of the rank that failed first, and `ConfigError` unless each
    rank has a device.
    """
    machines = {machine.rank: machine for machine in scheduler.machines}
    missing = [rank for rank in range(len(bodies)) if rank not in machines]
    if missing:
        raise ConfigError(f"{len(bodies)} ranks need as many devices; make sim:{missing[0]} first")
    store = SimStore(scheduler)
    with _torch_distributed(store, len(bodies)):
        scheduler.ambient.extend((AttributeView(c10d, "_world"), *views))
        try:
            scheduler.run_threads(*(partial(_rank, machines[rank].sim.backend(), body) for rank, body in enumerate(bodies)))
        finally:
            del scheduler.ambient[-1 - len(views) :]


def _rank(backend: SimBackend, body: Callable[[], None]) -> None:
    c10d._world = _fresh_world()
    backend.become_current()
    body()


@contextmanager
def _torch_distributed(store: SimStore, size: int) -> Generator[None]:
    """Make torch.distributed create simulated groups inside the block, whichever backend a script names."""
    isolate: Any = getattr(torch_c10d(), "_set_thread_isolation_mode", None)
    if isolate is None:
        raise CapabilityError("this torch can't keep the groups of threads apart, so ranks of a script can't be watched")
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "sim"])
    registration = registered()
    assert registration is not None, "the ranks' devices exist"
    registration.dispatcher.override_operators(functional_collectives())
    before = {name: getattr(c10d, name) for name in ("init_process_group", "new_group")}
    outside = {name: getattr(dist, name) for name in before}

    def init(*args: Any, **kwargs: Any) -> None:
        del args
        rank = registration.dispatcher.rank_device().machine.rank
        for name, mine in (("rank", rank), ("world_size", size)):
            if kwargs.get(name, -1) not in (-1, mine):
                raise ConfigError(f"init_process_group({name}={kwargs[name]}): this is rank {rank} of {size}")
        before["init_process_group"](backend=_EVERYWHERE, store=store, rank=rank, world_size=size)

    def new(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        del args
        kept = {key: kwargs[key] for key in ("use_local_synchronization", "group_desc", "sort_ranks") if key in kwargs}
        return before["new_group"](ranks, backend=_EVERYWHERE, **kept)

    owners: tuple[Any, ...] = (c10d, dist)
    for owner in owners:
        owner.init_process_group, owner.new_group = init, new
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        for name in before:
            setattr(c10d, name, before[name])
            setattr(dist, name, outside[name])


def torch_c10d() -> Any:
    """Return the C++ module of torch.distributed."""
    import torch

    return torch._C._distributed_c10d


def _create(options: Any, _: Any) -> SimProcessGroup:
    """Create a process group of the backend `simccl`; torch calls this function."""
    found = registered()
    if found is None or found.dispatcher.current.backend() is None:
        raise CapabilityError(f"{NAME} joins simulated devices; make one per rank and run the ranks as its host threads")
    backend = found.dispatcher.rank_device().backend()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return SimProcessGroup(backend, options.group_id, ranks, options.store)
