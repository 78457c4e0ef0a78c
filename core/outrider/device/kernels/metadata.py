"""What kernels are told: of a batch, and of what lies beside a product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device.graph import HostParam


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """One kind of attention that a batch goes through: what of ``KernelSet.paged_attention`` is the same for all batches.

    ``heads`` of queries and ``kv_heads`` of the cache, ``head_size``, tokens of a page, ``dtype`` of queries and cache,
    ``scale`` and ``window`` as ``paged_attention`` has them.
    """

    heads: int
    kv_heads: int
    head_size: int
    page_size: int
    dtype: torch.dtype
    scale: float
    window: int = 0

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor, *, scale: float, window: int) -> AttentionShape:
        """That of a call of ``KernelSet.paged_attention`` with these operands."""
        return cls(
            heads=q.shape[1],
            kv_heads=k_cache.shape[2],
            head_size=q.shape[2],
            page_size=k_cache.shape[1],
            dtype=q.dtype,
            scale=scale,
            window=window,
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A ragged batch of B sequences with T new tokens in all, over a paged cache.

    ``query_start`` int32 [B+1]: offsets of each sequence's new tokens in the flat token dimension; tokens past the last
    offset are padding. ``seq_lens`` int32 [B]: cached tokens of each sequence, its new ones included. ``block_table``
    int32 [B, pages]: pages in order of position; unused entries are 0, the reserved page. ``max_query`` and ``max_kv``:
    host upper bounds of new tokens and cached tokens per sequence (``max_kv`` a bound, not the maximum: the host runs
    ahead of the device).

    ``tree_mask`` bool [T, max_query], or None for a causal batch: whether new token t sees new token j of its own
    sequence. Every new token sees all cached tokens before the new ones.

    ``uniform``: every sequence has exactly ``max_query`` new tokens and there is no padding, so T = B * max_query; False
    where that isn't known.

    ``seq_lens_host``: the exact lengths as a host parameter, only where the backend's policy declares
    ``exact_host_lengths``, and in ``KernelSet.plan_attention`` of kernels that declare ``plans_on_host``.
    ``host_query_start``: ``query_start`` on the host, where a batch isn't uniform and the host made it.

    ``settled``: a whole decoder layer has been enqueued since anything here was written, and since anything was written to
    the cache but each sequence's own new tokens in the layer that asks; no sequence's context is among another's new tokens.
    On one stream that says nothing new, unless kernels begin before the ones ahead of them have ended (programmatic dependent
    launch): then they may read all this at once. A kernel set that makes use of it sees to it that one kernel of each layer
    waits for all before it.

    ``shapes``: the attentions that this batch is planned for. ``plan``: what ``KernelSet.plan_attention`` made of this
    batch, if the library plans. Code that changes lengths or queries of a planned batch must remove both: the plan is
    for another batch.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query: int
    max_kv: int
    tree_mask: Tensor | None = None
    uniform: bool = False
    seq_lens_host: HostParam | None = None
    plan: object | None = None
    host_query_start: tuple[int, ...] | None = None
    shapes: tuple[AttentionShape, ...] = ()
    settled: bool = False


class Product(NamedTuple):
    """A matrix product that is still to be made: ``x @ weight.T + bias``.

    ``x`` [T, in], ``weight`` [out, in], ``bias`` [out] or None, all of one dtype.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None


class RotaryArgs(NamedTuple):
    """How new keys and queries are rotated, and where keys and values go: see :meth:`KernelSet.rope_write_cache`.

    ``cos`` and ``sin`` [T, D]; caches [pages, page size, Hkv, D], written; ``slots`` int64 [T].
    """

    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor

    def split(self, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D]: views of ``made`` [T, (Hq + 2 Hkv) D], which has all."""
        kv_heads, size = self.k_cache.shape[2:]
        heads = made.shape[-1] // size - 2 * kv_heads
        q, k, v = made.view(-1, heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), dim=1)
        return q, k, v


class HeadNorms(NamedTuple):
    """How queries and keys are normed head by head, before they're rotated: ``queries`` and ``keys`` [D], as the weights of
    :meth:`KernelSet.rms_norm`, and its ``eps``.
    """

    queries: Tensor
    keys: Tensor
    eps: float


class RequestRows(NamedTuple):
    """State of all requests of an engine, one of R rows each; row 0 is reserved for padding.

    ``last_tokens`` int64 [R], ``seeds`` int64 [R], ``temperature`` float32 [R], ``tables`` int32 [R, P]: the block table.
    """

    last_tokens: Tensor
    seeds: Tensor
    temperature: Tensor
    tables: Tensor


class RequestInputs(NamedTuple):
    """Private copies of what an iteration reads of its B requests, in the batch's order.

    ``rows`` int64 [B], ``lens`` int64 [B], ``last_tokens`` int64 [B], ``seeds`` int64 [B], ``temperature`` float32 [B],
    ``tables`` int32 [B, P].
    """

    rows: Tensor
    lens: Tensor
    last_tokens: Tensor
    seeds: Tensor
    temperature: Tensor
    tables: Tensor
