"""A KernelSet whose results for a token or a request don't depend, in a single bit, on what else is in the batch.

Libraries choose how to add up by the shape of the whole call: a row's result then changes in its last bits with the number
of other rows, with padding, and with where in a chunk the row lies. Here every reduction over floats is called with a shape
that is the same whatever the batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels.kernelset import KernelSet
from outrider.device.kernels.metadata import AttentionMetadata
from outrider.device.kernels.quantized import QuantizedWeight

if TYPE_CHECKING:
    from outrider.device.collectives import Group
    from outrider.device.stream import Stream


class InvariantKernels(KernelSet):
    """Wraps a backend's kernels: matrices in tiles of ``tile`` rows, everything else a row at a time.

    *Matrices.* A tile is padded with zeros to its full height, so each call has one shape for a weight. That rests on
    two properties of the library: one shape is always added up in one way, and no row of a tile is added up otherwise than
    another. ``tile`` 1 needs only the first; the tests check both where they run.

    *Attention.* One token a call, over every page that its request's table has, with what it doesn't see masked: the length
    of the call depends on the engine's ``max_context`` and page size alone. The masked part has weight 0, which adds nothing.

    *Cost.* Weights are read once a tile; attention costs the same for a short context as for the longest; and there are
    many more launches. The size of a batch is a host number, so nothing is read from the device, and a capture works.
    """

    row_invariant = True
    tunes = False  # what was measured for the kernels inside was measured for batches, which these never give them

    def __init__(self, inner: KernelSet, *, tile: int = 16) -> None:
        self._inner = inner
        self._tile = tile
        self.name = f"{inner.name}, batch-invariant"
        self.cache_formats = inner.cache_formats

    def batch_invariant(self) -> KernelSet:
        """It is already."""
        return self

    def every_variant(self) -> AbstractContextManager[None] | None:
        """Those of the kernels inside."""
        return self._inner.every_variant()

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, group: Group, stream: Stream
    ) -> Tensor:
        """Added up in the order of the ranks. A library chooses its order by the shape; of two ranks there's only one."""
        if group.size <= 2:
            return super().all_reduce_rms_norm(x, residual, weight, eps, group=group, stream=stream)
        parts = x.new_empty(group.size, *x.shape)
        group.all_gather(parts, x, stream=stream)
        added = parts[0]
        for part in parts[1:]:
            added.add_(part)
        return self.add_rms_norm(added, residual, weight, eps)

    def compiled(self) -> Mapping[str, int]:
        """Those of the kernels inside."""
        return self._inner.compiled()

    def chosen(self) -> Mapping[str, str]:
        """Those of the kernels inside."""
        return self._inner.chosen()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In tiles of one height."""
        return self._in_tiles(lambda part: self._inner.linear(part, weight, bias), x)

    def linear_quantized(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """In tiles of one height."""
        return self._in_tiles(lambda part: self._inner.linear_quantized(part, weight, bias), x)

    def _in_tiles(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # a tree's levels come with a dimension more
        rows, tile = flat.shape[0], self._tile
        padded = F.pad(flat, (0, 0, 0, -rows % tile))
        # A slice may be aligned otherwise than its tile at another place, and libraries look at that: each is a copy.
        made = torch.cat([product(part.clone()) for part in padded.split(tile)])[:rows]
        return made.view(*x.shape[:-1], made.shape[-1])

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """A copy of rows."""
        return self._inner.embedding(tokens, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """A row at a time."""
        return _each(lambda row: self._inner.rms_norm(row, weight, eps), x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The sum is exact in itself; the norm a row at a time."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """A row at a time: vector code computes the end of a buffer otherwise than its middle."""
        return _each(self._inner.silu_mul, gate_up)

    def route(self, logits: Tensor, count: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        """A row at a time."""
        rows = [self._inner.route(row.clone(), count, renormalize=renormalize) for row in logits.split(1)]
        weights, chosen = zip(*rows, strict=True)
        return torch.cat(weights), torch.cat(chosen)

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """A token at a time."""
        return _each(lambda token, share, own: self._inner.experts(token, share, own, gate_up, down), x, weights, chosen)

    def experts_quantized(
        self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight
    ) -> Tensor:
        """A token at a time."""
        return _each(
            lambda token, share, own: self._inner.experts_quantized(token, share, own, gate_up, down), x, weights, chosen
        )

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
        """A row at a time."""
        for i in range(q.shape[0]):
            row = slice(i, i + 1)
            self._inner.rope_write_cache(q[row], k[row], v[row], cos[row], sin[row], k_cache, v_cache, slots[row])

    def plan_attention(self, metadata: AttentionMetadata, *, stream: Stream) -> AttentionMetadata:
        """There is no plan: the wrapped kernels would make it for the whole batch."""
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
    ) -> Tensor:
        """A token at a time over the whole table of its request."""
        tables, visible, real = _visible(metadata, q.shape[0], k_cache.shape[1], window)
        page_size, kv_heads, size = k_cache.shape[1:]
        span = tables.shape[1] * page_size
        out = []
        for token in range(q.shape[0]):
            pages = tables[token]
            keys = k_cache[pages].to(q.dtype).view(1, span, kv_heads, size).transpose(1, 2)
            values = v_cache[pages].to(q.dtype).view(1, span, kv_heads, size).transpose(1, 2)
            # A weight of zero doesn't hide a NaN that somebody else left behind the sequence.
            seen = visible[token].view(1, 1, span, 1)
            keys, values = torch.where(seen, keys, 0.0), torch.where(seen, values, 0.0)
            out.append(
                F.scaled_dot_product_attention(
                    q[token : token + 1].unsqueeze(2).clone(),
                    keys,
                    values,
                    attn_mask=visible[token].clone().view(1, 1, 1, span),
                    scale=scale,
                    enable_gqa=q.shape[1] != kv_heads,
                )
            )
        return torch.where(real.view(-1, 1, 1), torch.cat(out).squeeze(2), 0.0)

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, draft: bool = False) -> Tensor:
        """A request at a time."""
        return _each(lambda *row: self._inner.sample(*row, draft=draft), logits, temperature, seeds, positions)

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A request at a time."""
        results = []
        for i in range(target_logits.shape[0]):
            row = slice(i, i + 1)
            probs = None if draft_probs is None else draft_probs[row].clone()
            results.append(
                self._inner.verify_chain(
                    target_logits[row].clone(), draft_tokens[row], probs, temperature[row], seeds[row], positions[row]
                )
            )
        tokens, accepted = zip(*results, strict=True)
        return torch.cat(tokens), torch.cat(accepted)

    def truncate_logits(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """A request at a time."""
        return _each(self._inner.truncate_logits, logits, temperature, top_k, top_p, min_p)

    def verify_tree(
        self,
        target_logits: Tensor,
        tokens: Tensor,
        parents: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        depth: int,
        sampling: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A request at a time."""
        operands = (target_logits, tokens, parents, temperature, seeds, positions)
        results = [
            self._inner.verify_tree(*(operand[i : i + 1].clone() for operand in operands), depth=depth, sampling=sampling)
            for i in range(tokens.shape[0])
        ]
        chosen, path, accepted = zip(*results, strict=True)
        return torch.cat(chosen), torch.cat(path), torch.cat(accepted)

    # Biases, penalties and counts add, multiply and divide single numbers, and a move copies them, whatever the shape is.

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A request at a time."""
        results = [self._inner.logprobs(logits[i : i + 1].clone(), tokens[i : i + 1], count) for i in range(logits.shape[0])]
        values, ids = zip(*results, strict=True)
        return torch.cat(values), torch.cat(ids)


def _each(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """``function`` of each row, on copies: they are all aligned alike."""
    return torch.cat([function(*(tensor[i : i + 1].clone() for tensor in rows)) for i in range(rows[0].shape[0])])


def _visible(metadata: AttentionMetadata, tokens: int, page_size: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token the pages of its request, int64 [T, P], what it sees of them, bool [T, P * page size], and whether it
    is none of the padding, bool [T].
    """
    starts = metadata.query_start.to(torch.int64)
    token = torch.arange(tokens, device=starts.device)
    batch = metadata.seq_lens.shape[0]
    # Padding behind the last request counts as that request's.
    request = (torch.searchsorted(starts, token, right=True) - 1).clamp(max=batch - 1)
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
