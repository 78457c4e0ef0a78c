"""Calls that change an engine, as its first rank took them and as the others do them too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from outrider.engine.requests.request_state import RequestState
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import Media


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Queue a request."""

    tokens: tuple[int, ...]
    params: SamplingParams | None
    priority: int
    media: tuple[Media, ...]


@dataclass(frozen=True, slots=True)
class Queue:
    """Queue what ``generate`` runs: ``params`` for all or for each, and the media of each prompt."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams | tuple[SamplingParams | None, ...] | None
    media: tuple[tuple[Media, ...], ...] | None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request."""

    request: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop requests whose caller has gone."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveOver:
    """Take a request out for another engine of the same ranks."""

    request: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Go on with a request that each rank keeps its part of, under ``key``."""

    key: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Queue a request that another engine knows."""

    state: RequestState


@dataclass(frozen=True, slots=True)
class Expect:
    """Reserve pages in a data-parallel group for a request that another engine lends."""

    state: RequestState
    group: int


@dataclass(frozen=True, slots=True)
class Arrive:
    """The pages of an expected request are written. ``relay``: for the rank that has them, where it's another."""

    request: int
    relay: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Forsake:
    """Free the pages of an expected request."""

    request: int


@dataclass(frozen=True, slots=True)
class Ask:
    """What is beside the engine of each rank is asked something; ``number`` of the question."""

    number: int
    said: str


Command: TypeAlias = AddRequest | Queue | Abort | Forget | GiveOver | TakeOver | Resume | Expect | Arrive | Forsake | Ask
