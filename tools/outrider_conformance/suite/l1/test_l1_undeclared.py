"""L1: undeclared abilities do not work. Each ability is tried as if declared; one that works must be declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch

from outrider.device import Backend
from outrider_conformance.lab import Lab, expect
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable
from outrider_conformance.suite.l0.test_l0_identity import BUILDS_ON
from outrider_conformance.suite.l1 import test_l1_events as events
from outrider_conformance.suite.l1 import test_l1_rules as rules
from outrider_conformance.suite.l1 import test_l1_streams as streams
from outrider_conformance.suite.l2 import test_l2_graphs as graphs
from outrider_conformance.suite.l3 import test_l3_flags as flags
from outrider_conformance.suite.l3 import test_l3_params as params


def _delays(backend: Backend) -> None:
    backend.delay(backend.create_stream("s"), 1 << 20)
    backend.synchronize()


def _limits_memory(backend: Backend) -> None:
    assert backend.memory_info().total > 0


PROBES: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "asynchronous": streams.test_work_returns_before_it_has_run,
        "concurrent_streams": streams.test_streams_run_beside_each_other,
        "event_timing": events.test_time_is_measured,
        "flags": flags.test_a_wait_after_the_set_passes,
        "perturbs_timing": _delays,
        "memory_limit": _limits_memory,
        "captures_graphs": graphs.test_a_replay_does_not_run_the_callable,
        "forks_in_capture": graphs.test_a_capture_may_fork,
        "waits_inside_graphs": graphs.test_a_graph_may_wait_for_an_event_outside,
        "updates_graph_params": params.test_a_rebind_changes_the_next_replay,
        "reports_accesses": rules.test_accesses_are_reported,
        "row_exact_accesses": rules.test_rows_are_reported_exactly,
    }
)
"""A test of each ability. The effect of stream priorities can't be observed."""


@promise("Capabilities", "and so does a working ability that isn't declared.")
@pytest.mark.parametrize("ability", PROBES)
def test_what_works_is_declared(lab: Lab, ability: str) -> None:
    """The test of an undeclared ability fails if it runs on a view of the backend that declares the ability."""
    declared, base = lab.backend.capabilities, BUILDS_ON.get(ability)
    if getattr(declared, ability):
        not_applicable(f"{ability} is declared")
    if base is not None and not getattr(declared, base):
        not_applicable(f"{ability} means nothing without {base}")
    told = Lab(lab.backend.with_capabilities(**{ability: True}), lab.pace, longest_delays=False)
    given = {"lab": told, "backend": told.backend}
    try:
        PROBES[ability](**{name: given[name] for name in inspect.signature(PROBES[ability]).parameters})
    except Exception:  # whatever the device says when it can't: that's the right answer here
        return
    raise AssertionError(
        f"{ability} works but isn't declared: set Capabilities({ability}=True), so that it's used and tested"
    )


@promise("Capabilities.dtypes", "Floating dtypes in which every kernel of the backend's KernelSet works.")
def test_dtypes_compute(lab: Lab) -> None:
    """A tensor of each declared dtype can be made, added and read back."""
    (stream,) = lab.streams("s")
    for dtype in sorted(lab.backend.capabilities.dtypes, key=str):
        x = lab.full(stream, 2, dtype=dtype)
        with lab.backend.on(stream):
            y = x + x
        expect(lab.read_tensor(stream, y), 4.0, f"2 + 2 in {dtype}")
        expect(y.dtype, dtype, "the dtype of a sum")
    stream.synchronize()
    assert torch.float32 in lab.backend.capabilities.dtypes, "float32 isn't declared: the kit and the bundled model need it"
