"""The attention operator that shows FlashInfer's memory accesses to observers: an overload with a plan's tables.

A FlashInfer wrapper can't be an operand. The wrapper's table is a tensor operand, and its tensor object maps to the wrapper.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from outrider.device.kernels.operators import register_operator

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")


def know(tables: Any, wrapper: object) -> None:
    """Register ``wrapper`` as the FlashInfer wrapper that reads ``tables``."""
    tables.flashinfer_wrapper = ref(wrapper)


def _run(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
    wrapper = rest[-1].flashinfer_wrapper()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wrapper.run(q, (k_cache, v_cache), out=out)
    return out


register_operator(
    _LIBRARY,
    "paged_attention.flashinfer(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_start, Tensor seq_lens, "
    "Tensor block_table, Tensor? tree_mask, int max_query, int max_kv, float scale, int window, Tensor indices, "
    "Tensor? mask, Tensor(a!) scratch, Tensor tables) -> Tensor",
    _run,
    lambda q, *rest: torch.empty(q.shape, dtype=q.dtype, device=q.device),
)
OPERATOR = torch.ops.outrider.paged_attention.flashinfer
