"""TCP connections between the processes: frames, authentication, messages in both directions, detection of lost peers.

Use a hub in one thread. Only :meth:`ConnectionHub.poll` waits, for at most the time that the caller passes.

A frame has JSON and bytes, and received data is never executed or unpickled. Its five parts: ``ORPD``, the length of the text
(4 bytes, little-endian), the total length of the blobs (8 bytes, little-endian), the text and the blobs. The text is a JSON
object: ``kind``, ``body`` and ``blobs``, the length of each blob.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.device import ConfigError, OutriderError

VERSION = 4
"""Version of the messages. It rises when an older process could misunderstand a message."""
_MAGIC = b"ORPD"
_FRAME = struct.Struct("<4sIQ")
_MAX_TEXT_BYTES = 64 << 20


class WireError(OutriderError):
    """Raised for a received message that isn't of this version, or is too long. The receiver closes the connection."""


@dataclass(frozen=True, slots=True)
class WireMessage:
    """A message between two processes, such as a prefill server and a decode server: a kind, fields and binary data."""

    kind: str
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the message, as plain data for JSON, which refers to blobs by their indices."""
    blobs: tuple[bytes, ...] = field(default=(), repr=False)

    def encode(self) -> bytes:
        """Return the message as the bytes of one frame."""
        fields = {"kind": self.kind, "body": self.body, "blobs": [len(blob) for blob in self.blobs]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        return b"".join((_FRAME.pack(_MAGIC, len(text), sum(map(len, self.blobs))), text, *self.blobs))


class MessageDecoder:
    """An incremental decoder of frames.

    ``limit`` is the maximum number of bytes of text and blobs of a message. It may be changed between two messages.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterable[WireMessage]:
        """Append ``data`` to the received bytes and yield each message that is now complete.

        Raises :class:`WireError` for an invalid frame. The decoder can't be used afterwards.
        """
        self._received += data
        while len(self._received) >= _FRAME.size:
            magic, text_bytes, blob_bytes = _FRAME.unpack_from(self._received)
            if magic != _MAGIC:
                raise WireError("the other side speaks another protocol: expected the first bytes of a message")
            if text_bytes > min(self.limit, _MAX_TEXT_BYTES) or text_bytes + blob_bytes > self.limit:
                raise WireError(f"a message of {text_bytes + blob_bytes} bytes is too long; expected at most {self.limit}")
            end = _FRAME.size + text_bytes + blob_bytes
            if len(self._received) < end:
                return
            text = self._received[_FRAME.size : _FRAME.size + text_bytes]
            blobs = bytes(self._received[_FRAME.size + text_bytes : end])
            del self._received[:end]
            yield _decode_frame(text, blobs)


def _decode_frame(text: bytearray, blobs: bytes) -> WireMessage:
    try:
        fields = json.loads(text)
        kind, body, lengths = fields["kind"], fields["body"], fields["blobs"]
        if not isinstance(kind, str) or not isinstance(body, dict) or not isinstance(lengths, list):
            raise ValueError("a part has the wrong type")
        if not all(type(length) is int and length >= 0 for length in lengths) or sum(lengths) != len(blobs):
            raise ValueError("the lengths don't add up")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a message can't be read: {error}") from None
    return WireMessage(kind, body, tuple(_split(blobs, lengths)))


def _split(data: bytes, lengths: Sequence[int]) -> Iterable[bytes]:
    start = 0
    for length in lengths:
        yield data[start : start + length]
        start += length


_MAX_HANDSHAKE_MESSAGE_BYTES = 1 << 14
"""Maximum bytes of a message from a peer that hasn't yet proved that it knows the secret."""
_MAX_MESSAGE_BYTES = 256 << 20
_MAX_UNSENT_BYTES = 512 << 20
"""Maximum number of queued bytes for one peer. The hub closes the connection of a peer that reads too slowly."""
_RECEIVE_BYTES = 1 << 20
_PING_INTERVAL_S = 2.0
_HANDSHAKE_TIMEOUT_S = 10.0
_SILENCE_TIMEOUT_S = 30.0
_RECONNECT_INTERVAL_S = 0.25
_NONCE_BYTES = 32


class ProcessRole(StrEnum):
    """The role of a process in disaggregated serving."""

    PREFILL = "prefill"
    DECODE = "decode"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """The address of a server: a host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Return the address of ``HOST:PORT``; an IPv6 host is in brackets. Raises :class:`ConfigError`."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
            raise ConfigError(f"{text!r} isn't an address; expected HOST:PORT")
        return cls(host, int(port))

    @property
    def family(self) -> int:
        """Address family for :mod:`socket`: ``AF_INET6`` for a host with colons, else ``AF_INET``."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """An event of one connection, which :meth:`ConnectionHub.poll` returns."""

    kind: str
    """``joined`` (the peer is authenticated), ``message`` or ``left`` (the connection is closed)."""
    peer: int
    """Number of the connection, unique within the hub."""
    role: ProcessRole
    message: WireMessage | None = None
    why: str = ""
    """Reason of the event ``left``."""


@dataclass(eq=False, slots=True)
class _Connection:
    peer: int
    sock: socket.socket
    address: PeerAddress | None
    """Address to which this process connected, and reconnects. None for an accepted connection."""
    nonce: bytes
    """Random bytes that this process sent. The peer authenticates them with the secret."""
    decoder: MessageDecoder = field(default_factory=lambda: MessageDecoder(_MAX_HANDSHAKE_MESSAGE_BYTES))
    unsent: deque[memoryview] = field(default_factory=deque)
    unsent_bytes: int = 0
    is_connecting: bool = False
    role: ProcessRole | None = None
    """Role of the peer, from its message *hello*."""
    peer_nonce: bytes = b""
    is_authenticated: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    last_received_at: float = field(default_factory=time.monotonic)
    last_sent_at: float = field(default_factory=time.monotonic)


class ConnectionHub:
    """The connections of one process to its peers.

    The hub accepts connections on ``listen``; None accepts none. All processes share ``secret``. Each side proves that it
    knows the secret before the other side reads any other message. A peer that sends nothing for 30 seconds is gone.
    Raises :class:`ConfigError` if the address can't be bound, or if it is exposed without a secret.
    """

    def __init__(self, role: ProcessRole, *, listen: PeerAddress | None, secret: bytes = b"") -> None:
        self._role, self._secret = role, secret
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._num_connections = 0
        self._reconnect_at: dict[PeerAddress, float] = {}
        """Time of the next connection attempt, by address of the server."""
        self._events: deque[ConnectionEvent] = deque()
        self._listener: socket.socket | None = None
        self.address = listen
        if listen is not None:
            require_secret(listen.host, secret)
            try:
                self._listener = socket.create_server((listen.host, listen.port), family=listen.family)
            except OSError as error:
                raise ConfigError(f"can't listen on {listen}: {error.strerror}") from None
            self._listener.setblocking(False)
            self.address = PeerAddress(listen.host, self._listener.getsockname()[1])
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """Return a file descriptor that is readable when :meth:`poll` has something to do. Timeouts need a poll as well."""
        return self._selector.fileno()

    def connect_to(self, address: PeerAddress) -> None:
        """Connect to a server, and reconnect whenever the connection is lost."""
        self._reconnect_at[address] = 0.0

    def send(self, peer: int, message: WireMessage) -> None:
        """Queue a message. A message to a peer that is gone is dropped; the event *left* reports the peer."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._queue(connection, message)

    def disconnect(self, peer: int, why: str) -> None:
        """Close a connection with the reason ``why``. The event *left* follows."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._drop_connection(connection, why)

    def stop_listening(self) -> None:
        """Stop listening: the hub accepts no further connections."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def poll(self, seconds: float) -> list[ConnectionEvent]:
        """Send and receive messages, and return the events since the last call. Wait up to ``seconds`` for the
        first event.
        """
        self._reconnect()
        if self._events:
            seconds = 0.0
        for key, mask in self._selector.select(min(seconds, _PING_INTERVAL_S)):
            if key.data is None:
                self._accept()
                continue
            connection: _Connection = key.data
            if mask & selectors.EVENT_WRITE and connection.peer in self._connections:
                self._flush(connection)
            if mask & selectors.EVENT_READ and connection.peer in self._connections:
                self._receive(connection)
        self._check_timeouts()
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        """Close every connection. Queued messages are sent as far as the sockets take them without waiting."""
        self._reconnect_at.clear()
        for connection in list(self._connections.values()):
            self._flush(connection)
            self._drop_connection(connection, "closed")
        self.stop_listening()
        self._selector.close()
        self._events.clear()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            sock, _ = self._listener.accept()
            self._add(sock, None)

    def _reconnect(self) -> None:
        now = time.monotonic()
        connected = {connection.address for connection in self._connections.values()}
        for address, attempt_at in self._reconnect_at.items():
            if address in connected or now < attempt_at:
                continue
            self._reconnect_at[address] = now + _RECONNECT_INTERVAL_S
            try:
                info = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
                sock = socket.socket(info[0], info[1], info[2])
                sock.setblocking(False)
                sock.connect_ex(info[4])
            except OSError:
                continue
            self._add(sock, address)

    def _add(self, sock: socket.socket, address: PeerAddress | None) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._num_connections += 1
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection = _Connection(self._num_connections, sock, address, nonce, is_connecting=address is not None)
        self._connections[connection.peer] = connection
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        hello = {"version": VERSION, "role": self._role, "nonce": connection.nonce.hex()}
        self._queue(connection, WireMessage("hello", hello))

    def _queue(self, connection: _Connection, message: WireMessage) -> None:
        data = message.encode()
        connection.unsent.append(memoryview(data))
        connection.unsent_bytes += len(data)
        connection.last_sent_at = time.monotonic()
        if connection.unsent_bytes > _MAX_UNSENT_BYTES:
            self._drop_connection(connection, "it doesn't read what it's sent")
        elif not connection.is_connecting:
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        connection.is_connecting = False
        try:
            while connection.unsent:
                sent = connection.sock.send(connection.unsent[0])
                connection.unsent_bytes -= sent
                if sent < len(connection.unsent[0]):
                    connection.unsent[0] = connection.unsent[0][sent:]
                    break
                connection.unsent.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._drop_connection(connection, str(error.strerror))
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, mask, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._drop_connection(connection, str(error.strerror))
            return
        if not data:
            self._drop_connection(connection, "it closed the connection")
            return
        connection.last_received_at = time.monotonic()
        try:
            for message in connection.decoder.feed(data):
                if connection.peer not in self._connections:
                    return
                self._handle_message(connection, message)
        except WireError as error:
            self._drop_connection(connection, str(error))

    def _handle_message(self, connection: _Connection, message: WireMessage) -> None:
        if not connection.is_authenticated:
            self._handle_handshake(connection, message)
        elif message.kind != "ping":
            assert connection.role is not None
            self._events.append(ConnectionEvent("message", connection.peer, connection.role, message))

    def _handle_handshake(self, connection: _Connection, message: WireMessage) -> None:
        """Handle the two messages of the handshake, which each side sends.

        *hello* has a random nonce. *proof* has the HMAC of the other side's nonce and the sender's role under the secret.
        """
        body = message.body
        try:
            if message.kind == "hello" and connection.role is None:
                if body["version"] != VERSION:
                    raise WireError(f"it speaks version {body['version']!r} of these messages, this one speaks {VERSION}")
                connection.role, connection.peer_nonce = ProcessRole(body["role"]), bytes.fromhex(body["nonce"])
                if connection.role is self._role or len(connection.peer_nonce) != _NONCE_BYTES:
                    raise WireError(f"a {connection.role} has nothing to say to a {self._role}")
                self._queue(connection, WireMessage("proof", {"proof": self._proof(connection.peer_nonce, self._role)}))
            elif message.kind == "proof" and connection.role is not None:
                if not hmac.compare_digest(str(body["proof"]), self._proof(connection.nonce, connection.role)):
                    raise WireError("it doesn't know the secret")
                connection.is_authenticated, connection.decoder.limit = True, _MAX_MESSAGE_BYTES
                self._events.append(ConnectionEvent("joined", connection.peer, connection.role))
            else:
                raise WireError(f"it says {message.kind!r} where it should say who it is")
        except (KeyError, ValueError, TypeError) as error:
            raise WireError(f"its greeting can't be read: {error}") from None

    def _proof(self, nonce: bytes, role: ProcessRole) -> str:
        return hmac.new(self._secret, nonce + role.encode(), "sha256").hexdigest()

    def _check_timeouts(self) -> None:
        """Close connections whose handshake or peer is too slow, and send a ping to peers that got no message lately."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if not connection.is_authenticated and now - connection.opened_at > _HANDSHAKE_TIMEOUT_S:
                self._drop_connection(connection, "it didn't say who it is")
            elif now - connection.last_received_at > _SILENCE_TIMEOUT_S:
                self._drop_connection(connection, f"it said nothing for {_SILENCE_TIMEOUT_S:g} s")
            elif connection.is_authenticated and now - connection.last_sent_at > _PING_INTERVAL_S:
                self._queue(connection, WireMessage("ping"))

    def _drop_connection(self, connection: _Connection, why: str) -> None:
        if self._connections.pop(connection.peer, None) is None:
            return
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.is_authenticated and connection.role is not None:
            self._events.append(ConnectionEvent("left", connection.peer, connection.role, why=why))


def require_secret(host: str, secret: bytes) -> None:
    """Raise :class:`ConfigError` if other machines can reach ``host`` and there is no secret."""
    if secret or host in ("localhost", "::1") or host.startswith("127."):
        return
    raise ConfigError(
        f"{host} can be reached from other machines, and anybody there could read and write requests and pages: give "
        "--api-key-file, or listen on 127.0.0.1"
    )
