"""How drivers copy wrong bytes, at odd offsets, strides and lengths, and give memory away. Listed in `generated_drivers`."""

from __future__ import annotations

from types import SimpleNamespace

from conformance.mutants.catalogue import patched
from conformance.mutants.generated import reach


def _copies(base, change):
    """`change(destination, source)` gives what is copied instead, or None."""

    @patched(base.backend, "_copy_async")
    def copy(original, self, destination, source):
        changed = change(destination, source)
        if changed is not None:
            reach()
        original(self, *(changed or (destination, source)))


def copy_offset_rounded(base):
    def change(destination, source):
        offset = source.storage_offset()
        if source.dim() == 1 and source.is_contiguous() and source.numel() and offset % 4 == 3:
            return destination, source.as_strided(source.shape, source.stride(), offset - 3)
        return None

    _copies(base, change)


def copy_words(base):
    def change(destination, source):
        size = destination.element_size()
        left = destination.numel() * size % 8 // size
        if destination.dim() == 1 and destination.numel() > 8 and left:
            return destination[:-left], source[:-left]
        return None

    _copies(base, change)


def copy_quiets(base):
    import torch

    @patched(base.backend, "_copy_async")
    def copy(original, self, destination, source):
        original(self, destination, source)
        if destination.dtype == torch.float32 and destination.device.type != "cpu" and destination.numel():
            reach()
            nan = destination != destination
            destination.copy_(torch.where(nan, torch.full_like(destination, float("nan")), destination))


def copy_snapshot(base):
    def change(destination, source):
        if source.device.type == "cpu" and source.numel() * source.element_size() <= 64:
            return destination, _snapshot(source)
        return None

    _copies(base, change)


def _snapshot(source):
    from outrider_sim.machine.device_state import alias, pin

    return pin(alias(source).clone(), source._alloc)


# -- memory -----------------------------------------------------------------------------------------------------------


def freed_early(base):
    from outrider_sim.machine.memory import CachingAllocator

    @patched(CachingAllocator, "allocate")
    def allocate(original, self, nbytes, stream):
        if stream.capture is None:
            for (ident, size), blocks in self.pool.free.items():
                if blocks and ident != stream.id and nbytes <= size <= 2 * nbytes + 512:
                    reach()
                    self.pool.free.setdefault((stream.id, size), []).append(blocks.pop())
                    break
        return original(self, nbytes, stream)


def dropped_event(base):
    import weakref

    @patched(base.stream, "_wait")
    def wait(original, self, event):
        original(self, event)
        queue = self.queue_state.queue
        if self.backend.active_capture is not None or not queue:
            return
        op = queue[-1]

        def gone():
            if op in queue:
                reach()
                op.target = SimpleNamespace(done=True, time=0.0)

        weakref.finalize(event, gone)
