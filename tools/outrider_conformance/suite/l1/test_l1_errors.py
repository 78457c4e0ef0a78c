"""L1: the first host wait that covers a failed operation raises its error, typed and once, and the device continues.

These tests need a plugin that can make an operation fail on purpose (``Backend.provoke_fault``).
"""

from __future__ import annotations

import pytest

from outrider.device import Backend, DeviceError, DeviceFault
from outrider_conformance.host_waits import WAITS, fallible
from outrider_conformance.lab import Lab, expect
from outrider_conformance.promises import promise


@promise(
    "Backend.provoke_fault",
    "The first wait of the host that covers the operation raises it once, also if the wait covers the "
    "operation through other streams.",
)
@pytest.mark.parametrize("wait", WAITS)
def test_every_way_to_wait_raises_what_failed(lab: Lab, wait: str) -> None:
    """Each kind of host wait raises the error once. A second wait raises nothing, and later work runs."""
    fallible(lab)

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x = lab.full(a, 0)
        lab.slow(a)
        backend.provoke_fault(a)
        event = lab.record(a)
        with pytest.raises(DeviceError) as caught:
            WAITS[wait](backend, a, event)
        assert not caught.value.device_lost, f"a provoked fault is survived, and {wait} says that the device is lost"
        for again in WAITS.values():
            again(backend, a, event)
        lab.fill(a, x, 1)
        b.wait(lab.record(a, "filled"))
        lab.fill(b, x, 2)
        expect(lab.read_tensor(b, x), 2.0, "what was written after the error was raised")

    lab.check_in_every_order(program, schedules=6)


@promise("Backend.provoke_fault", "also if the wait covers the operation through other streams.")
@pytest.mark.parametrize("dropped", [False, True], ids=["of a stream", "of a dropped stream"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_fault_crosses_streams_with_the_work_behind_it(lab: Lab, wait: str, dropped: bool) -> None:
    """A host wait for a stream raises the error of work on another stream for which that stream waited, also of a stream
    that is dropped.
    """
    fallible(lab)

    def program(backend: Backend) -> None:
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

    lab.check_in_every_order(program, schedules=6)


@promise("DeviceFault", "One operation failed. The device still works; the results of that operation are undefined.")
def test_work_around_a_fault_is_done(lab: Lab) -> None:
    """Work before and after the failed operation on its stream, and work on another stream, has its results."""
    fallible(lab)

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y, z = lab.full(a, 0), lab.full(a, 0), lab.full(b, 0)
        lab.fill_late(a, x, 1)
        backend.provoke_fault(a)
        lab.fill(a, y, 2)
        lab.fill(b, z, 3)
        with pytest.raises(DeviceFault):
            a.synchronize()
        b.synchronize()
        expect([lab.current_values(t) for t in (x, y, z)], [1.0, 2.0, 3.0], "work before it, after it and on another stream")

    lab.check_in_every_order(program, schedules=6)
