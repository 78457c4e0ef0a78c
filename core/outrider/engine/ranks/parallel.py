"""ParallelConfig: the number of ranks of an engine and how they share its work."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import ConfigError
from outrider.errors import shown
from outrider.model import Shard, Shards

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
    timeout_s: float = 8.0
    """Seconds after which a rank counts another one as lost. An iteration must not take longer."""

    def __post_init__(self) -> None:
        for name in ("tensor", "data"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANKS:
                raise ConfigError(f"{name} is {shown(value)}; expected a whole number of ranks, 1 to {MAX_RANKS}")
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
        return Shards(attention=within, mlp=Shard(rank, self.world), vocabulary=within)

    def __str__(self) -> str:
        return f"tensor {self.tensor}, data {self.data}"
