"""KVCache: the pages that hold keys and values, and the states of recurrent layers.

Letters: P pages, S page size, Hkv KV heads, D head size, R state rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import ConfigError, RecurrentWindow
from outrider.model.config.model_config import ModelConfig, RecurrentConfig


class LayerState(NamedTuple):
    """States of one recurrent layer. Row 0 is reserved for the writes of padding sequences."""

    convolution: Tensor
    """Last inputs of the short convolution, the oldest first, [R, K - 1, C] in the model's dtype."""
    delta: Tensor
    """State of the gated delta rule, [R, Hv, D, E] in float32 or wider unless the config says otherwise."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Key and value tensors of each layer, each [P, S, Hkv, D] with the layer's heads, or the rotated keys and latent vectors
    of latent attention (:meth:`ModelConfig.cached_sizes`). Page 0 is reserved for the writes of padding tokens.

    A sequence's block table lists its pages. The engine decides which request owns which page, and which row of states.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values [P, S, Hkv, D] of each of ``ModelConfig.cached_layers``, in their order."""
    states: tuple[LayerState, ...] = ()
    """States of each recurrent layer, in the order of the layers; empty for a model without one."""
    windows: tuple[RecurrentWindow, ...] = ()
    """Verified tokens of each recurrent layer, of the rows of requests; empty if none are drafted."""
    pending: Tensor | None = None
    """Number of tokens of each row's windows that the row's states lack, int64 [rows of windows]; negative for updates in
    the second half of their window (:class:`~outrider.device.RecurrentKernels`). None without windows.
    """

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        rows: int,
        device: torch.device,
        windows: tuple[int, int] = (0, 0),
    ) -> KVCache:
        """Allocate the pages in ``cache_dtype`` and the state ``rows`` of a model in ``dtype``; see :meth:`allocate`.

        ``windows``: number of rows that have windows of verified tokens, and the most tokens of a window.
        """
        cache = cls.allocate(config, pages=pages, page_size=page_size, dtype=cache_dtype, device=device)
        if config.recurrent is None:
            return cache
        return cache.with_states(config.recurrent, rows, dtype).with_windows(config.recurrent, *windows, dtype)

    @classmethod
    def allocate(
        cls, config: ModelConfig, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Allocate zeroed pages without states, the reserved page included, on ``device`` in the caller's stream scope.

        Attention multiplies masked values by zero, so uninitialized pages with NaN would corrupt its result. Raises
        :class:`ConfigError` for fewer than two pages.
        """
        if pages < 2:
            raise ConfigError(f"a KV cache of {pages} pages holds nothing: page 0 is reserved, expected at least 2")
        if page_size < 1:
            raise ConfigError(f"a KV cache of page size {page_size} can't be: expected at least 1")

        def page_tensor(heads: int, size: int) -> Tensor:
            return torch.zeros((pages, page_size, heads, size), dtype=dtype, device=device)

        sizes = [config.of_layer(index).cached_sizes for index in config.cached_layers]
        return cls(tuple((page_tensor(*keys), page_tensor(*values)) for keys, values in sizes))

    def with_states(self, config: RecurrentConfig, rows: int, dtype: torch.dtype) -> KVCache:
        """Return a cache of the same pages with zeroed state ``rows`` of a model in ``dtype``."""
        inputs, state = config.state_shapes()
        wide, device = torch.promote_types(dtype, config.state_dtype), self.layers[0][0].device

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=device)

        return replace(self, states=tuple(LayerState(zeros(inputs, dtype), zeros(state, wide)) for _ in config.layers))

    def with_windows(self, config: RecurrentConfig, rows: int, tokens: int, dtype: torch.dtype) -> KVCache:
        """Return a cache of the same pages and states, with windows of ``tokens`` verified tokens for the first ``rows``.

        Returns this cache if one of both is 0.
        """
        if not rows or not tokens:
            return self
        wide, device = torch.promote_types(dtype, torch.float32), self.layers[0][0].device

        def window() -> RecurrentWindow:
            inputs = torch.zeros((rows, tokens, config.channels), dtype=dtype, device=device)
            return RecurrentWindow(inputs, torch.zeros((rows, 2, tokens, config.update_width), dtype=wide, device=device))

        pending = torch.zeros(rows, dtype=torch.int64, device=device)
        return replace(self, windows=tuple(window() for _ in config.layers), pending=pending)

    @property
    def pages(self) -> int:
        """Number of pages of this cache, the reserved page included."""
        return self.layers[0][0].shape[0]

    @property
    def page_size(self) -> int:
        """Number of tokens that one page holds."""
        return self.layers[0][0].shape[1]

    @staticmethod
    def page_bytes(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one page over all layers, keys and values together."""
        sizes = (each for index in config.cached_layers for each in config.of_layer(index).cached_sizes)
        return page_size * dtype.itemsize * sum(heads * size for heads, size in sizes)
