"""L2: an error inside a graph is raised like an error outside a graph."""

from __future__ import annotations

from contextlib import suppress

import pytest

from outrider.device import Backend, CapabilityError, CaptureContext, CaptureError, DeviceError, DeviceFault
from outrider_conformance.host_waits import WAITS, fallible
from outrider_conformance.lab import Lab, expect
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable


@promise("Backend.provoke_fault", "*Capture.* A captured operation fails at each replay of the graph.")
@pytest.mark.parametrize("wait", WAITS)
def test_every_way_to_wait_raises_what_failed_in_a_graph(lab: Lab, wait: str) -> None:
    """Each replay of a failing graph raises its error once; other graphs and later work run."""
    fallible(lab)

    def program(backend: Backend) -> None:
        a, b = lab.streams("a", "b")
        x, y = lab.full(a, 2), lab.full(a, 0)
        fails = True

        def fn(context: CaptureContext) -> None:
            context.outputs["y"].copy_(context.inputs["x"])
            if fails:
                backend.provoke_fault(b)

        try:
            broken = backend.capture("fails", fn, stream=b, inputs={"x": x}, outputs={"y": y})
        except CaptureError as error:
            if isinstance(error.__cause__, CapabilityError):
                not_applicable(str(error.__cause__))
            raise
        with suppress(DeviceError):  # a warm-up has run it
            backend.synchronize()
        fails = False
        whole = backend.capture("works", fn, stream=b, inputs={"x": x}, outputs={"y": y})
        for turn in (1.0, 2.0):
            lab.fill_late(b, x, turn)
            fails = True  # for a device without graphs, which runs the callable now
            broken.replay(b)
            fails = False
            event = lab.record(b)
            with pytest.raises(DeviceFault):
                WAITS[wait](backend, b, event)
            for again in WAITS.values():
                again(backend, b, event)
        lab.fill(b, x, 3)
        whole.replay(b)
        expect(lab.read_tensor(b, y), 3.0, "what another graph copied after the error was raised")

    lab.check_in_every_order(program, schedules=6)
