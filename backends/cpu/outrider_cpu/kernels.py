"""Kernels of the host: what torch has for it, and what a device can't do: look at lengths and temperatures first.

Each call here runs at once, so a value may be read for the price of reading it. Attention then works on the tokens that are
cached, however much the block table could hold, and nothing is drawn for requests that don't sample.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet, Product, RotaryArgs

_ALONE = 16
"""Requests of a batch up to which each has an attention call of its own, without a mask where it sees everything."""


class CpuKernels(KernelSet):
    """The torch references, with fewer operations."""

    name = "cpu"

    def batch_invariant(self) -> KernelSet:
        """Over the references: here the length of a call depends on the batch."""
        return KernelSet().batch_invariant()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Torch's own where it's as exact: in float32 and wider."""
        if x.dtype.itemsize < torch.float32.itemsize:
            return super().rms_norm(x, weight, eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The sum in place, then the norm."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Two operations on the halves."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def linear_rope_write_cache(self, product: Product, rotary: RotaryArgs) -> Tensor:
        """Queries and keys are rotated together."""
        k_cache, v_cache = rotary.k_cache, rotary.v_cache
        kv_heads, size = k_cache.shape[2:]
        made = self.linear(*product).view(product.x.shape[0], -1, size)
        turned, v = made[:, :-kv_heads], made[:, -kv_heads:]
        half = size // 2
        sin = rotary.sin.unsqueeze(1)
        first, second = turned[..., :half], turned[..., half:]
        rotated = turned * rotary.cos.unsqueeze(1)
        rotated[..., :half].addcmul_(second, sin[..., :half], value=-1)
        rotated[..., half:].addcmul_(first, sin[..., half:])
        k_cache.flatten(0, 1).index_copy_(0, rotary.slots, rotated[:, -kv_heads:])
        v_cache.flatten(0, 1).index_copy_(0, rotary.slots, v)
        return rotated[:, :-kv_heads]

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
        """Over as many cached tokens as there are."""
        lens: list[int] = metadata.seq_lens.tolist()
        if len(lens) > _ALONE:
            bound = min(metadata.max_kv, max(1, *lens))
            tight = replace(metadata, max_kv=bound)
            return super().paged_attention(q, k_cache, v_cache, tight, scale=scale, window=window)
        starts: list[int] = metadata.query_start.tolist()
        parts: list[Tensor] = []
        for index, (start, end, length) in enumerate(zip(starts, starts[1:], lens, strict=False)):
            if end == start:
                continue
            count = end - start
            queries = q[start:end]
            if length < count:  # padding: it has no tokens of its own
                parts.append(torch.zeros_like(queries))
                continue
            keys, values = (_cached(cache, metadata.block_table[index], length) for cache in (k_cache, v_cache))
            tree = None if metadata.tree_mask is None else metadata.tree_mask[start:end, :count]
            parts.append(_attend(queries, keys, values, tree, scale, window))
        beyond = q.shape[0] - starts[len(lens)]
        if beyond:
            parts.append(q.new_zeros(beyond, *q.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, draft: bool = False) -> Tensor:
        """The likeliest where no row samples."""
        if any(temperature.tolist()):
            return super().sample(logits, temperature, seeds, positions, draft=draft)
        return logits.argmax(-1)

    def verify_chain(
        self,
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
        return super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)


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
