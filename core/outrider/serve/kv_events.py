"""Events of the prefix cache on ZMQ, in the format that vLLM's has and that routers (Dynamo, llm-d) read.

Needs the extra ``kv-events``. A message has three frames: the topic, a sequence number (8 bytes, big-endian) and a batch in
msgpack: an array of the time, the events and the data-parallel rank. Each event is a map with its ``type``.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

from outrider.device import ConfigError
from outrider.engine.engine import Engine
from outrider.engine.requests.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

REPLAY_BATCHES = 10_000
"""Batches that a subscriber can ask for again."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number behind the last replayed batch."""

_MEDIUM = "GPU"  # the format's word for the memory of the device that computes
_WATERMARK = 100_000  # messages that wait for a slow subscriber before it loses some
_MOST_EVENTS = 1_000  # of a batch
_IDLE_S = 0.05
_CLOSING_S = 2.0


class StoredOnWire(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """Pages that can be hit from now on; ``extra_keys``: for each, what it depends on besides its tokens."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class RemovedOnWire(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """Pages that can't be hit any more."""

    block_hashes: list[int]
    medium: str | None


class ClearedOnWire(msgspec.Struct, tag="AllBlocksCleared"):
    """No page can be hit any more."""


class BatchOnWire(msgspec.Struct, array_like=True):
    """Events in order. ``ts``: seconds since 1970."""

    ts: float
    events: list[StoredOnWire | RemovedOnWire | ClearedOnWire]
    data_parallel_rank: int | None = None


class KvEventPublisher:
    """Publishes events from a thread of its own; :meth:`tell` may be called from any thread, and doesn't block.

    ``endpoint`` is bound where it has a ``*`` (``tcp://*:5557``) or is ``ipc://`` or ``inproc://``, else connected to, as in
    vLLM. ``replay``: an address to bind, where subscribers ask for the batches that they missed: a request has one frame, the
    first sequence number wanted (8 bytes, big-endian); batches come as sequence number and payload, :data:`END_OF_REPLAY`
    behind the last. So many as ``buffer`` are kept. A subscriber that is too slow loses events, never the engine time.

    Raises :class:`ConfigError` for an address that can't be had.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        page_size: int,
        replay: str | None = None,
        rank: int = 0,
        topic: str = "",
        buffer: int = REPLAY_BATCHES,
    ) -> None:
        self._page_size = page_size
        self._rank = rank
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._next = 0
        self._queue: SimpleQueue[CacheEvent | None] = SimpleQueue()
        self._closing = False
        self._context = zmq.Context()
        self._publishes = self._socket(zmq.PUB, "--kv-events", endpoint, bind=_is_local(endpoint))
        self._replays = None if replay is None else self._socket(zmq.ROUTER, "--kv-events", replay, bind=True)
        self._thread = threading.Thread(target=self._run, name="outrider-kv-events", daemon=True)
        self._thread.start()

    def tell(self, event: CacheEvent) -> None:
        """Publish an event. Those told after :meth:`close` are dropped."""
        self._queue.put(event)

    def close(self) -> None:
        """Publish what was told so far, and end. Allowed twice."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(_CLOSING_S)
        for socket in (self._publishes, self._replays):
            if socket is not None:
                socket.close(linger=200)
        self._context.term()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _socket(self, kind: int, option: str, address: str, *, bind: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_WATERMARK)
        try:
            port = address.rpartition(":")[2] if address.startswith("tcp:") else ""
            if port.isdecimal() and not 0 < int(port) < 2**16:  # ZMQ takes it modulo 2**16
                raise ValueError(f"{port} is no port")
            (socket.bind if bind else socket.connect)(address)
        except (zmq.ZMQError, ValueError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{option} {address}: {error}; expected an address that ZMQ can "
                f"{'bind' if bind else 'connect to'}, such as tcp://*:5557 or ipc:///run/outrider/kv-events"
            ) from None
        return socket

    def _run(self) -> None:
        while True:
            if self._replays is not None:
                while self._replays.poll(0):
                    self._replay(self._replays)
            events, ends = self._take()
            if events:
                self._publish(events)
            if ends:
                return

    def _take(self) -> tuple[list[CacheEvent], bool]:
        """Events that wait, and whether this is the end."""
        events: list[CacheEvent] = []
        with contextlib.suppress(Empty):
            event = self._queue.get(timeout=_IDLE_S)
            while True:
                if event is None:
                    return events, True
                events.append(event)
                if len(events) == _MOST_EVENTS:
                    break
                event = self._queue.get_nowait()
        return events, False

    def _publish(self, events: Sequence[CacheEvent]) -> None:
        batch = BatchOnWire(time.time(), [self._on_wire(event) for event in events], self._rank)
        payload = msgspec.msgpack.encode(batch)
        self._kept.append((self._next, payload))
        self._publishes.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._next += 1

    def _on_wire(self, event: CacheEvent) -> StoredOnWire | RemovedOnWire | ClearedOnWire:
        match event:
            case BlockStored():
                extras = [_extra_keys(extra) for extra in event.extras]
                return StoredOnWire(
                    block_hashes=list(event.hashes),
                    parent_block_hash=event.parent,
                    token_ids=list(event.tokens),
                    block_size=self._page_size,
                    lora_id=None,
                    medium=_MEDIUM,
                    lora_name=None,
                    extra_keys=extras if any(extras) else None,
                )
            case BlockRemoved():
                return RemovedOnWire(block_hashes=list(event.hashes), medium=_MEDIUM)
            case AllBlocksCleared():
                return ClearedOnWire()

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        client, *frames = socket.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != 8:
            return  # nothing that the format knows; there is no form for an error
        first = int.from_bytes(frames[1], "big")
        for number, payload in self._kept:
            if number >= first:
                socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        socket.send_multipart((client, b"", END_OF_REPLAY, b""))


def make_watched(make: Callable[..., Engine], address: str, replay: str | None, **given: Any) -> Engine:
    """The engine that ``make`` makes of what is ``given``. Its prefix cache is told of at ``address``, for as long as the
    engine lives; of several ranks, the first tells.
    """
    engine = make(**given)
    if engine.follows:
        return engine
    publisher = KvEventPublisher(address, page_size=engine.config.page_size, replay=replay)
    try:
        engine.watch_prefix_cache(publisher.tell)
    except BaseException:
        publisher.close()
        raise
    weakref.finalize(engine, publisher.close)
    return engine


def _is_local(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _extra_keys(extra: object) -> tuple[Any, ...] | None:
    """What :meth:`Request.besides_tokens` says, for msgpack: (digest in hexadecimal, place in the prompt) of each medium."""
    if not isinstance(extra, tuple):
        return None
    rope_key, digests = extra
    rope = () if not rope_key else (f"rope:{rope_key}",)
    return (*rope, *((digest.hex(), start) for start, digest in digests))
