"""Enumeration of kernel variants, all compiled before requests are served."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TypeVar

from triton.runtime.errors import OutOfResources

from outrider_triton.launch import compile_only, power_of_two, vocabulary_shares
from outrider_triton.tiles.derive.attention import AttentionLaunch
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
            with nullcontext() if self.depth > 1 else _compiling():
                yield
        finally:
            self.depth -= 1
            if not self.depth:
                self._compiled_keys.clear()
                self._configs.clear()


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile launched kernels concurrently, and load all of them onto the device at the end."""
    with compiling() as mode:
        yield
    for future in mode.future_kernels.values():
        with ignore_unfitting():
            _ = future.result().run  # Triton loads a kernel onto the device at the first access


def ignore_unfitting() -> AbstractContextManager[None]:
    """Ignore variants that need more resources than the device has: only a call that uses one must fail."""
    return suppress(OutOfResources)


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
