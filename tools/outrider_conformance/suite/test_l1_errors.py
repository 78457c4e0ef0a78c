"""L1: the first host wait that covers a failed operation raises its error, typed and once, and the device continues.

These tests need a plugin that can make an operation fail on purpose (``Backend.provoke_fault``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch

from outrider.device import Backend, DeviceError, DeviceFault, Event, Stream
from outrider_conformance.lab import Lab, expect, in_every_order
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable
from outrider_conformance.suite.test_l2_graphs import triple

_WAIT_S = 10.0
_DELAYS = 3
"""Number of delays in which an operation after one delay has run."""


def query_until_done(asked: Stream | Event) -> None:
    """Query ``asked`` until the answer is True or the query raises. A device without a clock makes progress only
    in a wait.
    """
    until = time.monotonic() + _WAIT_S
    while not asked.query():
        if asked.backend.control is not None:
            asked.synchronize()
            continue
        assert time.monotonic() < until, "the answer stays False for work that must have ended"
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
        "event.synchronize_within": lambda backend, stream, event: _within(event),
        "event.query": lambda backend, stream, event: query_until_done(event),
        "stream.query": lambda backend, stream, event: query_until_done(stream),
        "a value that is read back": lambda backend, stream, event: _copied_back(backend, stream),
    }
)
"""The host waits by name. Each raises the error of failed work that it covers."""


def fallible(lab: Lab) -> None:
    """End the test as not applicable if the plugin can't make an operation fail on purpose."""
    if type(lab.backend)._provoke_fault is Backend._provoke_fault:
        not_applicable("the plugin offers no provoke_fault: nothing can be made to fail on purpose")


@promise(
    "Backend.provoke_fault",
    "The first wait of the host that covers the operation raises it once, also if the wait covers the "
    "operation through other streams.",
)
@pytest.mark.parametrize("wait", WAITS)
@in_every_order(schedules=6)
def test_every_way_to_wait_raises_what_failed(lab: Lab, wait: str) -> None:
    """Each kind of host wait raises the error once, also of two operations that failed. A second wait raises nothing, and
    later work runs.
    """
    fallible(lab)
    backend = lab.backend
    a, b = lab.streams("a", "b")
    x = lab.full(a, 0)
    lab.slow(a)
    for _ in range(2):
        backend.provoke_fault(a)
    event = lab.record(a)
    with pytest.raises(DeviceError) as caught:
        WAITS[wait](backend, a, event)
    assert not caught.value.device_lost, f"a provoked fault is survived, and {wait} says that the device is lost"
    assert str(caught.value).strip(), f"the error of {wait} has no text: say what failed"
    for again in WAITS.values():
        again(backend, a, event)
    lab.fill(a, x, 1)
    b.wait(lab.record(a, "filled"))
    lab.fill(b, x, 2)
    expect(lab.read_tensor(b, x), 2.0, "what was written after the error was raised")


@promise("Backend.provoke_fault", "also if the wait covers the operation through other streams.")
@pytest.mark.parametrize("dropped", [False, True], ids=["of a stream", "of a dropped stream"])
@pytest.mark.parametrize("wait", WAITS)
@in_every_order(schedules=6)
def test_a_fault_crosses_streams_with_the_work_behind_it(lab: Lab, wait: str, dropped: bool) -> None:
    """A host wait for a stream raises the error of work on another stream for which that stream waited, also of a stream
    that is dropped.
    """
    fallible(lab)
    backend = lab.backend
    a, b = lab.streams("a", "b")
    lab.slow(a)
    backend.provoke_fault(a)
    b.wait(lab.record(a, "made"))
    if dropped:
        del a
    event = lab.record(b, "used")
    with pytest.raises(DeviceFault):
        WAITS[wait](backend, b, event)
    backend.synchronize()


@promise("DeviceFault", "One operation failed. The device still works; the results of that operation are undefined.")
@in_every_order(schedules=6)
def test_work_around_a_fault_is_done(lab: Lab) -> None:
    """Work before and after the failed operation on its stream, and work on another stream, has its results. Verbs that
    enqueue raise nothing.
    """
    fallible(lab)
    backend = lab.backend
    a, b, c = lab.streams("a", "b", "c")
    x, z = lab.full(a, 0), lab.full(b, 0)
    graph = triple(lab, a)
    lab.fill_late(a, x, 1)
    backend.provoke_fault(a)
    if backend.control is None:
        time.sleep(_DELAYS * lab.pace.target_ms / 1e3)  # it has failed by now, where the device has a clock
    graph.replay(a)
    lab.fill(b, z, 3)
    c.wait(lab.record(a))
    with pytest.raises(DeviceFault):
        a.synchronize()
    b.synchronize()
    found = [lab.current_values(tensor) for tensor in (x, graph.outputs["y"], z)]
    expect(found, [1.0, 1.0, 3.0], "work before it, a replay after it, and work on another stream")
