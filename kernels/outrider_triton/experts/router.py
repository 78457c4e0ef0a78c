"""The operator of routers in float32 (:mod:`outrider_triton.experts.jit.router`)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.device import Weight
from outrider_triton.experts.jit import router as jit
from outrider_triton.launch import define, launch, power_of_two

_EXPERTS = 2
"""Rows of a router that a program multiplies: with more, few tokens leave multiprocessors without work."""
MAX_ROUTED_TOKENS = 64
"""Number of tokens up to which one program for each token and pair of experts is faster than the library's product."""
_MAX_HIDDEN = 8192


def _router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, pdl: bool) -> Tensor:
    (tokens, size), experts = x.shape, weight.shape[0]
    out = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    block = power_of_two(size)
    launch(
        jit.router_logits,
        (tokens, triton.cdiv(experts, _EXPERTS)),
        *(x, weight, bias, out, experts, size, x.stride(0)),
        EXPERTS=_EXPERTS,
        BLOCK=block,
        pdl=pdl,
        warps=4 if block <= 4096 else 8,
    )
    return out


define("router_logits.triton", _router_logits)


def multiplies_router(x: Tensor, weight: Weight) -> bool:
    """Return True if the kernel takes these tokens and this router: 16 bits, and contiguous float32."""
    return (
        isinstance(weight, Tensor)
        and weight.dtype is torch.float32
        and weight.is_contiguous()
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and x.shape[1] <= _MAX_HIDDEN
    )
