"""What one iteration does: the scheduler's decision, as an immutable record."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.requests.features import Features
from outrider.engine.requests.hand_over import HandOver
from outrider.engine.requests.lent import Arrived
from outrider.engine.requests.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next context tokens of one request, ``start`` inclusive to ``end`` exclusive."""

    request: Request
    start: int
    end: int

    @property
    def final(self) -> bool:
        """Whether the context ends with this chunk."""
        return self.end == len(self.request.context)


@dataclass(frozen=True, slots=True)
class Together:
    """What an iteration is in all data-parallel groups, the same on every rank but for ``launched``.

    ``batches``: those of all groups. ``launched``: what this rank launches: the batch of its group, with idle requests of
    row 0 so that as many decode as in any other group, and with an idle token where only others have prompts. ``features``:
    of all decoding requests. ``widths``: of each pass over prompts, the most tokens that a group has in it.
    """

    batches: tuple[Batch, ...]
    launched: Batch
    features: Features
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one iteration does. ``table_updates`` are (row, index, page); ``arrivals`` are requests whose state comes from
    another engine, and which decode from the next iteration on. ``drafted``: tokens that are drafted for each decoding
    request; None: as many as the proposer drafts. ``together``: what other data-parallel groups do in it; None: there are
    none. ``needed``: what its decoding requests need, where that is known already.
    """

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[Request, ...]
    admitted: tuple[Request, ...]
    table_updates: tuple[tuple[int, int, int], ...]
    arrivals: tuple[tuple[Request, HandOver | Arrived], ...] = ()
    drafted: int | None = None
    together: Together | None = None
    needed: Features | None = None

    @property
    def everyone(self) -> tuple[Batch, ...]:
        """The batches of all data-parallel groups."""
        return (self,) if self.together is None else self.together.batches

    @property
    def launched(self) -> Batch:
        """What is launched for it."""
        return self if self.together is None else self.together.launched

    @property
    def features(self) -> Features:
        """Of all requests that decode in the iteration, here and elsewhere."""
        if self.together is not None:
            return self.together.features
        return Features.of(self.decode) if self.needed is None else self.needed

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request that the iteration works on."""
        prefilled = (chunk.request for chunk in self.prefill)
        return (*self.decode, *prefilled, *(request for request, _ in self.arrivals))

    @property
    def guided(self) -> bool:
        """Whether a mask decides what may come, in any group: of a request that decodes, or behind a prompt."""
        chosen = (
            request
            for each in self.everyone
            for request in (*each.decode, *(chunk.request for chunk in each.prefill if chunk.final))
        )
        return any(request.guidance is not None for request in chosen)

    def only(self, request: Request) -> Batch:
        """The part of the batch that concerns one request."""
        return Batch(
            prefill=tuple(chunk for chunk in self.prefill if chunk.request is request),
            decode=tuple(each for each in self.decode if each is request),
            admitted=tuple(each for each in self.admitted if each is request),
            table_updates=tuple(update for update in self.table_updates if update[0] == request.row),
            arrivals=tuple(arrival for arrival in self.arrivals if arrival[0] is request),
            drafted=self.drafted,
        )
