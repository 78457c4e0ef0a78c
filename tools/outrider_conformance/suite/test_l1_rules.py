"""L1: wrong calls raise the errors of the backend interface, observers see every verb, and undeclared abilities do not work.

Each undeclared ability is tried as if declared; one that works must be declared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from unittest.mock import call

import pytest
import torch

from outrider.device import (
    Backend,
    InterfaceError,
    Observer,
    Stream,
)
from outrider.registry.probing import changed_state, process_state
from outrider_conformance.lab import WIDTH, Lab, expect, in_every_order, observed_calls
from outrider_conformance.promises import needs, promise
from outrider_conformance.reporting.verdict import not_applicable
from outrider_conformance.suite import test_l1_events as events
from outrider_conformance.suite import test_l1_streams as streams
from outrider_conformance.suite import test_l2_graphs as graphs
from outrider_conformance.suite import test_l3_flags_and_parameters as parameters
from outrider_conformance.suite.test_l0_plugin import BUILDS_ON
from outrider_conformance.suite.test_l1_errors import WAITS
from outrider_conformance.suite.test_l1_operators import VERBS


@promise("Backend.create_stream", "unique among the backend's streams.")
def test_stream_names_are_unique(backend: Backend) -> None:
    """Eight streams created under one name have different names, by which reports and schedules refer to them."""
    made = [backend.create_stream("same") for _ in range(8)]
    expect(len({stream.name for stream in made}), 8, "different names of eight streams made under one name")
    expect(made[0].name, "same", "the name of the first")
    assert all(stream in backend.streams for stream in made), "backend.streams lacks streams that were made"


@promise("Backend.attach", "One observer at a time.")
def test_one_observer_at_a_time(backend: Backend) -> None:
    """A second observer is refused until the first is detached. A new observer receives a report of each existing stream."""
    stream = backend.create_stream("early")
    with observed_calls(backend) as observer:
        told = call.stream_created(stream) in observer.method_calls
        assert told, "an observer isn't told of streams that existed before it"
        with pytest.raises(InterfaceError):
            backend.attach(Observer())
    backend.attach(Observer())
    backend.detach()


def _verbs(lab: Lab, a: Stream, b: Stream) -> dict[str, Callable[[], object]]:
    """Return calls of verbs by name, with work on the streams ``a`` and ``b``."""
    backend, x, event, graph = lab.backend, lab.full(a, 0), lab.record(a), graphs.triple(lab, a)
    pinned = backend.empty_pinned("p", tuple(x.shape), x.dtype).tensor
    verbs: dict[str, Callable[[], object]] = {"Backend.create_stream or another verb that creates": partial(lab.streams, "s")}
    verbs |= {name: partial(verb, lab, a, b, event) for name, verb in VERBS.items()}
    verbs |= {name: partial(wait, backend, a, event) for name, wait in WAITS.items()}
    verbs |= {"Backend.memory_info": backend.memory_info, "Graph.replay": partial(graph.replay, a)}
    verbs |= {"Backend.copy_async": partial(backend.copy_async, x, pinned, stream=a)}
    verbs |= {"Backend.empty_pinned": partial(backend.empty_pinned, "p", (1,), x.dtype)}
    if backend.capabilities.perturbs_timing:
        verbs |= {"Backend.delay": partial(backend.delay, a, 1)}
    if backend.capabilities.flags:
        flag = backend.create_flag("f")
        verbs |= {"Flag.set": partial(flag.set, a), "Flag.wait": partial(flag.wait, b), "Flag.reset": partial(flag.reset, b)}
    return verbs


@promise("Backend.on", "Place the calling thread's torch work on ``stream``")
@in_every_order(schedules=1)
def test_no_verb_leaves_another_stream_current(lab: Lab) -> None:
    """After each verb with other streams, work in a scope is neither early nor late: it's still on the scope's stream."""
    backend = lab.backend
    a, here, b = lab.streams("a", "here", "b")
    x, early, late = (lab.full(here, 0) for _ in range(3))
    for number, (name, verb) in enumerate(_verbs(lab, a, b).items(), 1):
        lab.fill_late(here, x, number)
        with backend.on(here):
            verb()
            early.copy_(x)
            for stream in (a, b):
                lab.slow(stream)
            late.copy_(x)
        here.synchronize()
        found = [lab.current_values(early), lab.current_values(late)]
        expect(found, [float(number)] * 2, f"work in a scope of 'here' after {name} with other streams")


@promise("Backend", "No method changes torch's global state")
def test_no_verb_changes_global_state(lab: Lab) -> None:
    """Torch's global state and the process's are the same after each verb, and inside a scope."""
    torch.manual_seed(7919)  # a seed that no plugin sets
    backend, states = lab.backend, [process_state()]
    a, b = lab.streams("a", "b")

    def enter() -> None:
        with suppress(ValueError), backend.on(a):
            states.append(process_state())
            raise ValueError("of the test")

    for name, verb in {**_verbs(lab, a, b), "Backend.on": enter}.items():
        verb()
        changed = [part for after in (*states, process_state()) for part in changed_state(states[0], after)]
        assert not changed, f"{name} changes {', '.join(dict.fromkeys(changed))}: restore it in the same call"


@needs("reports_accesses")
@promise("Capabilities.reports_accesses")
def test_accesses_are_reported(backend: Backend) -> None:
    """A copy between two tensors is reported on its stream, as a read of one tensor and a write of the other."""
    stream = backend.create_stream("s")
    with backend.on(stream):
        source, destination = torch.ones(16, device=backend.device), torch.zeros(16, device=backend.device)
    stream.synchronize()
    with observed_calls(backend) as observer, backend.on(stream):
        destination.copy_(source)
    operations = [operation for (operation,), _ in observer.launched.call_args_list]
    places = {"read": backend.locate(source), "write": backend.locate(destination)}
    seen = {("write" if a.write else "read", a.storage, a.start, a.end) for o in operations for a in o.accesses}
    for kind, place in places.items():
        assert (kind, place.storage, place.start, place.end) in seen, f"the {kind} of the copy wasn't reported: {seen}"
    assert all(operation.stream == "s" for operation in operations), operations


@needs("reports_accesses")
@promise("Backend.locate")
def test_a_slice_is_located_inside_its_tensor(lab: Lab) -> None:
    """The place of a slice is its part of the place of its tensor, on the device and in pinned memory."""
    (stream,) = lab.streams("s")
    for whole in (lab.full(stream, 0), lab.backend.empty_pinned("p", (WIDTH,), torch.float32).tensor):
        place, part = lab.backend.locate(whole), lab.backend.locate(whole[8:24])
        found = (place.end - place.start, part.storage == place.storage, part.start - place.start, part.end - place.start)
        expect(found, (4 * WIDTH, True, 32, 96), "bytes of a tensor, and the place of its elements 8 to 24")


@needs("reports_accesses", "row_exact_accesses")
@promise(
    "Observer.rows_touched",
    "Report the rows that an operation touched. It was launched before, with an access to the whole operand.",
)
def test_rows_are_reported_exactly(backend: Backend) -> None:
    """A cache write is reported with the rows of its slots and no other rows."""
    stream = backend.create_stream("s")
    with backend.on(stream):
        x, turn = torch.ones(2, 1, 4, device=backend.device), torch.ones(2, 4, device=backend.device)
        keys, values = (torch.zeros(4, 2, 1, 4, device=backend.device) for _ in range(2))
        slots = torch.tensor([3, 6], dtype=torch.int64, device=backend.device)
    stream.synchronize()
    with observed_calls(backend) as observer:
        with backend.on(stream):
            backend.kernels.rope_write_cache(x, x.clone(), x.clone(), turn, turn, keys, values, slots)
        stream.synchronize()
    place = backend.locate(keys)
    row = (place.end - place.start) // 8
    written = {
        ((a.start - place.start) // row, (a.end - place.start) // row)
        for (_, accesses), _ in observer.rows_touched.call_args_list
        for a in accesses
        if a.storage == place.storage and a.write
    }
    expect(written, {(3, 4), (6, 7)}, "rows of the key cache that were reported as written")


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
        "flags": parameters.test_a_wait_after_the_set_passes,
        "perturbs_timing": _delays,
        "memory_limit": _limits_memory,
        "captures_graphs": graphs.test_a_replay_does_not_run_the_callable,
        "forks_in_capture": graphs.test_a_capture_may_fork,
        "waits_inside_graphs": graphs.test_a_graph_may_wait_for_an_event_outside,
        "updates_graph_params": parameters.test_a_rebind_changes_the_next_replay,
        "reports_accesses": test_accesses_are_reported,
        "row_exact_accesses": test_rows_are_reported_exactly,
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


@promise("Capabilities.dtypes")
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
