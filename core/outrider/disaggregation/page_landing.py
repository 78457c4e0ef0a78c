"""The receiving end of page transfers from a prefill server: on one rank, or on tensor-parallel and data-parallel ranks.

Each rank of the decode server has its own link with the prefill server, for its KV heads of the pages of its group. A request
has arrived once all ranks of its group have their notice. The first rank controls the links of the other ranks
with :meth:`~outrider.engine.engine.Engine.ask_ranks`, in JSON, between two iterations. On the other ranks,
:class:`FollowerLinks` executes the requests.

A prefill engine of one rank has all heads of a page, and a tensor-parallel decode rank has its part of them. Both sides then
transfer *token slots* instead of pages. A slot is contiguous on both sides, and the transport copies it without staging. The
same holds for the parts of recurrent states: a rank's heads of the delta rule, and its channels of each convolution input.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any

from torch import Tensor

from outrider.device import CapabilityError, ConfigError, DeviceError, EngineStopped, OutriderError
from outrider.engine.engine import Engine
from outrider.engine.requests.hand_over import KV_DIMS, ExpectedPages
from outrider.model import RecurrentConfig, Shard
from outrider.transports import Link, LinkDown, Transport


def slots_of_part(caches: Sequence[Tensor], rank: Shard) -> tuple[Tensor, ...]:
    """Return views [token slots, elements of a slot] of the part of ``caches`` that tensor-parallel rank ``rank`` holds."""
    parts = []
    for cache in caches:
        heads = rank.kv_head_shard(cache.shape[2]) if cache.dim() == KV_DIMS else Shard()
        slots = cache.flatten(0, 1)
        parts.append(slots.reshape(slots.shape[0], heads.size, -1)[:, heads.rank])
    return tuple(parts)


def states_of_part(states: Sequence[Tensor], config: RecurrentConfig, rank: Shard) -> tuple[Tensor, ...]:
    """Return views [rows, elements] of the part of ``states`` that tensor-parallel rank ``rank`` holds. ``states`` are those
    of :class:`~outrider.model.LayerState`, of an engine with the layers of ``config``.
    """
    parts = []
    widths = (config.key_width, config.key_width, config.value_width)
    for convolution, delta in zip(states[::2], states[1::2], strict=True):
        for inputs in convolution.unbind(1):
            parts += [channels[:, slice(*rank.even(channels.shape[1]))] for channels in inputs.split(widths, 1)]
        parts.append(delta[:, slice(*rank.even(delta.shape[1]))].flatten(1))
    return tuple(parts)


def registered_memory(engine: Engine, tensor_ranks: int, part: Shard | None = None) -> tuple[tuple[Tensor, ...], ...]:
    """Return the regions and the states that a link registers between a prefill engine and one of ``tensor_ranks``
    tensor-parallel ranks of a decode server: the memory of ``engine`` itself, or with several ranks views of token slots.

    ``part`` is the rank's part of a prefill engine's memory. A rank registers all of its own.
    """
    if tensor_ranks == 1:
        return engine.page_memory, engine.state_memory
    part, states, parts = part or Shard(), iter(engine.state_memory), list[Tensor]()
    for config in (engine.model.config.recurrent, engine.proposer.recurrent):
        if config is not None:
            parts += states_of_part(list(islice(states, 2 * len(config.layers))), config, part)
    return slots_of_part(engine.page_memory, part), tuple(parts)


def slots_of_pages(pages: Sequence[int], page_size: int, num_slots: int) -> list[int]:
    """Return the block numbers of the token slots of ``pages``, in order, on a side with ``num_slots`` slots. The number of a
    state row becomes the one that it has after the slots.
    """
    num_pages = num_slots // page_size
    numbers: list[int] = []
    for page in pages:
        is_row = page >= num_pages
        numbers += [num_slots + page - num_pages] if is_row else range(page * page_size, (page + 1) * page_size)
    return numbers


class LandingRegistry:
    """The landings of an engine. The first rank has this object, and queries the other ranks with it, if there are any."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_alone = engine.groups == engine.model.shards.attention.size == 1
        """True for an engine of one rank."""
        self._numbers = count()
        self.landings: dict[int, PageLanding] = {}

    def open_landing(self, link: Link, host: str) -> PageLanding:
        """Open a link on each other rank and return the landing of ``link`` and these links.

        Raises :class:`ConfigError` if a rank can't open its link; ``link`` is then closed.
        """
        number = next(self._numbers)
        try:
            replies = self.query_ranks({"do": "open", "link": number, "host": host})
        except OutriderError:
            link.close()
            raise
        landing = PageLanding(self, number, link, [_decode(each["offer"]) for each in replies])
        self.landings[number] = landing
        return landing

    def query_ranks(self, query: dict[str, Any]) -> list[dict[str, Any]]:
        """Send ``query`` to the other ranks and return the reply of each. Raises :class:`ConfigError` or :class:`LinkDown`.

        The error is that of the first rank whose reply reports one.
        """
        if self.is_alone:
            return []
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
        for rank, reply in enumerate(self.query_ranks({"do": "look"}), 1):
            for number, events in reply["links"].items():
                landing = self.landings.get(int(number))
                if landing is not None:
                    landing.handle_link_events(rank, events)

    def ranks_of_group(self, group: int) -> range:
        """Return the tensor-parallel ranks of a data-parallel group, which share the KV heads of its pages."""
        tensor = self._engine.model.shards.attention.size
        return range(group * tensor, (group + 1) * tensor)


class PageLanding:
    """The links of a decode server's ranks with one prefill server, on the first rank."""

    def __init__(self, landings: LandingRegistry, number: int, link: Link, offers: Iterable[bytes]) -> None:
        self._landings, self._number, self._link = landings, number, link
        self._offers = (link.offer(), *offers)
        self._is_open = True
        self._waits_for_free: dict[int, set[int]] = {}
        """Other ranks on which the pages of a request aren't known to be free, by its number in :class:`ExpectedPages`. The
        entry stays, empty, until :meth:`are_pages_free` has returned True.
        """
        self._pending_notices: dict[bytes, set[int]] = {}
        """Ranks on which a notice hasn't arrived, by notice."""
        self._down: str | None = None

    @property
    def is_waiting(self) -> bool:
        """True if the landing waits for free pages or for a notice on another rank."""
        return self._is_open and any(
            ranks - {0} for ranks in (*self._waits_for_free.values(), *self._pending_notices.values())
        )

    def offers(self) -> tuple[bytes, ...]:
        """Return the offer of each rank's link, the first rank's first, for the links of the prefill server."""
        return self._offers

    def connect(self, offers: Sequence[bytes]) -> None:
        """Connect each rank's link with the prefill server's offer for it. Raises as :meth:`Link.connect` does."""
        first, *others = offers
        self._link.connect(first)
        encoded = [base64.b64encode(each).decode() for each in others]
        self._landings.query_ranks({"do": "connect", "link": self._number, "offers": encoded})

    def expect_pages(self, notice: bytes, expected: ExpectedPages) -> None:
        """Register a transfer with the links of the group that owns the pages.

        ``notice`` will report that the pages of the expected request are written.
        """
        owners = self._landings.ranks_of_group(expected.group)
        self._pending_notices[notice] = set(owners)
        self._waits_for_free[expected.request] = set(owners) - {0}
        if 0 in owners:
            self._link.expect_notice(notice, expected.written)
        if any(owners):
            query = {"do": "expect", "link": self._number, "notice": notice.hex(), "request": expected.request}
            self._landings.query_ranks(query | {"ranks": list(owners)})

    def are_pages_free(self, expected: ExpectedPages) -> bool:
        """Return whether the fence *pages free* has been reached on every rank that owns the pages: they may be written.

        Call it until it has returned True once. Raises :class:`LinkDown` if a link of any rank is down.
        """
        if self._down is not None:
            raise LinkDown(self._down)
        if self._waits_for_free[expected.request] or (expected.group == 0 and not expected.free.done()):
            return False
        del self._waits_for_free[expected.request]
        return True

    def cancel_landing(self, notice: bytes, expected: ExpectedPages) -> None:
        """Cancel a registered transfer of a request. The prefill server doesn't write its pages."""
        self._pending_notices.pop(notice, None)
        self._waits_for_free.pop(expected.request, None)

    def notices(self) -> list[bytes]:
        """Return the notices of finished writes that have arrived on every rank that owns the pages, each once.

        Raises :class:`LinkDown` if a link of any rank is down.
        """
        self._landings.poll_ranks()
        try:
            self._record_notices(0, self._link.notices())
        except LinkDown as error:
            self._down = self._down or (str(error) if self._landings.is_alone else f"rank 0: {error}")
        complete = [notice for notice, ranks in self._pending_notices.items() if not ranks]
        for notice in complete:
            del self._pending_notices[notice]
        if not complete and self._down is not None:
            raise LinkDown(self._down)
        return complete

    def handle_link_events(self, rank: int, events: dict[str, Any]) -> None:
        """Record the events of another rank's link: freed pages, received notices, and the reason if the link is down."""
        if "down" in events:
            self._down = self._down or f"rank {rank}: {events['down']}"
        for request in events["free"]:
            self._waits_for_free.get(request, set()).discard(rank)
        self._record_notices(rank, [bytes.fromhex(each) for each in events["notices"]])

    def _record_notices(self, rank: int, notices: Iterable[bytes]) -> None:
        for notice in notices:
            self._pending_notices.get(notice, set()).discard(rank)

    def close(self) -> None:
        """Close the link of each rank; afterwards none writes on any rank. May be called twice."""
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
            regions, states = registered_memory(engine, engine.model.shards.attention.size)
            link = self._transport.open(regions, engine.backend, accepts=False, host=query["host"], states=states)
            self._links[number], self._waits_for_free[number] = link, {}
            return {"offer": base64.b64encode(link.offer()).decode()}
        if query["do"] == "connect":
            self._links[number].connect(_decode(query["offers"][self._rank - 1]))
        elif query["do"] == "expect":
            if self._rank in query["ranks"]:
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
