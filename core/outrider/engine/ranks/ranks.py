"""Ranks: their number and shares, this process's rank, and its connections to the other ranks of an engine.

Ranks publish the first failure in a key-value store, and agree on the config of a new engine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

from outrider.device import (
    Backend,
    CapabilityError,
    CollectiveError,
    ConfigError,
    Decision,
    DeviceStuck,
    Group,
    OutriderError,
    StepMode,
)
from outrider.engine.config import Choice, DecidedConfig
from outrider.engine.ranks.heartbeats import STORE_LOST, Heartbeat, KeyValueStore, process_name
from outrider.engine.ranks.records import RanksDiffer, RanksFailed, decode, encode, wait_for_key
from outrider.engine.requests.hand_over import HandOver
from outrider.errors import shown
from outrider.model import LanguageModel, ModelRanks, Shard, Shards
from outrider.speculative.proposer import Proposer

MAX_RANKS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The ranks of an engine. A rank is one device with its own host thread. There are ``tensor * data`` ranks.

    Raises :class:`ConfigError` for invalid values. All ranks share the MLPs: each layer gathers the tokens of all groups and
    scatters the results.
    """

    tensor: int = 1
    """Tensor parallelism: the ranks of a group, which share the attention heads and the vocabulary of the same requests."""
    data: int = 1
    """Data parallelism: the number of groups. Each group has its own requests and KV cache."""
    expert: bool = False
    """Expert parallelism: True if all ranks divide the routed experts of a mixture, False if each rank has a slice of every
    expert. The number of ranks divides the number of experts.
    """
    timeout_s: float = 8.0
    """Seconds after which a rank counts another one as lost. An iteration must not take longer."""

    def __post_init__(self) -> None:
        for name in ("tensor", "data"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANKS:
                raise ConfigError(f"{name} is {shown(value)}; expected a whole number of ranks, 1 to {MAX_RANKS}")
        if not isinstance(self.expert, bool):
            raise ConfigError(f"expert is {shown(self.expert)}; expected True or False")
        if self.expert and self.world == 1:
            raise ConfigError(
                "expert is True, and there is one rank; expected several ranks, among which experts are divided"
            )
        seconds = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ConfigError(f"timeout_s is {shown(seconds)}; expected a positive number of seconds")

    @property
    def world(self) -> int:
        """The total number of ranks."""
        return self.tensor * self.data

    def group_and_index(self, rank: int) -> tuple[int, int]:
        """Return the data-parallel group of ``rank`` and its index in this group."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} isn't one of the {self.world} ranks of {self}; expected 0 to {self.world - 1}")
        return divmod(rank, self.tensor)

    def shards(self, rank: int) -> Shards:
        """Return the parts of the model's weights that ``rank`` holds."""
        _, tensor = self.group_and_index(rank)
        within = Shard(tensor, self.tensor)
        return Shards(attention=within, mlp=Shard(rank, self.world), vocabulary=within, divides_experts=self.expert)

    def __str__(self) -> str:
        return f"tensor {self.tensor}, data {self.data}{', experts divided' if self.expert else ''}"


_START_TIMEOUT_S = 600.0
"""Seconds that ranks wait for each other during the start. One of them may read its weights from a slower disk."""
_MIN_LIBRARY_TIMEOUT_S = 120.0
_FAILURE_WAIT_S = 1.0
"""Seconds that a rank waits for another rank's report of a failure before it reports the failure itself."""
_POLL_S = 0.05
_START_POLL_S = 1.0


_ExchangeMessage = tuple[str | None, str]
"""The subject of an exchange and a rank's encoded value, or None and the reason of the rank's failure."""


class Ranks:
    """The rank of this process, and its connections to the other ranks.

    The first rank *leads*: its engine accepts requests and makes all decisions. Follower ranks repeat the decisions of the
    decision log. Their decisions never depend on clocks, free memory or arrival times.
    """

    def __init__(
        self,
        backend: Backend,
        config: ParallelConfig,
        *,
        rank: int,
        store: Store,
        name: str = "outrider",
        find_lost_process: Callable[[], str | None] | None = None,
    ) -> None:
        """Join the other ranks. Every rank passes its own ``rank``, and the same ``store`` and ``name``.

        ``find_lost_process`` returns a message about a child process that ended or is stopped, if this process started the
        other ranks.
        Blocks until all ranks have joined. Raises :class:`~outrider.device.CapabilityError` if the backend has no
        collectives, and :class:`~outrider.device.CollectiveError` if a rank doesn't join in time.
        """
        self.backend = backend
        self.config = config
        self.rank = rank
        self.store = store
        self.name = name
        self.data_rank, self.tensor_rank = config.group_and_index(rank)
        tensor = tuple(range(self.data_rank * config.tensor, (self.data_rank + 1) * config.tensor))
        data = tuple(range(self.tensor_rank, config.world, config.tensor))
        self.key_value_store = KeyValueStore(store, name)
        self._find_lost_process = find_lost_process
        self._engines = itertools.count()
        self._num_exchanges = 0
        # Wait here for slow starts: the group's own timeout is that of an iteration.
        self.exchange("the start", str(config), str)
        self.tensor, self.data = self._group("tensor", tensor), self._group("data", data)
        self.model = ModelRanks(config.shards(rank), tensor=self.tensor, data=self.data)
        self.handed_over: dict[str, HandOver] = {}
        """This rank's part of each request between two engines, by a key that is equal on all ranks."""
        self.handed_over_numbers = itertools.count()
        self.failure_wait_s = _FAILURE_WAIT_S
        """Seconds that this rank waits for another rank's report after it lost the other ranks."""

    def _group(self, kind: str, ranks: tuple[int, ...]) -> Group | None:
        if len(ranks) == 1:
            return None
        name = f"{self.name}/{kind}/{ranks[0]}"
        # On an asynchronous device the watchdog limits each host wait. The library's own timeout ends the process, so it
        # has to be longer.
        is_asynchronous = self.backend.capabilities.asynchronous and self.backend.control is None
        timeout_s = max(self.config.timeout_s, _MIN_LIBRARY_TIMEOUT_S) if is_asynchronous else self.config.timeout_s
        return self.backend.create_group(name, ranks=ranks, rank=self.rank, store=self.store, timeout_s=timeout_s)

    @property
    def leads(self) -> bool:
        """Return True on the leading rank, whose engine accepts requests and makes decisions."""
        return self.rank == 0

    @property
    def groups(self) -> tuple[Group, ...]:
        """The collective groups that this rank is a member of."""
        return tuple(group for group in (self.tensor, self.data) if group is not None)

    def decide(self, name: str, value: Decision) -> None:
        """Report a decision that is equal on all ranks to each group, see :meth:`outrider.device.Group.decide`."""
        for group in self.groups:
            group.decide(name, value)

    def new_log_name(self) -> str:
        """Return the store's name of the next engine's decision log. Every rank creates its engines in the same order."""
        return f"{self.name}/engine/{next(self._engines)}"

    def exchange(self, what: str, value: Any, kind: Any) -> list[Any]:
        """Return the ``value`` of every rank, of type ``kind``, in rank order.

        All ranks call this method in the same order. It is slow and meant for the start. Raises :class:`RanksFailed` if a
        rank fails or doesn't call in time, and :class:`RanksDiffer` if a rank exchanges another subject than ``what``.
        """
        number = self._num_exchanges
        self._num_exchanges += 1
        self._publish(number, (what, encode(value, kind)))
        values = []
        for rank in range(self.config.world):
            key, until = self._exchange_key(number, rank), time.monotonic() + _START_TIMEOUT_S
            while not wait_for_key(self.store, key, _START_POLL_S):
                lost = None if self._find_lost_process is None else self._find_lost_process()
                if lost is not None or time.monotonic() > until:
                    raise RanksFailed(lost or f"rank {rank} didn't come to {what!r} within {_START_TIMEOUT_S:g} s")
            subject, text = decode(self.store.get(key), _ExchangeMessage)
            if subject is None:
                raise RanksFailed(text)
            if subject != what:
                raise RanksDiffer(f"rank {self.rank} is at {what!r}, and rank {rank} at {subject!r}; start all of them alike")
            values.append(decode(text, kind))
        return values

    def _publish(self, number: int, message: _ExchangeMessage) -> None:
        self.store.set(self._exchange_key(number, self.rank), encode(message, _ExchangeMessage))

    def check_same(self, what: str, values: Mapping[str, object]) -> None:
        """Raise :class:`RanksDiffer` with the first difference if ``values`` aren't equal on all ranks."""
        all_values = self.exchange(what, {name: repr(value) for name, value in values.items()}, Mapping[str, str])
        for rank, rank_values in enumerate(all_values):
            for name, value in all_values[0].items():
                if rank_values.get(name) != value:
                    raise RanksDiffer(
                        f"{what}: {name} is {value} on rank 0 and {rank_values.get(name)} on rank {rank}; start all ranks "
                        "with the same options, files and software"
                    )

    @property
    def progress(self) -> str:
        """The last decision and collective of this rank, for error messages."""
        return "; ".join(group.progress for group in self.groups)

    def heartbeat(self, number: int) -> Heartbeat:
        """Return this rank's heartbeat with this number."""
        return Heartbeat(
            number=number,
            has_decided=any(group.last_decision is not None for group in self.groups),
            calls=sum(group.call_count for group in self.groups),
            process=process_name(),
            progress=self.progress,
        )

    def report_failure(self, error: BaseException) -> str:
        """Report to the other ranks that this rank fails, and close the groups. Return the first report of any rank."""
        if isinstance(error, CollectiveError | DeviceStuck):
            with suppress(RuntimeError, OutriderError):  # the store may be gone
                self._wait_for_failure()
        report = f"rank {self.rank} failed: {type(error).__name__}: {error} ({self.progress})"
        try:
            first = self.key_value_store.publish_failure(report)
            self._publish(self._num_exchanges, (None, first))  # ends the wait of ranks in meet()
        except RuntimeError:  # raised by the store
            first = f"{STORE_LOST}: {self.progress}"
        with suppress(OutriderError):  # the first failure is the one to report
            self.close()
        return first

    def _wait_for_failure(self) -> None:
        """Wait for a report of the original failure, which most likely happened on another rank, or find that rank."""
        until = time.monotonic() + self.failure_wait_s
        before = self._other_heartbeats()
        while self.key_value_store.failure is None and time.monotonic() < until:
            lost = None if self._find_lost_process is None else self._find_lost_process()
            said = None if lost is None else f"{lost}; rank {self.rank} waited for it: {self.progress}"
            said = said or self._late_rank(before)
            if said is not None:
                self.key_value_store.publish_failure(said)
            else:
                time.sleep(_POLL_S)

    def _other_heartbeats(self) -> dict[int, Heartbeat]:
        beats = {rank: self.key_value_store.last_heartbeat(rank) for rank in range(self.config.world) if rank != self.rank}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def _late_rank(self, before: Mapping[int, Heartbeat]) -> str | None:
        """Return a message about a rank that made fewer calls than this one and gave a heartbeat since ``before``; None
        without one.
        """
        own_calls, beats = self.heartbeat(0).calls, self._other_heartbeats()
        late = min(beats, key=lambda rank: beats[rank].calls, default=None)
        if late is None or beats[late].calls >= own_calls or beats[late].number <= before.get(late, beats[late]).number:
            return None
        return (
            f"rank {late} hangs: it lives, and didn't make the call that rank {self.rank} waited for "
            f"(limit {self.config.timeout_s:g} s); {beats[late].progress}"
        )

    @contextmanager
    def starting(self) -> Generator[None]:
        """Report an exception during the start of this rank, so that the other ranks stop waiting for it."""
        try:
            yield
        except BaseException as error:
            first = self.report_failure(error)
            if isinstance(error, CollectiveError) and not first.startswith(f"rank {self.rank} "):
                raise RanksFailed(first) from error
            raise

    def close(self) -> None:
        """Close every group of this rank, also if one of them fails to end. Further calls do nothing."""
        with ExitStack() as stack:
            for group in self.groups:
                stack.callback(group.close)

    def _exchange_key(self, number: int, rank: int) -> str:
        return f"{self.name}/meeting/{number}/{rank}"


def part_of_model(ranks: Ranks | None) -> ModelRanks | None:
    """Return this rank's part of the model; None if the model is not split."""
    return None if ranks is None else ranks.model


def common_config(ranks: Ranks, config: DecidedConfig) -> DecidedConfig:
    """Return the config of the first rank, with the least that any rank's memory holds: pages, context, checkpoints."""
    configs: list[DecidedConfig] = ranks.exchange("the engine's config", config, DecidedConfig)
    first = configs[0]
    names = ("num_pages", "max_context", "state_checkpoints")
    least: dict[str, Any] = {name: min(getattr(each, name) for each in configs) for name in names}
    lowered = {name: value for name, value in least.items() if value < getattr(first, name)}
    reason = "the rank with the least memory has room for no more"
    choices = tuple(choice for choice in first.chosen if choice.name not in lowered)
    choices += tuple(Choice(name, value, reason) for name, value in lowered.items())
    return replace(first, **least, chosen=choices)


def join_engine(
    ranks: Ranks | None, backend: Backend, model: LanguageModel, proposer: Proposer, config: DecidedConfig
) -> DecidedConfig:
    """Return the config that all ranks share, after checking that several ranks can run this engine.

    Raises :class:`ConfigError` for a model of other ranks, :class:`CapabilityError` for a backend or kernels that can't run
    on several ranks, and :class:`~outrider.engine.ranks.records.RanksDiffer` if ranks have other models or proposers.
    """
    shared = None if model.ranks.is_single else model.ranks
    if shared is not part_of_model(ranks):
        raise ConfigError("an engine of several ranks has a model that was shared out among them; give both the same ranks")
    if ranks is None:
        return config
    config = common_config(ranks, config)
    uses_graphs = config.graphs or config.step_mode is StepMode.FUSED
    if uses_graphs and backend.capabilities.captures_graphs and not backend.capabilities.captures_collectives:
        raise CapabilityError(
            f"{backend.label} captures graphs, but no collectives in them (captures_collectives), and several ranks have "
            "some in every stage; use mode staged without graphs"
        )
    if ranks.data is not None and model.kernels.plans_on_host:
        raise CapabilityError(
            f"the kernels {model.kernels.name!r} plan each batch on the host, which idle data-parallel groups have no batch "
            "for; use other kernels, or tensor parallelism alone"
        )
    if ranks.data is not None and proposer.extends:
        proposer.prompt_passes(1, 1, 1)  # raises if the proposer doesn't declare its passes
    ranks.check_same(
        "the engine",
        {
            "model": model.config,
            "dtype": model.dtype,
            "KV cache": model.cache_dtype,
            "proposer": proposer.name,
            "drafts": (proposer.depth, proposer.nodes, proposer.relay),
            "kernels": model.kernels.name,
        },
    )
    return config
