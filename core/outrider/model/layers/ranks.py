"""Shards, the slices of a model's weights that a rank holds, and ModelRanks, the collectives of a split model.

Attention and MLP of a layer end in a product of which each rank computes one part of the sum. Such a part is *partial* until
it is reduced. Letters: T new tokens, N rows of logits, H hidden size, V vocabulary, D data-parallel groups, W tokens per
group in a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.device import BlockKernels, ConfigError, Group, KernelSet, RankBoundary, Stream
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
        """Return the first and last (exclusive) item of this slice, of ``count`` items in equal slices. ``count`` is a
        multiple of ``size``.
        """
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each

    def width(self, count: int) -> int:
        """Return the number of items in the largest slice of ``count`` items; later slices may be smaller."""
        return -(-count // self.size)

    def uneven(self, count: int) -> tuple[int, int]:
        """Return the first and last (exclusive) item of this slice, of ``count`` items: :meth:`width` items, or fewer in the
        last slices.
        """
        width = self.width(count)
        return min(self.rank * width, count), min((self.rank + 1) * width, count)

    def kv_head_shard(self, heads: int) -> Shard:
        """Return the slice of ``heads`` KV heads that this tensor-parallel rank holds. If there are fewer heads than ranks,
        several ranks hold the same head. Raises :class:`ConfigError` if the heads can't be divided.
        """
        size = min(heads, self.size)
        if heads % size or self.size % size:
            raise ConfigError(f"{heads} KV heads can't be shared out among {self.size} tensor-parallel ranks")
        return Shard(self.rank * size // self.size, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The slices that one rank holds: of attention heads, of the MLP's intermediate size, and of the vocabulary.

    Every rank holds the norms, the rotary tables, the fusion of an EAGLE head and the projection of an MTP head.
    """

    attention: Shard = field(default_factory=Shard)
    mlp: Shard = field(default_factory=Shard)
    vocabulary: Shard = field(default_factory=Shard)
    divides_experts: bool = False
    """True if the ranks of ``mlp`` divide the routed experts, instead of the intermediate size of each."""

    def held_experts(self, count: int) -> tuple[int, int] | None:
        """Return the first and last (exclusive) of ``count`` experts of this rank. None if it has a slice of each."""
        return self.mlp.even(count) if self.divides_experts else None

    def heads(self, config: ModelConfig) -> tuple[int, int]:
        """Return the first and last (exclusive) query head of this rank."""
        return self.attention.even(config.num_heads)

    def kv_heads(self, config: ModelConfig) -> tuple[int, int]:
        """Return the first and last (exclusive) KV head of this rank, by :meth:`Shard.kv_head_shard`."""
        return self.attention.kv_head_shard(config.num_kv_heads).even(config.num_kv_heads)

    def local(self, config: ModelConfig, model: str) -> ModelConfig:
        """Return ``config`` with this rank's heads and intermediate size. Hidden size and vocabulary stay the model's.

        ``model`` names the model in errors. Raises :class:`ConfigError` if heads or intermediate size can't be divided.
        """
        ranks, mlp = self.attention.size, self.mlp.size
        if config.sandwich is not None and max(ranks, mlp) > 1:
            raise ConfigError(f"{model}: a {config.family} model runs on one rank here, and there are {max(ranks, mlp)}")
        if config.joint_qk_norm and ranks > 1:
            raise ConfigError(
                f"{model}: a {config.family} model norms all heads of a token at once, and {ranks} tensor-parallel ranks "
                "would divide them; expected one, next to data- and expert-parallel ones"
            )
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
            experts=None if experts is None else experts.shard(mlp, divided=self.divides_experts),
            recurrent=None if config.recurrent is None else config.recurrent.shard(ranks),
        )


def _unequal(model: str, found: str, ranks: int, expected: str) -> ConfigError:
    return ConfigError(f"{model} has {found}, which can't be shared out among {ranks} ranks; expected {expected}")


class ModelRanks(RankBoundary):
    """One rank's slices of a model, and the collectives of its forward pass.

    ``tensor``: the tensor-parallel group, which splits attention heads and vocabulary and processes the same tokens. None:
    this rank alone. ``data``: the data-parallel group, whose ranks process different tokens and split the MLPs. None: this
    rank alone.

    Every method enqueues on the stream of :meth:`use_stream`, whose scope the caller has opened. All ranks of a group call
    the same methods in the same order.
    """

    def __init__(
        self, shards: Shards, *, tensor: Group | None = None, data: Group | None = None, is_single: bool = False
    ) -> None:
        self.shards = shards
        self.is_single = is_single
        """True if the model is whole on this rank, which runs it alone."""
        self.reduces = not is_single
        self.tensor = tensor
        self.data = data
        self._stream: Stream | None = None
        self._pass_widths: deque[int] = deque()
        self._width = 0

    def use_stream(self, stream: Stream) -> None:
        """Send later collectives to ``stream``. An engine calls this before it launches or captures."""
        self._stream = stream

    @property
    def stream(self) -> Stream:
        """The stream of the collectives. Raises :class:`ConfigError` before :meth:`use_stream`."""
        if self._stream is None:
            raise ConfigError("the collectives of a model of several ranks have no stream yet; an engine sets it")
        return self._stream

    # -- attention and MLP -----------------------------------------------------------------------------------------

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum ``partial`` [T, H] over the tensor-parallel ranks in place, and return it."""
        if self.tensor is not None:
            self.tensor.all_reduce(partial, stream=self.stream)
        return partial

    def add(self, partial: Tensor, rows: Tensor) -> Tensor:
        """Add the sum of ``partial`` [T, H] over the tensor-parallel ranks to ``rows`` [T, H] in place, and return
        ``rows``.
        """
        return rows.add_(self.reduce(partial))

    def add_rms_norm(self, kernels: BlockKernels, partial: Tensor, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add ``partial`` [T, H], reduced over the tensor-parallel ranks, to the residual ``rows`` [T, H], and return the
        normed sum. Several ranks use the kernel ``all_reduce_rms_norm``.
        """
        if self.tensor is None:
            return kernels.add_rms_norm(partial, rows, norm, eps)
        return kernels.all_reduce_rms_norm(partial, rows, norm, eps, group=self.tensor, stream=self.stream)

    def expect_pass_widths(self, widths: Sequence[int]) -> None:
        """Set W for each of the next passes: the maximum number of tokens of a data-parallel group, the same on all groups.

        A pass without a set width has W equal to this group's number of tokens.
        """
        self._pass_widths = deque(widths)

    def begin_pass(self, tokens: int) -> None:
        """Begin a pass through layers with ``tokens`` tokens on this rank: take the next of the widths that
        :meth:`expect_pass_widths` set.

        Raises :class:`ConfigError` for more tokens than the ranks agreed on.
        """
        self._width = self._pass_widths.popleft() if self._pass_widths else tokens
        if tokens > self._width:
            raise ConfigError(f"a pass has {tokens} tokens here, and the ranks agreed on {self._width} at most")

    def gather_tokens(self, normed: Tensor) -> Tensor:
        """Return the tokens of all data-parallel groups [D * W, H]. ``normed`` [T, H] are this group's, padded with zeros to
        W.
        """
        if self.data is None:
            return normed
        padded = normed.contiguous()
        if padded.shape[0] < self._width:
            padded = torch.nn.functional.pad(padded, (0, 0, 0, self._width - padded.shape[0]))
        gathered = padded.new_empty((self.data.size, *padded.shape))
        self.data.all_gather(gathered, padded, stream=self.stream)
        return gathered.flatten(0, 1)

    def scatter_tokens(self, partial: Tensor, tokens: int) -> Tensor:
        """Sum ``partial`` [D * W, H] over the data-parallel ranks. Return this group's ``tokens`` rows [T, H]."""
        if self.data is None:
            return partial
        parts = partial.view(self.data.size, self._width, -1)
        summed = torch.empty_like(parts[0])
        self.data.reduce_scatter(summed, parts, stream=self.stream)
        return summed[:tokens]

    # -- vocabulary ------------------------------------------------------------------------------------------------

    def embed(self, kernels: KernelSet, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return embeddings [T, H] of int64 ``tokens`` [T]. ``weight`` holds this rank's rows of the table."""
        if self.tensor is None:
            return kernels.gather_rows(weight, tokens)
        width, rank = weight.shape[0], self.shards.vocabulary.rank
        local_tokens = tokens - rank * width
        is_local = (local_tokens >= 0) & (local_tokens < width)
        embedded = kernels.gather_rows(weight, torch.where(is_local, local_tokens, 0))
        return self.reduce(embedded * is_local.unsqueeze(-1))

    def logits(self, own: Tensor, vocabulary: int) -> Tensor:
        """Return logits [N, V] over the whole ``vocabulary``, gathered from the slices ``own`` of all ranks.

        The result is bitwise identical on all ranks.
        """
        if self.tensor is None:
            return own
        gathered = own.new_empty((self.tensor.size, *own.shape))
        self.tensor.all_gather(gathered, own.contiguous(), stream=self.stream)
        return gathered.movedim(0, -2).flatten(-2)[..., :vocabulary].contiguous()

    @property
    def is_decider(self) -> bool:
        """True on the tensor-parallel rank whose values the others receive in :meth:`agree`."""
        return self.tensor is None or self.tensor.rank == 0

    # -- decisions -------------------------------------------------------------------------------------------------

    def agree(self, values: Tensor) -> None:
        """Broadcast ``values`` of the first tensor-parallel rank to the others, in place."""
        if self.tensor is not None:
            self.tensor.broadcast(values, root=0, stream=self.stream)


def or_single_rank(ranks: ModelRanks | None) -> ModelRanks:
    """Return ``ranks``, or for None a single rank, whose collectives change nothing."""
    return ModelRanks(Shards(), is_single=True) if ranks is None else ranks
