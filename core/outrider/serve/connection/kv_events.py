"""Publication of prefix cache events on ZMQ, in vLLM's format, which routers (Dynamo, llm-d) read.

Needs the extra ``kv-events``. A message has three frames: an empty topic, a sequence number (8 bytes, big-endian) and a
batch. The batch is a msgpack array of the Unix time in seconds, the events and the data-parallel rank. Each event is a map
with its ``type``. ``extra_keys`` has, for each page, the inputs besides its tokens that its KV depends on; None if there is
none.
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
from outrider.engine.requests.pages import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

REPLAY_BATCHES = 10_000
"""Number of latest batches that a subscriber can request again."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that follows the last replayed batch."""

_TOPIC = b""
_MEDIUM = "GPU"  # the format's name for the memory of the compute device
_MAX_QUEUED_MESSAGES = 100_000  # for a slow subscriber; further messages to it are dropped
_MAX_BATCH_EVENTS = 1_000
_POLL_INTERVAL_S = 0.05
_CLOSE_TIMEOUT_S = 2.0


class KvEventPublisher:
    """A publisher of prefix cache events. A background thread sends them.

    Any thread may call :meth:`publish`, which doesn't block. A subscriber that is too slow loses events; it never delays the
    engine.

    As in vLLM, an ``endpoint`` with ``*`` or ``::``, or with ``ipc://`` or ``inproc://``, is bound. The publisher connects to
    any other endpoint.

    ``replay`` is an address to bind, where subscribers request batches that they missed. A request has one frame: the first
    sequence number wanted (8 bytes, big-endian). The reply has one message for each batch, with sequence number and payload,
    then one with :data:`END_OF_REPLAY`. The publisher keeps the latest ``buffer`` batches.

    Raises :class:`ConfigError` for an address that can't be bound or connected to.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        page_size: int,
        replay: str | None = None,
        rank: int = 0,
        buffer: int = REPLAY_BATCHES,
    ) -> None:
        self._page_size = page_size
        self._rank = rank
        self._latest_batches: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._sequence_number = 0
        self._queue: SimpleQueue[CacheEvent | None] = SimpleQueue()
        self._context = zmq.Context()
        self._publish_socket = self._open_socket(zmq.PUB, endpoint, bind=_is_local(endpoint))
        self._replay_socket = None if replay is None else self._open_socket(zmq.ROUTER, replay, bind=True)
        self._thread = threading.Thread(target=self._run, name="outrider-kv-events", daemon=True)
        self._thread.start()

    def publish(self, event: CacheEvent) -> None:
        """Queue an event for publication. Events queued after :meth:`close` are dropped."""
        self._queue.put(event)

    def close(self) -> None:
        """Publish the queued events, and end the thread and the sockets. May be called twice."""
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        for socket in (self._publish_socket, self._replay_socket):
            if socket is not None:
                socket.close(linger=200)
        self._context.term()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _open_socket(self, kind: int, address: str, *, bind: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_MAX_QUEUED_MESSAGES)
        try:
            port = address.rpartition(":")[2] if address.startswith("tcp:") else ""
            if port.isdecimal() and not 0 < int(port) < 2**16:  # ZMQ would use it modulo 2**16
                raise ValueError(f"{port} is no port")
            (socket.bind if bind else socket.connect)(address)
        except (zmq.ZMQError, ValueError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--kv-events {address}: {error}; expected an address that ZMQ can "
                f"{'bind' if bind else 'connect to'}, such as tcp://*:5557 or ipc:///run/outrider/kv-events"
            ) from None
        return socket

    def _run(self) -> None:
        while True:
            if self._replay_socket is not None:
                while self._replay_socket.poll(0):
                    self._replay(self._replay_socket)
            events, is_closed = self._dequeue_events()
            if events:
                self._publish(events)
            if is_closed:
                return

    def _dequeue_events(self) -> tuple[list[CacheEvent], bool]:
        """Wait briefly for events. Return the events of one batch, and whether :meth:`close` was called."""
        events: list[CacheEvent] = []
        with contextlib.suppress(Empty):
            event = self._queue.get(timeout=_POLL_INTERVAL_S)
            while True:
                if event is None:
                    return events, True
                events.append(event)
                if len(events) == _MAX_BATCH_EVENTS:
                    break
                event = self._queue.get_nowait()
        return events, False

    def _publish(self, events: Sequence[CacheEvent]) -> None:
        payload = msgspec.msgpack.encode([time.time(), [self._on_wire(event) for event in events], self._rank])
        self._latest_batches.append((self._sequence_number, payload))
        self._publish_socket.send_multipart((_TOPIC, self._sequence_number.to_bytes(8, "big"), payload))
        self._sequence_number += 1

    def _on_wire(self, event: CacheEvent) -> dict[str, Any]:
        match event:
            case BlockStored():
                extras = [_extra_keys(extra) for extra in event.extras]
                return {
                    "type": "BlockStored",
                    "block_hashes": event.hashes,
                    "parent_block_hash": event.parent,
                    "token_ids": event.tokens,
                    "block_size": self._page_size,
                    "lora_id": None,
                    "medium": _MEDIUM,
                    "lora_name": None,
                    **({"extra_keys": extras} if any(extras) else {}),
                }
            case BlockRemoved():
                return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": _MEDIUM}
            case AllBlocksCleared():
                return {"type": "AllBlocksCleared"}

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        client, *frames = socket.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != 8:
            return  # not a request of this format, which has no error reply
        first = int.from_bytes(frames[1], "big")
        for number, payload in self._latest_batches:
            if number >= first:
                socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        socket.send_multipart((client, b"", END_OF_REPLAY, b""))


def make_engine_with_events(make: Callable[..., Engine], address: str, replay: str | None, **arguments: Any) -> Engine:
    """Call ``make(**arguments)`` and return its engine, whose prefix cache events are published at ``address``.

    The publisher lives as long as the engine. Of several ranks, only the first publishes events.
    """
    engine = make(**arguments)
    if engine.follows:
        return engine
    publisher = KvEventPublisher(address, page_size=engine.config.page_size, replay=replay)
    try:
        engine.watch_prefix_cache(publisher.publish)
    except BaseException:
        publisher.close()
        raise
    weakref.finalize(engine, publisher.close)
    return engine


def _is_local(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _extra_keys(extra: object) -> tuple[Any, ...] | None:
    """Return the value of :meth:`Request.extra_identity` for msgpack; None stays None.

    Each image becomes (digest in hexadecimal, position in the prompt).
    """
    if not isinstance(extra, tuple):
        return None
    rope_key, digests = extra
    rope = () if not rope_key else (f"rope:{rope_key}",)
    return (*rope, *((digest.hex(), start) for start, digest in digests))
