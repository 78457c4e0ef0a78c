"""What the prefix cache tells others of: routers send a request to the engine that has its prefix."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from outrider.engine.requests.pages import PageKey


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full pages that a request can hit from now on. One follows the other; the first follows the page ``parent``.

    ``hashes``: one for each page, unsigned 64 bits. A page's hash is made of its tokens, its ``extras`` and its parent's
    hash, alike in every process. ``tokens``: those of all these pages. ``extras``: for each page, what its contents depend
    on besides tokens, as :meth:`Request.besides_tokens` says it, or None.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    extras: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that can't be hit any more: their memory went to other requests."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No page can be hit any more, as after a fault of the device."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEvents:
    """Makes records of what a page pool tells, and hands them to ``handle``. Host alone.

    Pages with the same tokens can differ in what a draft's cache holds for them, which depends on the token behind the page.
    A router doesn't see that: such pages have one hash, stored with the first of them and removed with the last.
    """

    def __init__(self, handle: Callable[[CacheEvent], None]) -> None:
        self._handle = handle
        self._hashes: dict[PageKey, int] = {}
        self._pages: Counter[int] = Counter()

    def stored(self, keys: Sequence[PageKey]) -> None:
        """See :class:`~outrider.engine.requests.pages.PageWatcher`."""
        run: list[PageKey] = []
        for key in keys:
            own = self._hashes[key] = self._hash(key)
            self._pages[own] += 1
            known = self._pages[own] > 1
            if run and (known or key.parent is not run[-1]):
                self._tell_stored(run)
                run = []
            if not known:
                run.append(key)
        if run:
            self._tell_stored(run)

    def removed(self, key: PageKey) -> None:
        """See :class:`~outrider.engine.requests.pages.PageWatcher`."""
        own = self._hashes.pop(key)
        self._pages[own] -= 1
        if not self._pages[own]:
            del self._pages[own]
            self._handle(BlockRemoved((own,)))

    def cleared(self) -> None:
        """See :class:`~outrider.engine.requests.pages.PageWatcher`."""
        self._hashes.clear()
        self._pages.clear()
        self._handle(AllBlocksCleared())

    def _tell_stored(self, run: Sequence[PageKey]) -> None:
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
        """The hash of a page. A parent may have been forgotten while a request held its child: it's made again then."""
        chain: list[PageKey] = []
        ancestor: PageKey | None = key
        while ancestor is not None and ancestor not in self._hashes:
            chain.append(ancestor)
            ancestor = ancestor.parent
        found = 0 if ancestor is None else self._hashes[ancestor]
        for each in reversed(chain):
            contents = array("q", each.tokens).tobytes() + repr(each.extra).encode()
            found = int.from_bytes(blake2b(found.to_bytes(8) + contents, digest_size=8).digest())
        return found
