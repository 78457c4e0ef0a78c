"""Which part of a model's weights a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.device import ConfigError
from outrider.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` equal parts; of one part by default, so everything."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"part {self.rank} of {self.size} can't be; expected a number from 0 to {self.size - 1}")

    def even(self, count: int) -> tuple[int, int]:
        """First and last (exclusive) of ``count`` things that are shared out evenly: a multiple of ``size``."""
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each

    def width(self, count: int) -> int:
        """What the largest part of ``count`` things has, where the last ones may have less."""
        return -(-count // self.size)

    def uneven(self, count: int) -> tuple[int, int]:
        """First and last (exclusive) of ``count`` things, :meth:`width` in each part, as many as are left in the last."""
        width = self.width(count)
        return min(self.rank * width, count), min((self.rank + 1) * width, count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The parts that one rank holds: of the heads of an attention, of the inner size of an MLP, of the vocabulary.

    Norms, rotary tables, the fusion of an EAGLE head and the projection of an MTP head are held by every rank.
    """

    attention: Shard = field(default_factory=Shard)
    mlp: Shard = field(default_factory=Shard)
    vocabulary: Shard = field(default_factory=Shard)

    def heads(self, config: ModelConfig) -> tuple[int, int]:
        """Query heads of this rank, first and last (exclusive)."""
        return self.attention.even(config.num_heads)

    def kv_heads(self, config: ModelConfig) -> tuple[int, int]:
        """Key heads of this rank; where there are fewer than ranks, several ranks hold the same one."""
        size, rank, heads = self.attention.size, self.attention.rank, config.num_kv_heads
        if heads >= size:
            return self.attention.even(heads)
        return rank * heads // size, rank * heads // size + 1

    def local(self, config: ModelConfig, what: str) -> ModelConfig:
        """``config`` with the heads and the inner size that this rank holds; hidden size and vocabulary are the model's.

        ``what`` names the model for errors. Raises :class:`ConfigError` where heads or inner size can't be shared out.
        """
        ranks, mlp = self.attention.size, self.mlp.size
        if config.num_heads % ranks:
            raise _odd(what, f"{config.num_heads} heads", ranks, "a number of tensor-parallel ranks that divides them")
        if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
            raise _odd(what, f"{config.num_kv_heads} key heads", ranks, "one that divides them, or that they divide")
        if config.intermediate_size % mlp:
            raise _odd(what, f"an intermediate_size of {config.intermediate_size}", mlp, "a number of ranks that divides it")
        experts = config.experts
        first, last = self.kv_heads(config)
        return replace(
            config,
            num_heads=config.num_heads // ranks,
            num_kv_heads=last - first,
            intermediate_size=config.intermediate_size // mlp,
            experts=None if experts is None else experts.shared_out(mlp),
        )


def _odd(what: str, found: str, ranks: int, expected: str) -> ConfigError:
    return ConfigError(f"{what} has {found}, which can't be shared out among {ranks} ranks; expected {expected}")
