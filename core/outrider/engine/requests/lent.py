"""Requests on their way between engines whose pages the network card reads and writes: what each side holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from outrider.device import Fence
from outrider.engine.requests.request_state import RequestState


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lent:
    """A request that left an engine, whose pages stay until the other side has read them.

    ``pages`` hold the keys, values and draft caches of ``state.length`` tokens, and the draft's one more where it's there.
    ``relay``: what the proposer relays, on the host, by name, [1, ...]. Both may be read once ``ready`` is done.
    ``read``: to be given to the link that writes them elsewhere: *pages read*. ``slot`` is the engine's own.
    """

    state: RequestState
    pages: tuple[int, ...]
    relay: Mapping[str, Tensor] = field(repr=False)
    ready: Fence = field(repr=False)
    read: Fence = field(repr=False)
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expected:
    """Pages that wait for a request of another engine.

    ``pages``: as many as the sender has, or more: the first ones are filled. The network card may write them once ``free`` is
    done: *pages free*. ``written``: to be given to the link that tells of their arrival: *pages written*. ``request`` and
    ``slot`` are the engine's own.

    Where data-parallel ranks run the engine, the pages and both fences are those of the ranks of ``group``, and mean nothing
    elsewhere.
    """

    request: int
    pages: tuple[int, ...]
    free: Fence = field(repr=False)
    written: Fence = field(repr=False)
    slot: int
    group: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """What is left to do once a request's pages are here: its ``length``, its ``last`` token, and the proposer's ``relay`` in
    pinned memory, by name, [1, ...].
    """

    length: int
    last: int
    relay: Mapping[str, Tensor] = field(repr=False)
