"""Static device buffers that cross streams inside an iteration, allocated once.

Each has one writing stream and is used through views of the first B rows. Letters: B requests, K draft tokens, P pages a
request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import AttentionMetadata


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """What verify, accept and draft-extend read; written on plan. Views of one batch.

    ``rows``, ``lens``, ``seeds`` int64 [B]; ``temperature`` float32 [B]; ``tables`` int32 [B, P]; ``tokens``,
    ``positions`` (as rotary embedding takes them), ``slots`` int64 [B*(K+1)]; ``kv_lens`` int32 [B]; ``query_start``
    int32 [B+1]; ``extend_tokens`` int64 [B*(K+1)] and ``extend_last`` int64 [B], written in the extend plan.
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

    def attention(self, *, max_query: int, max_kv: int) -> AttentionMetadata:
        """Metadata of K+1 new tokens for each request."""
        return AttentionMetadata(
            query_start=self.query_start,
            kv_lens=self.kv_lens,
            block_table=self.tables,
            max_query=max_query,
            max_kv=max_kv,
        )


class StepBuffers:
    """Owner of the static buffers."""

    def __init__(self, *, max_requests: int, draft_tokens: int, pages: int, device: torch.device) -> None:
        self._width = draft_tokens + 1
        flat = max_requests * self._width

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.resolved_lens = zeros(max_requests)
        """Lengths of the batch's rows, gathered on schedule behind *published*."""
        self.lane = torch.arange(self._width, device=device)
        """0..K, the offsets of a request's new tokens; constant."""
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
            query_start=torch.arange(0, flat + 1, self._width, dtype=torch.int32, device=device),
            extend_tokens=zeros(flat),
            extend_last=zeros(max_requests),
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
            extend_tokens=full.extend_tokens[:flat],
            extend_last=full.extend_last[:batch],
        )
