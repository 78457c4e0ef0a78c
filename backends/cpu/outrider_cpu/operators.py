"""Operators of the host, as overloads of the backend interface's operators. Observers identify operands by name.

Each operator runs synchronously, so it can read values of its operands without a device wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels.operators import define_operator
from outrider.device.kernels.reference import bookkeeping, model
from outrider.device.kernels.reference.bookkeeping import place_accepted
from outrider.device.kernels.reference.model import as_cached, copy_rows, gather_rows
from outrider_cpu.compiled_blocks import VECTOR_ELEMENTS, compiled_functions

# -- attention over the KV pages of a batch ----------------------------------------------------------------------------


_TOGETHER = 1 << 17
"""Numbers of a request's keys in a layer up to which it shares its attention call with others: a copy of all keys and values
costs less than a call each. Of longer ones, each has its own, over its pages where they lie in a row."""
_PADDING = 1 << 17
"""Numbers of keys that are copied for nothing in a call, since a request there is longer, at most: they cost as much as
another call."""
_RAGGED = 16
"""Requests with different numbers of new tokens up to which each has a call of its own, also where keys are few."""
_GROUPED = 16
"""New tokens of a request up to which the query heads that share keys are rows of one product."""


def paged_attention(
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over each request's cached tokens, without the unused rest of its block table.

    The reference computes attention with sinks, over as many cached tokens as the longest request has.
    """
    lens: list[int] = seq_lens.tolist()
    starts: list[int] = query_start[: len(lens) + 1].tolist()
    longest = max(lens, default=0)
    beyond = q.shape[0] - starts[-1]
    parts: list[Tensor] = []
    count, numbers = starts[1] if lens else 0, k_cache.shape[2] * k_cache.shape[3]
    alike = len(lens) > 1 and 0 < count <= min(lens) and starts == list(range(0, count * len(lens) + 1, count))
    if sinks is None and alike and len(groups := _groups(lens, numbers)) < len(lens):
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
    if sinks is not None or (not alike and len(lens) > _RAGGED and longest * numbers <= _TOGETHER):
        whole: Tensor = torch.ops.outrider.paged_attention.default(
            *(q, k_cache, v_cache, query_start, seq_lens, block_table, tree_mask),
            *(max_query, min(max_kv, max(1, longest)), scale, window, sinks),
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
        first = max(0, length - window) if window > 0 and count == 1 else 0
        keys, values = (each.to(q.dtype) for each in _cached((k_cache, v_cache), block_table[index], first, length))
        tree = None if tree_mask is None else tree_mask[start:end, :count]
        parts.append(_attend(queries, keys, values, tree, scale, window))
    if beyond:
        parts.append(q.new_zeros(beyond, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _groups(lens: Sequence[int], numbers: int) -> list[list[int]]:
    """Return groups of indices of requests with similar lengths ``lens``. One call computes the attention of a group.
    ``numbers`` is the number of elements of a token's keys.
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


def _cached(caches: tuple[Tensor, Tensor], table: Tensor, first: int, end: int) -> list[Tensor]:
    """Return keys and values of a request's tokens from ``first`` to ``end`` [1, Hkv, L, D]: views of consecutive pages."""
    page_size, kv_heads, size = caches[0].shape[1:]
    count = -(-end // page_size)
    pages: list[int] = table[:count].tolist()
    offset = pages[0] * page_size
    if pages != list(range(pages[0], pages[0] + count)) or not all(cache.is_contiguous() for cache in caches):
        caches, offset = (caches[0].index_select(0, table[:count]), caches[1].index_select(0, table[:count])), 0
    shape, token = (1, kv_heads, end - first, size), kv_heads * size
    return [
        cache.as_strided(shape, (0, size, token, 1), cache.storage_offset() + (offset + first) * token) for cache in caches
    ]


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
    batch, count = q.shape[:2]
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
    rows, shared = _grouped(q, kv_heads) if count <= _GROUPED else (q.transpose(1, 2), 1)

    def attended() -> Tensor:
        return F.scaled_dot_product_attention(
            rows,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=visible.repeat(1, shared, 1).unsqueeze(1),
            scale=scale,
            enable_gqa=rows.shape[1] != kv_heads,
        )

    out = attended()
    if not math.isfinite(out.sum()):  # a value may be non-finite; an overflowing sum only costs time
        # A zero attention weight doesn't mask a NaN that another request left after this request's last token.
        outside = position >= lens.unsqueeze(1)
        for each in (keys, values):
            each.masked_fill_(outside[:, :, None, None], 0)
        out = attended()
    return _by_token(out, count)


def _attend(q: Tensor, keys: Tensor, values: Tensor, tree: Tensor | None, scale: float, window: int) -> Tensor:
    """Compute attention of one request: q [N, Hq, D] are its last N tokens, keys and values [1, Hkv, L, D] all its tokens.

    If N is 1, the caller passes only the keys and values that the window of this token covers.
    """
    count, heads, size = q.shape
    kv_heads, length = keys.shape[1:3]
    if count == 1:  # the heads that share keys are rows of one product, and see everything
        out = F.scaled_dot_product_attention(q.view(1, kv_heads, -1, size), keys, values, scale=scale)
        return out.reshape(1, heads, size)
    rows, shared = _grouped(q.unsqueeze(0), kv_heads) if count <= _GROUPED else (q.transpose(0, 1).unsqueeze(0), 1)
    mask = None
    causal = shared == 1 and tree is None and not window and length == count
    if not causal:
        mask = _mask(count, length, window, shared, q.dtype, tree is None)
        if tree is not None:
            mask = mask.clone()
            mask.view(shared, count, length)[:, :, length - count :].masked_fill_(~tree, -math.inf)
    out = F.scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=rows.shape[1] != kv_heads
    )
    return _by_token(out, count)


@lru_cache(maxsize=16)
def _mask(count: int, length: int, window: int, repeats: int, dtype: torch.dtype, causal: bool) -> Tensor:
    """Return the summands of the attention scores of a request's last ``count`` tokens, repeated [repeats count, length].

    All layers of an iteration share a mask. Without ``causal``, each token sees all new tokens.
    """
    visible = torch.ones(count, length, dtype=torch.bool)
    if causal:
        visible.tril_(length - count)
    if window > 0:
        visible.triu_(length - count - window + 1)
    return torch.zeros(count, length, dtype=dtype).masked_fill_(~visible, -math.inf).repeat(repeats, 1)


def _grouped(q: Tensor, kv_heads: int) -> tuple[Tensor, int]:
    """Return q [B, N, Hq, D] as [B, Hkv, G N, D], the tokens of a head together, and the G heads that share keys."""
    by_kv_head = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return by_kv_head.flatten(2, 3), by_kv_head.shape[2]


def _by_token(out: Tensor, count: int) -> Tensor:
    """Return attention outputs [B, Hkv, G N, D] of N = ``count`` tokens as [B N, Hq, D]."""
    heads = out.unflatten(2, (-1, count))
    by_token: Tensor = heads.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    return by_token


# -- operators ---------------------------------------------------------------------------------------------------------


# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_define = partial(define_operator, _LIBRARY, key="CPU")
_ARGMAX_BLOCK = 128
"""Elements of a block whose largest element is found by vector operations."""


def rope_write_cache(
    turned: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    """Rotate queries and keys ``turned`` [T, Hq + Hkv, D] together, and write the rotated keys and ``v`` to ``slots`` of the
    caches. Return the rotated heads [T, Hq + Hkv, D], the keys last.
    """
    first, second = turned.chunk(2, dim=-1)
    sin_first, sin_second = sin.unsqueeze(1).chunk(2, dim=-1)
    rotated = turned * cos.unsqueeze(1)
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    rotated_first.addcmul_(second, sin_first, value=-1)
    rotated_second.addcmul_(first, sin_second)
    _write(k_cache, slots, rotated[:, -v.shape[1] :])
    _write(v_cache, slots, v)
    return rotated


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    rows, cache = as_cached(rows, cache.dtype), cache.flatten(0, 1)
    if cache.dtype.itemsize == 1:  # torch copies no rows of eight-bit floats, but bytes
        rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
    cache.index_copy_(0, slots, rows)


def argmax(logits: Tensor) -> Tensor:
    """Return the lowest index of the largest element of each row [..., V]. torch compares element by element to find it; the
    largest of each block needs only vector operations.
    """
    if logits.shape[-1] % _ARGMAX_BLOCK or not logits.is_contiguous():
        return logits.argmax(-1)
    blocks = logits.view(-1, logits.shape[-1] // _ARGMAX_BLOCK, _ARGMAX_BLOCK)
    best = blocks.amax(-1).argmax(-1, keepdim=True)
    inside = blocks.gather(1, best.unsqueeze(2).expand(-1, -1, _ARGMAX_BLOCK)).argmax(-1)
    return inside.add_(best, alpha=_ARGMAX_BLOCK).view(logits.shape[:-1])


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, lane: int) -> Tensor:
    """Return the argmax if all rows are greedy, else sample."""
    if not any(temperature.tolist()):
        return _choose(logits.unsqueeze(1), None)[0].squeeze(1)
    sampled: Tensor = torch.ops.outrider.sample.default(logits, temperature, seeds, positions, lane)
    return sampled


def verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Verify a chain of drafts; compare with the argmax only if all rows are greedy."""
    if draft_probs is None or not any(temperature.tolist()):
        return _choose(target_logits, draft_tokens)[:2]
    decided: tuple[Tensor, Tensor] = torch.ops.outrider.verify_chain.default(
        target_logits, draft_tokens, draft_probs, temperature, seeds, positions
    )
    return decided


def verify_checked(
    target_logits: Tensor, draft_tokens: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, found: Tensor
) -> tuple[Tensor, Tensor]:
    """Verify a chain of drafts of greedy rows, and search the logits for NaN."""
    del temperature, seeds, positions
    tokens, accepted, may_be_nan = _choose(target_logits, draft_tokens)
    if may_be_nan:
        find_nan(target_logits.flatten(1), found)
    else:
        found.fill_(-1)
    return tokens, accepted


def _choose(logits: Tensor, drafted: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """Accept the tokens ``drafted`` [B, K] that have the largest of the ``logits`` [B, K + 1, V], and decide the next one.

    Return tokens [B, K + 1], accepted [B], and False if no logit is NaN. Without ``drafted``, K is 0.
    """
    functions, (requests, nodes, width) = compiled_functions(), logits.shape
    is_plain = logits.is_contiguous() and (drafted is None or drafted.is_contiguous())
    if functions is None or logits.dtype is not torch.float32 or width % VECTOR_ELEMENTS or not is_plain:
        tokens = argmax(logits)
        if drafted is None or nodes == 1:
            return tokens, tokens.new_zeros(requests), True
        accepted = tokens[:, :-1].eq(drafted).cumprod(1).sum(1)
        return tokens.masked_fill_(torch.arange(nodes) > accepted.unsqueeze(1), -1), accepted, True
    tokens = torch.empty((requests, nodes), dtype=torch.int64)
    accepted = torch.empty(requests, dtype=torch.int64)
    addresses = logits.data_ptr(), 0 if drafted is None else drafted.data_ptr()
    results = tokens.data_ptr(), accepted.data_ptr()
    memory = functions.run_on_rows("choose", *addresses, requests, nodes - 1, width, *results, 0)
    return tokens, accepted, memory[-1] != 0


def find_nan(x: Tensor, found: Tensor) -> None:
    """Search ``x`` only if its sum is NaN: a NaN element makes it so."""
    if x.is_floating_point() and math.isnan(x.sum()):
        torch.ops.outrider.find_nan.default(x, found)
    else:
        found.fill_(-1)


def gather_checked(source: Tensor, rows: Tensor | None, low: int, high: int, out: Tensor, found: Tensor) -> None:
    """Copy rows of ``source``; search for invalid values only if the sum is NaN or the smallest or largest integer is."""
    value = source if rows is None else source.index_select(0, rows)
    if source.is_floating_point():
        is_valid = not math.isnan(value.sum())
    else:
        lowest, highest = value.aminmax()
        is_valid = low <= int(lowest) and int(highest) < high
    if is_valid:
        out.copy_(value)
        found.fill_(-1)
    else:
        torch.ops.outrider.gather_checked.default(source, rows, low, high, out, found)


def scatter_rows(state: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write ``values`` [n, ...] to the rows ``rows`` int64 [n] of ``state`` [R, ...], except to row 0."""
    if 0 in rows.tolist():
        model.scatter_rows(state, rows, values)
    else:
        state.index_copy_(0, rows, values)


def place_tokens(
    lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
) -> None:
    """Write positions, cache slots and lengths of the tokens that follow ``lens`` cached tokens."""
    if (functions := compiled_functions()) is None:
        bookkeeping.place_tokens(lens, tables, page_size, last, positions, slots, seq_lens)
        return
    numbers = [*positions.shape, page_size, tables.shape[1], last, positions.shape[1] - seq_lens.shape[1]]
    numbers += [lens.data_ptr(), lens.stride(0) * 8, 0]
    for each in (tables, positions, slots, seq_lens):
        row, column = each.stride()
        numbers += [each.data_ptr(), row * each.itemsize, column * each.itemsize]
    functions.run_on_rows("place", *numbers)


_define("rope_write_cache.host", rope_write_cache, writes=("k_cache", "v_cache"))
_define("paged_attention.host", paged_attention)
_define("sample.host", sample)
_define("find_nan.host", find_nan, writes=("found",))
_define("gather_checked.host", gather_checked, writes=("out", "found"))
_define("verify_chain.host", verify_chain)
_define("verify_checked.host", verify_checked, writes=("found",))
_define("gather_rows.host", gather_rows)
_define("scatter_rows.host", scatter_rows, writes=("state",))
_define("copy_rows.host", copy_rows, writes=("out",))
_define("place_tokens.host", place_tokens, writes=("positions", "slots", "seq_lens"))
_define("place_accepted.host", place_accepted, writes=("following", "last", "positions"))
