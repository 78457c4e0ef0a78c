"""Shards: the slices of a model's weights that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.device import ConfigError
from outrider.model.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Slice ``rank`` of ``size`` equal slices. The default is a single slice: everything."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"part {self.rank} of {self.size} can't be; expected a number from 0 to {self.size - 1}")

    def even(self, count: int) -> tuple[int, int]:
        """Return the first and last (exclusive) of ``count`` items in this slice. ``count`` is a multiple of ``size``."""
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each

    def width(self, count: int) -> int:
        """Return the number of items in the largest slice of ``count`` items; later slices may be smaller."""
        return -(-count // self.size)

    def uneven(self, count: int) -> tuple[int, int]:
        """Return the first and last (exclusive) of ``count`` items in this slice: :meth:`width` items, or fewer in the last
        slices.
        """
        width = self.width(count)
        return min(self.rank * width, count), min((self.rank + 1) * width, count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The slices that one rank holds: of attention heads, of the MLP's intermediate size, and of the vocabulary.

    Every rank holds the norms, the rotary tables, the fusion of an EAGLE head and the projection of an MTP head.
    """

    attention: Shard = field(default_factory=Shard)
    mlp: Shard = field(default_factory=Shard)
    vocabulary: Shard = field(default_factory=Shard)

    def heads(self, config: ModelConfig) -> tuple[int, int]:
        """Return the first and last (exclusive) query head of this rank."""
        return self.attention.even(config.num_heads)

    def kv_heads(self, config: ModelConfig) -> tuple[int, int]:
        """Return the first and last (exclusive) KV head of this rank. If there are fewer heads than ranks, several ranks hold
        the same head.
        """
        size, rank, heads = self.attention.size, self.attention.rank, config.num_kv_heads
        if heads >= size:
            return self.attention.even(heads)
        return rank * heads // size, rank * heads // size + 1

    def local(self, config: ModelConfig, model: str) -> ModelConfig:
        """Return ``config`` with this rank's heads and intermediate size. Hidden size and vocabulary stay the model's.

        ``model`` names the model in errors. Raises :class:`ConfigError` if heads or intermediate size can't be divided.
        """
        ranks, mlp = self.attention.size, self.mlp.size
        if config.num_heads % ranks:
            raise _unequal(model, f"{config.num_heads} heads", ranks, "a number of tensor-parallel ranks that divides them")
        if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
            raise _unequal(model, f"{config.num_kv_heads} key heads", ranks, "one that divides them, or that they divide")
        if config.intermediate_size % mlp:
            raise _unequal(
                model, f"an intermediate_size of {config.intermediate_size}", mlp, "a number of ranks that divides it"
            )
        experts = config.experts
        first, last = self.kv_heads(config)
        return replace(
            config,
            num_heads=config.num_heads // ranks,
            num_kv_heads=last - first,
            intermediate_size=config.intermediate_size // mlp,
            experts=None if experts is None else experts.shard(mlp),
            recurrent=None if config.recurrent is None else config.recurrent.shard(ranks),
        )


def _unequal(model: str, found: str, ranks: int, expected: str) -> ConfigError:
    return ConfigError(f"{model} has {found}, which can't be shared out among {ranks} ranks; expected {expected}")
