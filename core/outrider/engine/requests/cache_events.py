"""Events of the prefix cache. A router uses them to send a request to the engine that caches its prefix."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from outrider.engine.requests.pages import PageKey


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of consecutive full pages that requests can hit from now on."""

    hashes: tuple[int, ...]
    """One unsigned 64-bit hash for each page, over its tokens, its extra and its parent's hash. Equal in every process."""
    parent: int | None
    """The hash of the page before the first one; None at the start of a sequence."""
    tokens: tuple[int, ...]
    """The tokens of all pages, in order."""
    extras: tuple[object, ...]
    """For each page, the result of :meth:`Request.extra_identity`, or None if the contents depend on tokens alone."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """An event: pages that requests can't hit any more, because their memory went to other requests."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache is empty, for example after a device fault."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEvents:
    """A :class:`~outrider.engine.requests.pages.PageWatcher` that passes each change to ``handle`` as an event.

    Several pages can have the same tokens and differ in the draft's cache, which depends on the token after the page.
    Such pages share one hash: the first of them sends :class:`BlockStored`, the last one :class:`BlockRemoved`.
    """

    def __init__(self, handle: Callable[[CacheEvent], None]) -> None:
        self._handle = handle
        self._hashes: dict[PageKey, int] = {}
        self._page_counts: Counter[int] = Counter()

    def stored(self, keys: Sequence[PageKey]) -> None:
        """Send one :class:`BlockStored` for each run of consecutive pages with new hashes."""
        run: list[PageKey] = []
        for key in keys:
            page_hash = self._hashes[key] = self._hash(key)
            self._page_counts[page_hash] += 1
            is_known = self._page_counts[page_hash] > 1
            if run and (is_known or key.parent is not run[-1]):
                self._send_stored(run)
                run = []
            if not is_known:
                run.append(key)
        if run:
            self._send_stored(run)

    def removed(self, key: PageKey) -> None:
        """Send :class:`BlockRemoved` if this was the last page of its hash."""
        page_hash = self._hashes.pop(key)
        self._page_counts[page_hash] -= 1
        if not self._page_counts[page_hash]:
            del self._page_counts[page_hash]
            self._handle(BlockRemoved((page_hash,)))

    def cleared(self) -> None:
        """Send the event :class:`AllBlocksCleared` to the listener."""
        self._hashes.clear()
        self._page_counts.clear()
        self._handle(AllBlocksCleared())

    def _send_stored(self, run: Sequence[PageKey]) -> None:
        parent = run[0].parent
        self._handle(
            BlockStored(
                hashes=tuple(self._hashes[key] for key in run),
                parent=None if parent is None else self._hash(parent),
                tokens=tuple(token for key in run for token in key.tokens),
                extras=tuple(key.extra for key in run),
            )
        )

    def _hash(self, key: PageKey) -> int:
        """Return the hash of a page. Recompute those of evicted ancestors: a child page can outlive its parent."""
        unhashed: list[PageKey] = []
        ancestor: PageKey | None = key
        while ancestor is not None and ancestor not in self._hashes:
            unhashed.append(ancestor)
            ancestor = ancestor.parent
        page_hash = 0 if ancestor is None else self._hashes[ancestor]
        for page_key in reversed(unhashed):
            contents = array("q", page_key.tokens).tobytes() + repr(page_key.extra).encode()
            page_hash = int.from_bytes(blake2b(page_hash.to_bytes(8) + contents, digest_size=8).digest())
        return page_hash
