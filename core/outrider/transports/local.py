"""Both sides in one process, on one backend: copies on a stream of their own, which no other stream waits for.

On a simulated device that stream is the network card: an actor that is ordered by the host alone, whose every order can be
tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from torch import Tensor

from outrider.device import Backend, CapabilityError, ConfigError, Fence
from outrider.transports.link import Link, LinkDown, Transfer, Transport


class LocalTransport(Transport):
    """Links between engines that share a backend object. The two sides are opened with the same transport object."""

    name = "local"

    def __init__(self) -> None:
        self._links: dict[bytes, LocalLink] = {}
        self._numbers = count()

    def open(self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str) -> LocalLink:
        """Make one side; the other one has to be of the same backend object."""
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
        self._arriving: list[tuple[bytes, Fence]] = []

    def expecting(self, notice: bytes, written: Fence) -> None:
        """The fence that is signalled behind the write with that notice, and asked before the notice is given out."""
        self._expected[notice] = written

    def notices(self) -> list[bytes]:
        """Those whose fence is done."""
        found = []
        while self._arriving and self._arriving[0][1].done():
            found.append(self._arriving.pop(0)[0])
        if self._down and not found:
            raise LinkDown("the other side of this link was closed")
        return found

    def close(self) -> None:
        """Wait for the copies of both sides, and end."""
        for link in (self, self._peer):
            if link is not None:
                link._stream.synchronize()
                link._down = True

    def _offer(self) -> bytes:
        return self._key

    def _connect(self, address: bytes) -> None:
        peer = self._transport.find(address)
        if peer.backend is not self.backend:
            raise CapabilityError(f"the other side is on {peer.backend.label}, this one on {self.backend.label}")
        self._peer = peer

    def _write(self, ours: list[int], theirs: list[int], notice: bytes, read: Fence | None) -> Transfer:
        peer = self._alive()
        self._copy(peer.regions, theirs, self.regions, ours)
        read = read or self._fence()
        read.signal(self._stream)
        written = peer._expected.pop(notice, None) or self._fence()
        written.signal(self._stream)
        peer._arriving.append((notice, written))
        return _Copied(self, read)

    def _read(self, ours: list[int], theirs: list[int]) -> Transfer:
        self._copy(self.regions, ours, self._alive().regions, theirs)
        read = self._fence()
        read.signal(self._stream)
        return _Copied(self, read)

    def _copy(self, to: Sequence[Tensor], into: list[int], of: Sequence[Tensor], blocks: list[int]) -> None:
        with self.backend.on(self._stream):
            for target, source in zip(to, of, strict=True):
                for there, here in zip(into, blocks, strict=True):
                    target[there].copy_(source[here])

    def _alive(self) -> LocalLink:
        if self._down or self._peer is None:
            raise LinkDown("the other side of this link was closed")
        return self._peer

    def _fence(self) -> Fence:
        return self.backend.speculative_sync.create_fence("transfer")


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
