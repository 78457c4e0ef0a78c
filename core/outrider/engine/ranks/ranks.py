"""Ranks: one rank among those that run an engine together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import Backend, CollectiveError, Decision, DeviceStuck, Group, OutriderError
from outrider.engine.ranks.codec import decode, encode
from outrider.engine.ranks.parallel import ParallelConfig
from outrider.engine.ranks.records import RanksDiffer, RanksFailed, RecordLog, came
from outrider.engine.ranks.room import GONE, Room
from outrider.engine.requests.hand_over import HandOver
from outrider.model import ModelRanks

_START_S = 600.0
"""Seconds that ranks wait for each other while they start: one may read its weights from a slower disk."""
_LIBRARY_S = 120.0
_HEAR_S = 1.0
"""So long a rank that lost the others waits to hear who failed before it says so itself, unless it's told otherwise."""
_ASK_S = 0.05


@dataclass(frozen=True, slots=True)
class _Word:
    """What a rank says where all meet: ``what`` they meet for, and its value as text. ``what`` None: why it failed."""

    what: str | None
    said: str


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
        self._engines = itertools.count()
        self._meetings = 0
        self._leaving = itertools.count()
        self.meet("the start", str(config), str)  # a group waits no longer than an iteration may
        self.tensor, self.data = self._group("tensor", tensor), self._group("data", data)
        self.model = ModelRanks(config.shards(rank), tensor=self.tensor, data=self.data)
        self.handed_over: dict[str, HandOver] = {}
        """This rank's part of requests that left an engine, by a key that all ranks know, until another engine took them."""
        self.hears_s = _HEAR_S
        """So long it waits to hear who failed, where it lost the others."""
        self.who_ended: Callable[[], str | None] | None = None
        """Where this process started the others: what it knows of one that has ended."""

    def _group(self, kind: str, ranks: tuple[int, ...]) -> Group | None:
        if len(ranks) == 1:
            return None
        name = f"{self.name}/{kind}/{ranks[0]}"
        # Beside the host, calls are limited where the host waits for them; a library's own limit ends the process.
        beside = self.backend.capabilities.asynchronous and self.backend.control is None
        limit = max(self.config.timeout_s, _LIBRARY_S) if beside else self.config.timeout_s
        return self.backend.create_group(name, ranks=ranks, rank=self.rank, store=self.store, timeout_s=limit)

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

    def meet(self, what: str, value: Any, kind: Any) -> list[Any]:
        """Every rank's ``value``, of type ``kind``, in order of ranks; all of them call it, in the same order. For starts
        alone: it's slow.
        """
        number = self._meetings
        self._meetings += 1
        self._say(number, _Word(what, encode(value, kind)))
        found = []
        for rank in range(self.config.world):
            key = self._meeting(number, rank)
            if not came(self.store, key, _START_S):
                raise RanksFailed(f"rank {rank} didn't come to {what!r} within {_START_S:g} s")
            word: _Word = decode(self.store.get(key), _Word)
            if word.what is None:
                raise RanksFailed(word.said)
            if word.what != what:
                raise RanksDiffer(
                    f"rank {self.rank} is at {what!r}, and rank {rank} at {word.what!r}; start all of them alike"
                )
            found.append(decode(word.said, kind))
        return found

    def _say(self, number: int, word: _Word) -> None:
        self.store.set(self._meeting(number, self.rank), encode(word, _Word))

    def check_same(self, what: str, values: Mapping[str, object]) -> None:
        """Raise :class:`RanksDiffer` unless all ranks have the same ``values``; names the first one that differs."""
        theirs = self.meet(what, {name: repr(value) for name, value in values.items()}, Mapping[str, str])
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
            self._hear()
        said = f"rank {self.rank} failed: {type(error).__name__}: {error} ({self.progress})"
        try:
            first = self.room.fail(said)
            self._say(self._meetings, _Word(None, first))  # whoever waits for this rank needn't any more
        except RuntimeError:  # what a store raises
            first = f"{GONE}: {self.progress}"
        self.close()
        return first

    def _hear(self) -> None:
        """Wait until it's known who failed: most likely another rank."""
        if self.who_ended is None:
            with suppress(RuntimeError, OutriderError):
                self.room.hear(self.hears_s)
            return
        until = time.monotonic() + self.hears_s
        while self.room.failure is None and time.monotonic() < until:
            ended = self.who_ended()
            if ended is not None:
                self.room.fail(f"{ended}; rank {self.rank} waited for it: {self.progress}")
            else:
                time.sleep(_ASK_S)

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
