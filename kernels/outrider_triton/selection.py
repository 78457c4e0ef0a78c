"""Operators that sample and verify tokens, as overloads of the backend interface's operators."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.device.kernels.operators import expect
from outrider_triton.jit import selection as jit
from outrider_triton.launch import define, launch, power_of_two

_VOCABULARY_BLOCK = 1024
_GREEDY_BLOCK = 2048
"""Number of logits that a program of greedy selection loads at once: it keeps little other state, so more loads can be in
flight.
"""


def _best(
    logits: Tensor,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    parents: Tensor | None = None,
    *,
    sampling: bool = False,
    lane: int = 0,
    depth: int = 0,
    shares: int,
    pdl: bool,
    find: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the largest logit of each share and its index, both [rows, shares], for ``logits`` [B, V] or [B, N, V], and
    None. With ``sampling``, noise is added to the logits.

    ``find``: return the index of each share's first NaN instead of None.
    """
    nodes, vocabulary = (1 if logits.dim() == 2 else logits.shape[1]), logits.shape[-1]
    flat = logits.reshape(-1, vocabulary)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    count = flat.shape[0]
    best = torch.empty((count, shares), dtype=torch.float32, device=logits.device)
    index = torch.empty((count, shares), dtype=torch.int32, device=logits.device)
    firsts = torch.empty_like(index) if find else None
    launch(
        jit.partial_argmax,
        (count, shares),
        *(flat, temperature, seeds, positions, parents, best, index, firsts, nodes, vocabulary, flat.stride(0)),
        SAMPLING=sampling,
        LANE=lane,
        DEPTH=depth,
        SHARES=shares,
        BLOCK=_VOCABULARY_BLOCK if sampling else _GREEDY_BLOCK,
        pdl=pdl,
        warps=4,
    )
    return best, index, firsts


def _sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, lane: int, shares: int, pdl: bool
) -> Tensor:
    operands = (temperature.contiguous(), seeds.contiguous(), positions.contiguous())
    best, index, _ = _best(logits, *operands, sampling=True, lane=lane, shares=shares, pdl=pdl)
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    launch(jit.reduce_argmax, (tokens.shape[0],), best, index, tokens, SHARES=shares, pdl=pdl, warps=1)
    return tokens


define("sample.triton", _sample)


def _verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    lanes: list[int],
    shares: int,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    if draft_probs is None:
        return _accept_greedy(target_logits, draft_tokens, None, shares, pdl)
    batch, num_draft_tokens = draft_tokens.shape
    drafts = draft_tokens.contiguous()
    tokens, accepted = _empty_chain(draft_tokens)
    accept, residual = lanes
    logits = target_logits if target_logits.stride(-1) == 1 else target_logits.contiguous()
    vocabulary = logits.shape[-1]
    temperature, seeds, positions = temperature.contiguous(), seeds.contiguous(), positions.contiguous()
    probs = draft_probs.contiguous()
    count = batch * (num_draft_tokens + 1)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((*shape, count, shares), dtype=dtype, device=logits.device)

    best, index, sums = empty(), empty(dtype=torch.int32), empty()
    picked, picked_at, residual_mass = empty(2), empty(2, dtype=torch.int32), empty()
    sizes = (num_draft_tokens, vocabulary, logits.stride(0), logits.stride(1))
    launch(
        jit.partial_softmax,
        (count, shares),
        *(logits, temperature, best, index, sums, *sizes),
        BLOCK=_VOCABULARY_BLOCK,
        SHARES=shares,
        pdl=pdl,
        warps=4,
    )
    launch(
        jit.partial_residual,
        (count, shares),
        *(logits, probs, temperature, seeds, positions, best, sums, picked, picked_at, residual_mass, *sizes),
        LANE=residual,
        BLOCK=_VOCABULARY_BLOCK,
        SHARES=shares,
        pdl=pdl,
        warps=4,
    )
    launch(
        jit.accept_sampling,
        (batch,),
        *(logits, drafts, probs, temperature, seeds, positions, best, index, sums, picked, picked_at, residual_mass),
        *(tokens, accepted, count, *sizes),
        LANE=accept,
        NUM_DRAFT_TOKENS=num_draft_tokens,
        SHARES=shares,
        pdl=pdl,
        warps=1,
    )
    return tokens, accepted


def _accept_greedy(
    target_logits: Tensor, draft_tokens: Tensor, found: Tensor | None, shares: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Verify chains of drafts in a batch in which no row samples. ``found``: also report NaN among the logits, without
    reading them again.
    """
    (batch, num_draft_tokens), vocabulary, find = draft_tokens.shape, target_logits.shape[-1], found is not None
    tokens, accepted = _empty_chain(draft_tokens)
    best, index, firsts = _best(target_logits, shares=shares, pdl=pdl, find=find)
    launch(
        jit.accept_greedy,
        (batch,),
        *(best, index, firsts, draft_tokens.contiguous() if num_draft_tokens else tokens, tokens, accepted, found),
        *(num_draft_tokens, vocabulary, 0 if found is None else found.stride(0)),
        SHARES=shares,
        NUM_DRAFT_TOKENS=num_draft_tokens,
        pdl=pdl,
        warps=1,
    )
    return tokens, accepted


define("verify_checked.triton", _accept_greedy, writes=("found",))


def _empty_chain(draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    batch, num_draft_tokens = draft_tokens.shape
    return draft_tokens.new_empty((batch, num_draft_tokens + 1)), draft_tokens.new_empty((batch,))


define("verify_chain.triton", _verify_chain)


def _verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    depth: int,
    sampling: bool,
    lane: int,
    shares: int,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, shape = tokens.shape[0], (tokens.shape[0], depth + 1)
    chosen, path, accepted = tokens.new_empty(shape), tokens.new_empty(shape), tokens.new_empty((batch,))
    parents = parents.contiguous()
    operands = (temperature.contiguous(), seeds.contiguous(), positions.contiguous(), parents)
    best, index, _ = _best(
        target_logits, *operands, sampling=sampling, lane=lane, depth=depth if sampling else 0, shares=shares, pdl=pdl
    )
    batch, nodes = tokens.shape
    launch(
        jit.walk_tree,
        (batch,),
        *(best, index, tokens.contiguous(), parents, chosen, path, accepted, nodes),
        SHARES=shares,
        NODES=power_of_two(nodes),
        DEPTH=depth,
        pdl=pdl,
        warps=1,
    )
    return chosen, path, accepted


define("verify_tree.triton", _verify_tree)


def _apply_token_bitmask(logits: Tensor, bitmask: Tensor, pdl: bool) -> Tensor:
    batch, nodes, vocabulary = logits.shape
    words = triton.cdiv(vocabulary, 32)
    expect(
        bitmask.dtype == torch.int32 and bitmask.shape == (batch, nodes, words),
        lambda: f"a bitmask {tuple(bitmask.shape)} of {bitmask.dtype} for logits {tuple(logits.shape)}",
    )
    source = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch(
        jit.apply_token_bitmask,
        (batch * nodes, triton.cdiv(vocabulary, _VOCABULARY_BLOCK)),
        *(source, bitmask.contiguous(), out, nodes, vocabulary, words, source.stride(0), source.stride(1)),
        BLOCK=_VOCABULARY_BLOCK,
        pdl=pdl,
        warps=4,
    )
    return out


define("apply_token_bitmask.triton", _apply_token_bitmask)
