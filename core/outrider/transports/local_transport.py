"""A transport between two engines of one process: copies on a separate stream, for which no other stream waits.

On a simulated device this stream acts as the network card: only the host orders it, and the explorer can try every order.
Between two backends, such as those of two devices, the bytes go through host memory. Each side then copies on its own stream,
because two backends share no fence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from torch import Tensor

from outrider.device import Backend, ConfigError, Fence, PinnedBuffer
from outrider.transports.link import Link, LinkDown, PageTransfer, Transport


class LocalTransport(Transport):
    """A factory of links between engines of one process. Open both sides of a link with the same object."""

    name = "local"

    def __init__(self) -> None:
        self._links: dict[bytes, LocalLink] = {}
        self._numbers = count()

    def open(self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str) -> LocalLink:
        """Create one side of a link over ``regions``. ``accepts`` and ``host`` are ignored."""
        del accepts, host
        key = b"local %d" % next(self._numbers)
        link = LocalLink(self, key, regions, backend)
        self._links[key] = link
        return link

    def find_link(self, key: bytes) -> LocalLink:
        """Return the side whose offer is ``key``. Raises :class:`ConfigError` if this object hasn't opened it."""
        if key not in self._links:
            raise ConfigError("the other side isn't in this process, or was opened with another transport object")
        return self._links[key]


class LocalLink(Link):
    """One side of a local link. A write is a series of copies on the link's stream."""

    def __init__(self, transport: LocalTransport, key: bytes, regions: Sequence[Tensor], backend: Backend) -> None:
        super().__init__(transport.name, regions, backend)
        self._transport, self._key = transport, key
        self._stream = backend.create_stream("network")
        self._peer: LocalLink | None = None
        self._down = False
        self._expected: dict[bytes, Fence] = {}
        """Fence of each registered write, by notice."""
        self._arriving: list[tuple[bytes, Fence, list[PinnedBuffer]]] = []
        """Notice, fence and staging buffers of each write whose copies have been enqueued."""
        self._on_host: list[tuple[bytes, list[int], list[Tensor]]] = []
        """Notice, blocks and values of each write from another backend whose bytes are in host memory."""

    def expect_notice(self, notice: bytes, written: Fence) -> None:
        """Register the fence that is signalled after the copies of the write with ``notice``."""
        self._expected[notice] = written

    def notices(self) -> list[bytes]:
        """Return the notices of the writes whose fences have been reached.

        Raises :class:`LinkDown` once the other side has closed the link.
        """
        while self._on_host and not self._down:
            self._write_from_host(*self._on_host.pop(0))
        notices = []
        while self._arriving and self._arriving[0][1].done():
            notices.append(self._arriving.pop(0)[0])
        if self._down and not notices:
            raise LinkDown("the other side of this link was closed")
        return notices

    def close(self) -> None:
        """Close both sides, and wait for their copies on this backend. Copies of another backend don't use this memory."""
        for link in (self, self._peer):
            if link is not None:
                link._down = True
                if link.backend is self.backend:
                    link._stream.synchronize()

    def _offer(self) -> bytes:
        return self._key

    def _connect(self, address: bytes) -> None:
        self._peer = self._transport.find_link(address)

    def _write(self, local_blocks: list[int], peer_blocks: list[int], notice: bytes, read: Fence | None) -> PageTransfer:
        peer, read = self._require_peer(), read or self._create_fence()
        if peer.backend is not self.backend:
            staging = self._create_staging(len(local_blocks))
            for region, buffer in zip(self.regions, staging, strict=True):
                for staged, blocks in _runs(range(len(local_blocks)), local_blocks):
                    with self.backend.on(self._stream):
                        packed = region[blocks].contiguous()  # a copy only if the region has gaps
                    self.backend.copy_async(buffer.tensor[staged], packed, stream=self._stream)
            read.signal(self._stream)

            def pass_to_peer() -> None:
                peer._on_host.append((notice, peer_blocks, [buffer.tensor.clone() for buffer in staging]))

            return _HostTransfer(self, read, pass_to_peer)
        with self.backend.on(self._stream):
            for target, source in zip(peer.regions, self.regions, strict=True):
                for target_blocks, source_blocks in _runs(peer_blocks, local_blocks):
                    target[target_blocks].copy_(source[source_blocks])
        read.signal(self._stream)
        written = peer._expected.pop(notice, None) or self._create_fence()
        written.signal(self._stream)
        peer._arriving.append((notice, written, []))
        return _StreamTransfer(self, read)

    def _create_staging(self, num_blocks: int) -> list[PinnedBuffer]:
        """Return a pinned host buffer for ``num_blocks`` blocks of each region."""
        buffers = [self.backend.empty_pinned("link", (num_blocks, *each.shape[1:]), each.dtype) for each in self.regions]
        for buffer in buffers:
            buffer.renew()
        return buffers

    def _write_from_host(self, notice: bytes, blocks: list[int], values: list[Tensor]) -> None:
        """Copy a write from another backend, which is in host memory, to this side's blocks."""
        staging = self._create_staging(len(blocks))
        for region, buffer, value in zip(self.regions, staging, values, strict=True):
            buffer.tensor.copy_(value)
            for written_blocks, staged in _runs(blocks, range(len(blocks))):
                self.backend.copy_async(region[written_blocks], buffer.tensor[staged], stream=self._stream)
        written = self._expected.pop(notice, None) or self._create_fence()
        written.signal(self._stream)
        self._arriving.append((notice, written, staging))

    def _require_peer(self) -> LocalLink:
        """Return the other side. Raises :class:`LinkDown` unless the link is connected and open."""
        if self._down or self._peer is None:
            raise LinkDown("the other side of this link was closed")
        return self._peer

    def _create_fence(self) -> Fence:
        return self.backend.speculative_sync.create_fence("transfer")


def _runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Return slices of both sequences of block numbers in which the numbers of both are consecutive."""
    start = 0
    for end in range(1, len(first) + 1):
        is_consecutive = end < len(first) and all(each[end] == each[end - 1] + 1 for each in (first, second))
        if not is_consecutive:
            count = end - start
            yield slice(first[start], first[start] + count), slice(second[start], second[start] + count)
            start = end


class _HostTransfer(PageTransfer):
    """A write to another backend: copies to host memory. Then ``pass_to_peer`` gives the bytes to the other side."""

    def __init__(self, link: LocalLink, copied: Fence, pass_to_peer: Callable[[], None]) -> None:
        self._link, self._copied = link, copied
        self._pass_to_peer: Callable[[], None] | None = pass_to_peer

    def done(self) -> bool:
        """Query the fence after the copies. Once it is reached, give the bytes to the other side."""
        if self._pass_to_peer is None:
            return True
        self._link._require_peer()
        if not self._copied.done():
            return False
        self._pass_to_peer()
        self._pass_to_peer = None
        return True


class _StreamTransfer(PageTransfer):
    """A transfer within one backend: copies on the link's stream, followed by a fence."""

    def __init__(self, link: LocalLink, copied: Fence) -> None:
        self._link, self._copied = link, copied

    def done(self) -> bool:
        """Query the fence after the copies. Raises :class:`LinkDown` if it isn't reached and the link is closed."""
        if self._copied.done():
            return True
        self._link._require_peer()
        return False
