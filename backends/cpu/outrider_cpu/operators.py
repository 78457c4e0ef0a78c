"""Operators of the host, as overloads of the seam's: what watches a run knows them by the operands' names.

Each runs at once, so it may read a value for the price of reading it. Inside an operator that is its own business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels.reference import as_cached

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_ALONE = 16
"""Requests of a batch up to which each has an attention call of its own, without a mask where it sees everything."""


def _define(schema: str, implementation: Callable[..., Any]) -> None:
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.split("(", 1)[0], implementation, "CPU")


def _rope_write_cache(
    turned: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    """Queries and keys are rotated together; the last heads of the result are the keys."""
    half = turned.shape[-1] // 2
    sin = sin.unsqueeze(1)
    rotated = turned * cos.unsqueeze(1)
    rotated[..., :half].addcmul_(turned[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(turned[..., :half], sin[..., half:])
    _write(k_cache, slots, rotated[:, -v.shape[1] :])
    _write(v_cache, slots, v)
    return rotated


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    rows, cache = as_cached(rows, cache.dtype), cache.flatten(0, 1)
    if cache.dtype.itemsize == 1:  # torch copies no rows of eight-bit floats, but bytes
        rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
    cache.index_copy_(0, slots, rows)


def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tree_mask: Tensor | None,
    max_query: int,
    max_kv: int,
    scale: float,
    window: int,
) -> Tensor:
    """Over as many cached tokens as there are."""
    lens: list[int] = seq_lens.tolist()
    if len(lens) > _ALONE:
        bound = min(max_kv, max(1, *lens))
        whole: Tensor = torch.ops.outrider.paged_attention.default(
            q, k_cache, v_cache, query_start, seq_lens, block_table, tree_mask, max_query, bound, scale, window
        )
        return whole
    starts: list[int] = query_start.tolist()
    parts: list[Tensor] = []
    for index, (start, end, length) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        count = end - start
        if not count:
            continue
        queries = q[start:end]
        if length < count:  # padding: it has no tokens of its own
            parts.append(torch.zeros_like(queries))
            continue
        keys, values = (_cached(cache, block_table[index], length).to(q.dtype) for cache in (k_cache, v_cache))
        tree = None if tree_mask is None else tree_mask[start:end, :count]
        parts.append(_attend(queries, keys, values, tree, scale, window))
    beyond = q.shape[0] - starts[len(lens)]
    if beyond:
        parts.append(q.new_zeros(beyond, *q.shape[1:]))
    return torch.cat(parts)  # also of one part: a result shares no memory with an operand


def _cached(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Keys or values of the first ``length`` tokens of a request [length, Hkv, D]; a view where its pages lie in a row."""
    page_size = cache.shape[1]
    count = -(-length // page_size)
    pages: list[int] = table[:count].tolist()
    first = pages[0]
    in_a_row = pages == list(range(first, first + count))
    found = cache[first : first + count] if in_a_row else cache.index_select(0, table[:count])
    return found.flatten(0, 1)[:length]


def _attend(q: Tensor, keys: Tensor, values: Tensor, tree: Tensor | None, scale: float, window: int) -> Tensor:
    """One request: q [N, Hq, D] are its last N tokens, keys and values [L, Hkv, D] all of them."""
    count, heads, size = q.shape
    length, kv_heads = keys.shape[:2]
    if count == 1:
        if window > 0:
            keys, values = keys[-window:], values[-window:]
        # The heads that share keys are rows of one product, and see everything.
        shared = q.reshape(1, kv_heads, heads // kv_heads, size)
        out = F.scaled_dot_product_attention(shared, _by_head(keys), _by_head(values), scale=scale)
        return out.reshape(1, heads, size)
    mask = None
    causal = tree is None and not window and length == count
    if not causal:
        mask = torch.ones(count, length, dtype=torch.bool).tril_(length - count)
        if tree is not None:
            mask[:, length - count :] = tree
        if window > 0:
            mask.triu_(length - count - window + 1)
    out = F.scaled_dot_product_attention(
        _by_head(q),
        _by_head(keys),
        _by_head(values),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out.squeeze(0).transpose(0, 1)


def _by_head(x: Tensor) -> Tensor:
    """[L, H, D] as [1, H, L, D]."""
    return x.transpose(0, 1).unsqueeze(0)


def _sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, lane: int) -> Tensor:
    """The likeliest where no row samples."""
    if not any(temperature.tolist()):
        return logits.argmax(-1)
    drawn: Tensor = torch.ops.outrider.sample.default(logits, temperature, seeds, positions, lane)
    return drawn


def _verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Without drafts there's nothing to verify, and without a row that samples no distribution to look at."""
    if draft_probs is not None and not any(temperature.tolist()):
        draft_probs = None
    if draft_probs is None and not draft_tokens.shape[1]:
        return target_logits.argmax(-1), draft_tokens.new_zeros(draft_tokens.shape[0])
    decided: tuple[Tensor, Tensor] = torch.ops.outrider.verify_chain.default(
        target_logits, draft_tokens, draft_probs, temperature, seeds, positions
    )
    return decided


_define(
    "rope_write_cache.host(Tensor turned, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slots) -> Tensor",
    _rope_write_cache,
)
_define(
    "paged_attention.host(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_start, Tensor seq_lens, Tensor block_table, "
    "Tensor? tree_mask, int max_query, int max_kv, float scale, int window) -> Tensor",
    _paged_attention,
)
_define("sample.host(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, int lane) -> Tensor", _sample)
_define(
    "verify_chain.host(Tensor target_logits, Tensor draft_tokens, Tensor? draft_probs, Tensor temperature, Tensor seeds, "
    "Tensor positions) -> (Tensor, Tensor)",
    _verify_chain,
)
