"""Commands: records of the calls that change an engine. Follower ranks repeat the calls of the first rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from outrider.engine.requests.hand_over import RequestState
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import Media


@dataclass(frozen=True, slots=True)
class AddCommand:
    """A command to queue one request of a caller."""

    tokens: tuple[int, ...]
    params: SamplingParams | None
    priority: int
    media: tuple[Media, ...]


@dataclass(frozen=True, slots=True)
class QueueCommand:
    """A command to queue the requests of one ``generate`` call."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams | tuple[SamplingParams | None, ...] | None
    """Parameters of all requests, or one entry for each prompt."""
    media: tuple[tuple[Media, ...], ...] | None
    """The media of each prompt."""


@dataclass(frozen=True, slots=True)
class AbortCommand:
    """A command to end the request with number ``request``."""

    request: int


@dataclass(frozen=True, slots=True)
class DropCommand:
    """A command to drop requests whose caller has disappeared."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandOverCommand:
    """A command to hand a request over to another engine of the same ranks."""

    request: int


@dataclass(frozen=True, slots=True)
class TakeOverCommand:
    """A command to continue a handed-over request. Each rank stores its part under ``key``."""

    key: str


@dataclass(frozen=True, slots=True)
class ResumeCommand:
    """A command to queue a request that another engine has started."""

    state: RequestState


@dataclass(frozen=True, slots=True)
class ExpectPagesCommand:
    """Reserve pages in a data-parallel group for a request that another engine lends."""

    state: RequestState
    group: int


@dataclass(frozen=True, slots=True)
class PagesArrivedCommand:
    """A command to continue an expected request whose pages have arrived."""

    request: int
    relay: Mapping[str, Tensor]
    """The proposer's relayed tensors; the first rank passes them to the rank that has the pages."""


@dataclass(frozen=True, slots=True)
class ReleasePagesCommand:
    """Release the pages of an expected request that won't arrive."""

    request: int


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """Request a vote from the component next to the engine of each follower rank."""

    number: int
    """The number of this request for a vote."""
    said: str
    """The text of the request."""


Command: TypeAlias = (
    AddCommand
    | QueueCommand
    | AbortCommand
    | DropCommand
    | HandOverCommand
    | TakeOverCommand
    | ResumeCommand
    | ExpectPagesCommand
    | PagesArrivedCommand
    | ReleasePagesCommand
    | VoteRequest
)
