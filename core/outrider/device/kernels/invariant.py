"""A batch-invariant KernelSet: the bits of a token's or request's result don't depend on the other rows of the batch.

Libraries choose the order of a sum by the shape of the whole call. A row's result then changes in its last bits with the
number of other rows, with padding, and with the row's offset in a chunk. This module calls every reduction over floats with
a shape that doesn't depend on the batch.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels.kernelset import KernelSet
from outrider.device.kernels.metadata import AttentionMetadata, RotaryArgs
from outrider.device.kernels.recurrent_kernels import RecurrentBatch
from outrider.device.kernels.reference.model import attend_with_sinks, joined_pages
from outrider.device.kernels.weights import QuantizedWeight

if TYPE_CHECKING:
    from outrider.device.collectives import Group
    from outrider.device.stream import Stream


_SAMPLING = ("temperature", "seeds", "positions")


def _row_by_row(kernel: Callable[..., Any], *rows: str) -> Callable[..., Any]:
    """Return the method that calls the wrapped ``kernel`` once per row of the operands ``rows``, and joins the results.

    The operands of a call are copies, which all have the same alignment. An operand may be None.
    """
    _, *parameters = inspect.signature(kernel).parameters.values()
    signature = inspect.Signature(parameters)

    def call(self: InvariantKernels, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        operands = {name: given[name] for name in rows if given[name] is not None}
        results = []
        for i in range(given[rows[0]].shape[0]):
            row = {name: operand[i : i + 1].clone() for name, operand in operands.items()}
            bound = inspect.BoundArguments(signature, OrderedDict(given | row))
            results.append(getattr(self._inner, kernel.__name__)(*bound.args, **bound.kwargs))
        if isinstance(results[0], Tensor):
            return torch.cat(results)
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    return call


class InvariantKernels(KernelSet):
    """A wrapper of a backend's kernels that calls products in tiles of ``tile`` rows, and all other kernels per row.

    *Products.* A tile is padded with zeros to its full height, so all calls with one weight have the same shape. The result
    is invariant if the library has two properties: it sums one shape always in one order, and it sums all rows of a tile in
    the same order. ``tile`` 1 needs only the first property; the tests check both on the device on which they run.

    *Attention.* One token per call, over every page of its request's table, with invisible positions masked. The length of
    the call depends only on the engine's ``max_context`` and page size. Masked positions have weight 0 and add nothing.

    *Cost.* Weights are read once per tile. Attention costs the same for a short context as for the longest. The number of
    launches is much higher. The size of a batch is a host number, so nothing is read from the device, and a capture works.
    """

    row_invariant = True
    optional_operands = KernelSet.optional_operands
    tunes = False  # the wrapped kernels were tuned for batches, and this class never calls them with a batch

    def __init__(self, inner: KernelSet, *, tile: int = 16) -> None:
        self._inner = inner
        self._tile = tile
        self.name = f"{inner.name}, batch-invariant"
        self.cache_formats = inner.cache_formats
        computed = inner.optional_operands | {"attention_sinks", "joint_head_norms"}  # attention blocks are computed here
        self.optional_operands = type(self).optional_operands & computed
        self.state_interval = inner.state_interval

    def batch_invariant(self) -> KernelSet:
        """Return this kernel set, which is already invariant."""
        return self

    def every_variant(self) -> AbstractContextManager[None] | None:
        """Return the scope in which the wrapped kernels compile every variant."""
        return self._inner.every_variant()

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, group: Group, stream: Stream
    ) -> Tensor:
        """Sum in the order of the ranks: a library chooses its order by the shape. Two ranks have only one order."""
        if group.size <= 2:
            return super().all_reduce_rms_norm(x, residual, weight, eps, group=group, stream=stream)
        parts = x.new_empty(group.size, *x.shape)
        group.all_gather(parts, x, stream=stream)
        total = parts[0]
        for part in parts[1:]:
            total.add_(part)
        return self.add_rms_norm(total, residual, weight, eps)

    def compiled(self) -> Mapping[str, int]:
        """Return the compiled variants of the wrapped kernels, by kernel."""
        return self._inner.compiled()

    def chosen(self) -> Mapping[str, str]:
        """Return the measured choices of the wrapped kernels, by purpose."""
        return self._inner.chosen()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply with the wrapped kernel in tiles of a fixed number of rows, so that a row's result ignores
        the batch size.
        """
        return self._in_tiles(lambda part: self._inner.linear(part, weight, bias), x)

    def linear_quantized(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """Multiply with the wrapped kernel in tiles of a fixed number of rows, as :meth:`linear` does."""
        return self._in_tiles(lambda part: self._inner.linear_quantized(part, weight, bias), x)

    def _in_tiles(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # operands of a tree's levels have one more dimension
        rows, tile = flat.shape[0], self._tile
        padded = F.pad(flat, (0, 0, 0, -rows % tile))
        # Libraries choose kernels by alignment, which differs between slices: each tile is a copy.
        products = torch.cat([product(part.clone()) for part in padded.split(tile)])[:rows]
        return products.view(*x.shape[:-1], products.shape[-1])

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add all rows at once, since each sum has two terms; then norm each row alone."""
        residual.add_(x)
        normed: Tensor = self.rms_norm(residual, weight, eps)
        return normed

    def short_convolution(
        self, x: Tensor, weight: Tensor, state: Tensor, batch: RecurrentBatch, window: Tensor | None = None
    ) -> Tensor:
        """Call the wrapped kernel once per token."""
        tokens = _LoneTokens.of_batch(batch, x.shape[0])
        if window is not None:
            self._inner.short_convolution(x[:1], weight, state, tokens.without_tokens(), window)
            tokens.write_window(window, batch.rows, x)
        states = tokens.copy_rows(state)
        made = [
            self._inner.short_convolution(x[own].clone(), weight, states, alone) for own, alone in tokens.batches_of_one()
        ]
        if window is None:
            state.index_copy_(0, batch.rows, states[:-1])
        return tokens.without_padding(torch.cat(made))

    def gated_delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        batch: RecurrentBatch,
        updates: Tensor | None = None,
    ) -> Tensor:
        """Call the wrapped kernel once per token. With ``updates``, each call has a window of its own for its token."""
        tokens = _LoneTokens.of_batch(batch, mixed.shape[0])
        if updates is not None:
            operands = mixed[:1], gates[:1], a_log, dt_bias, state
            self._inner.gated_delta_rule(*operands, tokens.without_tokens(), updates)
        states = tokens.copy_rows(state)
        made, kept = [], []
        for own, alone in tokens.batches_of_one():
            operands = mixed[own].clone(), gates[own].clone(), a_log, dt_bias, states
            if updates is None:
                made.append(self._inner.gated_delta_rule(*operands, alone))
                continue
            window = updates.new_zeros(states.shape[0], 2, 1, updates.shape[3])
            pending = torch.zeros(states.shape[0], dtype=torch.int64, device=state.device)
            made.append(self._inner.gated_delta_rule(*operands, alone._replace(pending=pending), window))
            kept.append(window[alone.rows, 0, 0])
            self._inner.gated_delta_rule(*operands, tokens.settling(alone, pending + 1), window)
        if updates is None:
            state.index_copy_(0, batch.rows, states[:-1])
        else:
            assert batch.pending is not None  # required with a window
            half = batch.pending.index_select(0, batch.rows) > 0
            tokens.write_window(updates.flatten(0, 1), 2 * batch.rows + half, torch.cat(kept))
        return tokens.without_padding(torch.cat(made))

    def chunk_gated_delta_rule(
        self, mixed: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        """Compute the delta rule token by token, because the bits of a chunk would depend on where the chunk begins."""
        return self.gated_delta_rule(mixed, gates, a_log, dt_bias, state, batch)

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
        """Call the wrapped kernel once per row."""
        for i in range(q.shape[0]):
            row = slice(i, i + 1)
            self._inner.rope_write_cache(q[row], k[row], v[row], cos[row], sin[row], k_cache, v_cache, slots[row])

    def plan_attention(self, metadata: AttentionMetadata, *, stream: Stream) -> AttentionMetadata:
        """Return the metadata without a plan: the wrapped kernels would plan for the whole batch."""
        del stream
        return metadata

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
        """Attend with one token per call, over the whole block table of its request."""
        tables, visible, real = _visible(metadata, q.shape[0], k_cache.shape[1], window)
        page_size, kv_heads, size = k_cache.shape[1:]
        span = tables.shape[1] * page_size
        out = []
        for token in range(q.shape[0]):
            pages = tables[token]
            keys = k_cache[pages].to(q.dtype).view(1, span, kv_heads, size).transpose(1, 2)
            values = v_cache[pages].to(q.dtype).view(1, span, kv_heads, size).transpose(1, 2)
            # A weight of zero doesn't hide a NaN that an earlier owner of the page left after the end of the sequence.
            seen = visible[token].view(1, 1, span, 1)
            keys, values = torch.where(seen, keys, 0.0), torch.where(seen, values, 0.0)
            query, mask = q[token : token + 1].unsqueeze(2).clone(), visible[token].clone().view(1, 1, 1, span)
            if sinks is None:
                out.append(
                    F.scaled_dot_product_attention(
                        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != kv_heads
                    )
                )
            else:
                out.append(attend_with_sinks(query, keys, values, mask, scale, sinks))
        return torch.where(real.view(-1, 1, 1), torch.cat(out).squeeze(2), 0.0)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply with the wrapped kernel in tiles of a fixed number of rows, as :meth:`linear` does."""
        made = self._in_tiles(
            lambda part: self._inner.head_linear(part.unflatten(1, x.shape[1:]), weight).flatten(1), x.flatten(1)
        )
        return made.view(x.shape[0], x.shape[1], -1)

    def latent_norm_rope_write_cache(
        self, latent: Tensor, norm: Tensor, eps: float, q: Tensor, k: Tensor, rotary: RotaryArgs
    ) -> None:
        """Call the wrapped kernel once per row."""
        for i in range(q.shape[0]):
            row = slice(i, i + 1)
            own = rotary._replace(cos=rotary.cos[row], sin=rotary.sin[row], slots=rotary.slots[row])
            self._inner.latent_norm_rope_write_cache(latent[row], norm, eps, q[row], k[row], own)

    def latent_attention(
        self,
        q: Tensor,
        q_rotated: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
    ) -> Tensor:
        """Call :meth:`paged_attention` with queries and copies of pages whose parts are joined."""
        joined, table = joined_pages(k_cache, v_cache, metadata.block_table, q.dtype)
        batch = replace(metadata, block_table=table)
        made = InvariantKernels.paged_attention(self, torch.cat((q, q_rotated), dim=-1), joined, joined, batch, scale=scale)
        return made[..., : q.shape[2]].contiguous()

    # Vector code computes the end of a buffer differently from its middle, so elementwise kernels are called per row, too.
    rms_norm = _row_by_row(KernelSet.rms_norm, "x")
    silu_mul = _row_by_row(KernelSet.silu_mul, "gate_up")
    sigmoid_mul = _row_by_row(KernelSet.sigmoid_mul, "x", "gate")
    gated_rms_norm = _row_by_row(KernelSet.gated_rms_norm, "x", "gate")
    route = _row_by_row(KernelSet.route, "logits")
    experts = _row_by_row(KernelSet.experts, "x", "weights", "chosen")
    experts_quantized = _row_by_row(KernelSet.experts_quantized, "x", "weights", "chosen")
    sample = _row_by_row(KernelSet.sample, "logits", *_SAMPLING)
    truncate_logits = _row_by_row(KernelSet.truncate_logits, "logits", "temperature", "top_k", "top_p", "min_p")
    logprobs = _row_by_row(KernelSet.logprobs, "logits", "tokens")
    verify_chain = _row_by_row(KernelSet.verify_chain, "target_logits", "draft_tokens", "draft_probs", *_SAMPLING)
    verify_tree = _row_by_row(KernelSet.verify_tree, "target_logits", "tokens", "parents", *_SAMPLING)
    # Biases, penalties and counts compute each number alone, and a move copies: no shape changes their results.


@dataclass(frozen=True, slots=True)
class _LoneTokens:
    """The T tokens of a batch of B sequences, for calls of recurrent kernels with one token each on copies of the states."""

    batch: RecurrentBatch
    sequence: Tensor
    """int64 [T]: the sequence of each token."""
    lane: Tensor
    """int64 [T]: index of each token in its sequence."""
    is_token: Tensor
    """bool [T]: False for padding."""

    @classmethod
    def of_batch(cls, batch: RecurrentBatch, tokens: int) -> _LoneTokens:
        starts = batch.query_start.to(torch.int64)
        token, sequence = _token_owners(starts, tokens, batch.rows.shape[0])
        return cls(batch, sequence, token - starts.index_select(0, sequence), token < starts[-1])

    @property
    def _earlier(self) -> Tensor:
        """int32 [B]: number of earlier tokens of each sequence."""
        return self.batch.seq_lens - self.batch.query_start.diff()

    def without_tokens(self) -> RecurrentBatch:
        """Return the batch without new tokens, whose rows are settled."""
        starts = torch.zeros_like(self.batch.query_start)
        return RecurrentBatch(self.batch.rows, starts, self._earlier.clamp(max=1), 1, pending=self.batch.pending)

    def copy_rows(self, state: Tensor) -> Tensor:
        """Return copies of the states of the sequences [B + 1, ...]; the last one takes padding."""
        return torch.cat((state.index_select(0, self.batch.rows), state[:1]))

    def batches_of_one(self) -> Iterator[tuple[slice, RecurrentBatch]]:
        """Yield each token's place, and the batch of this token alone on the copies of :meth:`copy_rows`."""
        rows = torch.where(self.is_token, self.sequence, self.batch.rows.shape[0])
        lens = (self._earlier.index_select(0, self.sequence) + self.lane + 1).to(torch.int32)
        starts = torch.arange(2, dtype=torch.int32, device=rows.device)
        for index in range(rows.shape[0]):
            own = slice(index, index + 1)
            yield own, RecurrentBatch(rows[own], starts, lens[own], 1)

    @staticmethod
    def settling(alone: RecurrentBatch, pending: Tensor) -> RecurrentBatch:
        """Return the batch ``alone`` without its token, which is pending."""
        return alone._replace(query_start=torch.zeros_like(alone.query_start), pending=pending)

    def write_window(self, window: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write ``values`` [T, W] to ``window`` [P, N, W], at each sequence's place among ``rows`` int64 [B]. Padding is
        written to row 0.
        """
        place = torch.where(self.is_token, rows.index_select(0, self.sequence), 0)
        lane = torch.where(self.is_token, self.lane, 0)
        window.index_put_((place, lane), values.to(window.dtype))

    def without_padding(self, results: Tensor) -> Tensor:
        """Return ``results`` [T, ...] with zeros for padding."""
        return torch.where(self.is_token.view(-1, *[1] * (results.dim() - 1)), results, 0.0)


def _token_owners(starts: Tensor, tokens: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the tokens, int64 [T], and the index of each token's sequence among ``count``, int64 [T].

    Padding after the last sequence counts as part of the last sequence.
    """
    token = torch.arange(tokens, device=starts.device)
    return token, (torch.searchsorted(starts, token, right=True) - 1).clamp(max=count - 1)


def _visible(metadata: AttentionMetadata, tokens: int, page_size: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tables, visibility and validity of each token.

    Tables int64 [T, P] are the pages of the token's request. Visibility bool [T, P * page size] is True at the positions
    that the token sees. Validity bool [T] is False for padding.
    """
    starts = metadata.query_start.to(torch.int64)
    token, request = _token_owners(starts, tokens, metadata.seq_lens.shape[0])
    tables = metadata.block_table.index_select(0, request).to(torch.int64)
    begin, end = starts[:-1].index_select(0, request), starts[1:].index_select(0, request)
    lens = metadata.seq_lens.to(torch.int64).index_select(0, request)
    own = (token - begin).unsqueeze(1)  # index among the request's new tokens
    position = torch.arange(tables.shape[1] * page_size, device=starts.device)
    new = position - (lens - (end - begin)).unsqueeze(1)  # index among the new tokens; negative in the context
    if metadata.tree_mask is None:
        visible = new <= own
    else:
        visible = (new < 0) | metadata.tree_mask.gather(1, new.clamp(0, metadata.max_query - 1))
    visible = visible & (position < lens.unsqueeze(1))
    if window > 0:
        visible = visible & (new > own - window)
    real = token < end
    return tables, visible | ~real.unsqueeze(1), real  # a token that sees nothing would be NaN
