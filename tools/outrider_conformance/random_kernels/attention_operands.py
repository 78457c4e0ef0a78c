"""Operands of attention: the metadata of a batch, and their comparison with the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outrider.device import AttentionMetadata

Operands = Mapping[str, Tensor]


def attention_metadata(o: Operands, *, max_query: int, max_kv: int, **more: Any) -> AttentionMetadata:
    """Return the metadata of a batch whose starts, lengths and page table are operands of ``o``."""
    return AttentionMetadata(
        query_start=o["query_start"],
        seq_lens=o["seq_lens"],
        block_table=o["block_table"],
        max_query=max_query,
        max_kv=max_kv,
        **more,
    )


def in_float64(operands: Operands) -> dict[str, Tensor]:
    """Return copies of the operands for the reference: floating tensors in float64, the others unchanged."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in operands.items()}


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinity where either holds NaN."""
    return float((found.cpu().double() - wanted).abs().nan_to_num(nan=float("inf")).max())
