"""The transport ``torch``: sends and receives of gloo (torch.distributed) through host memory, with two threads on each side.

No side writes the other side's memory directly. The receiver's thread writes it under a lock, which :meth:`TorchLink.close`
takes.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, distributed

from outrider.device import Backend, CapabilityError, ConfigError, Fence
from outrider.transports.link import NOTICE_BYTES, Link, LinkDown, PageTransfer, Transport, check_blocks

dist: Any = distributed  # torch has no types for most of it
_HEADER_TAG, _BODY_TAG = 1, 2
"""Message tags of gloo. Each side sends from one thread, so the parts of a body follow their header."""
_HEADER_FIELDS = 5
_MAGIC = 0x6F757472
_RECEIVE_TIMEOUT = timedelta(days=30)
_CONNECT_TIMEOUT = timedelta(seconds=60)
_JOIN_TIMEOUT_S = 5.0


class _Kind(IntEnum):
    WRITE = 1
    """Message kind: write blocks. Its parts are header, block numbers, notice, and the bytes of each region."""
    OVER = 2
    """Message kind: the write with the header's number is in this side's memory."""
    END = 3
    """Message kind: the sender has closed the link."""


@dataclass(eq=False, slots=True)
class _TransferJob:
    kind: _Kind
    number: int
    """Number of the transfer on the side that started it."""
    local_blocks: list[int]
    peer_blocks: list[int]
    notice: bytes = b""


class TorchTransport(Transport):
    """A factory of links, each a gloo process group of two. It works with every backend except simulated devices."""

    name = "torch"

    def open(
        self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str, states: Sequence[Tensor] = ()
    ) -> TorchLink:
        """Create one side of a link. With ``accepts``, it listens on a free port of ``host``."""
        return TorchLink(regions, backend, states, rank=0 if accepts else 1, host=host)


class TorchLink(Link):
    """One side of a gloo link. Rank 0 is the side that accepts the connection."""

    def __init__(
        self, regions: Sequence[Tensor], backend: Backend, states: Sequence[Tensor], *, rank: int, host: str
    ) -> None:
        super().__init__(TorchTransport.name, regions, backend, states)
        if not dist.is_available() or not dist.is_gloo_available():
            raise CapabilityError("this torch was built without gloo, which the transport torch needs")
        if backend.control is not None:
            raise CapabilityError(
                f"{backend.label} runs when its schedule says so; the transport torch has threads of its own"
            )
        self._rank, self._host = rank, host
        self._on_host = all(region.device.type == "cpu" for region in self.regions)
        self._flat = tuple(region.view(region.shape[0], -1).view(torch.uint8) for region in self.regions)
        self._lock = threading.Lock()
        self._closed = False
        self._down: str | None = None
        self._numbers = count(1)
        self._transfers: dict[int, _GlooTransfer] = {}
        """Running transfers that this side has started, by number."""
        self._notices: deque[bytes] = deque()
        self._jobs: SimpleQueue[_TransferJob | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._store: Any = None
        self._listener: socket.socket | None = None
        self._address: dict[str, Any] = {}
        self._stream = None if self._on_host else backend.create_stream("network")
        if rank == 0:
            self._listener = socket.create_server((host, 0))
            self._address = {"host": host, "port": self._listener.getsockname()[1]}

    def notices(self) -> list[bytes]:
        """Return the notices of the writes that the receiving thread has written to memory."""
        notices = []
        while self._notices:
            notices.append(self._notices.popleft())
        if not notices:
            self.require_up()
        return notices

    def close(self) -> None:
        """Close the link under the lock, after which the receiving thread writes no memory.

        The threads end once the other side has received *END*, or is dead. The call waits up to 5 s for each thread.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._down = self._down or "it was closed"
        self._jobs.put(_TransferJob(_Kind.END, 0, [], []))
        self._jobs.put(None)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.close()
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)

    def require_up(self) -> None:
        """Raise :class:`LinkDown` if this link is down."""
        if self._down is not None:
            raise LinkDown(f"this link is down: {self._down}")

    def _offer(self) -> bytes:
        return json.dumps(self._address).encode()

    def _connect(self, address: bytes) -> None:
        host, port = self._host, 0
        if self._rank == 1:
            try:
                fields = json.loads(address)
                host, port = str(fields["host"]), fields["port"]
                if type(port) is not int or not 0 < port < 1 << 16:
                    raise ValueError("the port is out of range")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(f"the other side's address can't be read: {error}") from None
        group: SimpleQueue[Any] = SimpleQueue()  # the sender passes the process group, or None, to the receiver
        sender = threading.Thread(target=self._send_all, args=(host, port, group), name="outrider-link-send", daemon=True)
        receiver = threading.Thread(target=self._receive_all, args=(group,), name="outrider-link-receive", daemon=True)
        self._threads = [sender, receiver]
        for thread in self._threads:
            thread.start()

    def _write(self, local_blocks: list[int], peer_blocks: list[int], notice: bytes, read: Fence | None) -> PageTransfer:
        del read
        self.require_up()
        number = next(self._numbers)
        self._transfers[number] = transfer = _GlooTransfer(self)
        self._jobs.put(_TransferJob(_Kind.WRITE, number, local_blocks, peer_blocks, notice))
        return transfer

    # -- the sending thread ------------------------------------------------------------------------------------------

    def _send_all(self, host: str, port: int, group_queue: SimpleQueue[Any]) -> None:
        try:
            group = self._create_group(host, port)
        except Exception as error:
            group_queue.put(None)
            self._fail(f"no connection came about: {error}")
            return
        group_queue.put(group)
        try:
            while (job := self._jobs.get()) is not None:
                self._send_job(group, job)
        except Exception as error:
            self._fail(str(error).splitlines()[0])

    def _create_group(self, host: str, port: int) -> Any:
        """Create the process group of the two sides. Returns when the other side has connected."""
        timeouts = {"timeout": _CONNECT_TIMEOUT, "wait_for_workers": False}
        if self._listener is not None:
            listening = self._listener.detach()
            any_port = 0  # the store uses the port of the listening socket
            self._store = dist.TCPStore(self._host, any_port, 2, is_master=True, master_listen_fd=listening, **timeouts)
        else:
            self._store = dist.TCPStore(host, port, 2, is_master=False, **timeouts)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = _RECEIVE_TIMEOUT
        return dist.ProcessGroupGloo(self._store, self._rank, 2, options)

    def _send_job(self, group: Any, job: _TransferJob) -> None:
        header = [_MAGIC, job.kind, job.number, len(job.peer_blocks), len(job.notice)]
        body = [torch.tensor(job.peer_blocks, dtype=torch.int64)] if job.peer_blocks else []
        if job.notice:
            body.append(torch.frombuffer(bytearray(job.notice), dtype=torch.uint8))
        if job.kind is _Kind.WRITE:
            body += self._gather_blocks(job.local_blocks)
        peer = 1 - self._rank
        group.send([torch.tensor(header, dtype=torch.int64)], peer, _HEADER_TAG).wait()
        for part in body:
            group.send([part], peer, _BODY_TAG).wait()

    def _gather_blocks(self, blocks: list[int]) -> list[Tensor]:
        """Return the bytes of ``blocks`` of each region in host memory, as uint8 tensors [blocks, bytes of a block]."""
        indices = self._indices(blocks)
        if self._stream is None:
            return [region.index_select(0, index) for region, index in zip(self._flat, indices, strict=True)]
        host_parts = []
        with self.backend.on(self._stream):
            device_parts = [
                region.index_select(0, index.to(self.backend.device))
                for region, index in zip(self._flat, indices, strict=True)
            ]
        for part in device_parts:
            host = self.backend.empty_pinned("link", part.shape, torch.uint8)
            host.renew()
            self.backend.copy_async(host.tensor, part, stream=self._stream)
            host_parts.append(host.tensor)
        self._stream.synchronize()
        return host_parts

    def _indices(self, blocks: list[int]) -> list[Tensor]:
        """Return the blocks of each region among this side's ``blocks``, int64 each."""
        return [torch.tensor(each, dtype=torch.int64) for each in self._split(blocks, self.blocks)]

    # -- the receiving thread ----------------------------------------------------------------------------------------

    def _receive_all(self, group_queue: SimpleQueue[Any]) -> None:
        group = group_queue.get()
        if group is None:
            return
        try:
            while self._receive_one(group):
                pass
        except Exception as error:
            self._fail(str(error).splitlines()[0])

    def _receive_one(self, group: Any) -> bool:
        """Receive and handle one message. Return False after the last message.

        Raises :class:`ConfigError`, which ends the link, for a message that doesn't fit the registered memory.
        """
        header = self._receive(group, _HEADER_FIELDS, torch.int64, _HEADER_TAG).tolist()
        magic, kind, number, num_blocks, notice_bytes = header
        if magic != _MAGIC or not 0 <= num_blocks <= self.blocks + self.rows or not 0 <= notice_bytes <= NOTICE_BYTES:
            raise ConfigError("the other side sent something that isn't a message")
        if kind == _Kind.END:
            self._fail("the other side closed it")
            self._jobs.put(_TransferJob(_Kind.END, 0, [], []))  # the other side's receiving thread waits for it
            self._jobs.put(None)
            return False
        blocks = self._receive(group, num_blocks, torch.int64).tolist() if num_blocks else []
        if kind == _Kind.OVER:
            transfer = self._transfers.pop(number, None)
            if transfer is not None:
                transfer.is_over = True
        elif kind == _Kind.WRITE:
            notice = bytes(self._receive(group, notice_bytes, torch.uint8).tolist()) if notice_bytes else b""
            self._receive_blocks(group, blocks)
            self._notices.append(notice)
            self._jobs.put(_TransferJob(_Kind.OVER, number, [], []))
        else:
            raise ConfigError(f"the other side sent a message of the unknown kind {kind}")
        return True

    def _receive_blocks(self, group: Any, blocks: list[int]) -> None:
        """Receive the bytes of ``blocks`` of each region and write them to this side's memory, under the lock."""
        check_blocks(blocks, self.blocks + self.rows, "this side")
        for region, index in zip(self._flat, self._indices(blocks), strict=True):
            values = self._receive(group, len(index) * region.shape[1], torch.uint8).view(len(index), region.shape[1])
            with self._lock:
                if self._closed:
                    raise LinkDown("it was closed")
                if self._stream is None:
                    region.index_copy_(0, index, values)
                    continue
                with self.backend.on(self._stream):
                    region.index_copy_(0, index.to(self.backend.device), values.to(self.backend.device))
                self._stream.synchronize()

    def _receive(self, group: Any, size: int, dtype: torch.dtype, tag: int = _BODY_TAG) -> Tensor:
        tensor = torch.empty(size, dtype=dtype)
        group.recv([tensor], 1 - self._rank, tag).wait()
        return tensor

    def _fail(self, why: str) -> None:
        self._down = self._down or why


class _GlooTransfer(PageTransfer):
    def __init__(self, link: TorchLink) -> None:
        self._link = link
        self.is_over = False

    def done(self) -> bool:
        """Return whether the other side has confirmed the write."""
        if not self.is_over:
            self._link.require_up()
        return self.is_over
