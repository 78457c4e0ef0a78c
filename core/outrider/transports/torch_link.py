"""torch.distributed: sends and receives by gloo, through host memory, by two threads on each side.

No side writes into the other's memory: the receiver's own thread does, behind a lock that :meth:`~TorchLink.close` takes.
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
from outrider.transports.link import NOTICE_BYTES, Link, LinkDown, Transfer, Transport, check_blocks

dist: Any = distributed  # torch types little of it
_HEADER, _BODY = 1, 2
"""Tags. Each side sends from one thread, so that bodies follow their headers."""
_MAGIC = 0x6F757472
_WAIT = timedelta(days=30)
_JOIN_S = 5.0


class _Kind(IntEnum):
    WRITE = 1
    """Header, blocks, notice, bytes of each region."""
    OVER = 2
    """The write of that number has landed."""
    READ = 3
    """Write these blocks of yours to those of mine, as an answer to the read of that number."""
    ANSWER = 4
    END = 5


@dataclass(eq=False, slots=True)
class _Job:
    kind: _Kind
    number: int
    ours: list[int]
    theirs: list[int]
    notice: bytes = b""


class TorchTransport(Transport):
    """Links of gloo process groups of two. Works with memory of any backend whose work runs by itself."""

    name = "torch"

    def open(self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str) -> TorchLink:
        """Begin to listen on ``host``, where this side accepts."""
        return TorchLink(regions, backend, rank=0 if accepts else 1, host=host)


class TorchLink(Link):
    """One side; rank 0 is the one that accepts."""

    def __init__(self, regions: Sequence[Tensor], backend: Backend, *, rank: int, host: str) -> None:
        super().__init__(TorchTransport.name, regions, backend)
        if not dist.is_available() or not dist.is_gloo_available():
            raise CapabilityError("this torch was built without gloo, which the transport torch needs")
        if backend.control is not None:
            raise CapabilityError(
                f"{backend.label} runs when its schedule says so; the transport torch has threads of its own"
            )
        self._rank, self._host = rank, host
        self._on_host = all(region.device.type == "cpu" for region in self.regions)
        self._flat = tuple(region.view(self.blocks, -1).view(torch.uint8) for region in self.regions)
        self._lock = threading.Lock()
        self._closed = False
        self._down: str | None = None
        self._numbers = count(1)
        self._waiting: dict[int, _Awaited] = {}
        self._notices: deque[bytes] = deque()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._store: Any = None
        self._listener: socket.socket | None = None
        self._address: dict[str, Any] = {}
        self._stream = None if self._on_host else backend.create_stream("network")
        if rank == 0:
            self._listener = socket.create_server((host, 0))
            self._address = {"host": host, "port": self._listener.getsockname()[1]}

    def notices(self) -> list[bytes]:
        """What the receiving thread has put into memory."""
        found = []
        while self._notices:
            found.append(self._notices.popleft())
        if not found:
            self.check_up()
        return found

    def close(self) -> None:
        """Take the lock: from then on the receiving thread writes nothing. The threads end when the other side has heard of
        it, or is dead; one that hangs is waited for a few seconds.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._down = self._down or "it was closed"
        self._jobs.put(_Job(_Kind.END, 0, [], []))
        self._jobs.put(None)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.close()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def check_up(self) -> None:
        """Raise :class:`LinkDown` once it is."""
        if self._down is not None:
            raise LinkDown(f"this link is down: {self._down}")

    def _offer(self) -> bytes:
        return json.dumps(self._address).encode()

    def _connect(self, address: bytes) -> None:
        host, port = self._host, 0
        if self._rank == 1:
            try:
                read = json.loads(address)
                host, port = str(read["host"]), read["port"]
                if type(port) is not int or not 0 < port < 1 << 16:
                    raise ValueError("the port is out of range")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(f"the other side's address can't be read: {error}") from None
        ready: SimpleQueue[Any] = SimpleQueue()
        sender = threading.Thread(target=self._send_all, args=(host, port, ready), name="outrider-link-send", daemon=True)
        receiver = threading.Thread(target=self._receive_all, args=(ready,), name="outrider-link-receive", daemon=True)
        self._threads = [sender, receiver]
        for thread in self._threads:
            thread.start()

    def _write(self, ours: list[int], theirs: list[int], notice: bytes, read: Fence | None) -> Transfer:
        del read
        return self._ask(_Kind.WRITE, ours, theirs, notice)

    def _read(self, ours: list[int], theirs: list[int]) -> Transfer:
        return self._ask(_Kind.READ, ours, theirs, b"")

    def _ask(self, kind: _Kind, ours: list[int], theirs: list[int], notice: bytes) -> Transfer:
        self.check_up()
        number = next(self._numbers)
        self._waiting[number] = awaited = _Awaited(self)
        awaited.into = ours if kind is _Kind.READ else []
        self._jobs.put(_Job(kind, number, ours, theirs, notice))
        return awaited

    # -- the sending thread ------------------------------------------------------------------------------------------

    def _send_all(self, host: str, port: int, ready: SimpleQueue[Any]) -> None:
        try:
            group = self._join(host, port)
        except Exception as error:
            ready.put(None)
            self._fail(f"no connection came about: {error}")
            return
        ready.put(group)
        try:
            while (job := self._jobs.get()) is not None:
                self._send_job(group, job)
        except Exception as error:
            self._fail(str(error).splitlines()[0])

    def _join(self, host: str, port: int) -> Any:
        """The group of the two sides; returns when the other one is there."""
        short = timedelta(seconds=60)
        if self._listener is not None:
            listening = self._listener.detach()
            number = 0  # the store's own is that of the socket
            self._store = dist.TCPStore(
                self._host, number, 2, is_master=True, timeout=short, wait_for_workers=False, master_listen_fd=listening
            )
        else:
            self._store = dist.TCPStore(host, port, 2, is_master=False, timeout=short, wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = _WAIT
        return dist.ProcessGroupGloo(self._store, self._rank, 2, options)

    def _send_job(self, group: Any, job: _Job) -> None:
        sends = job.kind in (_Kind.WRITE, _Kind.ANSWER)
        header = [_MAGIC, job.kind, job.number, len(job.theirs), len(job.notice)]
        body = [torch.tensor(job.theirs, dtype=torch.int64)] if job.theirs else []
        if job.kind is _Kind.READ:
            body.append(torch.tensor(job.ours, dtype=torch.int64))
        if job.notice:
            body.append(torch.frombuffer(bytearray(job.notice), dtype=torch.uint8))
        if sends:
            body += self._gathered(job.ours)
        peer = 1 - self._rank
        group.send([torch.tensor(header, dtype=torch.int64)], peer, _HEADER).wait()
        for part in body:
            group.send([part], peer, _BODY).wait()

    def _gathered(self, blocks: list[int]) -> list[Tensor]:
        index = torch.tensor(blocks, dtype=torch.int64)
        if self._stream is None:
            return [region.index_select(0, index) for region in self._flat]
        found = []
        with self.backend.on(self._stream):
            chosen = index.to(self.backend.device)
            taken = [region.index_select(0, chosen) for region in self._flat]
        for part in taken:
            host = self.backend.empty_pinned("link", part.shape, torch.uint8)
            host.renew()
            self.backend.copy_async(host.tensor, part, stream=self._stream)
            found.append(host.tensor)
        self._stream.synchronize()
        return found

    # -- the receiving thread ----------------------------------------------------------------------------------------

    def _receive_all(self, ready: SimpleQueue[Any]) -> None:
        group = ready.get()
        if group is None:
            return
        try:
            while self._receive_one(group):
                pass
        except Exception as error:
            self._fail(str(error).splitlines()[0])

    def _receive_one(self, group: Any) -> bool:
        """Take one message in. False after the last one. What doesn't fit the registered memory ends the link."""
        header = self._received(group, 5, torch.int64, _HEADER).tolist()
        magic, kind, number, blocks, noticed = header
        if magic != _MAGIC or not 0 <= blocks <= self.blocks or not 0 <= noticed <= NOTICE_BYTES:
            raise ConfigError("the other side sent something that isn't a message")
        if kind == _Kind.END:
            self._fail("the other side closed it")
            self._jobs.put(_Job(_Kind.END, 0, [], []))  # its receiving thread waits for that
            self._jobs.put(None)
            return False
        listed = self._received(group, blocks, torch.int64).tolist() if blocks else []
        if kind == _Kind.OVER:
            self._finish(number)
        elif kind == _Kind.READ:
            asked = listed  # the blocks of this side; behind them come those of the other one
            into = self._received(group, blocks, torch.int64).tolist()
            check_blocks(asked, self.blocks, "this side")
            self._jobs.put(_Job(_Kind.ANSWER, number, asked, into))
        elif kind in (_Kind.WRITE, _Kind.ANSWER):
            notice = bytes(self._received(group, noticed, torch.uint8).tolist()) if noticed else b""
            self._land(group, listed)
            if kind == _Kind.WRITE:
                self._notices.append(notice)
                self._jobs.put(_Job(_Kind.OVER, number, [], []))
            else:
                self._finish(number)
        else:
            raise ConfigError(f"the other side sent a message of the unknown kind {kind}")
        return True

    def _land(self, group: Any, blocks: list[int]) -> None:
        check_blocks(blocks, self.blocks, "this side")
        index = torch.tensor(blocks, dtype=torch.int64)
        for region in self._flat:
            came = self._received(group, len(blocks) * region.shape[1], torch.uint8).view(len(blocks), region.shape[1])
            with self._lock:
                if self._closed:
                    raise LinkDown("it was closed")
                if self._stream is None:
                    region.index_copy_(0, index, came)
                    continue
                with self.backend.on(self._stream):
                    region.index_copy_(0, index.to(self.backend.device), came.to(self.backend.device))
                self._stream.synchronize()

    def _received(self, group: Any, size: int, dtype: torch.dtype, tag: int = _BODY) -> Tensor:
        made = torch.empty(size, dtype=dtype)
        group.recv([made], 1 - self._rank, tag).wait()
        return made

    def _finish(self, number: int) -> None:
        awaited = self._waiting.pop(number, None)
        if awaited is not None:
            awaited.over = True

    def _fail(self, why: str) -> None:
        self._down = self._down or why


class _Awaited(Transfer):
    def __init__(self, link: TorchLink) -> None:
        self._link = link
        self.over = False
        self.into: list[int] = []

    def done(self) -> bool:
        """Whether the other side has said so."""
        if not self.over:
            self._link.check_up()
        return self.over
