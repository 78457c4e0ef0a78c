"""Storages of torch's tensors: their identity, and the position of a tensor in its storage."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from outrider.device import Access
from outrider_sanitizer.detector.synchronization import HOST

if TYPE_CHECKING:
    from outrider.device import Backend


@dataclass(eq=False, slots=True)
class KnownStorage:
    """A storage that was seen. ``base`` is its offset, in bytes, in the memory that its number identifies."""

    number: int
    weak: StorageWeakRef
    device: bool
    pinned: bool
    home: str
    base: int = 0
    mapped: bool = False
    """True for pinned memory of another storage, as the device sees it."""


class Storages:
    """The numbers by which the sanitizer identifies storages; a number is never used twice."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._type = backend.device.type
        self._known: dict[int, KnownStorage] = {}
        self._suspects: list[int] = []
        self._count = 0
        self._pinned: list[tuple[int, int, KnownStorage]] = []
        """Pinned memory in the order of addresses: first address, end address, storage."""

    def known(self, tensor: Tensor) -> tuple[KnownStorage, bool] | None:
        """Return the storage of a tensor and True if it is new; None for host memory that the device cannot reach."""
        kind = tensor.device.type
        device = kind == self._type
        if not device and kind != "cpu":
            return None  # another device's
        storage = tensor.untyped_storage()
        # The weak reference keeps the storage's header, so this number isn't given to another while we know it.
        key = _key(storage)
        known = self._known.get(key)
        if known is not None and not known.weak.expired():
            return (known, False) if known.device or known.pinned else None
        if device and self._pinned and not isinstance(tensor, FakeTensor):  # which has no bytes: a compiler traces with it
            host = self._mapped(storage)
            if host is not None:
                self._known[key] = host
                return host, False
        pinned = not device and self._backend.is_pinned(tensor)
        self._count += 1
        known = KnownStorage(self._count, StorageWeakRef(storage), device, pinned, "")
        self._known[key] = known
        if pinned:
            address = storage.data_ptr()
            insort(self._pinned, (address, address + storage.nbytes(), known), key=itemgetter(0))
        return (known, True) if device or pinned else None

    def _mapped(self, storage: torch.UntypedStorage) -> KnownStorage | None:
        """Return the pinned memory that a device storage maps, found by its address, or None."""
        address = storage.data_ptr()
        at = bisect_right(self._pinned, address, key=itemgetter(0)) - 1
        if at < 0:
            return None
        first, end, host = self._pinned[at]
        if address >= end or host.weak.expired():
            return None
        known_storage = KnownStorage(host.number, StorageWeakRef(storage), True, True, HOST)
        known_storage.base, known_storage.mapped = address - first, True
        return known_storage

    def key(self, tensor: Tensor) -> int:
        """Return the key of the tensor's storage, which is unique while the storage lives."""
        return _key(tensor.untyped_storage())

    def note(self, tensor: Tensor) -> None:
        """Watch for the end of the tensor object, after which :meth:`gone` checks whether its storage was freed too."""
        key = _key(tensor.untyped_storage())
        weak = ref(tensor, partial(self._note_freed, key))
        # The reference must live as long as the tensor, and the tensor's own dictionary does.
        tensor.__dict__.setdefault("_outrider_refs", []).append(weak)

    def _note_freed(self, key: int, _: object) -> None:
        self._suspects.append(key)

    def gone(self) -> list[KnownStorage]:
        """Return the storages that were freed since the last call."""
        found = []
        while self._suspects:
            key = self._suspects.pop()
            known = self._known.get(key)
            if known is not None and known.weak.expired():
                del self._known[key]
                if known.mapped:
                    continue  # the memory is the other storage's
                found.append(known)
                if known.pinned:
                    self._pinned = [each for each in self._pinned if each[2] is not known]
        return found


def _key(storage: Any) -> int:
    """Return a key that no other living storage has; storages of simulated devices are not torch's own."""
    key: int = getattr(storage, "_cdata", id(storage))
    return key


def extent(tensor: Tensor, known: KnownStorage, write: bool, argument: str, born: int, by_rows: bool = False) -> Access:
    """Return the access of a tensor to the memory of ``known``; see :meth:`Access.of_tensor`."""
    return Access.of_tensor(tensor, known.number, write, argument, by_rows, born, known.base)
