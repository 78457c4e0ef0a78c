"""ExactKernels: Triton's kernels with one order of each row's sums, so that a row's bits don't depend on the batch.

A product of 16-bit operands adds its columns in order, within parts whose number depends on the weight alone. On Hopper all
instructions of the matrix unit then compute the same bits, so that a tile may have any size; elsewhere it has 16 tokens.
``tests/kernels/test_exact.py`` compares the bits of all tiles on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet
from outrider.device.kernels.invariant import InvariantKernels
from outrider.device.kernels.weights import quantized_products
from outrider_triton.attention import exact_operator
from outrider_triton.blocks import TritonBlocks
from outrider_triton.experts.kernels import sorted_block_tokens
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import compile_only, power_of_two, vocabulary_shares
from outrider_triton.tiles.configs import BUCKETS, STREAMED, MatmulConfig, bucket
from outrider_triton.tiles.derive.attention import AttentionHeads, attention_bytes
from outrider_triton.tiles.derive.products import fold_factor, rank_configs
from outrider_triton.tiles.derive.quantized import OperandStorage
from outrider_triton.tiles.facts import DeviceFacts

_TRITON = torch.ops.outrider
_ROWS = 64
"""Rows of an attention tile: the matrix unit's height on Hopper."""
_FEW = 16
"""Tokens of a tile where every tile must have the same number."""
_PREFILL = {
    "linear": MatmulConfig(256, 128, 64, 1, 8, 3, 0, 0, 0),
    "linear_parts": MatmulConfig(256, 128, 64, 1, 8, 3, 0, 0, 0),
    "linear_rope": MatmulConfig(128, 128, 64, 1, 8, 4, 0, 0, 0),
    "linear_silu_mul": MatmulConfig(256, 64, 64, 1, 8, 3, 0, 0, 0),
}
"""Tiles of products with more than :data:`_MAX_DECODED` tokens, by operator: measured on one H200."""
_MAX_DECODED = 1024
"""Tokens above which larger tiles keep all multiprocessors busy."""
_PART_COLUMNS = 256
"""Columns of a part are a multiple, so that parts begin at the same column with every tile."""
_BUSY = 0.35
"""Fraction of the multiprocessors that tiles of 128 weight rows occupy with all parts of a product."""


def split_of(facts: DeviceFacts, n: int, k: int) -> int:
    """Return the number of parts of a product with a weight [n, k] that the next kernel adds up."""
    split = 1
    while split < 8 and -(-n // 128) * split < _BUSY * facts.processors and k % (2 * split * _PART_COLUMNS) == 0:
        split *= 2
    return split


def has_fixed_order(operator: str, config: MatmulConfig, split: int) -> bool:
    """Return True if a tile configuration adds the columns of each of ``split`` parts in order."""
    return config.split == split and (config.descriptor != STREAMED or fold_factor(operator, config) == 1)


class ExactKernels(TritonKernels, InvariantKernels):
    """The batch-invariant kernels of the set ``inner``.

    Triton's kernels compute 16-bit products, experts, attention, norms and token choice. The base class
    :class:`~outrider.device.kernels.invariant.InvariantKernels` computes everything that they delegate, with the kernels of
    ``inner``: other dtypes, and quantised weights in tiles of 16 rows. Blocks with quantised weights are composed.
    """

    row_invariant = True
    tunes = False
    tune, use_tuned = KernelSet.tune, KernelSet.use_tuned

    def __init__(self, inner: TritonKernels) -> None:
        TritonKernels.__init__(self, inner.facts, device=inner.device, takes_over=False)
        InvariantKernels.__init__(self, inner)
        self.pdl = inner.pdl
        self._any_rows = self.facts.capability // 10 == 9

    def batch_invariant(self) -> KernelSet:
        """Return this kernel set, which is already invariant."""
        return self

    def is_native(self, name: str, block: object = None) -> bool:
        """Return False also for a block with quantised weights."""
        return super().is_native(name, block) and not quantized_products(block)

    # -- products ------------------------------------------------------------------------------------------------------

    def matmul_config(self, operator: str, x: Tensor, weight: Tensor, *, half: int = 0) -> MatmulConfig | None:
        """Return a configuration with the weight's order of sums, or None for operators that aren't used."""
        is_half = x.dtype in (torch.bfloat16, torch.float16) and x.dtype is weight.dtype and weight.is_contiguous()
        if not is_half or operator not in _PREFILL or not x.numel():
            return None
        n, k = weight.shape
        return self._exact_config(operator, x.numel() // x.shape[-1], n, k, half)

    def every_config(self, operator: str, dtype: str, n: int, k: int, *, half: int = 0) -> Iterable[MatmulConfig]:
        """Return the configurations of a weight for any number of tokens."""
        del dtype
        if operator not in _PREFILL:
            return ()
        return dict.fromkeys(self._exact_config(operator, m, n, k, half) for m in (*BUCKETS, _MAX_DECODED + 1))

    def _exact_config(self, operator: str, m: int, n: int, k: int, half: int = 0) -> MatmulConfig:
        split = split_of(self.facts, n, k) if operator == "linear_parts" else 1
        if self._any_rows and m > _MAX_DECODED:
            return replace(_PREFILL[operator], split=split)
        key = operator, n, k, half, bucket(m)
        config = self._derived.get(key)
        if config is None:
            config = self._derived[key] = self._choose(operator, bucket(m), n, k, split, half=half)
        return config

    def _choose(
        self, operator: str, m: int, n: int, k: int, split: int = 1, *, half: int = 0, whole: bool = False
    ) -> MatmulConfig:
        """Return the tiles with a fixed order whose time is estimated to be the least; ``whole``: of whole, loaded blocks."""
        for config in rank_configs(self.facts, operator, m=m if self._any_rows else _FEW, n=n, k=k, half=half):
            is_whole = not config.rows_per_program and not config.descriptor
            if has_fixed_order(operator, config, split) and (is_whole or not whole):
                return config
        return MatmulConfig(_FEW, 32, 64, split, 4, 2, 0, 0, 0)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Add the product in the kernel of the norm, in whose order other passes add it; the norm itself is dropped."""
        self.linear_add_rms_norm(x, weight, bias, residual, residual.new_ones(residual.shape[-1:]), 1.0)
        return residual

    linear_quantized = InvariantKernels.linear_quantized

    # -- experts -------------------------------------------------------------------------------------------------------

    experts_quantized = InvariantKernels.experts_quantized

    def _configs(
        self,
        tokens: int,
        chosen: int,
        shape: tuple[int, int, int],
        operators: tuple[str, str],
        storages: tuple[OperandStorage, OperandStorage],
    ) -> tuple[int, MatmulConfig, MatmulConfig]:
        """Return the tokens of a sorted block (0: unsorted), and the tile configurations of gates and outputs."""
        del storages  # unquantized: the base class computes others
        experts, inner, hidden = shape
        block_tokens = _FEW
        if tokens > _FEW and self._any_rows:
            block_tokens = max(_FEW, sorted_block_tokens(tokens, chosen, experts))
        key = block_tokens, chosen, *shape
        if key not in self._derived_experts:
            used = min(experts, block_tokens * chosen)
            gates = self._choose(operators[0], block_tokens, 2 * inner * used, hidden, whole=True)
            outputs = self._choose(operators[1], block_tokens, hidden * used, inner, whole=True)
            self._derived_experts[key] = block_tokens, gates, outputs
        return (block_tokens if tokens > _FEW else 0, *self._derived_experts[key][1:])

    # -- attention and recurrent layers --------------------------------------------------------------------------------

    chunk_gated_delta_rule = InvariantKernels.chunk_gated_delta_rule

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
        """Attend in chunks of positions; programs share the chunks of few queries."""
        if not self._attends(q):
            return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)
        config = self._tiles(q, k_cache)
        groups = -(-metadata.max_query // (config[0] // config[2])) * metadata.seq_lens.shape[0] * k_cache.shape[2]
        shares_chunks = metadata.max_kv > exact_operator.FIRST_CHUNK and groups < 2 * self.processors
        operands = q, k_cache, v_cache, metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
        limits = metadata.max_query, metadata.max_kv, scale, window
        is_tree, cache = metadata.tree_mask is not None, k_cache.dtype
        if self._scope.must_compile(("exact_attention", q.dtype, q.shape[1:], cache, k_cache.shape[1:], window, is_tree)):
            for shared in (False, True):
                with compile_only():
                    _TRITON.paged_attention.exact(*operands, *limits, shared, config, self.pdl)
        return _TRITON.paged_attention.exact(*operands, *limits, shares_chunks, config, self.pdl)  # type: ignore[no-any-return]

    def _tiles(self, q: Tensor, k_cache: Tensor) -> list[int]:
        """Return rows of a tile, positions of a tile, and query heads of a key head."""
        group = q.shape[1] // k_cache.shape[2]
        heads = AttentionHeads(group=group, kv_heads=k_cache.shape[2], size=q.shape[2], bytes=q.dtype.itemsize)
        rows, block_kv = max(_ROWS, power_of_two(group)), 64
        while attention_bytes(self.facts, heads, rows, block_kv) > self.facts.shared_bytes and block_kv > 16:
            block_kv //= 2
        return [rows, block_kv, group]

    # -- token choice and ranks ----------------------------------------------------------------------------------------

    def _shares(self, shape: Sequence[int]) -> Iterator[int]:
        """Yield the one number of programs that share a row."""
        yield vocabulary_shares(1, shape[-1], self.processors)

    all_reduce_rms_norm = InvariantKernels.all_reduce_rms_norm
    attention_block, mlp_block = TritonBlocks.attention_block, TritonBlocks.mlp_block
    experts_block, recurrent_block = TritonBlocks.experts_block, TritonBlocks.recurrent_block
