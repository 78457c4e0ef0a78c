"""KVCache: the pages that hold keys and values. Letters: P pages, S page size, Hkv KV heads, D head size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import ConfigError


@dataclass(frozen=True, slots=True)
class KVCache:
    """Key and value tensors of each layer, each [P, S, Hkv, D]. Page 0 is reserved for the writes of padding tokens.

    A sequence's block table lists its pages. The engine decides which request owns which page.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Allocate zeroed pages, the reserved page included, on ``device`` in the caller's stream scope.

        Attention multiplies masked values by zero, so uninitialized pages with NaN would corrupt its result. Raises
        :class:`ConfigError` for fewer than two pages.
        """
        if pages < 2:
            raise ConfigError(f"a KV cache of {pages} pages holds nothing: page 0 is reserved, expected at least 2")
        if page_size < 1:
            raise ConfigError(f"a KV cache of page size {page_size} can't be: expected at least 1")
        shape = (pages, page_size, num_kv_heads, head_size)

        def page_tensor() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(tuple((page_tensor(), page_tensor()) for _ in range(num_layers)))

    @property
    def pages(self) -> int:
        """Number of pages of this cache, the reserved page included."""
        return self.layers[0][0].shape[0]

    @property
    def page_size(self) -> int:
        """Number of tokens that one page holds."""
        return self.layers[0][0].shape[1]

    @staticmethod
    def page_bytes(num_layers: int, num_kv_heads: int, head_size: int, *, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one page over all layers, keys and values together."""
        return 2 * num_layers * page_size * num_kv_heads * head_size * dtype.itemsize
