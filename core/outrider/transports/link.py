"""The interface of transports, and the transport within a process. A vendor implements the interface by subclasses of
:class:`Transport` and :class:`Link`.

Outrider finds transport plugins by the entry-point group ``outrider.transports``.

A *link* connects two processes. Each side registers memory with it: *regions*, tensors on one device. The first dimension of
a region counts *blocks*. Block ``i`` of an engine's page memory, for example, is page ``i`` of a layer's keys. A transfer
writes selected blocks of every region to the other side. A link exchanges no other data: the caller sends the *offer* of each
side, a byte string that the other side's link needs to connect.

*States.* A link of engines with recurrent layers has further regions, the *states*. Their blocks are rows: row ``i`` is block
number ``blocks + i`` of its side, where ``blocks`` is the number of blocks of each other region there.

*Order.* Only the host orders a network card. A transfer may read and write memory from the call that starts it until the host
learns that it is over. Device streams aren't ordered with it. So before the call, the caller makes sure that its own blocks
are filled and that the other side's blocks are free. Two transfers of a link are unordered, unless one was over before the
other was started.

*Lifetime.* Regions must outlive the link. Blocks of a transfer belong to the link until the transfer is over or
:meth:`Link.close` has returned.

*Errors.* After the death of a peer or a network failure, every call on the link raises :class:`LinkDown`. A link doesn't
recover: the two sides create a new one. Blocks are valid only after the notice of their transfer.

*Progress.* A transfer is guaranteed to make progress only while both sides call :meth:`PageTransfer.done` and
:meth:`Link.notices`. A transport with threads makes progress without these calls.

*Threads.* Use a link in one thread, that of the engine. Only :meth:`Link.close` may block.
"""

from __future__ import annotations

import base64
import binascii
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from torch import Tensor

from outrider.device import Backend, ConfigError, Fence, OutriderError, PinnedBuffer

NOTICE_BYTES = 256
"""Maximum number of bytes of a notice."""
OFFER_BYTES = 1 << 22
"""Maximum number of bytes of an offer."""
_MAX_COUNT = 1 << 48
"""Upper limit of the numbers in an offer from the other side, which is untrusted."""


class LinkDown(OutriderError):
    """Raised when the other side of a link is gone or can't be reached."""


class PageTransfer(ABC):
    """A write of pages to the other side of a link, running or finished."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the transfer is over.

        The bytes are then in the peer's memory, and this side's blocks may be reused. The call never blocks. If it raises
        :class:`LinkDown`, the blocks may be reused once the link is closed.
        """


class Link(ABC):
    """One side of a connection. The module describes order, lifetime, errors and threads.

    ``regions`` are tensors [blocks, ...] on the device of ``backend``, all with the same number of blocks. Each block is
    contiguous. Blocks of a region may have gaps between them, so that a region can be a part of the KV heads. ``states`` are
    tensors [rows, ...] with the same properties.
    """

    def __init__(self, transport: str, regions: Sequence[Tensor], backend: Backend, states: Sequence[Tensor] = ()) -> None:
        self.transport = transport
        self.regions = (*regions, *states)
        """All regions: those of pages, then the states."""
        self.backend = backend
        self.blocks, self.rows = _count_blocks(regions), _count_blocks(states) if states else 0
        if not all(region[0].is_contiguous() for region in self.regions):
            raise ConfigError("a region of a link isn't contiguous: a block of it would be scattered over memory")
        self.block_bytes, self.row_bytes = _bytes_of_blocks(regions), _bytes_of_blocks(states)
        self.peer_blocks = self.peer_rows = 0

    def offer(self) -> bytes:
        """Return the argument for the other side's :meth:`connect`, at most ``OFFER_BYTES`` long.

        Each call returns the same bytes.
        """
        text = {"transport": self.transport, "address": base64.b64encode(self._offer()).decode()}
        text |= {name: getattr(self, name) for name in _SIZES}
        return json.dumps(text).encode()

    def connect(self, offer: bytes) -> None:
        """Connect with the other side's offer. Both sides call this once, in any order.

        The call may return before the connection exists. Transfers that are started earlier wait for the connection. Raises
        :class:`ConfigError` if transport or block sizes of the two sides differ, and :class:`LinkDown`.
        """
        fields = _decode_offer(offer)
        if fields["transport"] != self.transport:
            raise ConfigError(f"the other side's transport is {fields['transport']!r}, this one's {self.transport!r}")
        for name, of in (("block_bytes", "regions of {} bytes a block"), ("row_bytes", "recurrent states of {} bytes a row")):
            theirs, ours = fields[name], list(getattr(self, name))
            if theirs != ours:
                raise ConfigError(
                    f"the other side registers {of.format(theirs)}, this one {ours}: the engines need the same model, dtype, "
                    "page size and proposer"
                )
        self.peer_blocks, self.peer_rows = fields["blocks"], fields["rows"]
        self._connect(fields["address"])

    def start_write(
        self, local_blocks: Sequence[int], peer_blocks: Sequence[int], notice: bytes, *, read: Fence | None = None
    ) -> PageTransfer:
        """Start to write block ``local_blocks[i]`` to the other side's block ``peer_blocks[i]``, for each i and each region
        that has such blocks. A block of states goes to a block of states.

        The other side's :meth:`notices` returns ``notice`` after all bytes are in its memory. The bytes are then visible to
        all work that it enqueues or starts. A link that copies on device streams signals the fence ``read`` after its copies,
        and :meth:`PageTransfer.done` queries the fence. Other links ignore it.

        Raises :class:`ConfigError` for blocks that don't exist, and :class:`LinkDown`.
        """
        self._check(local_blocks, peer_blocks, notice)
        return self._write(list(local_blocks), list(peer_blocks), bytes(notice), read)

    def expect_notice(self, notice: bytes, written: Fence) -> None:
        """Register the fence that the arrival of ``notice`` signals. Call it before the other side may start the write.

        Only links that copy on device streams use the fence; others ignore it.
        """
        del notice, written

    @abstractmethod
    def notices(self) -> list[bytes]:
        """Return the notices of writes that have arrived, each once. Never blocks.

        Raises :class:`LinkDown` if the link is down and all notices have been returned.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the link. After the call, neither this side nor the other side reads or writes this side's memory over it.

        The call may block. It may be made twice, and after the other side's death.
        """

    @abstractmethod
    def _offer(self) -> bytes:
        """Return the address that :meth:`_connect` of the other side needs."""

    @abstractmethod
    def _connect(self, address: bytes) -> None:
        """Connect with the ``address`` that the other side's :meth:`_offer` returned. It is untrusted: check it."""

    @abstractmethod
    def _write(self, local_blocks: list[int], peer_blocks: list[int], notice: bytes, read: Fence | None) -> PageTransfer:
        """Implement :meth:`start_write`. The arguments have been checked."""

    def _check(self, local_blocks: Sequence[int], peer_blocks: Sequence[int], notice: bytes) -> None:
        if not self.peer_blocks:
            raise LinkDown("this link isn't connected; connect it with the other side's offer first")
        if len(local_blocks) != len(peer_blocks) or not local_blocks:
            raise ConfigError(f"{len(local_blocks)} blocks can't go to {len(peer_blocks)}; expected as many, at least one")
        check_blocks(local_blocks, self.blocks + self.rows, "this side")
        check_blocks(peer_blocks, self.peer_blocks + self.peer_rows, "the other side")
        if [block < self.blocks for block in local_blocks] != [block < self.peer_blocks for block in peer_blocks]:
            raise ConfigError("a block of pages can't go to a block of states, nor the reverse")
        if len(notice) > NOTICE_BYTES:
            raise ConfigError(f"a notice of {len(notice)} bytes is too long; expected at most {NOTICE_BYTES}")

    def _split(self, numbers: Sequence[int], blocks: int) -> list[list[int]]:
        """Return the blocks of each region among the block ``numbers`` of a side with ``blocks`` blocks of pages."""
        paged, rows = [each for each in numbers if each < blocks], [each - blocks for each in numbers if each >= blocks]
        return [paged] * len(self.block_bytes) + [rows] * len(self.row_bytes)


class Transport(ABC):
    """A factory of links between two processes."""

    name: str
    """Name of the transport's entry point."""

    @abstractmethod
    def open(
        self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str, states: Sequence[Tensor] = ()
    ) -> Link:
        """Register ``regions`` and ``states``, and create one side of a link, which isn't connected yet.

        The side with ``accepts`` listens, and the other side connects to it. ``host`` is this machine's address for the
        other side, and the only address on which the transport may listen. Raises
        :class:`~outrider.device.CapabilityError` if the transport can't transfer such memory.
        """


def check_blocks(blocks: Sequence[int], count: int, whose: str) -> None:
    """Raise :class:`ConfigError` unless ``blocks`` are distinct numbers from 0 to ``count`` - 1."""
    if not all(type(block) is int and 0 <= block < count for block in blocks):
        raise ConfigError(f"{whose} has {count} blocks, and was asked for {sorted(blocks)[-1:]}")
    if len(set(blocks)) != len(blocks):
        raise ConfigError(f"a block of {whose} is named twice in one transfer")


_SIZES = ("blocks", "block_bytes", "rows", "row_bytes")
"""Fields of an offer that describe the registered memory: attributes of :class:`Link`."""


def _count_blocks(regions: Sequence[Tensor]) -> int:
    """Return the number of blocks of each of ``regions``. Raises :class:`ConfigError` unless it is one number above 0."""
    counts = {region.shape[0] if region.dim() else 0 for region in regions}
    if len(counts) != 1 or 0 in counts:
        raise ConfigError(f"the regions of a link have {sorted(counts)} blocks; expected one number for all, above 0")
    return counts.pop()


def _bytes_of_blocks(regions: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(region[0].numel() * region.element_size() for region in regions)


def _decode_offer(offer: bytes) -> dict[str, Any]:
    """Return the checked fields of an offer. Raises :class:`ConfigError` for an offer that is too long or unreadable."""
    if len(offer) > OFFER_BYTES:
        raise ConfigError(f"the other side's offer has {len(offer)} bytes; expected at most {OFFER_BYTES}")
    try:
        fields = json.loads(offer)
        transport, sizes = fields["transport"], {name: fields[name] for name in _SIZES}
        counts = (sizes["blocks"], sizes["rows"] + 1, *sizes["block_bytes"], *sizes["row_bytes"])
        if not isinstance(transport, str) or not all(type(each) is int and 0 < each < _MAX_COUNT for each in counts):
            raise ValueError("a number is missing or out of range")
        address = base64.b64decode(fields["address"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise ConfigError(f"the other side's offer can't be read: {error}") from None
    return sizes | {"transport": transport, "address": address}


# -- the transport within a process --------------------------------------------------------------------------------------


class LocalTransport(Transport):
    """A factory of links between engines of one process. Open both sides of a link with the same object.

    A link copies on a separate stream, for which no other stream waits. On a simulated device this stream acts as the network
    card: only the host orders it, and the explorer can try every order. Between two backends, such as those of two devices,
    the bytes go through host memory. Each side then copies on its own stream, because two backends share no fence.
    """

    name = "local"

    def __init__(self) -> None:
        self._links: dict[bytes, LocalLink] = {}
        self._numbers = count()

    def open(
        self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str, states: Sequence[Tensor] = ()
    ) -> LocalLink:
        """Create one side of a link over ``regions`` and ``states``. ``accepts`` and ``host`` are ignored."""
        del accepts, host
        key = b"local %d" % next(self._numbers)
        link = LocalLink(self, key, regions, backend, states)
        self._links[key] = link
        return link

    def find_link(self, key: bytes) -> LocalLink:
        """Return the side whose offer is ``key``. Raises :class:`ConfigError` if this object hasn't opened it."""
        if key not in self._links:
            raise ConfigError("the other side isn't in this process, or was opened with another transport object")
        return self._links[key]


class LocalLink(Link):
    """One side of a local link. A write is a series of copies on the link's stream."""

    def __init__(
        self,
        transport: LocalTransport,
        key: bytes,
        regions: Sequence[Tensor],
        backend: Backend,
        states: Sequence[Tensor],
    ) -> None:
        super().__init__(transport.name, regions, backend, states)
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
        sources = self._split(local_blocks, self.blocks)
        if peer.backend is not self.backend:
            staging = self._create_staging(sources)
            for region, buffer, own in zip(self.regions, staging, sources, strict=True):
                for staged, blocks in _runs(range(len(own)), own):
                    with self.backend.on(self._stream):
                        packed = region[blocks].contiguous()  # a copy only if the region has gaps
                    self.backend.copy_async(buffer.tensor[staged], packed, stream=self._stream)
            read.signal(self._stream)

            def pass_to_peer() -> None:
                peer._on_host.append((notice, peer_blocks, [buffer.tensor.clone() for buffer in staging]))

            return _LocalTransfer(self, read, pass_to_peer)
        with self.backend.on(self._stream):
            targets = self._split(peer_blocks, peer.blocks)
            for target, source, numbers in zip(peer.regions, self.regions, zip(targets, sources, strict=True), strict=True):
                for target_blocks, source_blocks in _runs(*numbers):
                    target[target_blocks].copy_(source[source_blocks])
        read.signal(self._stream)
        written = peer._expected.pop(notice, None) or self._create_fence()
        written.signal(self._stream)
        peer._arriving.append((notice, written, []))
        return _LocalTransfer(self, read)

    def _create_staging(self, blocks: Sequence[Sequence[int]]) -> list[PinnedBuffer]:
        """Return a pinned host buffer for ``blocks`` of each region."""
        buffers = [
            self.backend.empty_pinned("link", (len(numbers), *region.shape[1:]), region.dtype)
            for region, numbers in zip(self.regions, blocks, strict=True)
        ]
        for buffer in buffers:
            buffer.renew()
        return buffers

    def _write_from_host(self, notice: bytes, blocks: list[int], values: list[Tensor]) -> None:
        """Copy a write from another backend, which is in host memory, to this side's blocks."""
        targets = self._split(blocks, self.blocks)
        staging = self._create_staging(targets)
        for region, buffer, value, own in zip(self.regions, staging, values, targets, strict=True):
            buffer.tensor.copy_(value)
            for written_blocks, staged in _runs(own, range(len(own))):
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


class _LocalTransfer(PageTransfer):
    """Copies on the link's stream, followed by a fence. In a write to another backend they go to host memory; then
    ``pass_to_peer`` gives the bytes to the other side.
    """

    def __init__(self, link: LocalLink, copied: Fence, pass_to_peer: Callable[[], None] | None = None) -> None:
        self._link, self._copied, self._pass_to_peer = link, copied, pass_to_peer

    def done(self) -> bool:
        """Query the fence after the copies. Raises :class:`LinkDown` if the link is closed before the other side has the
        bytes.
        """
        if self._pass_to_peer is not None:
            self._link._require_peer()
        if not self._copied.done():
            self._link._require_peer()
            return False
        if self._pass_to_peer is not None:
            self._pass_to_peer()
            self._pass_to_peer = None
        return True
