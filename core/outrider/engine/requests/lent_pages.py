"""Records of a request that migrates between a prefill server and a decode server, whose network cards copy its KV pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from outrider.device import Fence
from outrider.engine.requests.request_state import RequestState


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LentPages:
    """The sender's record of a request. The sender keeps the pages until the network card has read them."""

    state: RequestState
    pages: tuple[int, ...]
    """Pages with the keys, values and draft caches of ``state.length`` tokens. The draft cache can have one token more."""
    relay: Mapping[str, Tensor] = field(repr=False)
    """The tensors that the proposer relays between iterations, by name: [1, ...] on the host."""
    ready: Fence = field(repr=False)
    """The fence after which ``pages`` and ``relay`` may be read."""
    read: Fence = field(repr=False)
    """The fence *pages read*, for the link: the link signals it once the network card has read the pages."""
    slot: int
    """The engine's index of the two fences."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedPages:
    """The receiver's record of a request, with pages that the network card fills.

    With data-parallel ranks, only the ranks of ``group`` may use the pages and the fences.
    """

    request: int
    """The request's number in the receiving engine."""
    pages: tuple[int, ...]
    """At least as many pages as the sender has. The network card fills the first ones."""
    free: Fence = field(repr=False)
    """The fence *pages free*, after which the network card may write the pages."""
    written: Fence = field(repr=False)
    """The fence *pages written*, for the link: the link signals it once all pages have arrived."""
    slot: int
    """The engine's index of the two fences."""
    group: int = 0
    """The data-parallel group of the request."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrivedPages:
    """The state of an arrived request that its pages don't contain. The engine writes it to the request's row."""

    length: int
    """Number of tokens in the target's KV cache."""
    last_token: int
    """The last token of the output."""
    relay: Mapping[str, Tensor] = field(repr=False)
    """The tensors that the proposer relays between iterations, by name: [1, ...] in pinned memory."""
