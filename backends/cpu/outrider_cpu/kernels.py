"""Kernels of the host, built from torch operators.

The host reads lengths and temperatures before it computes. Attention covers only the cached tokens, regardless of the
block table's capacity. Greedy requests generate no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import (
    CACHE_FORMATS,
    AttentionBlock,
    AttentionMetadata,
    DecoderShape,
    HeadNorms,
    KernelSet,
    MlpBlock,
    RotaryArgs,
)
from outrider_cpu import operators
from outrider_cpu.compiled_blocks import CompiledBlocks
from outrider_cpu.packed_weights import PackedWeights, is_observed

_TARGET, _DRAFT = 0, 2
"""Random-number lanes of the target's and the draft's samples."""
_MIN_UNCACHED_WEIGHT_ELEMENTS = 1 << 22
"""Elements from which on a weight exceeds the cache of a core."""
_WEIGHT_FIRST_TOKENS = MappingProxyType({torch.float32: range(6, 49), torch.bfloat16: range(2, 33)})
"""Tokens for which a product with a large weight is faster with the weight as its first operand
(docs/evidence/README.md#2026-11-26-host-batches)."""


def _host(name: str) -> Callable[..., Any]:
    """Return the function of :mod:`outrider_cpu.operators`, or the operator with this function if operators are observed."""
    return getattr(torch.ops.outrider, name).host if is_observed() else getattr(operators, name)  # type: ignore[no-any-return]


def _method(name: str) -> Callable[..., Any]:
    """Return a method that calls a function of :mod:`outrider_cpu.operators` with the kernel's operands."""

    def method(_self: KernelSet, *operands: Any, **named: Any) -> Any:
        return _host(name)(*operands, **named)

    method.__name__ = name
    return method


class CpuKernels(KernelSet):
    """Host kernels that compute the torch references' results with fewer operations."""

    name = "cpu"
    cache_formats = frozenset(CACHE_FORMATS)
    optional_operands = KernelSet.optional_operands
    verify_chain, verify_checked, find_nan = _method("verify_chain"), _method("verify_checked"), _method("find_nan")
    gather_rows, scatter_rows, copy_rows = _method("gather_rows"), _method("scatter_rows"), _method("copy_rows")
    place_tokens, place_accepted = _method("place_tokens"), _method("place_accepted")

    def __init__(self) -> None:
        self._packed_weights = PackedWeights()
        self._compiled_blocks = CompiledBlocks()
        self._eps: dict[tuple[float, torch.dtype], Tensor] = {}
        """Scalars of the norms: a tensor operand costs less than a number."""

    def batch_invariant(self) -> KernelSet:
        """Return the torch references' batch-invariant kernels. The kernels here depend on the batch's longest sequence."""
        return KernelSet().batch_invariant()

    def for_shape(self, shape: DecoderShape) -> KernelSet:
        """Return these kernels, which compile the attention of this shape at load."""
        self._compiled_blocks.heads = shape.head_size, shape.heads // shape.kv_heads
        return self

    def is_native(self, name: str, block: object = None) -> bool:
        """Return True also for the halves of layers with block-quantized weights, whose functions are compiled. The weight
        of a product is packed.
        """
        if isinstance(block, Tensor):
            self._compiled_blocks.pack(block)
        return self._compile_block(block) is not None or super().is_native(name, block)

    def resolve_block(self, name: str, block: object) -> Callable[..., Any]:
        """Return the compiled function of a half of a layer with block-quantized weights, else the composed method."""
        compiled = self._compile_block(block)
        return super().resolve_block(name, block) if compiled is None else compiled

    def _compile_block(self, block: object) -> Callable[..., Any] | None:
        if isinstance(block, AttentionBlock):
            return self._compiled_blocks.attention_block(self, block, super().attention_block)
        return self._compiled_blocks.mlp_block(self, block, super().mlp_block) if isinstance(block, MlpBlock) else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply few tokens with a packed copy of the weight.

        Without a copy, a large weight is the first operand, because the library copies the second one.
        """
        if (compiled := self._compiled_blocks.linear(x, weight, bias)) is not None:
            return compiled
        if (packed := self._packed_weights.linear(x, weight, bias)) is not None:
            return packed
        tokens = x.numel() // weight.shape[1]
        large = weight.numel() >= _MIN_UNCACHED_WEIGHT_ELEMENTS and weight.is_contiguous() and weight.dtype is x.dtype
        if not large or tokens not in _WEIGHT_FIRST_TOKENS.get(x.dtype, ()):
            return super().linear(x, weight, bias)
        turned = x.contiguous().view(tokens, -1).t()
        made = torch.mm(weight, turned) if bias is None else torch.addmm(bias.unsqueeze(1), weight, turned)
        return made.t().contiguous().view(*x.shape[:-1], -1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the mean square from the norm of each row, in float32 or the wider dtype of ``x``."""
        if weight.dtype is not x.dtype:
            return super().rms_norm(x, weight, eps)
        if (compiled := self._compiled_blocks.rms_norm(x, weight, eps)) is not None:
            return compiled
        wide = x.float() if x.dtype.itemsize < torch.float32.itemsize else x
        if (added := self._eps.get((eps, wide.dtype))) is None:
            added = self._eps[eps, wide.dtype] = torch.tensor(eps, dtype=wide.dtype)
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normed = wide * torch.addcmul(added, norms, norms, value=1 / x.shape[-1]).rsqrt_()
        return normed.to(x.dtype).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add to the residual in place, then normalize the sum."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute SwiGLU with two operations on the two halves."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def head_norm_rope_write_cache(self, qkv: Tensor, norms: HeadNorms | None, rotary: RotaryArgs) -> Tensor:
        """Rotate queries and keys in one operation, then write the cache."""
        kv_heads, size = rotary.k_cache.shape[2:]
        if norms is not None or rotary.cos.shape[1] != size:
            return super().head_norm_rope_write_cache(qkv, norms, rotary)
        heads = qkv.view(qkv.shape[0], -1, size)
        turned, v = heads[:, :-kv_heads], heads[:, -kv_heads:]
        rotated: Tensor = _host("rope_write_cache")(turned, v, *rotary)
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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over each request's cached tokens, without the unused rest of its block table."""
        operands = metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
        limits = metadata.max_query, metadata.max_kv, scale, window, sinks
        return _host("paged_attention")(q, k_cache, v_cache, *operands, *limits)  # type: ignore[no-any-return]

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, draft: bool = False) -> Tensor:
        """Return the argmax if all rows are greedy, else sample."""
        lane = _DRAFT if draft else _TARGET
        return _host("sample")(logits, temperature, seeds, positions, lane)  # type: ignore[no-any-return]

    def gather_checked(
        self, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor, *, bounds: tuple[int, int] | None
    ) -> None:
        """Search only if the sum of the rows is NaN or an integer is invalid."""
        _host("gather_checked")(source, rows, *(bounds or (0, 0)), out, found)
