"""TileSelection: the tile configurations of one device and layer, stored or else derived.

VariantScope enumerates kernel variants, all compiled before requests are served.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Self, TypeVar

from outrider_triton.launch import compile_only, power_of_two, vocabulary_shares
from outrider_triton.tiles.configs import BUCKETS, AttentionConfig, MatmulConfig
from outrider_triton.tiles.derive.attention import AttentionLaunch
from outrider_triton.tiles.derive.fits import (
    MAX_TOKENS_TUNED,
    PREFILL_SAMPLE_TOKENS,
    UNQUANTIZED,
    OperandStorage,
    tile_tokens,
)
from outrider_triton.tiles.derive.products import MIN_STREAMED_TOKENS, choose_config, config_tokens
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.table import ANY_LAYER, Table
from outrider_triton.workers import compiling

_MAX_REQUESTS = 256
_Variant = TypeVar("_Variant")


class VariantScope:
    """The state of a warm-up: whether variants are being compiled, and the keys that were. All copies of a kernel set share
    one.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._compiled_keys: set[object] = set()
        self._configs: dict[object, tuple[AttentionLaunch, ...]] = {}

    def each(self, key: object, variants: Iterable[_Variant]) -> Iterator[_Variant]:
        """Yield each of ``variants`` inside the scope, at the first call for ``key``; kernels that the caller then launches
        are only compiled.
        """
        if self.depth and key not in self._compiled_keys:
            self._compiled_keys.add(key)
            for variant in variants:
                with compile_only():
                    yield variant

    def attention_configs(
        self, key: object, config: Callable[[int, int, int], AttentionLaunch], *, max_query: int, capacity: int
    ) -> tuple[AttentionLaunch, ...]:
        """Return :func:`attention_configs`, cached for the heads that ``key`` names, since it takes a tenth of a second."""
        sizes = key, power_of_two(max_query), capacity
        found = self._configs.get(sizes)
        if found is None:
            found = self._configs[sizes] = attention_configs(config, max_query=max_query, capacity=capacity)
        return found

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compile, for each call in the context, every other variant of its kernels, several at a time. Meanwhile each call
        runs with the variant that it needs.

        All variants are on the device when the context exits.
        """
        self.depth += 1
        try:
            with nullcontext() if self.depth > 1 else compiling():
                yield
        finally:
            self.depth -= 1
            if not self.depth:
                self._compiled_keys.clear()
                self._configs.clear()


def attention_configs(
    config: Callable[[int, int, int], AttentionLaunch], *, max_query: int, capacity: int
) -> tuple[AttentionLaunch, ...]:
    """Return every ``config(batch, max_query, max_kv)`` for at most ``max_query`` queries and ``capacity`` cached tokens."""
    found: dict[AttentionLaunch, None] = {}
    for queries in _powers(max_query):
        for batch in _powers(_MAX_REQUESTS):
            # Bounds in tables and of splits also lie between powers of two.
            for cached in (size + part for size in _powers(capacity) for part in (0, size // 4, size // 2)):
                found[config(batch, queries, min(max(cached, 1), capacity))] = None
    return tuple(found)


def share_counts(vocabulary: int, processors: int) -> tuple[int, ...]:
    """Return every number of programs that may share a vocabulary of ``vocabulary`` tokens on a device with
    ``processors``.
    """
    # With more than four rows per multiprocessor, each row has one program.
    return tuple(dict.fromkeys(vocabulary_shares(count, vocabulary, processors) for count in _powers(4 * processors)))


def _powers(limit: int) -> tuple[int, ...]:
    """Return the powers of two up to the first that isn't below ``limit``."""
    return tuple(1 << exponent for exponent in range(power_of_two(limit).bit_length()))


def compiled() -> Mapping[str, int]:
    """Return the number of variants that this process compiled or loaded, by kernel; none in the interpreter."""
    found = {}
    loaded = [(f"{name}.", module) for name, module in sys.modules.items()]
    modules = [module for name, module in loaded if name.startswith("outrider_triton.") and ".jit." in name]
    for module in modules:
        for name, kernel in vars(module).items():
            # Triton stores, for each device, a tuple that begins with the compiled variants.
            caches = getattr(kernel, "device_caches", None) or {}
            count = sum(len(cache[0]) for cache in caches.values())
            if count:
                found[name] = count
    return found


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
            return self.derived(operator, m=m, n=n, k=k)
        table = self.table
        entry = None if table is None else table.entry(operator, dtype, n=n, k=k, m=m, layer=self.layer)
        return self.derived(operator, m=m, n=n, k=k, half=half) if entry is None else entry.config

    def derived(
        self, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: OperandStorage = UNQUANTIZED
    ) -> MatmulConfig | None:
        """Return the derived configuration, or None for the library's product."""
        if m < 1:
            return None
        if m <= MAX_TOKENS_TUNED:
            m = tile_tokens(m, n, k, operator, stored)
        key = operator, stored, n, k, config_tokens(m, stored), half
        if key not in self._derived:
            self._derived[key] = choose_config(self.facts, operator, m=m, n=n, k=k, half=half, stored=stored)
        return self._derived[key]

    def token_counts(self, operator: str = "") -> Sequence[int]:
        """Return numbers of tokens that together need every configuration, and every kernel, of the product ``operator``."""
        # So many rows of every product, such as logits, would need gigabytes.
        prefill = {PREFILL_SAMPLE_TOKENS} if operator == "linear_silu_mul" and self.facts.streams_products else set()
        measured = () if self.table is None else self.table.entries.values()
        counts = {entry.m for layers in measured for entries in layers.values() for entry in entries}
        return sorted({1, MIN_STREAMED_TOKENS, *BUCKETS, MAX_TOKENS_TUNED + 1} | prefill | counts)

    def samples(self, operator: str, *key: object) -> Iterator[int]:
        """Yield each of :meth:`token_counts` inside the scope of variants, once for ``operator``, ``key`` and this layer. The
        caller computes so many rows, which only compiles the kernels.
        """
        counts = self.token_counts(operator) if self.scope.depth else ()
        return self.scope.each((operator, *key, self.layer), counts)

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
