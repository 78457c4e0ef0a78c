"""L1: memory belongs to its tensor until the last use has completed, and is reused only after its release.

Resources are reused rightly however many there are, and whatever their names and sizes are.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from outrider.device import Backend, OutOfDeviceMemory
from outrider_conformance.lab import Lab, expect, in_every_order
from outrider_conformance.promises import needs, promise

_MIB = 1 << 20


@promise("MemoryInfo", "``total`` and ``free`` are 0 where the backend doesn't declare ``memory_limit``.")
def test_memory_figures_are_numbers_of_bytes(backend: Backend) -> None:
    """Memory figures are whole numbers, and free and allocated bytes do not exceed the total."""
    info = backend.memory_info()
    assert all(isinstance(value, int) and value >= 0 for value in (info.total, info.free, info.allocated)), info
    if backend.capabilities.memory_limit:
        assert 0 < info.free <= info.total, info
        assert info.allocated + info.free <= info.total, info


@needs("host_writes_memory")
@promise("Capabilities.host_writes_memory", "Host and device share memory:")
def test_the_host_writes_device_memory(lab: Lab) -> None:
    """The device reads bytes that the host wrote directly, and the host reads bytes that the device wrote."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    x, y = lab.full(stream, 0), lab.full(stream, 0)
    x.view(torch.uint8).numpy()[:] = 0x3F
    lab.copy(stream, y, x)
    backend.synchronize()
    expect(bytes(y.view(torch.uint8).numpy()), b"\x3f" * y.nbytes, "what the device copied of bytes that the host wrote")


@needs("memory_limit")
@promise("Capabilities.memory_limit")
def test_memory_figures_follow_allocations(lab: Lab) -> None:
    """The figure of allocated bytes rises and falls with an allocation of 16 MiB."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    before = backend.memory_info().allocated
    with backend.on(stream):
        tensor = torch.zeros(16 * _MIB, dtype=torch.uint8, device=backend.device)
    stream.synchronize()
    test_memory_figures_are_numbers_of_bytes(backend)
    during = backend.memory_info().allocated
    assert during - before >= 16 * _MIB, f"16 MiB were allocated and the figure rose by {during - before}"
    del tensor
    gc.collect()
    backend.synchronize()
    after = backend.memory_info().allocated
    assert after <= during - 16 * _MIB, f"16 MiB were given back and the figure fell by {during - after}"


@needs("memory_limit")
@promise("OutOfDeviceMemory", "An allocation didn't fit. The device still works; queued work isn't affected.")
def test_out_of_memory_is_typed_and_survived(lab: Lab) -> None:
    """An allocation of twice the total memory raises a typed error, and work before and after it runs."""
    backend = lab.backend
    stream, x = lab.one_stream()
    lab.fill_late(stream, x, 1)
    before = backend.memory_info().allocated
    with pytest.raises(OutOfDeviceMemory) as caught, backend.guard("asking for too much"), backend.on(stream):
        torch.empty(2 * backend.memory_info().total, dtype=torch.uint8, device=backend.device)
    assert not caught.value.device_lost, "running out of memory is no loss of the device"
    expect(lab.read_tensor(stream, x), 1.0, "what was queued before")
    lab.fill(stream, x, 2)
    expect(lab.read_tensor(stream, x), 2.0, "what was enqueued after")
    expect(backend.memory_info().allocated, before, "allocated bytes after an allocation that failed")
    expect(lab.read_tensor(stream, lab.full(stream, 3, width=_MIB)), 3.0, "an allocation of 4 MiB after one that failed")


@promise("Backend.keep_alive")
@in_every_order()
def test_what_is_kept_alive_lives_until_the_event(lab: Lab) -> None:
    """A held object lives while its event is pending, and is dropped once the event has completed."""
    backend = lab.backend
    a, x = lab.one_stream()
    thing = {1}  # a weak reference to a set tells whether it lives
    alive = weakref.ref(thing)
    lab.fill_late(a, x, 1)
    event = lab.record(a)
    backend.keep_alive([thing], until=event)
    del thing
    if backend.release_finished() == 0:
        assert event.query(), "a hold was dropped before its event had completed"
    else:
        assert alive() is not None, "a hold is counted but its object is gone"
    event.synchronize()
    expect(backend.release_finished(), 0, "holds that remain after their event")
    assert alive() is None, "the object is still held though its event has completed"


@promise("Backend.release_finished")
@in_every_order()
def test_each_hold_has_its_own_event(lab: Lab) -> None:
    """Each of two holds is dropped with its own event: one event has completed while the other is pending."""
    backend = lab.backend
    done, busy = lab.streams("done", "busy")
    x = lab.full(busy, 0)
    early, late = [{n} for n in range(3)], [{n} for n in range(3)]
    watched = [[weakref.ref(thing) for thing in things] for things in (early, late)]
    over = lab.record(done, "over")
    lab.fill_late(busy, x, 1)
    pending = lab.record(busy, "pending")
    backend.keep_alive(early, until=over)
    backend.keep_alive(late, until=pending)
    early.clear()
    late.clear()
    over.synchronize()
    remaining = backend.release_finished()
    assert not any(ref() is not None for ref in watched[0]), "an object is still held though its event has completed"
    if remaining == 0:
        assert pending.query(), "a hold was dropped, or isn't counted, before its event had completed"
    else:
        expect(remaining, 1, "holds that remain while one event is pending")
        assert all(ref() is not None for ref in watched[1]), "an object was dropped before its event had completed"
    pending.synchronize()
    expect(backend.release_finished(), 0, "holds that remain after their events")


_LIVE = 200
"""Number of tensors that live at one time. Pools of drivers hold 16, 32, 64 or 128 of one size."""
_STEPS = 600
_SIZES = (1, 7, 64, 65, 512, 1024, 1025, 4096, 4097)
_DTYPES = (torch.uint8, torch.int32, torch.float32, torch.int64)
_VALUES = 113
"""Number of different contents; a prime, so that buffers whose numbers differ by a power of two differ in contents."""


@dataclass
class ReuseModel:
    """Tensors that a test allocates and drops at random. Each live tensor must hold the number that it was filled with."""

    allocate: Callable[[int, torch.dtype], Tensor]
    """Return a tensor with this many elements of this dtype."""
    fill: Callable[[Tensor, int], object]
    read: Callable[[Tensor], object]
    seed: int
    live: dict[int, Tensor] = field(default_factory=dict)
    made: int = 0

    def add_tensor(self, size: int, dtype: torch.dtype) -> None:
        """Allocate a tensor, and fill it with its number."""
        self.live[self.made] = tensor = self.allocate(size, dtype)
        self.fill(tensor, self.made % _VALUES)
        self.made += 1

    def check_tensors(self, what: str) -> None:
        """Fail if a live tensor holds another number than its own."""
        for number, tensor in self.live.items():
            expect(self.read(tensor), number % _VALUES, f"tensor {number} of {self.made}, {len(self.live)} live, {what}")

    def check_one_size(self) -> None:
        """Check many tensors of one size, then those that remain after every third one is dropped and made again."""
        for _ in range(_LIVE):
            self.add_tensor(64, torch.float32)
        self.check_tensors("all of one size")
        for number in list(self.live)[::3]:
            del self.live[number]
        for _ in range(_LIVE // 3):
            self.add_tensor(64, torch.float32)
        self.check_tensors("after every third one was dropped and made again")
        self.live.clear()

    def check_many_sizes(self) -> None:
        """Check tensors of boundary sizes that are allocated and dropped at random."""
        draw = random.Random(self.seed)
        for step in range(_STEPS):
            if len(self.live) > draw.randrange(_LIVE):
                del self.live[draw.choice(list(self.live))]
            else:
                self.add_tensor(draw.choice(_SIZES), draw.choice(_DTYPES))
            if step % 50 == 49:
                self.check_tensors("of many sizes")


@promise("Backend.empty_pinned", "No two live buffers share memory")
@pytest.mark.parametrize("sizes", ["one size", "many sizes"])
def test_pinned_buffers_are_reused_after_they_are_dropped(lab: Lab, sizes: str) -> None:
    """Hundreds of pinned buffers keep their contents while others are dropped. Only views of each buffer are left."""
    backend = lab.backend

    def number_in(tensor: Tensor) -> object:
        return int(tensor[0]) if bool((tensor == tensor[0]).all()) else "several numbers"

    model = ReuseModel(
        lambda size, dtype: backend.empty_pinned("same", (size,), dtype).tensor.detach(), Tensor.fill_, number_in, lab.seed
    )
    model.check_one_size() if sizes == "one size" else model.check_many_sizes()


@promise("Stream", "Work on one stream runs in order.")
@pytest.mark.parametrize("sizes", ["one size", "many sizes"])
def test_device_memory_is_reused_after_it_is_dropped(lab: Lab, sizes: str) -> None:
    """Hundreds of device tensors keep their contents while others are dropped and allocated."""
    (stream,) = lab.streams("s")

    def allocate(size: int, dtype: torch.dtype) -> Tensor:
        with lab.backend.on(stream):
            return torch.empty(size, dtype=dtype, device=lab.backend.device)

    def fill(tensor: Tensor, value: int) -> None:
        lab.fill(stream, tensor, value)

    def number_in(tensor: Tensor) -> object:
        with lab.backend.on(stream):
            equal = (tensor == tensor[0]).all()
        stream.synchronize()
        return int(tensor[:1].cpu()) if bool(equal.cpu()) else "several numbers"

    model = ReuseModel(allocate, fill, number_in, lab.seed)
    model.check_one_size() if sizes == "one size" else model.check_many_sizes()


@promise("Backend.empty_pinned", "No two live buffers share memory")
@in_every_order(schedules=4)
def test_copies_of_many_buffers_are_pending_at_once(lab: Lab) -> None:
    """Each of a hundred pinned buffers receives its own pending copy, and a hundred that were made in the scope of a busy
    stream are sources of one each.
    """
    backend = lab.backend
    stream, x = lab.one_stream()
    buffers = [backend.empty_pinned("same", (len(x),), torch.float32).tensor for _ in range(_LIVE // 2)]
    lab.slow(stream)
    for number, buffer in enumerate(buffers):
        lab.fill(stream, x, number)
        backend.copy_async(buffer, x, stream=stream)
    stream.synchronize()
    numbers = [float(number) for number in range(len(buffers))]
    expect([lab.current_values(buffer) for buffer in buffers], numbers, "of all buffers")
    received = lab.full(stream, 0, width=len(buffers) * len(x)).view(len(buffers), len(x))
    lab.slow(stream)
    buffers.clear()
    for number, row in enumerate(received):
        with backend.on(stream):
            buffers.append(backend.empty_pinned("same", (len(x),), torch.float32).tensor)
        buffers[number].fill_(number)
        backend.copy_async(row, buffers[number], stream=stream)
    expect(lab.read_tensor(stream, received[:, 0]), numbers, "of tensors that buffers were copied to")
