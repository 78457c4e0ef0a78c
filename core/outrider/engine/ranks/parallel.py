"""ParallelConfig: over how many ranks an engine is spread."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import ConfigError
from outrider.errors import shown
from outrider.model import Shard, Shards

MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Over how many ranks an engine is spread, validated when made. A rank is one device with a host thread of its own.

    ``tensor``: ranks that share the heads of each attention and the vocabulary, and work on the same requests. ``data``:
    groups of such ranks, each with requests and a KV cache of its own; all ranks share the MLPs, whose tokens are gathered
    from all groups and scattered back in each layer. ``tensor * data`` ranks in all.

    ``timeout_s``: seconds that a rank waits for another one before it takes it to be lost. It must be more than the longest
    iteration takes.
    """

    tensor: int = 1
    data: int = 1
    timeout_s: float = 8.0

    def __post_init__(self) -> None:
        for name in ("tensor", "data"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RANKS:
                raise ConfigError(f"{name} is {shown(value)}; expected a whole number of ranks, 1 to {MOST_RANKS}")
        seconds = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ConfigError(f"timeout_s is {shown(seconds)}; expected a positive number of seconds")

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tensor * self.data

    def place(self, rank: int) -> tuple[int, int]:
        """The data-parallel group of ``rank``, and its place in it."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} isn't one of the {self.world} ranks of {self}; expected 0 to {self.world - 1}")
        return divmod(rank, self.tensor)

    def shards(self, rank: int) -> Shards:
        """The parts of a model that ``rank`` holds."""
        _, tensor = self.place(rank)
        within = Shard(tensor, self.tensor)
        return Shards(attention=within, mlp=Shard(rank, self.world), vocabulary=within)

    def __str__(self) -> str:
        return f"tensor {self.tensor}, data {self.data}"
