"""Calls that change an engine, as its first rank took them and as the others do them too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

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


Command: TypeAlias = AddRequest | Queue | Abort | Forget | GiveOver | TakeOver | Resume
