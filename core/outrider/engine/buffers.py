"""Static device buffers that cross streams inside an iteration, allocated once.

Each has one writing stream and is used through views of the first B rows. Letters: B requests, N nodes of a draft with its
root (the width of verify), E tokens of a request that draft-extend takes in (one more than the longest path), P pages a
request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import AttentionMetadata


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """What trees need besides: the mask of verify, and draft-extend's own metadata, since only a path is taken in.

    ``mask`` bool [B*N, N]. Written in the extend plan: ``gather`` int64 [B*E], rows of verify along the path;
    ``positions``, ``slots`` int64 [B*E]; ``kv_lens`` int32 [B]; ``sources``, ``destinations`` int64 [B*(E-1)], cache slots
    that accepted nodes move between. ``query_start`` int32 [B+1] is constant.
    """

    mask: Tensor
    gather: Tensor
    positions: Tensor
    slots: Tensor
    kv_lens: Tensor
    sources: Tensor
    destinations: Tensor
    query_start: Tensor


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """What verify, accept and draft-extend read; written on plan. Views of one batch.

    ``rows``, ``lens``, ``seeds`` int64 [B]; ``temperature`` float32 [B]; ``tables`` int32 [B, P]; ``tokens``,
    ``positions`` (as rotary embedding takes them), ``slots`` int64 [B*N]; ``kv_lens`` int32 [B]; ``query_start``
    int32 [B+1]; ``extend_tokens`` int64 [B*E] and ``extend_last`` int64 [B], written in the extend plan; ``tree`` None for
    chains.
    """

    rows: Tensor
    lens: Tensor
    seeds: Tensor
    temperature: Tensor
    tables: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    kv_lens: Tensor
    query_start: Tensor
    extend_tokens: Tensor
    extend_last: Tensor
    tree: TreeInputs | None

    def attention(self, *, max_query: int, max_kv: int) -> AttentionMetadata:
        """Metadata of N new tokens for each request."""
        return AttentionMetadata(
            query_start=self.query_start,
            kv_lens=self.kv_lens,
            block_table=self.tables,
            max_query=max_query,
            max_kv=max_kv,
            tree_mask=None if self.tree is None else self.tree.mask,
        )

    def path_attention(self, tree: TreeInputs, *, max_query: int, max_kv: int) -> AttentionMetadata:
        """Metadata of E tokens for each request, an accepted path that has become a chain."""
        return AttentionMetadata(
            query_start=tree.query_start,
            kv_lens=tree.kv_lens,
            block_table=self.tables,
            max_query=max_query,
            max_kv=max_kv,
        )


class StepBuffers:
    """Owner of the static buffers. ``nodes``: K; ``depth``: D, smaller than K only for trees."""

    def __init__(self, *, max_requests: int, nodes: int, depth: int, is_tree: bool, pages: int, device: torch.device) -> None:
        self._width = width = nodes + 1
        self._extend = extend = depth + 1
        flat = max_requests * width
        flat_extend = max_requests * extend

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def every(step: int) -> Tensor:
            return torch.arange(0, max_requests * step + 1, step, dtype=torch.int32, device=device)

        self.resolved_lens = zeros(max_requests)
        """Lengths of the batch's rows, gathered on schedule behind *published*."""
        self.lane = torch.arange(width, device=device)
        """0..K, the offsets of a request's new tokens; constant."""
        tree = None
        if is_tree:
            tree = TreeInputs(
                mask=zeros(flat, width, dtype=torch.bool),
                gather=zeros(flat_extend),
                positions=zeros(flat_extend),
                slots=zeros(flat_extend),
                kv_lens=zeros(max_requests, dtype=torch.int32),
                sources=zeros(max_requests * depth),
                destinations=zeros(max_requests * depth),
                query_start=every(extend),
            )
        self._verify = VerifyInputs(
            rows=zeros(max_requests),
            lens=zeros(max_requests),
            seeds=zeros(max_requests),
            temperature=zeros(max_requests, dtype=torch.float32),
            tables=zeros(max_requests, pages, dtype=torch.int32),
            tokens=zeros(flat),
            positions=zeros(flat),
            slots=zeros(flat),
            kv_lens=zeros(max_requests, dtype=torch.int32),
            query_start=every(width),
            extend_tokens=zeros(flat_extend),
            extend_last=zeros(max_requests),
            tree=tree,
        )

    def verify(self, batch: int) -> VerifyInputs:
        """Views for ``batch`` requests."""
        full, flat = self._verify, batch * self._width
        return VerifyInputs(
            rows=full.rows[:batch],
            lens=full.lens[:batch],
            seeds=full.seeds[:batch],
            temperature=full.temperature[:batch],
            tables=full.tables[:batch],
            tokens=full.tokens[:flat],
            positions=full.positions[:flat],
            slots=full.slots[:flat],
            kv_lens=full.kv_lens[:batch],
            query_start=full.query_start[: batch + 1],
            extend_tokens=full.extend_tokens[: batch * self._extend],
            extend_last=full.extend_last[:batch],
            tree=None if full.tree is None else self._tree(full.tree, batch),
        )

    def _tree(self, full: TreeInputs, batch: int) -> TreeInputs:
        flat = batch * self._extend
        moves = batch * (self._extend - 1)
        return TreeInputs(
            mask=full.mask[: batch * self._width],
            gather=full.gather[:flat],
            positions=full.positions[:flat],
            slots=full.slots[:flat],
            kv_lens=full.kv_lens[:batch],
            sources=full.sources[:moves],
            destinations=full.destinations[:moves],
            query_start=full.query_start[: batch + 1],
        )
