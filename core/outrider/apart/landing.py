"""Where the pages of a prefill server's requests land: on one rank, or on those of data-parallel groups.

Each rank has a link of its own with the prefill server. The first one asks the others about theirs
(:meth:`~outrider.engine.engine.Engine.ask_ranks`), in JSON, between two iterations; they answer by :class:`RankPages`.
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
from outrider.engine.requests.lent import Expected
from outrider.transports import Link, LinkDown, Transport


class Landing(ABC):
    """The links with one prefill server."""

    @abstractmethod
    def offers(self) -> tuple[bytes, ...]:
        """What the other side's links connect to, one for each rank here."""

    @abstractmethod
    def connect(self, offers: Sequence[bytes]) -> None:
        """Take the other side's offers, as many. Raises as :meth:`Link.connect` does."""

    @abstractmethod
    def expecting(self, notice: bytes, expected: Expected) -> None:
        """``notice`` will tell that the pages of this request are written."""

    def forget(self, notice: bytes, expected: Expected) -> None:
        """That one doesn't come any more, and nobody writes its pages."""
        del notice, expected

    @abstractmethod
    def free(self, expected: Expected) -> bool:
        """*Pages free*: whether they may be written; asked until it's so. Raises :class:`LinkDown`."""

    @abstractmethod
    def notices(self) -> list[bytes]:
        """Notices that have come, on any rank. Raises :class:`LinkDown`."""

    @abstractmethod
    def close(self) -> None:
        """End the links. When it returns, no byte is written on any rank."""


class OneLanding(Landing):
    """The pages of an engine of one rank."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def offers(self) -> tuple[bytes, ...]:
        """The link's."""
        return (self._link.offer(),)

    def connect(self, offers: Sequence[bytes]) -> None:
        """Connect the link."""
        (offer,) = offers
        self._link.connect(offer)

    def expecting(self, notice: bytes, expected: Expected) -> None:
        """Tell the link."""
        self._link.expecting(notice, expected.written)

    def free(self, expected: Expected) -> bool:
        """Ask the fence."""
        return expected.free.done()

    def notices(self) -> list[bytes]:
        """The link's."""
        return self._link.notices()

    def close(self) -> None:
        """End the link."""
        self._link.close()


class RankLandings:
    """The first rank of several: makes landings, and asks the other ranks for all of them at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count()
        self.landings: dict[int, RankLanding] = {}

    def make(self, link: Link, host: str) -> RankLanding:
        """Over ``link`` here, and others like it on the other ranks. Raises :class:`ConfigError` where one can't be made."""
        number = next(self._numbers)
        try:
            answers = self.ask({"do": "open", "link": number, "host": host})
        except OutriderError:
            link.close()
            raise
        self.landings[number] = made = RankLanding(self, number, link, [_bytes(each["offer"]) for each in answers])
        return made

    def ask(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """What each other rank says. Raises :class:`ConfigError` or :class:`LinkDown` where one of them did."""
        answers = [json.loads(each) for each in self._engine.ask_ranks(json.dumps(asked))]
        for rank, answer in enumerate(answers, 1):
            if "down" in answer:
                raise LinkDown(f"rank {rank}: {answer['down']}")
            if "refused" in answer:
                raise ConfigError(f"rank {rank}: {answer['refused']}")
        return answers

    def look(self) -> None:
        """Hear what has happened on the other ranks, if anything is awaited there."""
        if not any(landing.awaits for landing in self.landings.values()):
            return
        for answer in self.ask({"do": "look"}):
            for number, found in answer["links"].items():
                landing = self.landings.get(int(number))
                if landing is not None:
                    landing.hear(found)


class RankLanding(Landing):
    """The pages of an engine of data-parallel ranks, as the first of them sees it."""

    def __init__(self, house: RankLandings, number: int, link: Link, offers: Iterable[bytes]) -> None:
        self._house, self._number, self._link = house, number, link
        self._offers = (link.offer(), *offers)
        self._open = True
        self._wanted: set[int] = set()
        self._freed: set[int] = set()
        self._coming: set[bytes] = set()
        self._came: list[bytes] = []
        self._down: str | None = None

    @property
    def awaits(self) -> bool:
        """Whether something is to happen on other ranks."""
        return self._open and bool(self._wanted or self._coming)

    def offers(self) -> tuple[bytes, ...]:
        """One of each rank."""
        return self._offers

    def connect(self, offers: Sequence[bytes]) -> None:
        """Connect each rank's link."""
        first, *others = offers
        self._link.connect(first)
        listed = [base64.b64encode(each).decode() for each in others]
        self._house.ask({"do": "connect", "link": self._number, "offers": listed})

    def expecting(self, notice: bytes, expected: Expected) -> None:
        """Tell the link of the rank that has the pages."""
        if expected.group == 0:
            self._link.expecting(notice, expected.written)
            return
        self._wanted.add(expected.request)
        self._coming.add(notice)
        said = {"do": "expect", "link": self._number, "notice": notice.hex(), "request": expected.request}
        self._house.ask(said | {"rank": expected.group})

    def free(self, expected: Expected) -> bool:
        """Ask the fence, or whether that rank has said so."""
        if self._down is not None:
            raise LinkDown(self._down)
        if expected.group == 0:
            return expected.free.done()
        if expected.request not in self._freed:
            return False
        self._freed.remove(expected.request)
        return True

    def forget(self, notice: bytes, expected: Expected) -> None:
        """Await nothing of it any more."""
        self._coming.discard(notice)
        self._wanted.discard(expected.request)
        self._freed.discard(expected.request)

    def notices(self) -> list[bytes]:
        """Those of this rank's link, and of the others."""
        self._house.look()
        found, self._came = [*self._came, *self._link.notices()], []
        if not found and self._down is not None:
            raise LinkDown(self._down)
        return found

    def hear(self, found: dict[str, Any]) -> None:
        """What has happened to this landing's link on another rank."""
        self._down = found.get("down") or self._down
        self._freed.update(self._wanted.intersection(found["free"]))
        self._wanted.difference_update(found["free"])
        notices = [bytes.fromhex(each) for each in found["notices"]]
        self._coming.difference_update(notices)
        self._came += notices

    def close(self) -> None:
        """End the link of each rank. Allowed twice."""
        if not self._open:
            return
        self._open = False
        self._link.close()
        del self._house.landings[self._number]
        with suppress(DeviceError, EngineStopped):  # the engine is lost: its ranks end, and their links with them
            self._house.ask({"do": "close", "link": self._number})


class RankPages:
    """Another rank than the first: has the links over its own pages, and answers for them. One thread, the engine's.

    ``answer`` is what :meth:`Engine.follow` takes.
    """

    def __init__(self, engine: Engine, transport: Transport, *, rank: int) -> None:
        self._engine, self._transport, self._rank = engine, transport, rank
        self._links: dict[int, Link] = {}
        self._wanted: dict[int, dict[int, Expected]] = {}

    def answer(self, said: str) -> str:
        """What the first rank asked. What goes wrong with a link is an answer too."""
        asked = json.loads(said)
        try:
            return json.dumps(self._do(asked))
        except LinkDown as error:
            return json.dumps({"down": str(error)})
        except (ConfigError, CapabilityError) as error:
            return json.dumps({"refused": str(error)})

    def close(self) -> None:
        """End all links."""
        for number in list(self._links):
            self._close(number)

    def _do(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "look":
            return {"links": {number: self._look(number) for number in self._links}}
        number = asked["link"]
        if asked["do"] == "open":
            engine = self._engine
            link = self._transport.open(engine.page_memory, engine.backend, accepts=False, host=asked["host"])
            self._links[number], self._wanted[number] = link, {}
            return {"offer": base64.b64encode(link.offer()).decode()}
        if asked["do"] == "connect":
            self._links[number].connect(_bytes(asked["offers"][self._rank - 1]))
        elif asked["do"] == "expect":
            if asked["rank"] == self._rank:
                expected = self._engine.expected[asked["request"]]
                self._links[number].expecting(bytes.fromhex(asked["notice"]), expected.written)
                self._wanted[number][expected.request] = expected
        else:
            assert asked["do"] == "close"
            self._close(number)
        return {}

    def _look(self, number: int) -> dict[str, Any]:
        wanted = self._wanted[number]
        there = self._engine.expected
        free = [request for request, expected in wanted.items() if request not in there or expected.free.done()]
        for request in free:
            del wanted[request]
        found: dict[str, Any] = {"free": free, "notices": []}
        try:
            found["notices"] = [notice.hex() for notice in self._links[number].notices()]
        except LinkDown as error:
            found["down"] = str(error)
        return found

    def _close(self, number: int) -> None:
        self._wanted.pop(number, None)
        link = self._links.pop(number, None)
        if link is not None:
            link.close()


def _bytes(given: str) -> bytes:
    return base64.b64decode(given, validate=True)
