"""Allocation of request rows and KV pages by number. Row 0 and page 0 are reserved for padding."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from outrider.device import InterfaceError

Extra = Callable[[int, int], object]
"""Return the extra identity of the tokens ``start`` to ``end``, such as image digests; None if tokens alone identify them."""


class FreeList:
    """A pool of the numbers 1 to count-1, for rows or pages. Allocation returns the most recently freed number first,
    initially the lowest.

    Freeing a number twice, or 0, raises: otherwise two requests could own one row.
    """

    def __init__(self, resource: str, count: int) -> None:
        self.resource = resource
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._allocated: set[int] = set()

    @property
    def available(self) -> int:
        """The number of free entries."""
        return len(self._free)

    def allocate(self) -> int:
        """Allocate one number. Raises :class:`InterfaceError` if none is free."""
        if not self._free:
            raise InterfaceError(f"no {self.resource} left: all {self.count - 1} are taken")
        number = self._free.pop()
        self._allocated.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Free an allocated number. Raises :class:`InterfaceError` if it isn't allocated."""
        if number not in self._allocated:
            raise InterfaceError(f"{self.resource} {number} was given back but isn't taken")
        self._allocated.remove(number)
        self._free.append(number)


@dataclass(frozen=True, slots=True)
class PageKey:
    """The identity of a full page's contents: everything that its keys and values depend on."""

    parent: PageKey | None
    """The key of the page before; None for the first page of a sequence."""
    tokens: tuple[int, ...]
    """The tokens of this page."""
    following_tokens: tuple[int, ...]
    """The tokens after this page that the draft's cache entries depend on."""
    extra: object = None
    """The result of :data:`Extra` for this page: it distinguishes pages with equal tokens, for example other images."""

    def __hash__(self) -> int:
        # The parent counts by identity, so that hashing doesn't walk the chain of parents.
        return hash((id(self.parent), self.tokens, self.following_tokens, self.extra))

    def __eq__(self, other: object) -> bool:
        # The pool interns parents: equal parents are the same object.
        return (
            isinstance(other, PageKey)
            and self.parent is other.parent
            and self.tokens == other.tokens
            and self.following_tokens == other.following_tokens
            and self.extra == other.extra
        )


class PagePool:
    """KV pages with shared prefixes: each page is free, held by one or more requests, or cached without a holder.

    A full page is registered under its key as soon as the work that fills it is enqueued. One stream makes all accesses to
    KV pages, so the next holder of the page reads it after the writes. If no page is free, the pool reuses the least
    recently freed cached page.
    """

    def __init__(
        self, *, count: int, page_size: int, ahead: int, share: bool, checkpoints: StateCheckpoints | None = None
    ) -> None:
        """Create a pool whose pages are all free.

        ``ahead`` is the number of tokens after a page that its contents depend on (EAGLE: the draft's keys and values at
        position i depend on token i+1). ``share``: register pages, so that requests share prefixes. ``checkpoints`` are the
        checkpoints of recurrent states, without which a prefix of a hybrid model can't be continued.
        """
        self.checkpoints = checkpoints
        self.count = count
        self.page_size = page_size
        self._ahead = ahead
        self.shares_prefixes = share
        """True if pages are registered, so that requests share prefixes."""
        self._free = list(range(count - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}
        self._watcher: CacheEvents | None = None

    def watch(self, watcher: CacheEvents | None) -> None:
        """Pass the registered pages and then each change to ``watcher``, in place of the previous watcher."""
        self._watcher = watcher
        if watcher is not None and self._page_of:
            watcher.stored(list(self._page_of))

    @property
    def available(self) -> int:
        """Number of pages that can be allocated: free pages, and cached pages that no request holds."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of registered pages that no request holds."""
        return len(self._cached)

    @property
    def state_checkpoints(self) -> int:
        """Number of prefixes whose recurrent states are kept."""
        return 0 if self.checkpoints is None else self.checkpoints.held

    def allocate(self) -> int:
        """Allocate a page with undefined contents. Raises :class:`InterfaceError` if all pages are held."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key]
            if self.checkpoints is not None:
                self.checkpoints.drop(key)
            if self._watcher is not None:
                self._watcher.removed(key)
        else:
            raise InterfaceError(f"no KV page left: all {self.count - 1} are held")
        self._holders[page] = 1
        return page

    def give_back(self, pages: Iterable[int]) -> None:
        """Drop one hold on each page, the last page first, so that eviction starts at the end of a sequence.

        Raises :class:`InterfaceError` for a page that no request holds.
        """
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
        """Hold the registered pages of the longest prefix of ``tokens`` that leaves at least one token to compute.

        Returns the pages and the key of the last page. With checkpoints of states, the prefix ends at one of them.
        """
        pages: list[int] = []
        key: PageKey | None = None
        restorable, restorable_key = 0, key
        while (len(pages) + 1) * self.page_size < len(tokens):
            candidate = self._key(key, tokens, len(pages), extra)
            page = self._page_of.get(candidate) if candidate is not None else None
            if page is None:
                break
            key = self._key_of[page]
            self._cached.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
            pages.append(page)
            if self.checkpoints is not None and self.checkpoints.has(key):
                restorable, restorable_key = len(pages), key
        if self.checkpoints is not None:
            self.give_back(pages[restorable:])
            pages, key = pages[:restorable], restorable_key
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
        """Register the full pages among the first ``filled`` of ``tokens``, whose contents are written or enqueued.

        The first ``done`` pages are already registered, the last one under ``key``. Returns the new key and count. If
        another page is registered under an equal key, requests continue to hit that page.
        """
        new_keys: list[PageKey] = []
        while self.shares_prefixes and (done + 1) * self.page_size <= filled:
            candidate = self._key(key, tokens, done, extra)
            if candidate is None:
                break
            registered = self._page_of.get(candidate)
            if registered is None:
                self._page_of[candidate] = pages[done]
                self._key_of[pages[done]] = candidate
                new_keys.append(candidate)
                key = candidate
            else:
                key = self._key_of[registered]
            done += 1
        if new_keys and self._watcher is not None:
            self._watcher.stored(new_keys)
        return key, done

    def unregister_all(self) -> None:
        """Unregister every page, for example after a fault that may have corrupted contents."""
        if self._key_of and self._watcher is not None:
            self._watcher.cleared()
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self._key_of.clear()
        self._page_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _key(self, parent: PageKey | None, tokens: Sequence[int], index: int, extra: Extra | None) -> PageKey | None:
        start, end = index * self.page_size, (index + 1) * self.page_size
        if end + self._ahead > len(tokens):
            return None
        ahead = tuple(tokens[end : end + self._ahead])
        return PageKey(parent, tuple(tokens[start:end]), ahead, None if extra is None else extra(start, end + self._ahead))


@dataclass(slots=True)
class DecodedState:
    """The copies of one decoding request's recurrent state: its newest published checkpoint, and one that may become the
    next.

    An iteration decides on the device how many tokens it accepts. The host therefore enqueues a copy where the request's
    length may be a multiple of the interval. It publishes the copy if the results confirm that length.
    """

    row: int = 0
    """The row that the next copy goes to; 0 if the request has none."""
    length: int = 0
    """The length in tokens at which the last copy becomes a checkpoint; 0 without an undecided copy."""
    awaited: int = 0
    """Number of iteration results that the host must still read to know the length at which the copy was made."""
    is_exact: bool = False
    """True if the copy has the expected length. It is published once the pages before it are registered."""
    key: PageKey | None = None
    """The key of the last page before the newest checkpoint; None without one."""
    has_evicted: bool = False
    """True if this request took the row of another prefix's checkpoint. Each request may do so once."""


class StateCheckpoints:
    """The rows of recurrent states that no request holds, and the prefixes whose states they hold.

    A recurrent state can't be cut to a shorter prefix, so a prefix hits only where a checkpoint was taken: at a multiple of
    ``interval`` tokens at which a prompt chunk or a decode iteration ended. All copies are on one stream, in the order in
    which the scheduler decides them, so a row may be given to another prefix while a copy from it is enqueued.
    """

    def __init__(self, *, first_row: int, count: int, interval: int) -> None:
        """Create ``count`` free rows, of which ``first_row`` is the first. ``interval`` is a multiple of the page size."""
        self.interval = interval
        self.count = count
        self._free = list(range(first_row + count - 1, first_row - 1, -1))
        self._row_of: OrderedDict[PageKey, int] = OrderedDict()

    @property
    def held(self) -> int:
        """Number of prefixes with a checkpoint."""
        return len(self._row_of)

    def row_of(self, key: PageKey) -> int | None:
        """Return the row of the state after the page ``key``, or None without a checkpoint there. The checkpoint counts as
        most recently used.
        """
        row = self._row_of.get(key)
        if row is not None:
            self._row_of.move_to_end(key)
        return row

    def has(self, key: PageKey) -> bool:
        """Return True if there is a checkpoint after the page ``key``."""
        return key in self._row_of

    def allocate_row(self, key: PageKey) -> int | None:
        """Return the row for a new checkpoint after the page ``key``: a free one, or that of the least recently used prefix.

        Returns None if there are no rows, or if the prefix has a checkpoint.
        """
        if not self.count or key in self._row_of:
            return None
        row = self._row_of[key] = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
        return row

    def provide_row(self, decoded: DecodedState) -> bool:
        """Give a decoding request a row for the next copy of its state, if it has none. Return False if no row is available.

        Unpublished copies hold at most half of the rows, so that prompts find one.
        """
        num_copies = self.count - len(self._free) - len(self._row_of)
        if decoded.row or num_copies >= self.count // 2:
            return decoded.row > 0
        if self._free:
            decoded.row = self._free.pop()
        elif not decoded.has_evicted:
            decoded.row, decoded.has_evicted = self._row_of.popitem(last=False)[1], True
        return decoded.row > 0

    def publish(self, decoded: DecodedState, key: PageKey) -> None:
        """Make the copy of a decoding request the checkpoint after the page ``key``, in place of the request's last one."""
        decoded.length, decoded.is_exact = 0, False
        if key in self._row_of:
            return
        self._row_of[key] = decoded.row
        decoded.row = 0 if decoded.key is None else self._row_of.pop(decoded.key, 0)
        decoded.key = key

    def release(self, decoded: DecodedState) -> None:
        """Free the row of a request that ends. Its checkpoint stays."""
        if decoded.row:
            self._free.append(decoded.row)

    def drop(self, key: PageKey) -> None:
        """Free the row of a prefix whose last page is no longer cached, if it has one."""
        row = self._row_of.pop(key, None)
        if row is not None:
            self._free.append(row)

    def clear(self) -> None:
        """Drop every checkpoint, for example after a fault that may have corrupted states."""
        self._free.extend(self._row_of.values())
        self._row_of.clear()

    def chunk_end(self, start: int, end: int, length: int) -> int:
        """Return the end of the next prefill chunk of a prompt of ``length`` tokens, which may span ``start`` to ``end``.

        The chunk ends at the last multiple of the interval inside, if at least one prompt token follows: kernels continue
        from there with the same bits. A chunk without such a multiple keeps its end.
        """
        if end == length and not self.count:
            return end
        last = (end - (end == length)) // self.interval * self.interval
        return last if last > start else end


@dataclass(frozen=True, slots=True)
class BlockStored:
    """An event: consecutive full pages are registered, so that requests can hit them from now on."""

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
    """An event: the prefix cache is empty, for example after a device fault."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEvents:
    """The sender of all changes of a :class:`PagePool`'s registered pages, in order: it passes each to ``handle`` as an
    event, on the thread that makes the change.

    Several pages can have the same tokens and differ in the draft's cache, which depends on the token after the page. Such
    pages share one hash: the first of them sends :class:`BlockStored`, the last one :class:`BlockRemoved`.
    """

    def __init__(self, handle: Callable[[CacheEvent], None]) -> None:
        self._handle = handle
        self._hashes: dict[PageKey, int] = {}
        self._page_counts: Counter[int] = Counter()

    def stored(self, keys: Sequence[PageKey]) -> None:
        """Send one :class:`BlockStored` for each series of consecutive pages whose hashes are new."""
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
