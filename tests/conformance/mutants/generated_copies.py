"""Faults of copies, and of memory that is used again too early."""

from __future__ import annotations

import weakref

from conformance.mutants.catalogue import other, patch, patched
from conformance.mutants.generated import reach

# -- copies ------------------------------------------------------------------------------------------------------------


def copy(change):
    def apply(base):
        def make(original):
            return lambda self, destination, source: change(self, original, destination, source)

        patch(base.backend, "_copy_async", make)

    return apply


def up_to(size):
    def change(self, original, destination, source):
        count = size // destination.element_size()
        if destination.numel() <= count:
            return original(self, destination, source)
        reach()
        return original(self, destination.flatten()[:count], source.flatten()[:count])

    return change


def beyond_blocks(self, original, destination, source):
    """A tail behind a multiple of 256 bytes is left out."""
    count = destination.numel() // (256 // destination.element_size()) * (256 // destination.element_size())
    if not 0 < count < destination.numel():
        return original(self, destination, source)
    reach()
    return original(self, destination.flatten()[:count], source.flatten()[:count])


def aligned(which):
    def change(self, original, destination, source):
        def lower(tensor):
            step = 16 // tensor.element_size()
            if tensor.storage_offset() % step == 0 or not tensor.is_contiguous():
                return tensor
            reach()
            return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() // step * step)

        if which == "source":
            return original(self, destination, lower(source))
        return original(self, lower(destination), source)

    return change


def flat(which):
    def change(self, original, destination, source):
        def straight(tensor):
            if tensor.is_contiguous():
                return tensor
            reach()
            strides, step = [], 1
            for size in reversed(tensor.shape):
                strides.insert(0, step)
                step *= size
            return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())

        if which == "source":
            return original(self, destination, straight(source))
        return original(self, straight(destination), source)

    return change


def through(dtypes, wide):
    """Values instead of bits: what has no value, or more digits than the other dtype, changes."""

    def change(self, original, destination, source):
        import torch

        if str(destination.dtype)[6:] not in dtypes:
            return original(self, destination, source)
        reach()
        return destination.copy_(source.to(getattr(torch, wide)))

    return change


def quiet(self, original, destination, source):
    """NaN loses its payload, and minus zero its sign."""
    import torch

    if not destination.is_floating_point():
        return original(self, destination, source)
    reach()
    return destination.copy_(torch.where(source == source, source + 0.0, torch.nan).to(source.dtype))


def halves(self, original, destination, source):
    """The second half of what is large goes to another stream."""
    if destination.numel() < 64 or destination.dim() != 1:
        return original(self, destination, source)
    reach()
    half = destination.numel() // 2
    original(self, destination[:half], source[:half])
    with self._on(other(self._thread.stream)):
        return original(self, destination[half:], source[half:])


def nothing_blocks(self, original, destination, source):
    """A copy of nothing waits for the stream."""
    if destination.numel() == 0 and self.active_capture is None:
        reach()
        self._thread.stream._synchronize()
    return original(self, destination, source)


def nothing_fails(self, original, destination, source):
    if destination.numel() == 0:
        reach()
        raise RuntimeError("invalid argument: size is 0")
    return original(self, destination, source)


def large_blocks(self, original, destination, source):
    """What is larger than 64 KiB goes through memory that isn't pinned: the host waits."""
    original(self, destination, source)
    if destination.numel() * destination.element_size() > 1 << 16 and self.active_capture is None:
        reach()
        self._thread.stream._synchronize()


def at_once_when_small(self, original, destination, source):
    """Up to 64 bytes travel with the command: read at the call."""
    import torch

    if destination.numel() * destination.element_size() > 64:
        return original(self, destination, source)
    with torch.utils._python_dispatch._disable_current_modes():
        reach()
        kept = source.clone()
    return original(self, destination, kept)


def overtakes(self, original, destination, source):
    """On an engine of its own, which nobody orders behind the stream's kernels."""
    if self.active_capture is not None:
        return original(self, destination, source)
    reach()
    stream = self._thread.stream
    before, stream.worker = stream.worker, self.__dict__.setdefault("engine", engine(stream))
    try:
        original(self, destination, source)
        mark = stream.worker.mark()
    finally:
        stream.worker = before
    stream.worker.put(mark.wait)
    return None


def engine(stream):
    from outrider_threads.worker import Failures

    return type(stream.worker)("copies", Failures())


COPIES = {
    "copies 4 KiB and no more": up_to(1 << 12),
    "copies 64 KiB and no more": up_to(1 << 16),
    "copies a MiB and no more": up_to(1 << 20),
    "leaves out what is behind a multiple of 256 bytes": beyond_blocks,
    "rounds the source's address down to 16 bytes": aligned("source"),
    "rounds the destination's address down to 16 bytes": aligned("destination"),
    "takes a strided source for contiguous": flat("source"),
    "takes a strided destination for contiguous": flat("destination"),
    "copies int64 by way of float64": through(("int64",), "float64"),
    "copies int32 by way of float32": through(("int32",), "float32"),
    "copies bytes by way of truth values": through(("uint8", "int8"), "bool"),
    "copies half dtypes by way of each other": through(("bfloat16",), "float16"),
    "copies float64 by way of float32": through(("float64",), "float32"),
    "changes the bits of NaN": quiet,
    "sends the second half to another stream": halves,
    "blocks the host for 0 bytes": nothing_blocks,
    "refuses 0 bytes": nothing_fails,
    "blocks the host for more than 64 KiB": large_blocks,
    "reads up to 64 bytes at the call": at_once_when_small,
    "overtakes the stream's kernels": overtakes,
}


# -- memory ------------------------------------------------------------------------------------------------------------


def reused(*, across):
    """Memory of results goes to a pool when their last name goes, whatever is still in flight."""

    def apply(base):
        from outrider_threads import queueing

        pool: dict = {}

        def give_back(key, raw):
            pool.setdefault(key, []).append(raw)

        def make(original):
            def allocated(value):
                import torch

                made = original(value)
                if not isinstance(made, torch.Tensor) or made.numel() == 0 or not made.is_contiguous():
                    return made
                key = (made.numel(), made.dtype, across)
                raw = pool[key].pop() if pool.get(key) else torch.empty(made.numel(), dtype=made.dtype)
                outer = torch.empty(0, dtype=made.dtype)
                outer.set_(raw.untyped_storage(), 0, made.shape, made.stride())
                weakref.finalize(outer, give_back, key, raw)
                reach()
                return outer

            return allocated

        queueing._allocated = make(queueing._allocated)

        @patched(queueing.Queueing, "__torch_dispatch__")
        def called(original, self, func, types, args=(), kwargs=None):
            return original(self, func, types, aliases(args), aliases(kwargs or {}))

    return apply


def aliases(tree):
    """Tensors of tasks are others than the program's: they keep the bytes alive, and not the claim to them."""
    import torch
    from torch.utils._pytree import tree_map

    def alias(value):
        if type(value) is torch.Tensor and value.numel():
            return torch.empty(0, dtype=value.dtype).set_(
                value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
            )
        return value

    return tree_map(alias, tree)


def keeper():
    from outrider.device.memory import KeepAlive

    return KeepAlive


def holds_first(base):
    patch(keeper(), "hold", lambda original: lambda self, objects, until: (reach(), original(self, objects[:1], until))[1])


def drops_all(base):
    @patched(keeper(), "release_finished")
    def release(original, self):
        before = len(self._held)
        left = original(self)
        if 0 < left < before:
            reach()
            self._held.clear()
            return 0
        return left


def returns_dropped(base):
    @patched(keeper(), "release_finished")
    def release(original, self):
        before = len(self._held)
        reach()
        return before - original(self)


def info_swapped(base):
    from dataclasses import replace

    @patched(base.backend, "memory_info")
    def info(original, self):
        found = original(self)
        reach()
        return replace(found, allocated=found.free, free=found.allocated)
