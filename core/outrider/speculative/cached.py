"""What proposers with a cache of their own, and those that draft trees, have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import Backend, ConfigError
from outrider.model import KVCache, ModelConfig
from outrider.speculative.proposer import Proposer
from outrider.speculative.tree import TreeShape


class CachedProposer(Proposer):
    """Owns keys and values of the layers of ``config``, in pages with the numbers of the target's."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._cache: KVCache | None = None
        self._page_size = 0

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Keys and values of each layer."""
        config = self._config
        self._page_size = page_size
        self._cache = KVCache.allocate(
            config.num_layers,
            config.num_kv_heads,
            config.head_size,
            pages=pages,
            page_size=page_size,
            dtype=self._dtype,
            device=backend.device,
        )

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
