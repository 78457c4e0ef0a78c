"""Operators of the host, as overloads of the backend interface's operators. Observers identify operands by name.

Each operator runs synchronously, so it can read values of its operands without a device wait.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from outrider.device.kernels.operators import define_operator
from outrider.device.kernels.reference import bookkeeping, model
from outrider.device.kernels.reference.bookkeeping import place_accepted
from outrider.device.kernels.reference.model import as_cached, copy_rows, gather_rows
from outrider_cpu.attention import attend_pages as paged_attention
from outrider_cpu.compiled_blocks import VECTOR_ELEMENTS, compiled_functions

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
