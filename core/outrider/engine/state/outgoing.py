"""How a device buffer leaves for the host: a ring on the device, and a pinned one."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import Backend, PinnedBuffer, Stream


class Outgoing:
    """Copies of ``source``, of an iteration each: *kept* within the device, so that the next iteration writes its own
    meanwhile, and copied to pinned memory from there.

    ``entries``: of both rings. One is filled again only after the host has read the results of the iteration that it was
    filled for. ``name``: of the pinned buffers, for errors. Made in a scope, where the copies on the device are allocated.
    """

    def __init__(self, backend: Backend, name: str, source: Tensor, *, entries: int) -> None:
        self._backend = backend
        self._source = source
        self._kept = [torch.empty_like(source) for _ in range(entries)]
        self._pinned: list[PinnedBuffer] = [
            backend.empty_pinned(f"{name}[{entry}]", source.shape, source.dtype) for entry in range(entries)
        ]

    def keep(self, entry: int) -> None:
        """Copy the source within the device; on forward, in the caller's scope."""
        self._kept[entry].copy_(self._source)

    def copy_out(self, entry: int, stream: Stream) -> int:
        """Copy what was kept to pinned memory on ``stream``, which the caller has ordered behind it; returns the entry's
        generation.
        """
        buffer = self._pinned[entry]
        generation = buffer.renew()
        self._backend.copy_async(buffer.tensor, self._kept[entry], stream=stream)
        return generation

    def read(self, entry: int, generation: int) -> Tensor:
        """Host, behind the copy's fence: that generation of the entry."""
        return self._pinned[entry].read(generation)
