"""Tile configurations of products and of attention, and the numbers of tokens that share one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BUCKETS = (8, 16, 32, 64, 128)
"""Upper bounds of the ranges of token counts that share a configuration."""
STREAMED = 2
"""Value of ``descriptor`` for streamed products: a warp of its own loads their operands."""
LARGE_M = 3
"""Value of ``descriptor`` for gate and up products with tiles for large M."""
SCALED_BLOCKS = 4
"""Value of ``descriptor`` for products of 33 to 128 tokens and a weight with scales of blocks, in equal shares of units."""
PREFILL_GATES = 5
"""Value of ``descriptor`` for gate and up products of prefill."""


def bucket(m: int) -> int:
    """Return the least of :data:`BUCKETS` that isn't below ``m``; the largest for more."""
    return next((size for size in BUCKETS if size >= m), BUCKETS[-1])


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Tile configuration of a skinny matrix product. Operators and JSON tables carry it as a list in field order.

    A streamed product (``descriptor`` :data:`STREAMED`) uses :mod:`outrider_triton.products.jit.streamed`, with four-bit
    weights :mod:`outrider_triton.quantized.jit.nibble_planes_streamed`. Gates for large M (:data:`LARGE_M`) use
    :mod:`outrider_triton.products.jit.large_m_gates`, gates of prefill (:data:`PREFILL_GATES`)
    :mod:`outrider_triton.products.jit.prefill_gates`, and products in shares (:data:`SCALED_BLOCKS`)
    :mod:`outrider_triton.quantized.jit.scaled_blocks`. These kernels reinterpret some fields.
    """

    block_m: int
    """Number of tokens per block."""
    block_n: int
    """Number of weight rows per block; streamed: rows per copy-engine box."""
    block_k: int
    """Number of columns per block; streamed with four-bit weights: all columns of a program."""
    split: int
    """Number of programs that share the columns, each with a part of the sum."""
    warps: int
    """Number of warps per program; streamed with four-bit weights or large M: four per warpgroup."""
    stages: int
    """Number of stages of loads in flight."""
    prefetch_columns: int
    """Number of weight columns, a multiple of 256, prefetched before the preceding kernel has ended.

    Streamed: 0; with four-bit weights, columns per tile; with large M, pipeline stages of tokens; gates of prefill: blocks
    of tokens that programs multiply by all rows before the next blocks.
    """
    descriptor: int
    """How the weight is loaded: 0 by pointers, 1 by the copy engine, :data:`STREAMED`, :data:`LARGE_M`,
    :data:`SCALED_BLOCKS` or :data:`PREFILL_GATES`.
    """
    rows_per_program: int = 0
    """Number of weight rows per program, 0 for a whole block; streamed: pairs of rows, or folded rows without a split;
    in shares and gates of prefill: number of programs.
    """

    def as_list(self) -> list[int]:
        """Return the fields in the order that operators and tables use."""
        return [getattr(self, name) for name in self.__dataclass_fields__]  # astuple takes six times as long

    def launch_constants(self, k: int) -> dict[str, Any]:
        """Return the constants of a launch over ``k`` columns by name; EVEN: each program has whole blocks of columns."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "EVEN": k % (self.split * self.block_k) == 0,
            "num_stages": self.stages,
            "warps": self.warps,
        }


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Measured configuration of attention over the cache."""

    block_kv: int
    """Number of cached tokens per block."""
    split: int
    """Number of programs that share a sequence's cached tokens."""
    warps: int
    stages: int
    streamed: bool = False
    """True if a TMA pipeline loads keys and values."""
