"""L1: a resource is reused only after it was released, however many there are and whatever their names and sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from outrider_conformance.lab import Lab, expect, in_every_order
from outrider_conformance.promises import promise

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
    """Hundreds of pinned buffers keep their contents while others are dropped and allocated."""
    backend = lab.backend

    def number_in(tensor: Tensor) -> object:
        return int(tensor[0]) if bool((tensor == tensor[0]).all()) else "several numbers"

    model = ReuseModel(
        lambda size, dtype: backend.empty_pinned("same", (size,), dtype).tensor, Tensor.fill_, number_in, lab.seed
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
    """Each of a hundred pinned buffers receives its own pending copy."""
    backend = lab.backend
    stream, x = lab.one_stream()
    buffers = [backend.empty_pinned("same", (len(x),), torch.float32).tensor for _ in range(_LIVE // 2)]
    lab.slow(stream)
    for number, buffer in enumerate(buffers):
        lab.fill(stream, x, number)
        backend.copy_async(buffer, x, stream=stream)
    stream.synchronize()
    expect([lab.current_values(buffer) for buffer in buffers], [float(n) for n in range(len(buffers))], "of all buffers")
