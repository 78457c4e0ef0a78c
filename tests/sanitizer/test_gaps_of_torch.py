"""Seven gaps of torch's own stream sanitizer, each shown by a program that it misses and ours catches.

torch's event handler is driven with what the simulated device does, through the calls that its own hooks make: kernel
launches of the dispatcher with the data pointers of device tensors, events, synchronisations, allocations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import EventHandler

from outrider.device import Access, Backend, Event, Observer, Operation, Stream
from outrider_sanitizer import FindingKind, watch
from outrider_sanitizer.races import RACES
from outrider_sanitizer.races.race import filled, order
from outrider_sim.backend import SimBackend
from outrider_sim.exploration import run_once
from outrider_sim.strategies import Strategy


class Torch(Observer):
    """Hands what happens to torch's sanitizer, as its dispatch mode and its hooks would."""

    def __init__(self) -> None:
        self.handler = EventHandler()
        self.errors: list[Any] = []
        self.streams: dict[str, int] = {}
        self.addresses: dict[int, int] = {}
        self.host: set[int] = set()
        self.fresh: set[int] = set()

    def stream(self, name: str) -> int:
        if name not in self.streams:
            self.streams[name] = len(self.streams)
            if name != "default":
                self.handler._handle_stream_creation(self.streams[name])
        return self.streams[name]

    def stream_created(self, stream: Stream) -> None:
        self.stream(stream.name)

    def pointer(self, access: Access) -> int:
        if access.storage in self.fresh:
            self.fresh.discard(access.storage)
            self.handler._handle_memory_allocation(self.addresses[access.storage])
        return self.addresses.setdefault(access.storage, access.storage << 32) + access.start

    def launched(self, operation: Operation) -> None:
        if "::" in operation.name and not operation.name.startswith(("aten::", "outrider::")):
            return  # torch's mode sees the dispatcher alone
        device = [a for a in operation.accesses if a.storage not in self.host]
        writes = {self.pointer(a) for a in device if a.write}
        reads = {self.pointer(a) for a in device if not a.write} - writes
        names: dict[int, list[str]] = {pointer: [""] for pointer in writes | reads}
        stream = self.stream(operation.stream)
        self.errors += self.handler._handle_kernel_launch(stream, reads, writes, set(), operation.name, names)

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        del generation
        self.handler._handle_event_record(id(event), self.stream(stream.name))

    def waited(self, stream: Stream, event: Event, generation: int) -> None:
        del generation
        self.handler._handle_event_wait(id(event), self.stream(stream.name))

    def event_synchronized(self, event: Event, generation: int) -> None:
        del generation
        self.handler._handle_event_synchronization(id(event))

    def stream_synchronized(self, stream: Stream) -> None:
        self.handler._handle_stream_synchronization(self.stream(stream.name))

    def device_synchronized(self) -> None:
        self.handler._handle_device_synchronization()

    def allocated(self, storage: int, nbytes: int, stream: str, location: str) -> None:
        del nbytes, location
        if stream == "host":
            self.host.add(storage)
        else:
            self.addresses[storage] = storage << 32
            self.fresh.add(storage)

    def address_reused(self, storage: int, previous: int) -> None:
        self.addresses[storage] = self.addresses.get(previous, previous << 32)

    def freed(self, storage: int, stream: str) -> None:
        if stream != "host" and storage not in self.fresh:
            self.handler._handle_memory_deallocation(self.addresses[storage])


def by_another_thread(backend: Backend) -> None:
    """One thread waits for the writer; another, which doesn't, launches the reader."""
    forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
    x = filled(backend, forward, 1.0)
    done = backend.create_event("done")
    forward.record(done)

    def waits() -> None:
        done.synchronize()

    def launches() -> None:
        with backend.on(plan):
            x * 1.0

    assert backend.control is not None
    backend.control.run_threads(waits, launches)


def outside_the_dispatcher(backend: Backend) -> None:
    """A kernel that is launched by handle; its backend reports what it writes."""
    forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
    x = filled(backend, forward, 1.0)
    order(forward, plan)
    if backend.observer is not None:
        place = backend.locate(x)
        write = Access(place.storage, place.start, place.end, True)
        backend.observer.launched(Operation("vendor::fused", plan.name, 1, (write,), "kernel.py:1"))
    with backend.on(forward):
        x * 1.0


GAPS = {
    "a: views at other offsets": (RACES["overlapping-views"].wrong, FindingKind.WRITE_AFTER_WRITE),
    "b: memory freed and used again on another stream": (RACES["reuse-across-streams"].wrong, FindingKind.REUSE),
    "c: graph replays": (RACES["input-overwritten"].wrong, FindingKind.WRITE_AFTER_READ),
    "d: pinned host memory": (RACES["host-read-early"].wrong, FindingKind.READ_AFTER_WRITE),
    "e: one host thread beside another": (by_another_thread, FindingKind.READ_AFTER_WRITE),
    "f: kernels outside the dispatcher": (outside_the_dispatcher, FindingKind.READ_AFTER_WRITE),
}


def torch_says(program: Any) -> list[Any]:
    backend = SimBackend()
    observer = Torch()
    backend.attach(observer)
    run_once(backend, program, Strategy())
    backend.detach()
    return observer.errors


@pytest.mark.parametrize("program", [pytest.param(p, id=name) for name, p in GAPS.items()])
def test_torch_misses_it_and_we_do_not(program: Any) -> None:
    wrong, kind = program
    assert torch_says(wrong) == []
    backend = SimBackend()
    with watch(backend) as report:
        run_once(backend, wrong, Strategy())
    assert {finding.kind for finding in report} == {kind}, str(report)


def test_torch_is_driven_as_it_should_be() -> None:
    """What torch's sanitizer does find, it finds here too."""
    assert len(torch_says(RACES["read-after-write"].wrong)) == 1
    assert torch_says(RACES["read-after-write"].right) == []


def test_torch_keeps_every_read_and_we_do_not() -> None:
    """g: its memory grows with the run."""
    backend = SimBackend()
    forward = backend.create_stream("forward")
    x = filled(backend, forward, 1.0)
    observer = Torch()
    backend.attach(observer)
    reads(backend, forward, x, 2000)
    backend.detach()
    assert max(len(info.reads) for info in observer.handler.tensors_accessed.accesses.values()) == 2000

    from outrider_sanitizer.observation.sanitizer import Sanitizer

    sanitizer = Sanitizer(backend)
    backend.attach(sanitizer)
    reads(backend, forward, x, 2000)
    backend.detach()
    kept = sum(len(shadow.records()) for shadow in sanitizer._ordering.memory.shadows.values())
    assert sanitizer.report.operations == 2000
    assert kept <= 4


def reads(backend: Backend, stream: Stream, x: torch.Tensor, count: int) -> None:
    with backend.on(stream):
        for _ in range(count):
            x * 1.0
