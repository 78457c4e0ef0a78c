"""TileSelection: the tile configurations of one device and layer, stored or else derived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Self

from outrider_triton.launch import compile_only, vocabulary_shares
from outrider_triton.tiles.configs import BUCKETS, AttentionConfig, MatmulConfig
from outrider_triton.tiles.derive.fits import MAX_TOKENS_TUNED, UNQUANTIZED, OperandStorage, tile_tokens
from outrider_triton.tiles.derive.products import MIN_STREAMED_TOKENS, choose_config, config_tokens
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.table import ANY_LAYER, Table
from outrider_triton.tiles.variants import VariantScope, share_counts


class TileSelection:
    """Tile configurations of one device, for layers of one shape. Stored choices take precedence over derived ones.

    Selections of several layers (:meth:`for_layer`) share the stored choices, the derived configurations and the scope in
    which variants are compiled.
    """

    def __init__(self, facts: DeviceFacts, table: Table | None = None) -> None:
        self.facts = facts
        self.scope = VariantScope()
        self.layer = ANY_LAYER
        self._tables = [table]
        self._derived: dict[tuple[object, ...], MatmulConfig | None] = {}

    @property
    def table(self) -> Table | None:
        """The stored choices in use: a shipped table merged with this machine's choices, or None."""
        return self._tables[-1]

    @table.setter
    def table(self, table: Table | None) -> None:
        self._tables[:] = [table]

    def for_layer(self, layer: str) -> Self:
        """Return a selection that prefers choices measured in ``layer``."""
        copied = copy(self)
        copied.layer = layer
        return copied

    def product(self, operator: str, dtype: str, *, m: int, n: int, k: int, half: int = 0) -> MatmulConfig | None:
        """Return the configuration for ``m`` tokens and an unquantized weight [n, k], or None for the library's product."""
        if not 0 < m <= MAX_TOKENS_TUNED:
            return None
        table = self.table
        entry = None if table is None else table.entry(operator, dtype, n=n, k=k, m=m, layer=self.layer)
        return self.derived(operator, m=m, n=n, k=k, half=half) if entry is None else entry.config

    def derived(
        self, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: OperandStorage = UNQUANTIZED
    ) -> MatmulConfig | None:
        """Return the derived configuration for up to 128 tokens, or None for the library's product."""
        if not 0 < m <= MAX_TOKENS_TUNED:
            return None
        m = tile_tokens(m, n, k, operator, stored)
        key = operator, stored, n, k, config_tokens(m, stored), half
        if key not in self._derived:
            self._derived[key] = choose_config(self.facts, operator, m=m, n=n, k=k, half=half, stored=stored)
        return self._derived[key]

    def token_counts(self) -> Sequence[int]:
        """Return numbers of tokens that together need every configuration, and every kernel, of any product."""
        measured = () if self.table is None else self.table.entries.values()
        counts = {entry.m for layers in measured for entries in layers.values() for entry in entries}
        return sorted({1, MIN_STREAMED_TOKENS, *BUCKETS, MAX_TOKENS_TUNED + 1} | counts)

    def samples(self, *key: object) -> Iterator[int]:
        """Yield each of :meth:`token_counts` inside the scope of variants, once for ``key`` and this layer. The caller
        computes so many rows, which only compiles the kernels.
        """
        return self.scope.each((*key, self.layer), self.token_counts())

    def attention(self, groups: int, head_size: int, group: int) -> AttentionConfig | None:
        """Return the stored configuration of attention with ``groups`` programs without splits, or None."""
        table = self.table
        return None if table is None else table.attention_config(groups, head_size, group, layer=self.layer)

    def vocabulary_shares(self, shape: Sequence[int]) -> Iterator[int]:
        """Yield the number of programs that share one row of a tensor of ``shape``.

        Inside the scope, first yield every number that another batch may need, each to be compiled and not run.
        """
        rows = 1
        for size in shape[:-1]:
            rows *= size
        if self.scope.depth:  # other operands need other variants, so repeat this for each call
            for count in share_counts(shape[-1], self.facts.processors):
                with compile_only():
                    yield count
        yield vocabulary_shares(rows, shape[-1], self.facts.processors)
