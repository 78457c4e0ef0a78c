"""ExactKernels: Triton's kernels with one order of each row's sums, so that a row's bits don't depend on the batch.

A product of 16-bit operands adds its columns in order, within parts whose number depends on the weight alone. On Hopper all
instructions of the matrix unit then compute the same bits, so that a tile may have any size; elsewhere it has 16 tokens.
``tests/kernels/test_exact.py`` compares the bits of all tiles on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet
from outrider.device.kernels.invariant import InvariantKernels
from outrider.device.kernels.weights import quantized_products
from outrider_triton.attention import operators as attention_operators
from outrider_triton.attention.cached import attends
from outrider_triton.attention.latent import attends_to_latents, exact_launch
from outrider_triton.attention.prefill import PromptAttention
from outrider_triton.experts.mixtures import ExpertProducts, sorted_block_tokens
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import power_of_two, vocabulary_shares
from outrider_triton.products.dense import DenseProducts
from outrider_triton.tiles.configs import BUCKETS, STREAMED, MatmulConfig, bucket
from outrider_triton.tiles.derive.attention import AttentionHeads, fit_attention_tile
from outrider_triton.tiles.derive.fits import OperandStorage, fold_factor
from outrider_triton.tiles.derive.products import rank_configs
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.selection import TileSelection

_TRITON = torch.ops.outrider
_ROWS = 64
"""Query rows of an attention tile: the height of Hopper's matrix unit."""
_FEW = 16
"""Number of tokens in a tile on devices where all tiles must have the same number."""
_PREFILL = {
    "linear": MatmulConfig(256, 128, 64, 1, 8, 3, 0, 0, 0),
    "linear_parts": MatmulConfig(256, 128, 64, 1, 8, 3, 0, 0, 0),
    "linear_rope": MatmulConfig(128, 128, 64, 1, 8, 4, 0, 0, 0),
    "linear_silu_mul": MatmulConfig(256, 64, 64, 1, 8, 3, 0, 0, 0),
}
"""Tiles of products with more than :data:`_MAX_DECODED` tokens, by operator: measured on one H200."""
_MAX_DECODED = 1024
"""Number of tokens above which larger tiles keep all multiprocessors busy."""
_PART_COLUMNS = 256
"""The number of columns in a part is a multiple of this, so that parts begin at the same column with every tile."""
_BUSY = 0.35
"""Fraction of the multiprocessors that tiles of 128 weight rows occupy with all parts of a product."""


def split_of(facts: DeviceFacts, n: int, k: int) -> int:
    """Return the number of parts into which the columns of a weight [n, k] are split. The next kernel adds up the parts."""
    split = 1
    while split < 8 and -(-n // 128) * split < _BUSY * facts.processors and k % (2 * split * _PART_COLUMNS) == 0:
        split *= 2
    return split


def has_fixed_order(operator: str, config: MatmulConfig, split: int) -> bool:
    """Return True if a tile configuration adds the columns of each of ``split`` parts in order."""
    return config.split == split and (config.descriptor != STREAMED or fold_factor(operator, config) == 1)


class ExactTiles(TileSelection):
    """The selection of tile configurations with which the sums of each row have one order."""

    def __init__(self, facts: DeviceFacts) -> None:
        super().__init__(facts)
        self.any_rows = facts.capability // 10 == 9
        """True if a tile may have any number of rows, because all instructions of the matrix unit add in one order
        (Hopper).
        """
        self._exact: dict[tuple[object, ...], MatmulConfig] = {}

    def product(self, operator: str, dtype: str, *, m: int, n: int, k: int, half: int = 0) -> MatmulConfig | None:
        """Return the configuration in which a weight [n, k] has its fixed order of sums, or None for operators that the exact
        kernels don't use.
        """
        del dtype
        return self._exact_config(operator, m, n, k, half) if operator in _PREFILL and m else None

    def token_counts(self, operator: str = "") -> Sequence[int]:
        """Return numbers of tokens that together need every configuration."""
        del operator
        return *BUCKETS, _MAX_DECODED + 1

    def _exact_config(self, operator: str, m: int, n: int, k: int, half: int = 0) -> MatmulConfig:
        split = split_of(self.facts, n, k) if operator == "linear_parts" else 1
        if self.any_rows and m > _MAX_DECODED:
            return replace(_PREFILL[operator], split=split)
        key = operator, n, k, half, bucket(m)
        if key not in self._exact:
            self._exact[key] = self.choose_config(operator, bucket(m), n, k, split, half=half)
        return self._exact[key]

    def choose_config(
        self, operator: str, m: int, n: int, k: int, split: int = 1, *, half: int = 0, whole: bool = False
    ) -> MatmulConfig:
        """Return the tile configuration with a fixed order of sums that is estimated to be the fastest for ``m`` tokens.
        ``whole``: only configurations of whole blocks that threads load.
        """
        for config in rank_configs(self.facts, operator, m=m if self.any_rows else _FEW, n=n, k=k, half=half):
            is_whole = not config.rows_per_program and not config.descriptor
            if has_fixed_order(operator, config, split) and (is_whole or not whole):
                return config
        return MatmulConfig(_FEW, 32, 64, split, 4, 2, 0, 0, 0)

    def vocabulary_shares(self, shape: Sequence[int]) -> Iterator[int]:
        """Yield the only number of programs that share one row of a tensor of ``shape``: it depends on the shape alone."""
        yield vocabulary_shares(1, shape[-1], self.facts.processors)


class ExactProducts(DenseProducts):
    """Unquantized products that one kernel computes for every number of tokens, so that the order of a row's sums never
    changes.
    """

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Add the product to ``residual`` in place, with the kernel of :meth:`linear_add_rms_norm`, whose norm is dropped.
        The order of sums is then the same as in passes that need the norm.
        """
        self.linear_add_rms_norm(x, weight, bias, residual, residual.new_ones(residual.shape[-1:]), 1.0)
        return residual


class ExactExperts(ExpertProducts):
    """The products of experts in which the sums of each row have one order."""

    def __init__(self, tiles: ExactTiles) -> None:
        super().__init__(tiles.facts)
        self._tiles = tiles

    def _configs(
        self,
        tokens: int,
        chosen: int,
        shape: tuple[int, int, int],
        operators: tuple[str, str],
        storages: tuple[OperandStorage, OperandStorage],
        *,
        large_m: bool = False,
    ) -> tuple[int, MatmulConfig, MatmulConfig]:
        """Return the tokens of a sorted block (0: unsorted), and the tile configurations of gates and outputs."""
        del storages, large_m  # unquantized: the base class computes others
        experts, inner, hidden = shape
        block_tokens = _FEW
        if tokens > _FEW and self._tiles.any_rows:
            block_tokens = max(_FEW, sorted_block_tokens(tokens, chosen, experts))
        key = block_tokens, chosen, *shape
        if key not in self._derived:
            used = min(experts, block_tokens * chosen)
            gates = self._tiles.choose_config(operators[0], block_tokens, 2 * inner * used, hidden, whole=True)
            outputs = self._tiles.choose_config(operators[1], block_tokens, hidden * used, inner, whole=True)
            self._derived[key] = block_tokens, gates, outputs
        return (block_tokens if tokens > _FEW else 0, *self._derived[key][1:])


class ExactKernels(TritonKernels, InvariantKernels):
    """The batch-invariant kernels of the set ``inner``.

    Triton's kernels compute 16-bit products, experts, attention, norms and token choice. The base class
    :class:`~outrider.device.kernels.invariant.InvariantKernels` computes everything that they delegate, with the kernels of
    ``inner``: other dtypes, and quantised weights in tiles of 16 rows. Blocks with quantised weights are composed.
    """

    row_invariant = True
    optional_operands = KernelSet.optional_operands
    tunes = False
    _max_routed_tokens = 1 << 62  # the library's product for more tokens would add in another order
    tune, use_tuned = KernelSet.tune, KernelSet.use_tuned

    def __init__(self, inner: TritonKernels) -> None:
        tiles = ExactTiles(inner.facts)
        self._any_rows = tiles.any_rows
        TritonKernels.__init__(self, inner.facts, device=inner.device, takes_over=False, tiles=tiles)
        InvariantKernels.__init__(self, inner)
        self.mixtures = ExactExperts(tiles)

    def _compose(self, tiles: TileSelection, prompts: PromptAttention) -> None:
        super()._compose(tiles, prompts)
        self.dense = ExactProducts(self, tiles)

    def batch_invariant(self) -> KernelSet:
        """Return this kernel set, which is already invariant."""
        return self

    def is_native(self, name: str, block: object = None) -> bool:
        """Return False also for a block with quantised weights."""
        return super().is_native(name, block) and not quantized_products(block)

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
        """Compute attention in chunks of positions. With few queries, programs share the chunks."""
        if not attends(q):
            return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window, sinks=sinks)
        config = self._attention_tiles(q, k_cache)
        groups = -(-metadata.max_query // (config[0] // config[2])) * metadata.seq_lens.shape[0] * k_cache.shape[2]
        shares_chunks = metadata.max_kv > attention_operators.FIRST_CHUNK and groups < 2 * self.facts.processors
        operands = q, k_cache, v_cache, metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
        limits = metadata.max_query, metadata.max_kv, scale, window
        is_tree, cache = metadata.tree_mask is not None, k_cache.dtype
        key = "exact_attention", q.dtype, q.shape[1:], cache, k_cache.shape[1:], window, is_tree, sinks is not None
        for shared in self.tiles.scope.each(key, (False, True)):
            _TRITON.paged_attention.exact(*operands, *limits, shared, config, self.pdl, sinks)
        return _TRITON.paged_attention.exact(*operands, *limits, shares_chunks, config, self.pdl, sinks)  # type: ignore[no-any-return]

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply in tiles of any number of tokens where all tiles add in one order, else in tiles of 16."""
        if self._any_rows or x.dtype.itemsize > 2 or x.stride(2) != 1:
            return TritonKernels.head_linear(self, x, weight)
        return _TRITON.head_linear.triton(x, weight, _FEW, self.pdl)  # type: ignore[no-any-return]

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
        """Compute attention in chunks of positions, as :meth:`paged_attention` does."""
        if not attends_to_latents(self.facts, q, q_rotated):
            return InvariantKernels.latent_attention(self, q, q_rotated, k_cache, v_cache, metadata, scale=scale)
        launch = exact_launch(self.facts, q, q_rotated, metadata)
        batch = metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
        operands = q, q_rotated, k_cache, v_cache, *batch, metadata.max_query, metadata.max_kv, scale, True
        shape = q.shape[1:], q_rotated.shape[2], k_cache.shape[1], metadata.tree_mask is None
        for split in self.tiles.scope.each(("exact_latents", q.dtype, k_cache.dtype, *shape), (1, 2)):
            _TRITON.latent_attention.triton(*operands, launch._replace(split=split)[:5], self.pdl)
        return _TRITON.latent_attention.triton(*operands, launch[:5], self.pdl)  # type: ignore[no-any-return]

    latent_norm_rope_write_cache = TritonKernels.latent_norm_rope_write_cache

    def _attention_tiles(self, q: Tensor, k_cache: Tensor) -> list[int]:
        """Return rows of a tile, positions of a tile, and query heads of a key head."""
        group = q.shape[1] // k_cache.shape[2]
        heads = AttentionHeads(group=group, kv_heads=k_cache.shape[2], size=q.shape[2], bytes=q.dtype.itemsize)
        rows, block_kv = fit_attention_tile(self.facts, heads, max(_ROWS, power_of_two(group)), 64)
        return [rows, block_kv, group]

    # Quantised products, prefill of recurrent layers and sums over ranks have no exact kernel in Triton.
    linear_quantized, experts_quantized = InvariantKernels.linear_quantized, InvariantKernels.experts_quantized
    chunk_gated_delta_rule = InvariantKernels.chunk_gated_delta_rule
    all_reduce_rms_norm = InvariantKernels.all_reduce_rms_norm
    attention_block, mlp_block = TritonKernels.attention_block, TritonKernels.mlp_block
    experts_block, recurrent_block = TritonKernels.experts_block, TritonKernels.recurrent_block
