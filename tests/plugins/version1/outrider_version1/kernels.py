"""Kernels of its own, by the names and with the plain tuples of the version before."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, CheckpointError, KernelSet, Product, RequestError, Turn
from outrider.device.errors import CheckpointError as SameError
from outrider.device.kernels.metadata import Turn as SameTurn

assert SameError is CheckpointError
assert SameTurn is Turn
assert issubclass(RequestError, Exception)


class Version1Kernels(KernelSet):
    """Lengths by their old names, a copy of them given to the reference by the old keywords."""

    name = "version1"

    def linear_rope_write_cache(self, product: Product, turn: Turn) -> Tensor:
        cos, sin, k_cache, v_cache, slots = turn
        return super().linear_rope_write_cache(product, Turn(cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache, slots=slots))

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        host = metadata.host_kv_lens  # there for whoever plans
        assert host is None or len(host.value) == len(metadata.kv_lens)
        own = replace(metadata, kv_lens=metadata.kv_lens.clone(), host_kv_lens=None)
        return super().paged_attention(q, k_cache, v_cache, own, scale=scale, window=window)

    def place_tokens(
        self, lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, kv_lens: Tensor
    ) -> None:
        super().place_tokens(lens, tables, page_size, last, positions, slots, kv_lens)

    def gather_requests(
        self,
        rows: Tensor,
        lens: Tensor,
        state: tuple[Tensor, Tensor, Tensor, Tensor],
        own: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        found: Tensor,
        *,
        lens_by_row: bool,
    ) -> None:
        last_tokens, seeds, temperature, tables = state
        super().gather_requests(
            rows, lens, (last_tokens, seeds, temperature, tables), tuple(own), found, lens_by_row=lens_by_row
        )

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        tokens, accepted = super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
        return torch.clone(tokens), accepted
