"""Faults of memory: pinned buffers, copies, figures, what a tool is told, and lifetime."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.mutants.catalogue import Mutant, patch, patched

THREADS, SIM = "threads", "sim"


def mutants() -> Iterator[Mutant]:
    for verb, fault, level, apply in (
        ("Backend._empty_pinned", "has another dtype", 1, _pinned_dtype),
        ("Backend._empty_pinned", "isn't contiguous", 1, _pinned_strided),
        ("Backend._copy_async", "copies the neighbours of a slice too", 1, _copy_neighbours),
        ("Backend.memory_info", "is negative", 1, _negative_memory),
    ):
        yield Mutant(verb, fault, THREADS, level, apply)
    for verb, fault, level, apply in (
        ("Backend._empty_pinned", "is pageable", 1, _pageable),
        ("Backend._is_pinned", "is True for all memory", 1, lambda base: patch(base.backend, "_is_pinned", _true)),
        ("Backend._is_pinned", "is False for all memory", 1, lambda base: patch(base.backend, "_is_pinned", _false)),
        ("Backend._is_pinned", "doesn't know slices", 1, _forgets_slices),
        ("Backend.memory_info", "doesn't follow allocations", 1, _frozen_memory),
        ("Backend.locate", "is one byte off", 1, _locate_off),
        ("Observer.launched", "isn't told of writes", 1, _writes_untold),
        ("Observer.rows_touched", "is told of one row more", 1, _rows_wrong),
    ):
        yield Mutant(verb, fault, SIM, level, apply)
    for base in (THREADS, SIM):
        yield Mutant("Backend.release_finished", "drops nothing", base, 1, _release_none)
        yield Mutant("Backend.release_finished", "waits for the events", base, 1, _release_waits)


def _pinned_dtype(base):
    import torch

    patch(base.backend, "_empty_pinned", lambda original: lambda self, shape, dtype: original(self, shape, torch.float64))


def _pinned_strided(base):
    patch(
        base.backend, "_empty_pinned", lambda original: lambda self, shape, dtype: original(self, (*shape, 2), dtype)[..., 0]
    )


def _copy(base, change):
    def make(original):
        return lambda self, destination, source: change(self, original, destination, source)

    patch(base.backend, "_copy_async", make)


def _copy_neighbours(base):
    def change(self, original, destination, source):
        if destination._base is not None and source._base is not None and destination._base.shape == source._base.shape:
            return original(self, destination._base, source._base)
        return original(self, destination, source)

    _copy(base, change)


def _negative_memory(base):
    from outrider.device import MemoryInfo

    base.backend.memory_info = lambda self: MemoryInfo(total=0, free=0, allocated=-1)


def _pageable(base):
    import torch

    base.backend._empty_pinned = lambda self, shape, dtype: torch.empty(shape, dtype=dtype)


def _true(original):
    return lambda self, tensor: True


def _false(original):
    return lambda self, tensor: False


def _forgets_slices(base):
    patch(base.backend, "_is_pinned", lambda original: lambda self, t: original(self, t) and t.storage_offset() == 0)


def _frozen_memory(base):
    from dataclasses import replace

    patch(base.backend, "memory_info", lambda original: lambda self: replace(original(self), allocated=0))


def _locate_off(base):
    from dataclasses import replace

    @patched(base.backend, "locate")
    def locate(original, self, tensor):
        place = original(self, tensor)
        return replace(place, start=place.start + 1)


def _attached(base, change):
    """The observer that is attached is a changed one."""

    @patched(base.backend, "attach")
    def attach(original, self, observer):
        change(observer)
        original(self, observer)


def _writes_untold(base):
    from dataclasses import replace

    def change(observer):
        told = observer.launched
        observer.launched = lambda o: told(replace(o, accesses=tuple(a for a in o.accesses if not a.write)))

    _attached(base, change)


def _rows_wrong(base):
    from dataclasses import replace

    def change(observer):
        told = observer.rows_touched
        observer.rows_touched = lambda o, rows: told(o, tuple(replace(a, end=a.end + (a.end - a.start)) for a in rows))

    _attached(base, change)


# -- lifetime -------------------------------------------------------------------------------------------------------------


def _keeper():
    from outrider.device.memory import KeepAlive

    return KeepAlive


def _release_none(base):
    _keeper().release_finished = lambda self: len(self._held)


def _release_waits(base):
    def make(original):
        return lambda self: ([event.synchronize() for event, _ in self._held], original(self))[1]

    patch(_keeper(), "release_finished", make)
