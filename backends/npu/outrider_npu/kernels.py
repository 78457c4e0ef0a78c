"""Kernels of an Ascend device: CANN computes attention and rotation, torch's references compute all other operators.

Attention calls ``npu_fused_infer_attention_score.out``. That overload's schema omits its written outputs, so a wrapper
operator declares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch_npu
from torch import Tensor

from outrider.device import AttentionMetadata, HostParam, KernelSet
from outrider.device.kernels.operators import define_operator

if TYPE_CHECKING:
    from outrider_npu.backend import NpuBackend

# Limits of the operator with paged keys and values, from its documentation in torch_npu 2.13.
_DTYPES = frozenset({torch.float16, torch.bfloat16})
_HEAD_ALIGNMENT = 16
_MOST_HEAD_SIZE = 512
_MOST_PAGE_SIZE = 512
_MOST_HEADS_PER_KV_HEAD = 64
_MOST_ROW = 65535  # heads * head size, of queries and of keys
_MOST_NUMBERS = 2**31 - 1  # of keys, where each sequence has one new token
_PAGE_ALIGNMENT = {True: 16, False: 128}  # by whether each sequence has one new token
_COMPRESSED = 2048  # the causal mask of sparse mode 3 has this size, whatever the lengths are

_ALL_MASK, _RIGHT_DOWN_CAUSAL, _DEFAULT_MASK = 1, 3, 0
_LAYOUT = "BSND"

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider_npu", "DEF")


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block_table: Tensor,
    kv_heads: int,
    scale: float,
    sparse_mode: int,
    inner_precise: int,
    seq_lens: list[int],
    workspace: Tensor | None,
    attention_out: Tensor,
    softmax_lse: Tensor,
) -> None:
    torch_npu.npu_fused_infer_attention_score.out(
        query,
        key,
        value,
        atten_mask=mask,
        actual_seq_lengths_kv=seq_lens,
        block_table=block_table,
        num_heads=query.shape[2],
        num_key_value_heads=kv_heads,
        scale=scale,
        input_layout=_LAYOUT,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
        block_size=key.shape[1],
        workspace=workspace,
        out=[attention_out, softmax_lse],
    )


define_operator(_LIBRARY, "fused_attention", _fused_attention, writes=("attention_out", "softmax_lse"))


class _Call(NamedTuple):
    """The first operands of one call: ``queries`` [B, S, Hq, D], ``keys`` and ``values`` [pages, page size, Hkv * D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    table: Tensor
    kv_heads: int
    scale: float
    sparse_mode: int
    inner_precise: int


class NpuKernels(KernelSet):
    """Kernels that use CANN for attention and rotation within its limits; :meth:`unfused` returns the exceeded limit."""

    name = "npu"
    optional_operands = KernelSet.optional_operands

    def __init__(self, backend: NpuBackend) -> None:
        self._backend = backend
        self._causal: Tensor | None = None

    def rope_write_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> None:
        """Rotate one-axis or three-axis positions with one operator.

        The caller passes each token's cosines and sines with the axes already selected. ``npu_mrope`` isn't used,
        because it takes positions and a table instead.
        """
        turn = (cos.unsqueeze(0).unsqueeze(2), sin.unsqueeze(0).unsqueeze(2))  # 1S1D beside BSND
        for x in (q[..., : cos.shape[1]], k[..., : cos.shape[1]]):
            x.copy_(torch_npu.npu_rotary_mul(x.contiguous().unsqueeze(0), *turn).squeeze(0))
        for cache, rows in ((k_cache, k), (v_cache, v)):
            cache.flatten(0, 1).index_copy_(0, slots, rows)

    def unfused(self, q: Tensor, k_cache: Tensor, metadata: AttentionMetadata) -> str:
        """Return why this attention needs torch's reference, or an empty string if CANN computes it."""
        size, page_size = q.shape[2], k_cache.shape[1]
        if metadata.seq_lens_host is None:
            # A bound and a mask don't suffice: the operator reads values after a sequence's end, and weight 0 keeps a NaN.
            return "the lengths aren't known on the host"
        if q.dtype not in _DTYPES:
            return f"the fused operator takes float16 and bfloat16, not {q.dtype}"
        if size % _HEAD_ALIGNMENT or size > _MOST_HEAD_SIZE:
            return f"a head size of {size} isn't a multiple of {_HEAD_ALIGNMENT} up to {_MOST_HEAD_SIZE}"
        alignment = _PAGE_ALIGNMENT[metadata.max_query == 1]
        if page_size % alignment or page_size > _MOST_PAGE_SIZE:
            return f"pages of {page_size} aren't multiples of {alignment} up to {_MOST_PAGE_SIZE}"
        heads, kv_heads = q.shape[1], k_cache.shape[2]
        if heads > _MOST_HEADS_PER_KV_HEAD * kv_heads or heads * size >= _MOST_ROW:
            return f"{heads} heads of {size} over {kv_heads} are more than the operator takes"
        if metadata.max_query == 1 and k_cache.numel() > _MOST_NUMBERS:
            return f"a cache of {k_cache.numel()} numbers a layer is more than the operator takes for one new token each"
        return ""

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention with the fused operator, or with torch's reference outside the operator's limits and with sinks.

        The operator takes the exact lengths as a host list, read through ``Backend.reissue`` so that a graph can be
        rebound. Without host lengths the reference runs. Sequences that share pages and together list more pages than
        the cache has are split among several calls.

        *Workspace.* A capture allocates one workspace for all layers of the same shape. The workspace lives as long as
        the graph, so all attention of one capture must run on one stream.
        """
        exact = metadata.seq_lens_host
        if exact is None or sinks is not None or self.unfused(q, k_cache, metadata):
            capture = self._backend.active_capture
            if exact is not None and capture is not None:
                capture.context.handles.setdefault(exact.name, [])  # the reference reads the lengths on the device
            return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window, sinks=sinks)
        tokens, heads, size = q.shape
        pages, page_size, kv_heads, _ = k_cache.shape
        batch, width, table = metadata.seq_lens.shape[0], metadata.max_query, metadata.block_table
        lane = torch.arange(width, device=q.device)
        start = metadata.query_start[:-1].to(torch.int64)
        query_lens = metadata.query_start[1:].to(torch.int64) - start
        flat = (start.unsqueeze(1) + lane).clamp_(max=tokens - 1)  # [B, width]
        queries = q.contiguous().view(batch, width, heads, size) if metadata.uniform else q[flat]
        keys, values = (cache.view(pages, page_size, kv_heads * size) for cache in (k_cache, v_cache))

        plain = metadata.uniform and metadata.tree_mask is None and window == 0
        mask: Tensor | None
        if plain:
            mask, sparse_mode = (None, _DEFAULT_MASK) if width == 1 else (self._causal_mask(), _RIGHT_DOWN_CAUSAL)
        else:
            mask, sparse_mode = _hidden(metadata, flat, query_lens, table.shape[1] * page_size, window), _ALL_MASK
        out = torch.empty_like(queries)
        inner_precise = 2 if mask is not None and width > 1 else 0  # a user's mask may hide a whole row
        for begin, end in self._parts(exact.value, pages, page_size, table.shape[1]):
            rows = slice(begin, end)
            part = mask[rows] if mask is not None and sparse_mode == _ALL_MASK else mask
            own = (queries[rows], keys, values, part, table[rows], kv_heads)
            self._issue(exact, _Call(*own, scale, sparse_mode, inner_precise), rows, out[rows])
        if metadata.uniform:
            return out.view(tokens, heads, size)
        real = lane.view(1, width) < query_lens.view(batch, 1)
        # Each padding lane has a row of its own after the tokens: the writes of one operation have no order.
        spare = torch.arange(tokens, tokens + batch * width, device=q.device).view(batch, width)
        result = q.new_zeros(tokens + batch * width, heads, size)
        result[torch.where(real, flat, spare).flatten()] = out.view(batch * width, heads, size)
        return result[:tokens]

    def _issue(self, exact: HostParam, call: _Call, rows: slice, out: Tensor) -> None:
        """Call the operator for the sequences of ``rows``, whose results it writes to ``out`` [B, S, Hq, D]; in a capture,
        the call is a task group.
        """
        most = call.keys.shape[0] * call.keys.shape[1]  # more is of a request that is over

        def own(lengths: tuple[int, ...]) -> list[int]:
            return [min(length, most) for length in lengths[rows]]

        workspace = self._workspace(call, own(exact.value))
        lse = torch.empty(1, dtype=torch.float32, device=out.device)

        def issue(lengths: tuple[int, ...]) -> None:
            torch.ops.outrider_npu.fused_attention(*call, own(lengths), workspace, out, lse)

        self._backend.reissue(exact, issue)

    def _parts(self, lengths: tuple[int, ...], pages: int, page_size: int, columns: int) -> list[tuple[int, int]]:
        """Return ranges of sequences whose pages, counted once per sequence, are no more than the cache has.

        CANN's operator counts a shared page for each sequence. In a capture any lengths may come later, up to the table's
        ``columns`` each.
        """
        if self._backend.active_capture is not None:
            step = max(pages // columns, 1)
            return [(begin, min(begin + step, len(lengths))) for begin in range(0, len(lengths), step)]
        parts, begin, taken = [], 0, 0
        for row, length in enumerate(lengths):
            needed = min(-(-length // page_size), pages)
            if taken + needed > pages:
                parts.append((begin, row))
                begin, taken = row, 0
            taken += needed
        return [*parts, (begin, len(lengths))]

    def _causal_mask(self) -> Tensor:
        """Return the compressed mask of sparse mode 3, which hides positions above the diagonal.

        The first causal batch creates the mask, and the host waits for it, so that every stream can read it. The creation
        is never in a capture, because a rehearsal precedes each capture.
        """
        if self._causal is None:
            ones = torch.ones((_COMPRESSED, _COMPRESSED), dtype=torch.bool, device=self._backend.device)
            self._causal = ones.triu_(diagonal=1)
            self._backend.module.current_stream().synchronize()
        return self._causal

    def _workspace(self, call: _Call, lengths: list[int]) -> Tensor | None:
        """Return a workspace for the maximum lengths, or None outside a capture, where the call allocates its own."""
        capture = self._backend.active_capture
        if capture is None or capture.rehearsal:
            return None
        shape = (*call.queries.shape, *call.keys.shape, *call.table.shape, call.sparse_mode)
        kept = capture.context.handles.setdefault(f"workspace {shape}", [])
        if not kept:
            made = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
                call.queries,
                call.keys,
                call.values,
                atten_mask=call.mask,
                actual_seq_lengths_kv=lengths,
                block_table=call.table,
                num_heads=call.queries.shape[2],
                num_key_value_heads=call.kv_heads,
                scale=call.scale,
                input_layout=_LAYOUT,
                sparse_mode=call.sparse_mode,
                inner_precise=call.inner_precise,
                block_size=call.keys.shape[1],
            )
            kept.append(made)
        workspace: Tensor = kept[0]
        return workspace


def _hidden(metadata: AttentionMetadata, flat: Tensor, query_lens: Tensor, span: int, window: int) -> Tensor:
    """Return the mask of hidden positions, bool [B, 1, width, span]: True hides a position from a new token."""
    batch, width = flat.shape
    lane = torch.arange(width, device=flat.device).view(1, width, 1)
    position = torch.arange(span, device=flat.device).view(1, 1, span)
    lens = metadata.seq_lens.to(torch.int64)
    index = position - (lens - query_lens).view(batch, 1, 1)  # among the new tokens; negative in the context
    if metadata.tree_mask is None:
        seen = index <= lane
    else:
        among = index.clamp(0, width - 1).expand(batch, width, span)
        seen = (index < 0) | metadata.tree_mask[flat].gather(2, among)
    seen = seen & (position < lens.view(batch, 1, 1))
    if window > 0:
        seen = seen & (index > lane - window)
    # A lane without a token sees its sequence's first key: what it computes is dropped, and must be finite.
    seen = seen | ((lane >= query_lens.view(batch, 1, 1)) & (position == 0))
    return (~seen).unsqueeze(1)
