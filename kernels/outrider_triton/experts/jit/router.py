"""The product of a router in float32 with tokens in 16 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin


@triton.jit
def router_logits(
    x, weight, bias, out, experts, size, x_token, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Multiply a token of ``x [tokens, size]`` by EXPERTS rows of ``weight [experts, size]``, and add their ``bias`` unless
    it is None; one program per (token, rows). The order of a sum depends on ``size`` alone. Weights are loaded before the
    wait.
    """
    lane = tl.arange(0, BLOCK)[None, :]
    expert = (tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS))[:, None]
    inside = expert < experts
    factors = tl.load(weight + expert * size + lane, mask=inside & (lane < size), other=0.0)
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    values = tl.load(x + token * x_token + lane, mask=lane < size, other=0.0)
    logits = tl.sum(factors * values.to(tl.float32), axis=1)[:, None]
    if bias is not None:
        logits += tl.load(bias + expert, mask=inside, other=0.0)
    tl.store(out + token * experts + expert, logits, mask=inside)
