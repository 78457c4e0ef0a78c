"""Ranks: one rank among those that run an engine together."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from outrider.device import Backend, CollectiveError, Decision, DeviceStuck, Group, OutriderError
from outrider.engine.ranks.parallel import ParallelConfig
from outrider.engine.ranks.records import RanksDiffer, RanksFailed, RecordLog, came
from outrider.engine.ranks.room import Room
from outrider.engine.requests.hand_over import HandOver
from outrider.model import ModelRanks

_START_S = 600.0
"""Seconds that ranks wait for each other while they start: one may read its weights from a slower disk."""
_LOOK_S = 2.0
_HEAR_S = 1.0
"""So long a rank that lost the others waits to hear who failed before it says so itself."""


class Ranks:
    """One rank, and how it reaches the others.

    The first rank of all *leads*: an engine there takes the caller's requests, and decides. The others follow its records
    (:class:`RecordLog`); they read nothing of clocks, of memory or of when something arrived.
    """

    def __init__(self, backend: Backend, config: ParallelConfig, *, rank: int, store: Store, name: str = "outrider") -> None:
        """Join the other ranks; every rank does so, each with its own ``rank`` and the same ``store`` and ``name``.

        Blocks until all are there. Raises :class:`~outrider.device.CapabilityError` where the backend has no collectives, and
        :class:`~outrider.device.CollectiveError` where a rank doesn't come.
        """
        self.backend = backend
        self.config = config
        self.rank = rank
        self.store = store
        self.name = name
        self.data_rank, self.tensor_rank = config.place(rank)
        tensor = tuple(range(self.data_rank * config.tensor, (self.data_rank + 1) * config.tensor))
        data = tuple(range(self.tensor_rank, config.world, config.tensor))
        self.room = Room(store, name)
        self.tensor, self.data = self._group("tensor", tensor), self._group("data", data)
        self.model = ModelRanks(config.shards(rank), tensor=self.tensor, data=self.data)
        self.handed_over: dict[str, HandOver] = {}
        """This rank's part of requests that left an engine, by a key that all ranks know, until another engine took them."""
        self._engines = itertools.count()
        self._meetings = itertools.count()
        self._leaving = itertools.count()

    def _group(self, kind: str, ranks: tuple[int, ...]) -> Group | None:
        if len(ranks) == 1:
            return None
        name = f"{self.name}/{kind}/{ranks[0]}"
        return self.backend.create_group(name, ranks=ranks, rank=self.rank, store=self.store, timeout_s=self.config.timeout_s)

    @property
    def leads(self) -> bool:
        """Whether engines here take requests, and decide."""
        return self.rank == 0

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups that this rank is in."""
        return tuple(group for group in (self.tensor, self.data) if group is not None)

    def decide(self, name: str, value: Decision) -> None:
        """Note a decision that all ranks make alike, see :meth:`outrider.device.Group.decide`."""
        for group in self.groups:
            group.decide(name, value)

    def new_log(self) -> RecordLog:
        """The log of the next engine; every rank makes its engines in the same order."""
        return RecordLog(self.store, f"{self.name}/engine/{next(self._engines)}")

    def meet(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value``, in order of ranks; all of them call it, in the same order. For starts alone: it's slow."""
        number = next(self._meetings)
        self.store.set(self._meeting(number, self.rank), pickle.dumps((what, value)))  # type: ignore[arg-type]
        found = []
        for rank in range(self.config.world):
            key = self._meeting(number, rank)
            self._wait(key, f"rank {rank} didn't come to {what!r}")
            theirs, given = pickle.loads(self.store.get(key))
            if theirs != what:
                raise RanksDiffer(f"rank {self.rank} is at {what!r}, and rank {rank} at {theirs!r}; start all of them alike")
            found.append(given)
        return found

    def _wait(self, key: str, missing: str) -> None:
        """Wait for a key, unless a rank says meanwhile that it failed."""
        until = time.monotonic() + _START_S
        while not came(self.store, key, _LOOK_S):
            failure = self.room.failure
            if failure is not None:
                raise RanksFailed(failure)
            if time.monotonic() > until:
                raise RanksFailed(f"{missing} within {_START_S:g} s")

    def check_same(self, what: str, values: Mapping[str, object]) -> None:
        """Raise :class:`RanksDiffer` unless all ranks have the same ``values``; names the first one that differs."""
        theirs = self.meet(what, {name: repr(value) for name, value in values.items()})
        for rank, given in enumerate(theirs):
            for name, value in theirs[0].items():
                if given.get(name) != value:
                    raise RanksDiffer(
                        f"{what}: {name} is {value} on rank 0 and {given.get(name)} on rank {rank}; start all ranks with the "
                        "same options, files and software"
                    )

    def keep(self, handed: HandOver) -> HandOver:
        """Keep this rank's part of a request that leaves an engine, under the same key on every rank."""
        handed = replace(handed, key=f"{self.name}/request/{next(self._leaving)}")
        assert handed.key is not None
        self.handed_over[handed.key] = handed
        return handed

    def forget(self, handed: HandOver) -> None:
        """Another engine of these ranks has taken the request."""
        del self.handed_over[str(handed.key)]

    @property
    def progress(self) -> str:
        """How far this rank is, for errors."""
        return "; ".join(group.progress for group in self.groups)

    def fail(self, error: BaseException) -> str:
        """Tell the others that this rank can't go on; returns what the first one said that told them."""
        if isinstance(error, CollectiveError | DeviceStuck):
            with suppress(RuntimeError, OutriderError):  # most likely another rank's failure
                self.room.hear(_HEAR_S)
        first = self.room.fail(f"rank {self.rank} failed: {type(error).__name__}: {error} ({self.progress})")
        self.close()
        return first

    @contextmanager
    def starting(self) -> Generator[None]:
        """Around what each rank does alone before it follows or leads: the others needn't wait for one that fails."""
        try:
            yield
        except BaseException as error:
            first = self.fail(error)
            if isinstance(error, CollectiveError) and not first.startswith(f"rank {self.rank} "):
                raise RanksFailed(first) from error
            raise

    def close(self) -> None:
        """Leave the groups. Allowed twice."""
        for group in self.groups:
            group.close()

    def _meeting(self, number: int, rank: int) -> str:
        return f"{self.name}/meeting/{number}/{rank}"
