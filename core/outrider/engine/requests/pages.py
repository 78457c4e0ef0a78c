"""Numbers for request rows and KV pages. Entry 0 is reserved for padding in both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.device import InterfaceError

Extra = Callable[[int, int], object]
"""What the contents of a range of tokens depend on besides the tokens, such as images; None for nothing."""


class FreeList:
    """Numbers 1..count-1, handed out lowest first after a start, most recently freed first later.

    Freeing a number twice, or 0, raises: a row that two requests own is the worst bug that a batch can have.
    """

    def __init__(self, what: str, count: int) -> None:
        self.what = what
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def available(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self) -> int:
        """One free number."""
        if not self._free:
            raise InterfaceError(f"no {self.what} left: all {self.count - 1} are taken")
        number = self._free.pop()
        self._taken.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Return a number that was taken."""
        if number not in self._taken:
            raise InterfaceError(f"{self.what} {number} was given back but isn't taken")
        self._taken.remove(number)
        self._free.append(number)


@dataclass(frozen=True, slots=True)
class PageKey:
    """Identity of a full page's contents: everything that its keys and values depend on.

    ``parent`` is the key of the page before it (None for the first), ``tokens`` are the page's own, ``ahead`` those after
    it that a draft's cache depends on. ``extra`` distinguishes contents that tokens don't show, such as images.
    """

    parent: PageKey | None
    tokens: tuple[int, ...]
    ahead: tuple[int, ...]
    extra: object = None

    def __hash__(self) -> int:
        # The parent's hash is cached by identity of the chain: hashing must not walk it.
        return hash((id(self.parent), self.tokens, self.ahead, self.extra))

    def __eq__(self, other: object) -> bool:
        # Parents are interned by the pool, so identity decides.
        return (
            isinstance(other, PageKey)
            and self.parent is other.parent
            and self.tokens == other.tokens
            and self.ahead == other.ahead
            and self.extra == other.extra
        )


class PageWatcher(Protocol):
    """Is told of every change of what a :class:`PagePool` can hit, in order, by the thread that makes it."""

    def stored(self, keys: Sequence[PageKey]) -> None:
        """Pages are known by these keys from now on; a parent comes before its children."""

    def removed(self, key: PageKey) -> None:
        """The page of this key is known no more: it was given to a request."""

    def cleared(self) -> None:
        """No page is known any more."""


class PagePool:
    """KV pages with shared prefixes: each page is free, held by one or more requests, or cached with no holder.

    A page is registered under its key as soon as the work that fills it is enqueued: every access to KV pages is on one
    stream, so the next holder of the page reads it later in that order. A cached page without a holder is reused, oldest
    first, when no page is free. ``ahead`` is how many tokens after a page its contents depend on: an EAGLE draft's keys
    and values at position i depend on token i+1.
    """

    def __init__(self, *, count: int, page_size: int, ahead: int, share: bool) -> None:
        self.count = count
        self.page_size = page_size
        self._ahead = ahead
        self._share = share
        self._free = list(range(count - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}
        self._watcher: PageWatcher | None = None

    def watch(self, watcher: PageWatcher | None) -> None:
        """Tell ``watcher`` of every change from now on, and at once of what is known already; None: tell nobody."""
        self._watcher = watcher
        if watcher is not None and self._page_of:
            watcher.stored(list(self._page_of))

    @property
    def shares(self) -> bool:
        """Whether pages are known by their contents at all."""
        return self._share

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and cached ones that no request holds."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that no request holds and whose contents may be hit again."""
        return len(self._cached)

    def take(self) -> int:
        """A page with contents of no meaning."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key]
            if self._watcher is not None:
                self._watcher.removed(key)
        else:
            raise InterfaceError(f"no KV page left: all {self.count - 1} are held")
        self._holders[page] = 1
        return page

    def give_back(self, pages: Iterable[int]) -> None:
        """Drop one hold on each page, the last one first so that a chain is evicted from its end."""
        for page in reversed(list(pages)):
            holders = self._holders.get(page, 0)
            if holders == 0:
                raise InterfaceError(f"KV page {page} was given back but no request holds it")
            if holders > 1:
                self._holders[page] = holders - 1
                continue
            del self._holders[page]
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def match(self, tokens: Sequence[int], extra: Extra | None = None) -> tuple[list[int], PageKey | None]:
        """Hold the cached pages of the longest known prefix of ``tokens`` that leaves at least one token to compute.

        Returns the pages and the key of the last.
        """
        pages: list[int] = []
        key: PageKey | None = None
        while (len(pages) + 1) * self.page_size < len(tokens):
            candidate = self._key(key, tokens, len(pages), extra)
            page = self._page_of.get(candidate) if candidate is not None else None
            if page is None:
                break
            key = self._key_of[page]
            self._cached.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
            pages.append(page)
        return pages, key

    def register(
        self,
        pages: Sequence[int],
        tokens: Sequence[int],
        filled: int,
        key: PageKey | None,
        done: int,
        extra: Extra | None = None,
    ) -> tuple[PageKey | None, int]:
        """Make known the pages whose contents are enqueued: those that end within the first ``filled`` of ``tokens``.

        ``done`` pages were brought in before, the last under ``key``. Returns both, brought forward. Where another page is
        known by the same key already, that one stays the one to hit.
        """
        new: list[PageKey] = []
        while self._share and (done + 1) * self.page_size <= filled:
            candidate = self._key(key, tokens, done, extra)
            if candidate is None:
                break
            known = self._page_of.get(candidate)
            if known is None:
                self._page_of[candidate] = pages[done]
                self._key_of[pages[done]] = candidate
                new.append(candidate)
                key = candidate
            else:
                key = self._key_of[known]
            done += 1
        if new and self._watcher is not None:
            self._watcher.stored(new)
        return key, done

    def forget_all(self) -> None:
        """Make every page unknown, as after a fault that may have spoilt their contents."""
        if self._key_of and self._watcher is not None:
            self._watcher.cleared()
        self._key_of.clear()
        self._page_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _key(self, parent: PageKey | None, tokens: Sequence[int], index: int, extra: Extra | None) -> PageKey | None:
        start, end = index * self.page_size, (index + 1) * self.page_size
        if end + self._ahead > len(tokens):
            return None
        ahead = tuple(tokens[end : end + self._ahead])
        besides = None if extra is None else extra(start, end + self._ahead)
        return PageKey(parent, tuple(tokens[start:end]), ahead, besides)
