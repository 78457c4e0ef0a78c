"""A fixed case of a kernel: its operands, and the call that a backend and the reference both run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet

Operands = Mapping[str, Tensor]
Call = Callable[[KernelSet, Operands], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class FixedKernelCase:
    """One kernel with fixed operands, compared with the reference kernel."""

    name: str
    make: Callable[[torch.dtype], dict[str, Tensor]]
    """Return the host operands in this dtype."""
    call: Call
    """Run the kernel, and return its results followed by the operands that it wrote."""
    exact: bool = False
    """The results are tokens or lengths, compared for equality. Logits stay in float32, where two devices draw the same."""
    changed: tuple[str, ...] = ()
    """Operands that the kernel writes in place. Each run gets its own copy of them."""


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
    """Return the operands of the reference: floating tensors in float64, the others unchanged."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in operands.items()}


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference; infinity where either tensor holds NaN."""
    return float((found.cpu().double() - wanted).abs().nan_to_num(nan=float("inf")).max())


def call_kernel(kernels: KernelSet, method: str, arguments: tuple[Any, ...], o: Operands, **options: Any) -> tuple[Any, ...]:
    """Call ``method`` and return its results as a tuple, which is empty for a kernel that only writes operands.

    An argument that is a string names an operand of ``o``; an operand that is absent is passed as None.
    """
    made = getattr(kernels, method)(*(o.get(each) if isinstance(each, str) else each for each in arguments), **options)
    return () if made is None else made if isinstance(made, tuple) else (made,)
