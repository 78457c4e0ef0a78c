"""Both sides in one process: copies on a stream of their own, which no other stream waits for.

On a simulated device that stream is the network card: an actor that is ordered by the host alone, whose every order can be
tried. Between two backends, such as those of two devices, the bytes go through the host's memory, and each side's copies are
on its own stream: there is no fence that both know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from torch import Tensor

from outrider.device import Backend, ConfigError, Fence, PinnedBuffer
from outrider.transports.link import Link, LinkDown, Transfer, Transport


class LocalTransport(Transport):
    """Links between engines of one process. The two sides are opened with the same transport object."""

    name = "local"

    def __init__(self) -> None:
        self._links: dict[bytes, LocalLink] = {}
        self._numbers = count()

    def open(self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str) -> LocalLink:
        """Make one side."""
        del accepts, host
        key = b"local %d" % next(self._numbers)
        self._links[key] = made = LocalLink(self, key, regions, backend)
        return made

    def find(self, key: bytes) -> LocalLink:
        """The side with that offer. Raises :class:`ConfigError` where there is none in this process."""
        if key not in self._links:
            raise ConfigError("the other side isn't in this process, or was opened with another transport object")
        return self._links[key]


class LocalLink(Link):
    """One side. A write is made of copies on the link's own stream."""

    def __init__(self, transport: LocalTransport, key: bytes, regions: Sequence[Tensor], backend: Backend) -> None:
        super().__init__(transport.name, regions, backend)
        self._transport, self._key = transport, key
        self._stream = backend.create_stream("network")
        self._peer: LocalLink | None = None
        self._down = False
        self._expected: dict[bytes, Fence] = {}
        self._arriving: list[tuple[bytes, Fence, list[PinnedBuffer]]] = []
        self._sent: list[tuple[bytes, list[int], list[Tensor]]] = []
        """Writes from another backend whose bytes are on the host."""

    def expecting(self, notice: bytes, written: Fence) -> None:
        """The fence that is signalled behind the write with that notice, and asked before the notice is given out."""
        self._expected[notice] = written

    def notices(self) -> list[bytes]:
        """Those whose fence is done."""
        while self._sent and not self._down:
            self._land(*self._sent.pop(0))
        found = []
        while self._arriving and self._arriving[0][1].done():
            found.append(self._arriving.pop(0)[0])
        if self._down and not found:
            raise LinkDown("the other side of this link was closed")
        return found

    def close(self) -> None:
        """Wait for the copies of both sides, and end. Those of another backend don't concern this side's memory."""
        for link in (self, self._peer):
            if link is not None:
                link._down = True
                if link.backend is self.backend:
                    link._stream.synchronize()

    def _offer(self) -> bytes:
        return self._key

    def _connect(self, address: bytes) -> None:
        self._peer = self._transport.find(address)

    def _write(self, ours: list[int], theirs: list[int], notice: bytes, read: Fence | None) -> Transfer:
        peer, read = self._alive(), read or self._fence()
        if peer.backend is not self.backend:
            staged = self._stage(self.regions, ours)
            for region, buffer in zip(self.regions, staged, strict=True):
                for place, block in enumerate(ours):
                    self.backend.copy_async(buffer.tensor[place], region[block], stream=self._stream)
            read.signal(self._stream)
            return _Sent(self, read, lambda: peer._sent.append((notice, theirs, [each.tensor.clone() for each in staged])))
        self._copy(peer.regions, theirs, self.regions, ours)
        read.signal(self._stream)
        written = peer._expected.pop(notice, None) or self._fence()
        written.signal(self._stream)
        peer._arriving.append((notice, written, []))
        return _Copied(self, read)

    def _read(self, ours: list[int], theirs: list[int]) -> Transfer:
        if self._alive().backend is not self.backend:
            raise ConfigError(f"the other side is on {self._alive().backend.label}, and reads go within one backend alone")
        self._copy(self.regions, ours, self._alive().regions, theirs)
        read = self._fence()
        read.signal(self._stream)
        return _Copied(self, read)

    def _copy(self, to: Sequence[Tensor], into: list[int], of: Sequence[Tensor], blocks: list[int]) -> None:
        with self.backend.on(self._stream):
            for target, source in zip(to, of, strict=True):
                for there, here in zip(into, blocks, strict=True):
                    target[there].copy_(source[here])

    def _stage(self, regions: Sequence[Tensor], blocks: list[int]) -> list[PinnedBuffer]:
        made = [self.backend.empty_pinned("link", (len(blocks), *each.shape[1:]), each.dtype) for each in regions]
        for buffer in made:
            buffer.renew()
        return made

    def _land(self, notice: bytes, blocks: list[int], values: list[Tensor]) -> None:
        """Write what came from another backend."""
        staged = self._stage(self.regions, blocks)
        for region, buffer, value in zip(self.regions, staged, values, strict=True):
            buffer.tensor.copy_(value)
            for place, block in enumerate(blocks):
                self.backend.copy_async(region[block], buffer.tensor[place], stream=self._stream)
        written = self._expected.pop(notice, None) or self._fence()
        written.signal(self._stream)
        self._arriving.append((notice, written, staged))

    def _alive(self) -> LocalLink:
        if self._down or self._peer is None:
            raise LinkDown("the other side of this link was closed")
        return self._peer

    def _fence(self) -> Fence:
        return self.backend.speculative_sync.create_fence("transfer")


class _Sent(Transfer):
    """Copies to the host, from where ``then`` hands them on. It's over when this side's blocks are free."""

    def __init__(self, link: LocalLink, over: Fence, then: Callable[[], None]) -> None:
        self._link, self._over = link, over
        self._then: Callable[[], None] | None = then

    def done(self) -> bool:
        """Ask the fence; hand the bytes on."""
        if self._then is None:
            return True
        self._link._alive()
        if not self._over.done():
            return False
        self._then()
        self._then = None
        return True


class _Copied(Transfer):
    """Copies on the link's stream, with a fence behind them."""

    def __init__(self, link: LocalLink, over: Fence) -> None:
        self._link, self._over = link, over

    def done(self) -> bool:
        """Ask the fence."""
        if self._over.done():
            return True
        self._link._alive()
        return False
