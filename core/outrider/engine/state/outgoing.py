"""Outgoing: copies of a device buffer to the host through a device ring and a pinned ring."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import Backend, PinnedBuffer, Stream


class Outgoing:
    """Copies of ``source`` for the host, one for each iteration in flight.

    A copy within the device lets the next iteration overwrite ``source`` during the copy to pinned memory. A ring entry is
    free once the host has read the results of its iteration.
    """

    def __init__(self, backend: Backend, name: str, source: Tensor, *, entries: int) -> None:
        """Allocate the device ring, on the current stream, and the pinned ring.

        ``name`` is the prefix of the pinned buffers' names in errors. ``entries`` is the size of both rings.
        """
        self._backend = backend
        self._source = source
        self._device_ring = [torch.empty_like(source) for _ in range(entries)]
        self._pinned_ring: list[PinnedBuffer] = [
            backend.empty_pinned(f"{name}[{entry}]", source.shape, source.dtype) for entry in range(entries)
        ]

    def copy_on_device(self, entry: int) -> None:
        """Copy the source to device ring entry ``entry``, on the current stream (forward)."""
        self._device_ring[entry].copy_(self._source)

    def copy_out(self, entry: int, stream: Stream) -> int:
        """Copy device ring entry ``entry`` to pinned memory on ``stream``, and return the pinned entry's generation.

        The caller orders ``stream`` after the copy within the device.
        """
        buffer = self._pinned_ring[entry]
        generation = buffer.renew()
        self._backend.copy_async(buffer.tensor, self._device_ring[entry], stream=stream)
        return generation

    def read_entry(self, entry: int, generation: int) -> Tensor:
        """Return generation ``generation`` of a pinned entry, after the fence of its copy."""
        return self._pinned_ring[entry].read_generation(generation)
