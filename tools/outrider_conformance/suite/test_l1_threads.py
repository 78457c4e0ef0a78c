"""L1: host threads create resources and enqueue work at the same time, and get resources of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pytest
import torch

from outrider.device import Stream
from outrider_conformance.lab import THREADS, WIDTH, Lab, call_at_once, expect
from outrider_conformance.promises import needs, promise

_EACH = 3
_ROUNDS = 6
_STREAM_ROUNDS = 30
_Made = TypeVar("_Made")


def _made_at_once(make: Callable[[str], _Made], each: int = _EACH) -> Sequence[_Made]:
    """Return what ``make`` returned, ``each`` times on each of several threads, always under one name."""
    made: list[_Made] = []
    call_at_once(lambda _: made.extend([make("same") for _ in range(each)]))
    return made


@promise("Backend", "*Threads.* Every method may be called from any thread.")
def test_threads_create_resources_at_once(lab: Lab) -> None:
    """Streams, events, pinned buffers and pools that eight threads create at once are all different."""
    backend = lab.backend
    for _ in range(_STREAM_ROUNDS):
        streams = _made_at_once(backend.create_stream, each=1)  # devices have a limited number
        expect(len({stream.name for stream in streams}), len(streams), "different names of the streams")
        expect(len({id(stream) for stream in streams}), len(streams), "different streams")
        assert set(streams) <= set(backend.streams), "backend.streams lacks streams that were made"
    events = _made_at_once(backend.create_event)
    expect(len({id(event) for event in events}), len(events), "different events")
    for number, event in enumerate(events):
        expect(streams[number % len(streams)].record(event), 1, "the first generation of an event")
    buffers = _made_at_once(lambda name: backend.empty_pinned(name, (WIDTH,), torch.int64))
    for number, buffer in enumerate(buffers):
        buffer.tensor.fill_(number)
    expect([lab.current_values(buffer.tensor) for buffer in buffers], [*range(len(buffers))], "contents of the buffers")
    pools = _made_at_once(backend.create_graph_pool)
    expect(len({id(pool) for pool in pools}), len(pools), "different graph pools")


@needs("asynchronous", "concurrent_streams")
@promise("Backend", "*Threads.* Every method may be called from any thread.")
def test_streams_of_threads_are_all_their_own(lab: Lab) -> None:
    """While one of eight streams that eight threads created at once is busy, the other seven are not."""

    def alone(index: int) -> bool:
        made: list[Stream | None] = [None] * THREADS

        def create(number: int) -> None:
            made[number] = lab.backend.create_stream("s")

        call_at_once(create)
        streams = [stream for stream in made if stream is not None]
        busy = streams.pop(index)
        lab.fill_late(busy, lab.full(busy, 0), 1)
        for event in [lab.record(stream) for stream in streams]:
            event.synchronize()
        return not busy.query()

    for index in range(THREADS):
        lab.check_in_some_order(
            partial(alone, index), f"the stream of thread {index} always waits for the stream of another thread"
        )


@promise("Backend", "*Threads.* Every method may be called from any thread.")
@pytest.mark.parametrize("direction", ["up", "down"])
def test_threads_work_at_once(lab: Lab, direction: str) -> None:
    """Each of eight threads writes, copies and waits on a stream of its own, and reads its own values."""
    backend = lab.backend

    def exchange(number: int) -> None:
        stream, other = lab.streams(f"a{number}", f"b{number}")
        pinned = backend.empty_pinned("pinned", (WIDTH,), torch.float32).tensor
        x = lab.full(stream, 0)
        for turn in range(_ROUNDS):
            value = float(100 * number + turn)
            if direction == "down":
                (lab.fill if turn else lab.fill_late)(stream, x, value)
                other.wait(lab.record(stream, "filled"))
                backend.copy_async(pinned, x, stream=other)
                other.synchronize()
                expect(lab.current_values(pinned), value, f"what thread {number} copied to the host")
            else:
                pinned.fill_(value)
                backend.copy_async(x, pinned, stream=other)
                copied = lab.record(other, "copied")
                stream.wait(copied)
                with backend.on(stream):
                    y = x + 1
                stream.synchronize()
                expect(lab.current_values(y), value + 1, f"what thread {number} computed from its copy")

    call_at_once(exchange)
