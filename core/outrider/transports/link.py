"""What a transport promises. A vendor, or anybody, subclasses :class:`Transport` and :class:`Link`; plugins are found by the
entry-point group ``outrider.transports``.

A *link* joins two processes, once. Each side registers memory with it: *regions*, tensors on one device that consist of
*blocks*, their first dimension; block ``i`` of an engine's page memory is page ``i`` of a layer's keys, say. A transfer moves
chosen blocks of every region. What the two sides say to each other beside that is carried by somebody else: a link only
hands out an *offer*, some bytes that the other side's link needs to connect.

*Order.* A network card is ordered by the host alone. A transfer reads and writes memory at any time between the call that
starts it and the moment when the host has learnt that it's over; streams of the device know nothing of it. So before the
call, the caller has made sure that its own blocks are filled and that the other side's are free. Two transfers of a link
aren't ordered to each other, unless one was over when the other was started.

*Lifetime.* Regions must outlive the link. Blocks of a transfer belong to the link until the transfer is over or
:meth:`Link.close` has returned.

*Errors.* When a peer dies or the network fails, everything that concerns the link raises :class:`LinkDown`, and goes on doing
so: a link doesn't recover, the sides make another one. Nobody may believe bytes of a transfer that wasn't told of.

*Progress.* A transfer is sure to come along only while both sides go on asking, for :meth:`Transfer.done` and
:meth:`Link.notices`; some transports have threads of their own, and need no asking.

*Threads.* One thread uses a link, that of the engine. No call blocks for longer than it takes to hand work over, but
:meth:`Link.close`.
"""

from __future__ import annotations

import base64
import binascii
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from outrider.device import Backend, ConfigError, Fence, OutriderError

NOTICE_BYTES = 256
"""How long a notice may be."""
OFFER_BYTES = 1 << 22
"""How long an offer may be."""


class LinkDown(OutriderError):
    """The other side of a link is gone, or can't be reached."""


class Transfer(ABC):
    """A transfer that was started."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it's over: a write's bytes are in the peer's memory, a read's bytes are here, and this side's blocks may be
        used for something else. Never blocks. Raises :class:`LinkDown`; the blocks are free then once the link is closed.
        """


class Link(ABC):
    """One side of a connection. See the module for order, lifetime, errors and threads.

    ``regions``: contiguous tensors [blocks, ...] on the device of ``backend``, all with the same number of blocks.
    """

    def __init__(self, transport: str, regions: Sequence[Tensor], backend: Backend) -> None:
        self.transport = transport
        self.regions = tuple(regions)
        self.backend = backend
        counts = {region.shape[0] if region.dim() else 0 for region in self.regions}
        if len(counts) != 1 or 0 in counts:
            raise ConfigError(f"the regions of a link have {sorted(counts)} blocks; expected one number for all, above 0")
        if not all(region.is_contiguous() for region in self.regions):
            raise ConfigError("a region of a link isn't contiguous: a block of it would be scattered over memory")
        (self.blocks,) = counts
        self.block_bytes = tuple(region.numel() // self.blocks * region.element_size() for region in self.regions)
        self.peer_blocks = 0

    def offer(self) -> bytes:
        """What the other side's :meth:`connect` takes, at most ``OFFER_BYTES``. The same at each call."""
        text = {"transport": self.transport, "blocks": self.blocks, "block_bytes": list(self.block_bytes)}
        return json.dumps(text | {"address": base64.b64encode(self._offer()).decode()}).encode()

    def connect(self, offer: bytes) -> None:
        """Take the other side's offer; both sides do, in any order. The connection may come about later: what is started
        before that waits. Call once.

        Raises :class:`ConfigError` where the two don't fit, and :class:`LinkDown`.
        """
        read = _read_offer(offer)
        if read["transport"] != self.transport:
            raise ConfigError(f"the other side's transport is {read['transport']!r}, this one's {self.transport!r}")
        if tuple(read["block_bytes"]) != self.block_bytes:
            raise ConfigError(
                f"the other side registers regions of {read['block_bytes']} bytes a block, this one "
                f"{list(self.block_bytes)}: the engines need the same model, dtype, page size and proposer"
            )
        self.peer_blocks = read["blocks"]
        self._connect(read["address"])

    def write(self, ours: Sequence[int], theirs: Sequence[int], notice: bytes, *, read: Fence | None = None) -> Transfer:
        """Start to write this side's blocks ``ours`` to the other side's ``theirs``, each to its own, in every region.

        The other side gets ``notice`` from :meth:`notices` after all bytes are in its memory, visible to whatever it enqueues
        or starts from then on. ``read`` is for links whose copies are work of the backend, on streams: such a link
        signals it behind them, and ``done`` asks it; others leave it alone.

        Raises :class:`ConfigError` for blocks that don't exist, and :class:`LinkDown`.
        """
        self._check(ours, theirs, notice)
        return self._write(list(ours), list(theirs), bytes(notice), read)

    def read(self, ours: Sequence[int], theirs: Sequence[int]) -> Transfer:
        """Start to read the other side's blocks ``theirs`` into this side's ``ours``. The other side learns nothing of it.

        Raises as :meth:`write` does.
        """
        self._check(ours, theirs, b"")
        return self._read(list(ours), list(theirs))

    def expecting(self, notice: bytes, written: Fence) -> None:
        """The fence for the arrival of ``notice``, before the other side is told where to write. For links whose copies are
        work of the backend; others need none.
        """
        del notice, written

    @abstractmethod
    def notices(self) -> list[bytes]:
        """Notices of writes that have arrived, each once. Never blocks. Raises :class:`LinkDown` once there are no more."""

    @abstractmethod
    def close(self) -> None:
        """End the link. When it returns, no byte of this side's memory is read or written on its behalf any more, whatever
        the other side does. Allowed twice, and after the other side's death; the only call that may take long.
        """

    @abstractmethod
    def _offer(self) -> bytes:
        """What :meth:`_connect` of the other side needs."""

    @abstractmethod
    def _connect(self, address: bytes) -> None:
        """Transport's verb for :meth:`connect`. ``address`` is what the other side's :meth:`_offer` gave, and its word alone:
        check it.
        """

    @abstractmethod
    def _write(self, ours: list[int], theirs: list[int], notice: bytes, read: Fence | None) -> Transfer:
        """Transport's verb for :meth:`write`."""

    @abstractmethod
    def _read(self, ours: list[int], theirs: list[int]) -> Transfer:
        """Transport's verb for :meth:`read`."""

    def _check(self, ours: Sequence[int], theirs: Sequence[int], notice: bytes) -> None:
        if not self.peer_blocks:
            raise LinkDown("this link isn't connected; connect it with the other side's offer first")
        if len(ours) != len(theirs) or not ours:
            raise ConfigError(f"{len(ours)} blocks can't go to {len(theirs)}; expected as many, at least one")
        check_blocks(ours, self.blocks, "this side")
        check_blocks(theirs, self.peer_blocks, "the other side")
        if len(notice) > NOTICE_BYTES:
            raise ConfigError(f"a notice of {len(notice)} bytes is too long; expected at most {NOTICE_BYTES}")


class Transport(ABC):
    """Makes links. ``name``: that of its entry point."""

    name: str

    @abstractmethod
    def open(self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str) -> Link:
        """Register ``regions`` and make one side of a link; it's connected later.

        One of the two sides ``accepts``, the other one came to it. ``host``: this machine's address that the other side
        reaches it by; a transport listens nowhere else. Raises :class:`~outrider.device.CapabilityError` where it can't move
        such memory.
        """


def check_blocks(blocks: Sequence[int], count: int, whose: str) -> None:
    """Raise :class:`ConfigError` unless each is the number of a block, and none is there twice."""
    if not all(type(block) is int and 0 <= block < count for block in blocks):
        raise ConfigError(f"{whose} has {count} blocks, and was asked for {sorted(blocks)[-1:]}")
    if len(set(blocks)) != len(blocks):
        raise ConfigError(f"a block of {whose} is named twice in one transfer")


def _read_offer(offer: bytes) -> dict[str, Any]:
    """The parts of an offer, checked. Raises :class:`ConfigError`."""
    if len(offer) > OFFER_BYTES:
        raise ConfigError(f"the other side's offer has {len(offer)} bytes; expected at most {OFFER_BYTES}")
    try:
        read = json.loads(offer)
        sizes = read["block_bytes"]
        whole = [read["blocks"], *sizes]
        if not isinstance(read["transport"], str) or not all(type(each) is int and 0 < each < 1 << 48 for each in whole):
            raise ValueError("a number is missing or out of range")
        address = base64.b64decode(read["address"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise ConfigError(f"the other side's offer can't be read: {error}") from None
    return {"transport": read["transport"], "blocks": read["blocks"], "block_bytes": sizes, "address": address}
