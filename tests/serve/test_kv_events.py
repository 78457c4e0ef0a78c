"""KV events on ZMQ, read as vLLM's subscribers read them: with structs of that format, from the wire alone."""

import gc
import threading

import pytest

msgspec = pytest.importorskip("msgspec", reason="not run: the extra kv-events isn't installed")
zmq = pytest.importorskip("zmq", reason="not run: the extra kv-events isn't installed")

from typing import Any  # noqa: E402

from outrider import SamplingParams  # noqa: E402
from outrider.device import ConfigError  # noqa: E402
from outrider.engine.requests.pages import AllBlocksCleared, BlockRemoved, BlockStored  # noqa: E402
from outrider.serve.connection.kv_events import KvEventPublisher, make_engine_with_events  # noqa: E402
from outrider.speculative.eagle import EagleProposer  # noqa: E402
from outrider_proof import tiny  # noqa: E402


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class Stored(KVCacheEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class Removed(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class Cleared(KVCacheEvent, tag="AllBlocksCleared"):
    pass


class KVEventBatch(EventBatch):
    events: list[Stored | Removed | Cleared]


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Subscriber:
    """A client with both of its sockets; every wait has an end."""

    def __init__(self, endpoint, replay):
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(endpoint)
        self.events.subscribe(b"")
        self.asks = self.context.socket(zmq.REQ)
        self.asks.connect(replay)
        # A REQ socket reads one answer of a request; this one reads all of them, as vLLM's example does.
        self.asks.setsockopt(zmq.REQ_RELAXED, 1)

    def next(self):
        assert self.events.poll(60_000), "no event came within a minute"
        _topic, number, payload = self.events.recv_multipart()
        return int.from_bytes(number, "big"), DECODER.decode(payload)

    def replay(self, first):
        """Batches from ``first`` on. A DEALER can read more than one answer to a question."""
        with self.context.socket(zmq.DEALER) as asks:
            asks.connect(self.asks.getsockopt(zmq.LAST_ENDPOINT))
            asks.send_multipart((b"", first.to_bytes(8, "big")))
            found = []
            while True:
                assert asks.poll(60_000), "no answer came within a minute"
                _, number, payload = asks.recv_multipart()
                if int.from_bytes(number, "big", signed=True) == -1:
                    return found
                found.append((int.from_bytes(number, "big"), DECODER.decode(payload)))

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def wire(tmp_path):
    made = []

    def connect(**options):
        publisher = KvEventPublisher(f"ipc://{tmp_path}/events", replay=f"ipc://{tmp_path}/replay", **options)
        made.append(publisher)
        subscriber = Subscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
        made.append(subscriber)
        return publisher, subscriber

    yield connect
    for each in reversed(made):
        each.close()


def hear_first(publisher, subscriber):
    """A subscription takes a moment to arrive: tell until something is heard. Returns the next number."""
    while True:
        publisher.publish(AllBlocksCleared())
        if subscriber.events.poll(50):
            break
    publisher.publish(BlockRemoved((0,)))
    while True:
        number, batch = subscriber.next()
        if batch.events == [Removed([0], "GPU")]:
            return number + 1


def test_an_engine_is_heard(wire):
    engine = tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), max_requests=1, page_size=4)
    publisher, subscriber = wire(page_size=4, rank=3)
    first = hear_first(publisher, subscriber)
    engine.watch_prefix_cache(publisher.publish)
    prompt = [3, 1, 4, 1, 6, 9, 2, 6, 7, 3]
    engine.generate([prompt], SamplingParams(max_tokens=1))
    number, batch = subscriber.next()
    assert number == first
    assert batch.data_parallel_rank == 3
    (stored,) = batch.events
    assert (stored.token_ids, stored.block_size, stored.parent_block_hash) == (prompt[:8], 4, None)
    assert len(stored.block_hashes) == 2
    assert stored.medium == "GPU"
    engine._scheduler.pages.unregister_all()
    assert subscriber.next()[1].events == [Cleared()]


def test_what_was_missed_can_be_had_again(wire):
    publisher, subscriber = wire(page_size=2, buffer=3)
    first = hear_first(publisher, subscriber)
    told = []
    for index in range(5):
        publisher.publish(BlockStored(hashes=(2**64 - 1 - index,), parent=index or None, tokens=(1, 2), extras=(None,)))
        told.append(subscriber.next())
    assert [number for number, _ in told] == list(range(first, first + 5))
    assert subscriber.replay(first + 3) == told[3:]
    assert subscriber.replay(0) == told[2:], "three batches are kept"
    assert subscriber.replay(first + 5) == []
    assert told[0][1].events[0].block_hashes == [2**64 - 1]


def test_a_request_for_replay_that_makes_no_sense_is_left_alone(wire):
    publisher, subscriber = wire(page_size=2)
    first = hear_first(publisher, subscriber)
    with subscriber.context.socket(zmq.DEALER) as asks:
        asks.connect(subscriber.asks.getsockopt(zmq.LAST_ENDPOINT))
        for frames in ((b"x",), (b"", b"123"), (b"", b"", b"", b"")):
            asks.send_multipart(frames)
        publisher.publish(BlockRemoved((7,)))
        number, batch = subscriber.next()
        assert (number, batch.events) == (first, [Removed([7], "GPU")])
        assert len(subscriber.replay(first)) == 1
        assert not asks.poll(0)


def test_images_are_told_of(wire):
    publisher, subscriber = wire(page_size=2)
    hear_first(publisher, subscriber)
    publisher.publish(BlockStored(hashes=(1, 2), parent=None, tokens=(1, 2, 3, 4), extras=(None, (0, ((3, b"\x01\xff"),)))))
    (stored,) = subscriber.next()[1].events
    assert stored.extra_keys == [None, (["01ff", 3],)]


def test_what_was_told_is_published_before_the_end(tmp_path):
    publisher = KvEventPublisher(f"ipc://{tmp_path}/e", page_size=2)
    subscriber = Subscriber(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    hear_first(publisher, subscriber)
    for index in range(3000):
        publisher.publish(BlockRemoved((index,)))
    publisher.close()
    publisher.close()
    heard = []
    while len(heard) < 3000:
        heard += [event.block_hashes[0] for event in subscriber.next()[1].events]
    assert heard == list(range(3000))
    subscriber.close()


@pytest.mark.parametrize("address", ["tcp://*:99999", "nonsense", "ipc:///nowhere/at/all/x"])
def test_an_address_that_cannot_be_had_is_named(address):
    with pytest.raises(ConfigError, match=r"--kv-events .*expected an address") as found:
        KvEventPublisher(address, page_size=2)
    assert address in str(found.value)


def test_a_made_engine_is_heard_for_as_long_as_it_lives(tmp_path, collects_little):
    address = f"ipc://{tmp_path}/e"

    def make():
        return tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), max_requests=1, page_size=4)

    engine = make_engine_with_events(make, address, None)
    subscriber = Subscriber(address, f"ipc://{tmp_path}/r")
    for first in range(600):  # until the subscription has arrived
        engine.generate([[first % 4, 1, 4, 1, 6, first]], SamplingParams(max_tokens=1))
        engine._scheduler.pages.unregister_all()
        if subscriber.events.poll(100):
            break
    assert subscriber.next()[1].events
    del engine
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "outrider-kv-events"]
    subscriber.close()
    with pytest.raises(ConfigError, match="prefix_cache=True"):
        make_engine_with_events(
            lambda: tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), prefix_cache=False), address, None
        )
