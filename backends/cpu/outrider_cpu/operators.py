"""Operators of the host, as overloads of the backend interface's operators. Observers identify operands by name.

Each operator runs synchronously, so it can read values of its operands without a device wait.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from outrider.device.kernels.operators import define_operator
from outrider.device.kernels.reference.model import as_cached
from outrider_cpu.attention import attend_pages

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
        return argmax(logits)
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
        choice, count = argmax(target_logits), draft_tokens.shape[1]
        accepted = choice[:, :count].eq(draft_tokens).cumprod(1).sum(1)
        return choice.masked_fill_(torch.arange(count + 1) > accepted.unsqueeze(1), -1), accepted
    decided: tuple[Tensor, Tensor] = torch.ops.outrider.verify_chain.default(
        target_logits, draft_tokens, draft_probs, temperature, seeds, positions
    )
    return decided


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


_define("rope_write_cache.host", rope_write_cache, writes=("k_cache", "v_cache"))
_define("paged_attention.host", attend_pages)
_define("sample.host", sample)
_define("find_nan.host", find_nan, writes=("found",))
_define("gather_checked.host", gather_checked, writes=("out", "found"))
_define("verify_chain.host", verify_chain)
