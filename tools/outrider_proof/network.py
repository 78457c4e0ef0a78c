"""Moves of requests between two engines of one backend by network, on a stream that only the host orders."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.requests.hand_over import ExpectedPages, LentPages
    from outrider.transports import PageTransfer

APART = 3
"""Turns between what one side learns and what the other does. There is one host here where there would be two: what it learns
for one side would order the other one too. Which side is first changes from move to move.
"""
PATIENCE = 12
"""Turns that a request waits for pages."""


class Network:
    """The pair of network links between two engines."""

    def __init__(self, first: Engine, second: Engine) -> None:
        from outrider.transports.local_transport import LocalTransport

        self.engines = first, second
        transport = LocalTransport()
        self.links = tuple(
            transport.open(engine.page_memory, engine.backend, accepts=not side, host="127.0.0.1")
            for side, engine in enumerate(self.engines)
        )
        for link, other in zip(self.links, reversed(self.links), strict=True):
            link.connect(other.offer())
        self.numbers = count()
        self._arrived: tuple[set[bytes], set[bytes]] = set(), set()

    def has_arrived(self, side: int, notice: bytes) -> bool:
        """Return True once after the notice has arrived at ``side``; callers poll until then."""
        self._arrived[side].update(self.links[side].notices())
        if notice not in self._arrived[side]:
            return False
        self._arrived[side].remove(notice)
        return True

    def close(self) -> None:
        """Close the first link, which ends both sides."""
        self.links[0].close()


class NetworkMove:
    """One request that moves from the engine of ``side`` to the other. ``arrive(side, id)`` is called after the move."""

    def __init__(self, network: Network, side: int, lent: LentPages, arrive: Callable[[int, int], None]) -> None:
        self._network, self._side = network, side
        self._lent, self._arrive = lent, arrive
        self._number = next(network.numbers)
        self._notice = b"%d" % self._number
        self._turns = 0
        self._expected: ExpectedPages | None = None
        self._transfer: PageTransfer | None = None
        self._there = self._back = False

    def _go_back(self, giver: Engine) -> bool:
        """Return the request to its first engine after a timeout, because both engines may wait for each other's pages."""
        giver.lending.returned(self._lent)
        self._arrive(self._side, giver.resume(self._lent.state))
        return True

    def advance(self) -> bool:
        """Advance the move without waiting; return True if the request has arrived and its old pages are free."""
        giver, taker = self._network.engines[self._side], self._network.engines[1 - self._side]
        ours, theirs = self._network.links[self._side], self._network.links[1 - self._side]
        if self._transfer is None:
            self._expected = self._expected or taker.lending.expect(self._lent.state)
            if self._expected is None:
                self._turns += 1
                return self._turns > PATIENCE and self._go_back(giver)
            if not self._lent.ready.done() or not self._expected.free.done():
                return False
            theirs.expect_notice(self._notice, self._expected.written)
            pages = self._expected.pages[: len(self._lent.pages)]
            self._turns = 0
            self._transfer = ours.start_write(self._lent.pages, pages, self._notice, read=self._lent.read)
        assert self._expected is not None
        self._turns += 1
        early, late = self._turns > 0, self._turns > APART
        tells, returns = (late, early) if self._number % 2 else (early, late)
        if tells and not self._there and self._network.has_arrived(1 - self._side, self._notice):
            self._arrive(1 - self._side, taker.lending.arrived(self._expected, self._lent.relay))
            self._there = True
        if returns and not self._back and self._transfer.done():
            giver.lending.returned(self._lent)
            self._back = True
        return self._there and self._back
