"""Which variants of a kernel there can be: what is compiled beforehand, so that nothing is when requests are served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.errors import OutOfResources

from outrider_triton.derive import MOST, every
from outrider_triton.facts import DeviceFacts
from outrider_triton.jit import (
    activations,
    attention,
    attention_ring,
    bookkeeping,
    choose,
    expert_quantized,
    experts,
    fused,
    matmul,
    peers,
    planes,
    planes_ring,
    prompt_attention,
    quantized,
    rows,
    streamed,
    tall,
)
from outrider_triton.launch import power_of_two, shares
from outrider_triton.table import ANY, BUCKETS, MatmulConfig, Table

_MOST_ROWS = 1024
_MOST_REQUESTS = 256


class Scope:
    """Whether every variant is to be run, and which were. One for all copies of a kernel set."""

    def __init__(self) -> None:
        self.depth = 0
        self._run: set[object] = set()
        self._configs: dict[object, tuple[tuple[int, ...], ...]] = {}

    def first(self, key: object) -> bool:
        """Whether the variants named so are to be run now: inside, and not yet."""
        if not self.depth or key in self._run:
            return False
        self._run.add(key)
        return True

    def attention_configs(
        self, key: object, config: Callable[[int, int, int], list[int]], *, max_query: int, capacity: int
    ) -> tuple[tuple[int, ...], ...]:
        """:func:`attention_configs`, once inside for the heads that ``key`` names: it takes a tenth of a second."""
        sizes = key, power_of_two(max_query), capacity
        found = self._configs.get(sizes)
        if found is None:
            found = self._configs[sizes] = attention_configs(config, max_query=max_query, capacity=capacity)
        return found

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Until it's left, calls run what they need, and have every other variant compiled; several at a time, meanwhile.

        All of them are on the device when it's left.
        """
        self.depth += 1
        try:
            with nullcontext() if self.depth > 1 else _compiling():
                yield
        finally:
            self.depth -= 1
            if not self.depth:
                self._run.clear()
                self._configs.clear()


@contextmanager
def _compiling() -> Iterator[None]:
    """A scope in which several threads compile. A launch waits for its own kernel alone."""
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="outrider-compile") as pool:
        mode = AsyncCompileMode(pool)
        with mode:
            yield
        for made in mode.future_kernels.values():
            with that_fit():
                _ = made.result().run  # Triton loads a kernel onto the device when this is first asked for


def that_fit() -> AbstractContextManager[None]:
    """A variant may need more of the device than there is. That is an error for the call that needs it, and only then."""
    return suppress(OutOfResources)


def products(
    facts: DeviceFacts,
    table: Table | None,
    operator: str,
    dtype: str,
    *,
    n: int,
    k: int,
    half: int = 0,
    layer: str = ANY,
) -> tuple[MatmulConfig, ...]:
    """Each configuration that a product with this weight has for some number of tokens in ``layer``."""
    counts = () if table is None else range(1, MOST + 1)
    tuned = {m: table.entry(operator, dtype, n=n, k=k, m=m, layer=layer) for m in counts} if table else {}
    found = dict.fromkeys(entry.config for entry in tuned.values() if entry is not None and entry.config is not None)
    served = {m for m in BUCKETS if tuned.get(m) is not None}
    found.update(dict.fromkeys(every(facts, operator, n=n, k=k, half=half, but=served)))
    return tuple(found)


def attention_configs(
    config: Callable[[int, int, int], list[int]], *, max_query: int, capacity: int
) -> tuple[tuple[int, ...], ...]:
    """Each ``config(batch, max_query, max_kv)`` for as many queries or fewer, and a block table of ``capacity`` tokens."""
    found: dict[tuple[int, ...], None] = {}
    for queries in _powers(max_query):
        for batch in _powers(_MOST_REQUESTS):
            # Bounds of tables and of splits lie between powers of two as well.
            for cached in (size + part for size in _powers(capacity) for part in (0, size // 4, size // 2)):
                found[tuple(config(batch, queries, min(max(cached, 1), capacity)))] = None
    return tuple(found)


def share_counts(vocabulary: int, processors: int) -> tuple[int, ...]:
    """Among how many programs a vocabulary may be shared out."""
    return tuple(dict.fromkeys(shares(count, vocabulary, processors) for count in _powers(_MOST_ROWS)))


def _powers(most: int) -> tuple[int, ...]:
    """The powers of two up to the first that isn't below ``most``."""
    return tuple(1 << exponent for exponent in range(power_of_two(most).bit_length()))


def compiled() -> Mapping[str, int]:
    """Variants that this process has compiled or loaded, by kernel; none where they're interpreted."""
    found = {}
    modules = (
        activations,
        attention,
        attention_ring,
        bookkeeping,
        choose,
        expert_quantized,
        experts,
        fused,
        matmul,
        peers,
        planes,
        planes_ring,
        prompt_attention,
        quantized,
        rows,
        streamed,
        tall,
    )
    for module in modules:
        for name, kernel in vars(module).items():
            # Triton keeps, for each device, the compiled variants first in a tuple.
            caches = getattr(kernel, "device_caches", None) or {}
            count = sum(len(cache[0]) for cache in caches.values())
            if count:
                found[name] = count
    return found
