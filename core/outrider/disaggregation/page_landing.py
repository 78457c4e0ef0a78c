"""The receiving end of page transfers from a prefill server: on one rank, or on the ranks of data-parallel groups.

Each rank of the decode server has its own link with the prefill server. The first rank controls the links of the other ranks
with :meth:`~outrider.engine.engine.Engine.ask_ranks`, in JSON, between two iterations. On the other ranks,
:class:`FollowerLinks` executes the requests.
"""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from outrider.device import CapabilityError, ConfigError, DeviceError, EngineStopped, OutriderError
from outrider.engine.engine import Engine
from outrider.engine.requests.hand_over import ExpectedPages
from outrider.transports import Link, LinkDown, Transport


class PageLanding(ABC):
    """The links of a decode server's ranks with one prefill server."""

    @abstractmethod
    def offers(self) -> tuple[bytes, ...]:
        """Return the offer of each rank's link, for the links of the prefill server."""

    @abstractmethod
    def connect(self, offers: Sequence[bytes]) -> None:
        """Connect each rank's link with the prefill server's offer for it. Raises as :meth:`Link.connect` does."""

    @abstractmethod
    def expect_pages(self, notice: bytes, expected: ExpectedPages) -> None:
        """Register a transfer: ``notice`` will report that the pages of the expected request are written."""

    def cancel_landing(self, notice: bytes, expected: ExpectedPages) -> None:
        """Cancel a registered transfer of a request. The prefill server doesn't write its pages."""
        del notice, expected

    @abstractmethod
    def are_pages_free(self, expected: ExpectedPages) -> bool:
        """Return whether the fence *pages free* has been reached: the pages may be written. Raises :class:`LinkDown`.

        Call it until it has returned True once.
        """

    @abstractmethod
    def notices(self) -> list[bytes]:
        """Return the notices of finished writes that have arrived on any rank, each once. Raises :class:`LinkDown`."""

    @abstractmethod
    def close(self) -> None:
        """Close the links. After the call, no link writes on any rank."""


class SingleRankLanding(PageLanding):
    """The landing of an engine of one rank."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def offers(self) -> tuple[bytes, ...]:
        """Return the connection offer of this rank's link."""
        return (self._link.offer(),)

    def connect(self, offers: Sequence[bytes]) -> None:
        """Connect this rank's link with the prefill server's only offer."""
        (offer,) = offers
        self._link.connect(offer)

    def expect_pages(self, notice: bytes, expected: ExpectedPages) -> None:
        """Register the fence *pages written* with the link."""
        self._link.expect_notice(notice, expected.written)

    def are_pages_free(self, expected: ExpectedPages) -> bool:
        """Query the fence *pages free* without waiting."""
        return expected.free.done()

    def notices(self) -> list[bytes]:
        """Return the notices of writes that have arrived on this rank's only link, each once."""
        return self._link.notices()

    def close(self) -> None:
        """Close the link, and wait until the prefill server can no longer write pages over it."""
        self._link.close()


class LandingRegistry:
    """The landings of an engine of several ranks. The first rank has this object, and queries the other ranks with it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count()
        self.landings: dict[int, MultiRankLanding] = {}

    def open_landing(self, link: Link, host: str) -> MultiRankLanding:
        """Open a link on each other rank and return the landing of ``link`` and these links.

        Raises :class:`ConfigError` if a rank can't open its link; ``link`` is then closed.
        """
        number = next(self._numbers)
        try:
            replies = self.query_ranks({"do": "open", "link": number, "host": host})
        except OutriderError:
            link.close()
            raise
        landing = MultiRankLanding(self, number, link, [_decode(each["offer"]) for each in replies])
        self.landings[number] = landing
        return landing

    def query_ranks(self, query: dict[str, Any]) -> list[dict[str, Any]]:
        """Send ``query`` to the other ranks and return the reply of each. Raises :class:`ConfigError` or :class:`LinkDown`.

        The error is that of the first rank whose reply reports one.
        """
        replies = [json.loads(each) for each in self._engine.ask_ranks(json.dumps(query))]
        for rank, reply in enumerate(replies, 1):
            if "down" in reply:
                raise LinkDown(f"rank {rank}: {reply['down']}")
            if "refused" in reply:
                raise ConfigError(f"rank {rank}: {reply['refused']}")
        return replies

    def poll_ranks(self) -> None:
        """Query the link events of the other ranks, if a landing waits for one, and pass them to the landings."""
        if not any(landing.is_waiting for landing in self.landings.values()):
            return
        for reply in self.query_ranks({"do": "look"}):
            for number, events in reply["links"].items():
                landing = self.landings.get(int(number))
                if landing is not None:
                    landing.handle_link_events(events)


class MultiRankLanding(PageLanding):
    """The landing of an engine of data-parallel ranks, on the first rank."""

    def __init__(self, landings: LandingRegistry, number: int, link: Link, offers: Iterable[bytes]) -> None:
        self._landings, self._number, self._link = landings, number, link
        self._offers = (link.offer(), *offers)
        self._is_open = True
        self._waits_for_free: set[int] = set()
        """Requests whose pages on another rank aren't known to be free, by their numbers in :class:`ExpectedPages`."""
        self._freed: set[int] = set()
        """Requests whose pages on another rank are free, until :meth:`are_pages_free` has returned True for them."""
        self._pending_notices: set[bytes] = set()
        """Notices that will arrive on another rank."""
        self._received_notices: list[bytes] = []
        self._down: str | None = None

    @property
    def is_waiting(self) -> bool:
        """True if the landing waits for free pages or for a notice on another rank."""
        return self._is_open and bool(self._waits_for_free or self._pending_notices)

    def offers(self) -> tuple[bytes, ...]:
        """Return the offer of each rank's link, the first rank's first."""
        return self._offers

    def connect(self, offers: Sequence[bytes]) -> None:
        """Connect this rank's link, and make each other rank connect its link."""
        first, *others = offers
        self._link.connect(first)
        encoded = [base64.b64encode(each).decode() for each in others]
        self._landings.query_ranks({"do": "connect", "link": self._number, "offers": encoded})

    def expect_pages(self, notice: bytes, expected: ExpectedPages) -> None:
        """Register the transfer with the link of the rank that owns the pages."""
        if expected.group == 0:
            self._link.expect_notice(notice, expected.written)
            return
        self._waits_for_free.add(expected.request)
        self._pending_notices.add(notice)
        query = {"do": "expect", "link": self._number, "notice": notice.hex(), "request": expected.request}
        self._landings.query_ranks(query | {"rank": expected.group})

    def are_pages_free(self, expected: ExpectedPages) -> bool:
        """Query the fence on this rank, or return what the owning rank has reported.

        Raises :class:`LinkDown` if a link of any rank is down.
        """
        if self._down is not None:
            raise LinkDown(self._down)
        if expected.group == 0:
            return expected.free.done()
        if expected.request not in self._freed:
            return False
        self._freed.remove(expected.request)
        return True

    def cancel_landing(self, notice: bytes, expected: ExpectedPages) -> None:
        """Stop waiting for the pages and the notice of a cancelled transfer."""
        self._pending_notices.discard(notice)
        self._waits_for_free.discard(expected.request)
        self._freed.discard(expected.request)

    def notices(self) -> list[bytes]:
        """Return the notices that have arrived on this rank's link and on the other ranks' links.

        Raises :class:`LinkDown` if a link of any rank is down.
        """
        self._landings.poll_ranks()
        notices, self._received_notices = [*self._received_notices, *self._link.notices()], []
        if not notices and self._down is not None:
            raise LinkDown(self._down)
        return notices

    def handle_link_events(self, events: dict[str, Any]) -> None:
        """Record the events of another rank's link: freed pages, received notices, and the reason if the link is down."""
        self._down = events.get("down") or self._down
        self._freed.update(self._waits_for_free.intersection(events["free"]))
        self._waits_for_free.difference_update(events["free"])
        notices = [bytes.fromhex(each) for each in events["notices"]]
        self._pending_notices.difference_update(notices)
        self._received_notices += notices

    def close(self) -> None:
        """Close the link of each rank. May be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        self._link.close()
        del self._landings.landings[self._number]
        with suppress(DeviceError, EngineStopped):  # the engine is lost: the other ranks end and close their links
            self._landings.query_ranks({"do": "close", "link": self._number})


class FollowerLinks:
    """The links over the pages of a rank other than the first. They execute the first rank's queries.

    Pass :meth:`execute_query` to :meth:`Engine.follow`. Use the object in the engine's thread.
    """

    def __init__(self, engine: Engine, transport: Transport, *, rank: int) -> None:
        self._engine, self._transport, self._rank = engine, transport, rank
        self._links: dict[int, Link] = {}
        self._waits_for_free: dict[int, dict[int, ExpectedPages]] = {}
        """Expected requests whose pages aren't known to be free, by number of the link and of the request."""

    def execute_query(self, query_text: str) -> str:
        """Execute a query of the first rank and return the reply. Errors of a link are part of the reply."""
        query = json.loads(query_text)
        try:
            return json.dumps(self._execute(query))
        except LinkDown as error:
            return json.dumps({"down": str(error)})
        except (ConfigError, CapabilityError) as error:
            return json.dumps({"refused": str(error)})

    def close(self) -> None:
        """Close the links of all prefill servers on this rank."""
        for number in list(self._links):
            self._close(number)

    def _execute(self, query: dict[str, Any]) -> dict[str, Any]:
        if query["do"] == "look":
            return {"links": {number: self._link_events(number) for number in self._links}}
        number = query["link"]
        if query["do"] == "open":
            engine = self._engine
            link = self._transport.open(engine.page_memory, engine.backend, accepts=False, host=query["host"])
            self._links[number], self._waits_for_free[number] = link, {}
            return {"offer": base64.b64encode(link.offer()).decode()}
        if query["do"] == "connect":
            self._links[number].connect(_decode(query["offers"][self._rank - 1]))
        elif query["do"] == "expect":
            if query["rank"] == self._rank:
                expected = self._engine.lending.expected[query["request"]]
                self._links[number].expect_notice(bytes.fromhex(query["notice"]), expected.written)
                self._waits_for_free[number][expected.request] = expected
        else:
            assert query["do"] == "close"
            self._close(number)
        return {}

    def _link_events(self, number: int) -> dict[str, Any]:
        """Return the requests whose pages have become free and the notices that have arrived, or why the link is down."""
        waiting, current = self._waits_for_free[number], self._engine.lending.expected
        free = [request for request, expected in waiting.items() if request not in current or expected.free.done()]
        for request in free:
            del waiting[request]
        events: dict[str, Any] = {"free": free, "notices": []}
        try:
            events["notices"] = [notice.hex() for notice in self._links[number].notices()]
        except LinkDown as error:
            events["down"] = str(error)
        return events

    def _close(self, number: int) -> None:
        self._waits_for_free.pop(number, None)
        link = self._links.pop(number, None)
        if link is not None:
            link.close()


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
