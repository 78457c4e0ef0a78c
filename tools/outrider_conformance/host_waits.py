"""All host waits that report failed work, for tests about errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from outrider.device import Backend, Event, Stream
from outrider_conformance.lab import Lab
from outrider_conformance.reporting.verdict import not_applicable

_WAIT_S = 10.0


def _query_until_done(asked: Stream | Event) -> None:
    """Query ``asked`` until the answer is True or the query raises. A device without a clock makes progress only
    in a wait.
    """
    until = time.monotonic() + _WAIT_S
    while not asked.query():
        if asked.backend.control is not None:
            asked.synchronize()
            continue
        assert time.monotonic() < until, "the answer stays False for work that failed"
        time.sleep(1e-4)


def _within(event: Event) -> None:
    assert event.synchronize_within(_WAIT_S), "the generation after failed work never completes"


def _copied_back(backend: Backend, stream: Stream) -> None:
    with backend.guard("reading a value"), backend.on(stream):
        torch.ones(3, device=backend.device).sum().item()


Wait = Callable[[Backend, Stream, Event], None]
WAITS: Mapping[str, Wait] = MappingProxyType(
    {
        "stream.synchronize": lambda backend, stream, event: stream.synchronize(),
        "event.synchronize": lambda backend, stream, event: event.synchronize(),
        "backend.synchronize": lambda backend, stream, event: backend.synchronize(),
        "synchronize_within": lambda backend, stream, event: _within(event),
        "event.query": lambda backend, stream, event: _query_until_done(event),
        "stream.query": lambda backend, stream, event: _query_until_done(stream),
        "a value that is read back": lambda backend, stream, event: _copied_back(backend, stream),
    }
)
"""The host waits by name. Each raises the error of failed work that it covers."""


def fallible(lab: Lab) -> None:
    """End the test as not applicable if the plugin can't make an operation fail on purpose."""
    if type(lab.backend)._provoke_fault is Backend._provoke_fault:
        not_applicable("the plugin offers no provoke_fault: nothing can be made to fail on purpose")
