"""Operators of the host, as overloads of the backend interface's operators. Observers identify operands by name.

Each operator runs synchronously, so it can read values of its operands without a device wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels.operators import define_operator
from outrider.device.kernels.reference.model import as_cached

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_define = partial(define_operator, _LIBRARY, key="CPU")
_TOGETHER = 1 << 17
"""Maximum number of elements of a request's keys in a layer for which requests share an attention call: a copy of the keys
and values costs less than a call. A longer request has a call of its own, over its pages in place if they are consecutive.
"""
_PADDING = 1 << 17
"""Maximum number of padding elements of keys that a shared call copies because its longest request is longer: more cost as
much as another call.
"""
_RAGGED = 16
"""Maximum number of requests with different numbers of new tokens for which each has a call of its own, even if
keys are few.
"""


def _rope_write_cache(
    turned: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    """Rotate queries and keys together. The last heads of the result are the keys."""
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
    """Compute attention over each request's cached tokens, without the unused rest of its block table."""
    lens: list[int] = seq_lens.tolist()
    starts: list[int] = query_start[: len(lens) + 1].tolist()
    longest = max(lens, default=0)
    beyond = q.shape[0] - starts[-1]
    parts: list[Tensor] = []
    count, numbers = starts[1] if lens else 0, k_cache.shape[2] * k_cache.shape[3]
    alike = 0 < count <= min(lens, default=0) and starts == list(range(0, count * len(lens) + 1, count))
    if alike and len(groups := _groups(lens, numbers)) < len(lens):
        operands = [q[: starts[-1]].unflatten(0, (-1, count)), seq_lens, block_table]
        if tree_mask is not None:
            operands.append(tree_mask[: starts[-1], :count].reshape(-1, count, count))
        if len(groups) == 1:
            made = _attend_together(k_cache, v_cache, longest, scale, window, *operands)
            return torch.cat((made, q.new_zeros(beyond, *q.shape[1:]))) if beyond else made
        made = torch.zeros_like(q)
        rows = made[: starts[-1]].unflatten(0, (-1, count))
        for group in groups:
            which = torch.tensor(group)
            own = [each.index_select(0, which) for each in operands]
            attended = _attend_together(k_cache, v_cache, lens[group[0]], scale, window, *own)
            rows.index_copy_(0, which, attended.unflatten(0, (-1, count)))
        return made
    if not alike and len(lens) > _RAGGED and longest * numbers <= _TOGETHER:
        whole: Tensor = torch.ops.outrider.paged_attention.default(
            *(q, k_cache, v_cache, query_start, seq_lens, block_table, tree_mask),
            *(max_query, min(max_kv, max(1, longest)), scale, window),
        )
        return whole
    for index, ((start, end), length) in enumerate(zip(pairwise(starts), lens, strict=True)):
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
    if beyond:
        parts.append(q.new_zeros(beyond, *q.shape[1:]))
    return torch.cat(parts)  # also of one part: a result shares no memory with an operand


def _groups(lens: Sequence[int], numbers: int) -> list[list[int]]:
    """Return groups of requests of similar lengths, whose attention one call computes; ``numbers``: elements of a token's
    keys.
    """
    groups: list[list[int]] = []
    padding = most = 0
    for index in sorted(range(len(lens)), key=lens.__getitem__, reverse=True):
        padding += (most - lens[index]) * numbers
        if not groups or most * numbers > _TOGETHER or padding > _PADDING:
            groups.append([])
            padding, most = 0, lens[index]
        groups[-1].append(index)
    return groups


def _cached(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return keys or values of a request's first ``length`` tokens [length, Hkv, D], as a view if its
    pages are consecutive.
    """
    page_size = cache.shape[1]
    count = -(-length // page_size)
    pages: list[int] = table[:count].tolist()
    first = pages[0]
    in_a_row = pages == list(range(first, first + count))
    found = cache[first : first + count] if in_a_row else cache.index_select(0, table[:count])
    return found.flatten(0, 1)[:length]


def _all_cached(cache: Tensor, pages: Tensor, batch: int) -> Tensor:
    """Return keys or values of ``batch`` requests [B, S, Hkv, D]; S is the longest request's tokens, in whole ``pages``."""
    return cache.index_select(0, pages).view(batch, -1, *cache.shape[2:])


def _attend_together(
    k_cache: Tensor,
    v_cache: Tensor,
    longest: int,
    scale: float,
    window: int,
    q: Tensor,
    lens: Tensor,
    tables: Tensor,
    tree: Tensor | None = None,
) -> Tensor:
    """Attend for several requests over copies of their keys and values: q [B, N, Hq, D] → [B N, Hq, D]."""
    batch, count, heads, size = q.shape
    kv_heads = k_cache.shape[2]
    pages = tables[:, : -(-longest // k_cache.shape[1])].flatten()
    keys, values = (_all_cached(cache, pages, batch).to(q.dtype) for cache in (k_cache, v_cache))
    position = torch.arange(keys.shape[1])
    last = (lens - count).view(batch, 1, 1) + torch.arange(count).unsqueeze(1)  # that a query sees, of [B, N, S]
    visible = position <= last
    if tree is not None:
        new = position - (lens - count).unsqueeze(1)  # [B, S]: index among the new tokens; negative in the context
        among = tree.gather(2, new.clamp(0, count - 1).unsqueeze(1).expand(batch, count, -1))
        visible = (new < 0).unsqueeze(1) | (among & (new < count).unsqueeze(1))
    if window > 0:
        visible &= position > last - window
    # Of one token, the heads that share keys are rows of one product.
    own = q.reshape(batch, kv_heads, heads // kv_heads, size) if count == 1 else q.transpose(1, 2)

    def attended() -> Tensor:
        return F.scaled_dot_product_attention(
            own,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=visible.unsqueeze(1),
            scale=scale,
            enable_gqa=own.shape[1] != kv_heads,
        )

    out = attended()
    if not math.isfinite(out.sum()):  # a value may be non-finite; an overflowing sum only costs time
        # A zero attention weight doesn't mask a NaN that another request left after this request's last token.
        outside = position >= lens.unsqueeze(1)
        for each in (keys, values):
            each.masked_fill_(outside[:, :, None, None], 0)
        out = attended()
    return (out if count == 1 else out.transpose(1, 2)).reshape(batch * count, heads, size)


def _attend(q: Tensor, keys: Tensor, values: Tensor, tree: Tensor | None, scale: float, window: int) -> Tensor:
    """Compute attention of one request: q [N, Hq, D] are its last N tokens, keys and values [L, Hkv, D] all its tokens."""
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
    """Return a view of ``x`` [L, H, D] as [1, H, L, D], the layout of torch's attention."""
    return x.transpose(0, 1).unsqueeze(0)


def _sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, lane: int) -> Tensor:
    """Return the argmax if all rows are greedy, else sample."""
    if not any(temperature.tolist()):
        return logits.argmax(-1)
    sampled: Tensor = torch.ops.outrider.sample.default(logits, temperature, seeds, positions, lane)
    return sampled


def _verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Verify a chain of drafts; take the argmax if there are no drafts, and ignore the distributions if
    all rows are greedy.
    """
    if draft_probs is not None and not any(temperature.tolist()):
        draft_probs = None
    if draft_probs is None and not draft_tokens.shape[1]:
        return target_logits.argmax(-1), draft_tokens.new_zeros(draft_tokens.shape[0])
    decided: tuple[Tensor, Tensor] = torch.ops.outrider.verify_chain.default(
        target_logits, draft_tokens, draft_probs, temperature, seeds, positions
    )
    return decided


_define("rope_write_cache.host", _rope_write_cache, writes=("k_cache", "v_cache"))
_define("paged_attention.host", _paged_attention)
_define("sample.host", _sample)
_define("verify_chain.host", _verify_chain)
