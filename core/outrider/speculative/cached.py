"""What proposers with a cache of their own, and those that draft trees, have in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError, KernelSet
from outrider.model import KVCache, ModelConfig
from outrider.speculative.proposer import MOST_REQUESTS, DraftInputs, Proposer
from outrider.speculative.tree import TreeShape

UNBOUNDED = 1 << 62
"""A last position beyond all."""


class Places:
    """Where the n tokens behind each request's cached ones go, one of each request a pass. All computed at once."""

    def __init__(self, kernels: KernelSet, inputs: DraftInputs, query_start: Tensor, *, count: int, page_size: int) -> None:
        batch = inputs.seq_lens.shape[0]
        self._inputs = inputs
        self._query_start = query_start[: batch + 1]
        self.positions = inputs.seq_lens.new_empty((count, batch))
        self.slots = torch.empty_like(self.positions)
        self._seq_lens = torch.empty_like(self.positions, dtype=torch.int32)
        columns = (self.positions.t(), self.slots.t(), self._seq_lens.t())
        kernels.place_tokens(inputs.seq_lens, inputs.tables, page_size, UNBOUNDED, *columns)

    def attention(self, index: int, host_name: str) -> AttentionMetadata:
        """What a pass over the tokens at ``index`` is told; ``host_name``: its lengths, where the host has them."""
        inputs, behind = self._inputs, index + 1
        return AttentionMetadata(
            query_start=self._query_start,
            seq_lens=self._seq_lens[index],
            block_table=inputs.tables,
            max_query=1,
            max_kv=inputs.max_kv,
            uniform=True,
            seq_lens_host=inputs.seq_lens_host.param(host_name, behind) if inputs.seq_lens_host is not None else None,
        )


def chain_lengths(tokens: int, ahead: int) -> Mapping[str, int]:
    """``Proposer.host_lengths`` of a chain whose first token is relayed: draft-extend has ``ahead``, each pass one more."""
    return {"extend": ahead, **{f"draft.{step}": step + ahead for step in range(1, tokens)}}


class CachedProposer(Proposer):
    """Owns keys and values of the layers of ``config``, in pages with the numbers of the target's."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._cache: KVCache | None = None
        self._page_size = 0
        self._query_start = torch.empty(0, dtype=torch.int32)

    @property
    def token_bytes(self) -> int:
        """Keys and values of each layer."""
        config = self._config
        return KVCache.page_bytes(config.num_layers, config.num_kv_heads, config.head_size, page_size=1, dtype=self._dtype)

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Keys and values of each layer."""
        config = self._config
        self._page_size = page_size
        # Not by the pages: batches that are captured or measured are padded, also where requests have fewer pages than that.
        self._query_start = torch.arange(MOST_REQUESTS + 1, dtype=torch.int32, device=backend.device)
        self._cache = KVCache.allocate(
            config.num_layers,
            config.num_kv_heads,
            config.head_size,
            pages=pages,
            page_size=page_size,
            dtype=self._dtype,
            device=backend.device,
        )

    def places(self, kernels: KernelSet, inputs: DraftInputs, *, count: int) -> Places:
        """Those of the next ``count`` tokens of each request."""
        return Places(kernels, inputs, self._query_start, count=count, page_size=self._page_size)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """Keys and values of each layer in turn."""
        return tuple(tensor for pair in self.cache.layers for tensor in pair)

    @property
    def cache(self) -> KVCache:
        """The proposer's cache; exists from :meth:`allocate` on."""
        if self._cache is None:
            raise ConfigError(f"the proposer {self.name!r} has no cache yet; the engine allocates it")
        return self._cache


class TreeProposer(CachedProposer):
    """Drafts trees of a shape, from T first tokens that it relays with their log-probabilities.

    Keys and values of drafted nodes lie in scratch slots behind the committed ones, under a tree mask; later iterations
    overwrite them. The choice of nodes is deterministic, also for requests that sample.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, shape: TreeShape) -> None:
        super().__init__(config, dtype)
        self._shape = shape

    @property
    def depth(self) -> int:
        """D."""
        return self._shape.depth

    @property
    def nodes(self) -> int:
        """K."""
        return self._shape.nodes

    @property
    def is_tree(self) -> bool:
        """Always."""
        return True

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """The cache, and the shape's constants."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        self._shape.bind(backend.device)
