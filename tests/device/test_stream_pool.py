"""Streams of devices whose torch hands them out of a small pool, again and again."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from outrider.device import Backend, CapabilityError, TorchDeviceBackend


class Queue:
    """One of the pool; ``busy`` while it has work."""

    busy = False

    def query(self):
        return not self.busy


class Pooled(TorchDeviceBackend):
    """With a pool of eight, and nothing else of a device."""

    capabilities = kernels = speculative_sync = None

    def __init__(self):
        Backend.__init__(self, "pooled", torch.device("cpu"))
        pool = itertools.cycle([Queue() for _ in range(8)])
        self.module = SimpleNamespace(Stream=lambda device, priority: next(pool))

    @classmethod
    def concrete(cls):
        """An object of this class, what it leaves abstract left out."""
        cls.__abstractmethods__ = frozenset()
        return cls()


@pytest.fixture
def backend(collects_little):
    return Pooled.concrete()


def test_no_two_streams_share_a_queue(backend):
    made = [backend.create_stream("s") for _ in range(8)]
    assert len({id(stream.native) for stream in made}) == 8
    with pytest.raises(CapabilityError, match="no stream left that is distinct from the 8 in use"):
        backend.create_stream("one more")
    assert backend.streams == tuple(made)


def test_what_nobody_refers_to_makes_room(backend):
    """In cycles too: engines are."""
    kept = [backend.create_stream("kept") for _ in range(4)]
    for number in range(6):  # every second one needs room
        holder = {"streams": [backend.create_stream("a"), backend.create_stream("b")]}
        holder["itself"] = holder
        queues = {id(stream.native) for stream in (*kept, *holder["streams"])}
        assert len(queues) == 6, f"the {number}th pair shares a queue"
        assert set(backend.streams) >= {*kept, *holder["streams"]}
        del holder


def test_what_still_has_work_makes_no_room(backend):
    kept = [backend.create_stream("kept") for _ in range(6)]
    queues = [backend.create_stream("dropped").native for _ in range(2)]
    queues[0].busy = True
    later = backend.create_stream("later")
    assert later.native is queues[1]
    assert queues[0] in {stream.native for stream in backend.streams}, "its work isn't over: it has to be waited for yet"
    with pytest.raises(CapabilityError, match="no stream left"):
        backend.create_stream("one more")
    queues[0].busy = False
    assert backend.create_stream("one more").native is queues[0]
    assert len(kept) == 6


def test_a_device_for_which_torch_pins_no_memory_is_named(backend):
    with pytest.raises(CapabilityError, match=r"torch pins no host memory for backend 'pooled'.* override _empty_pinned"):
        backend.empty_pinned("results", (4,), torch.int64)
