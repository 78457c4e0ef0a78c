"""Ways to wait for work that failed, for tests about errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from outrider.device import Backend, Event, Stream
from outrider_conformance.lab import Lab
from outrider_conformance.verdict import not_applicable

_PATIENCE = 10.0


def _asked(asked: Stream | Event) -> None:
    """Until the answer is yes, or there is an error. A device without a clock need never get there by itself."""
    until = time.monotonic() + _PATIENCE
    while not asked.query():
        if asked.backend.control is not None:
            asked.synchronize()
            continue
        assert time.monotonic() < until, "the answer stays False for work that failed"
        time.sleep(1e-4)


def _within(event: Event) -> None:
    assert event.synchronize_within(_PATIENCE), "the generation behind work that failed never completes"


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
        "event.query": lambda backend, stream, event: _asked(event),
        "stream.query": lambda backend, stream, event: _asked(stream),
        "a value that is read back": lambda backend, stream, event: _copied_back(backend, stream),
    }
)
"""Every way in which the host learns that work is done. Each raises what failed in work that it covers."""


def fallible(lab: Lab) -> None:
    """Ends the test as not applicable where nothing can be made to fail."""
    if type(lab.backend)._provoke_fault is Backend._provoke_fault:
        not_applicable("the plugin offers no provoke_fault: nothing can be made to fail on purpose")
