"""Connections between the processes: who may speak, messages in and out, and who is gone.

One thread; no call blocks but for the time that :meth:`Hub.poll` is given.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.apart.wire import VERSION, Decoder, Message, WireError
from outrider.device import ConfigError

_GREETING_BYTES = 1 << 14
"""A message of somebody who hasn't proved that it knows the secret."""
_MESSAGE_BYTES = 256 << 20
_UNSENT_BYTES = 512 << 20
_READ_BYTES = 1 << 20
_PING_S = 2.0
_GREETING_S = 10.0


class Role(StrEnum):
    """What a process is to the others."""

    PREFILL = "prefill"
    DECODE = "decode"
    CLIENT = "client"


_SPEAKS_TO: Mapping[Role, frozenset[Role]] = {
    Role.PREFILL: frozenset({Role.DECODE, Role.CLIENT}),
    Role.DECODE: frozenset({Role.PREFILL, Role.CLIENT}),
    Role.CLIENT: frozenset({Role.PREFILL, Role.DECODE}),
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """``HOST:PORT``; IPv6 in brackets. Raises :class:`ConfigError`."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
            raise ConfigError(f"{text!r} isn't an address; expected HOST:PORT")
        return cls(host, int(port))

    @property
    def family(self) -> int:
        """Of the address, as sockets name it: IPv6 where it has colons."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Event:
    """``kind``: joined, message or left. ``why``: of one that left."""

    kind: str
    peer: int
    role: Role
    message: Message | None = None
    why: str = ""


@dataclass(eq=False, slots=True)
class _Connection:
    peer: int
    sock: socket.socket
    address: Address | None
    """Of one that this side went to; it goes there again."""
    nonce: bytes
    decoder: Decoder = field(default_factory=lambda: Decoder(_GREETING_BYTES))
    unsent: deque[memoryview] = field(default_factory=deque)
    waiting: int = 0
    connecting: bool = False
    role: Role | None = None
    theirs: bytes = b""
    proved: bool = False
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)


class Hub:
    """The connections of one process.

    ``listen``: where it accepts others; None: nowhere. ``secret``: shared by all processes; each proves that it knows it,
    before anything else it says is read. ``silence_s``: who says nothing for so long is gone.
    """

    def __init__(self, role: Role, *, listen: Address | None, secret: bytes = b"", silence_s: float = 30.0) -> None:
        self._role, self._secret, self._silence_s = role, secret, silence_s
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._number = 0
        self._again: dict[Address, float] = {}
        self._events: deque[Event] = deque()
        self._listener: socket.socket | None = None
        self.address = listen
        if listen is not None:
            check_exposed(listen.host, secret)
            try:
                self._listener = socket.create_server((listen.host, listen.port), family=listen.family)
            except OSError as error:
                raise ConfigError(f"can't listen on {listen}: {error.strerror}") from None
            self._listener.setblocking(False)
            self.address = Address(listen.host, self._listener.getsockname()[1])
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def reach(self, address: Address) -> None:
        """Connect to a server, now and again whenever it's lost."""
        self._again[address] = 0.0

    def send(self, peer: int, message: Message) -> None:
        """Queue a message. One for somebody who is gone is dropped: *left* says so, or will."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._queue(connection, message)

    def drop(self, peer: int, why: str) -> None:
        """End a connection; *left* follows."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._lose(connection, why)

    def refuse_new(self) -> None:
        """Accept nobody any more."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def poll(self, seconds: float) -> list[Event]:
        """What has happened; waits at most so long for anything."""
        self._reconnect()
        if self._events:
            seconds = 0.0
        for key, mask in self._selector.select(min(seconds, _PING_S)):
            if key.data is None:
                self._accept()
                continue
            connection: _Connection = key.data
            if mask & selectors.EVENT_WRITE and connection.peer in self._connections:
                self._flush(connection)
            if mask & selectors.EVENT_READ and connection.peer in self._connections:
                self._receive(connection)
        self._look_after()
        found = list(self._events)
        self._events.clear()
        return found

    def close(self) -> None:
        """End every connection, after what can be sent at once."""
        self._again.clear()
        for connection in list(self._connections.values()):
            self._flush(connection)
            self._lose(connection, "closed")
        self.refuse_new()
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
        there = {connection.address for connection in self._connections.values()}
        for address, after in self._again.items():
            if address in there or now < after:
                continue
            self._again[address] = now + 0.25
            try:
                info = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
                sock = socket.socket(info[0], info[1], info[2])
                sock.setblocking(False)
                sock.connect_ex(info[4])
            except OSError:
                continue
            self._add(sock, address)

    def _add(self, sock: socket.socket, address: Address | None) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._number += 1
        connection = _Connection(self._number, sock, address, secrets.token_bytes(32), connecting=address is not None)
        self._connections[connection.peer] = connection
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        hello = {"version": VERSION, "role": self._role, "nonce": connection.nonce.hex()}
        self._queue(connection, Message("hello", hello))

    def _queue(self, connection: _Connection, message: Message) -> None:
        data = message.encode()
        connection.unsent.append(memoryview(data))
        connection.waiting += len(data)
        connection.said = time.monotonic()
        if connection.waiting > _UNSENT_BYTES:
            self._lose(connection, "it doesn't read what it's sent")
        elif not connection.connecting:
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        connection.connecting = False
        try:
            while connection.unsent:
                sent = connection.sock.send(connection.unsent[0])
                connection.waiting -= sent
                if sent < len(connection.unsent[0]):
                    connection.unsent[0] = connection.unsent[0][sent:]
                    break
                connection.unsent.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._lose(connection, str(error.strerror))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, wanted, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(connection, str(error.strerror))
            return
        if not data:
            self._lose(connection, "it closed the connection")
            return
        connection.heard = time.monotonic()
        try:
            for message in connection.decoder.feed(data):
                if connection.peer not in self._connections:
                    return
                self._take(connection, message)
        except WireError as error:
            self._lose(connection, str(error))

    def _take(self, connection: _Connection, message: Message) -> None:
        if not connection.proved:
            self._greet(connection, message)
        elif message.kind != "ping":
            assert connection.role is not None
            self._events.append(Event("message", connection.peer, connection.role, message))

    def _greet(self, connection: _Connection, message: Message) -> None:
        """Each side sends a number that it draws; each answers with the other's, signed by the secret and its own role."""
        body = message.body
        try:
            if message.kind == "hello" and connection.role is None:
                if body["version"] != VERSION:
                    raise WireError(f"it speaks version {body['version']!r} of these messages, this one speaks {VERSION}")
                connection.role, connection.theirs = Role(body["role"]), bytes.fromhex(body["nonce"])
                if connection.role not in _SPEAKS_TO[self._role] or len(connection.theirs) != 32:
                    raise WireError(f"a {connection.role} has nothing to say to a {self._role}")
                self._queue(connection, Message("proof", {"proof": self._proof(connection.theirs, self._role)}))
            elif message.kind == "proof" and connection.role is not None:
                if not hmac.compare_digest(str(body["proof"]), self._proof(connection.nonce, connection.role)):
                    raise WireError("it doesn't know the secret")
                connection.proved, connection.decoder.limit = True, _MESSAGE_BYTES
                self._events.append(Event("joined", connection.peer, connection.role))
            else:
                raise WireError(f"it says {message.kind!r} where it should say who it is")
        except (KeyError, ValueError, TypeError) as error:
            raise WireError(f"its greeting can't be read: {error}") from None

    def _proof(self, nonce: bytes, role: Role) -> str:
        return hmac.new(self._secret, nonce + role.encode(), "sha256").hexdigest()

    def _look_after(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if not connection.proved and now - connection.began > _GREETING_S:
                self._lose(connection, "it didn't say who it is")
            elif now - connection.heard > self._silence_s:
                self._lose(connection, f"it said nothing for {self._silence_s:g} s")
            elif connection.proved and now - connection.said > _PING_S:
                self._queue(connection, Message("ping"))

    def _lose(self, connection: _Connection, why: str) -> None:
        if self._connections.pop(connection.peer, None) is None:
            return
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.proved and connection.role is not None:
            self._events.append(Event("left", connection.peer, connection.role, why=why))


def check_exposed(host: str, secret: bytes) -> None:
    """Raise :class:`ConfigError` for an address that others can reach without a secret that they need."""
    if secret or host in ("localhost", "::1") or host.startswith("127."):
        return
    raise ConfigError(
        f"{host} can be reached from other machines, and anybody there could read and write requests and pages: give "
        "--api-key-file, or listen on 127.0.0.1"
    )


def body_of(event: Event) -> Mapping[str, Any]:
    """The body of a message event."""
    assert event.message is not None
    return event.message.body
