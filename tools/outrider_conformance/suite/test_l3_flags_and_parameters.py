"""L3: resettable flags order streams, and host parameters of a graph are rebound between replays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, CaptureContext, Graph, Stream
from outrider_conformance.lab import CALLS, Lab, call_on_new_thread, expect, in_every_order
from outrider_conformance.promises import needs, promise
from outrider_conformance.reporting.verdict import not_applicable

_MANY = 32
_VERY_MANY = 300
"""Number of flags: more than the 256 values of a byte, and than the entries of small tables."""
_SEVERAL = 20
_ROUNDS = 3
"""Replays of a graph that resets a flag. The wait of a replay checks the reset of the replay before: two replays would leave
the second reset, and so any reset after the first one, unchecked.
"""


@needs("flags")
@promise("Capabilities.flags", "resettable flags, for which a wait may be enqueued before its set.")
@in_every_order()
def test_a_wait_may_precede_its_set(lab: Lab) -> None:
    """A wait that is enqueued before the set holds its stream, and not the host."""
    a, b, x, y = lab.two_streams()
    flag = lab.backend.create_flag("f")
    flag.wait(b)
    lab.copy(b, y, x)
    assert not b.query(), "work after a wait for a flag that has not been set is said to have run"
    lab.fill_late(a, x, 1)
    flag.set(a)
    expect(lab.read_tensor(b, y), 1.0, "what was read after the wait")


@needs("flags")
@promise(
    "Flag.set", "Raise the flag after everything enqueued on ``stream`` so far. The set is lost if the flag is up by then."
)
@in_every_order()
def test_a_wait_after_the_set_passes(lab: Lab) -> None:
    """Several waits pass one set, also a wait after the others have passed. The set is called in another stream's scope."""
    a, b, c = lab.streams("a", "b", "c")
    x, y, z = lab.full(a, 0), lab.full(b, 0), lab.full(c, 0)
    last = lab.full(a, 0)
    flag = lab.backend.create_flag("f")
    lab.fill_late(a, x, 1)
    with lab.backend.on(c):
        flag.set(a)
    for stream, tensor in ((b, y), (c, z)):
        flag.wait(stream)
        lab.copy(stream, tensor, x)
    expect([lab.read_tensor(b, y), lab.read_tensor(c, z)], [1.0, 1.0], "what two streams read after one set")
    flag.wait(b)
    lab.expect_read(b, last, x, 1.0, "what was read after a wait that others had passed")


@needs("flags")
@promise("Flag.reset")
@pytest.mark.parametrize("other_thread", ["no verb", "wait", "set", "reset"])
@in_every_order(schedules=8)
def test_a_reset_makes_the_next_wait_wait_again(lab: Lab, other_thread: str) -> None:
    """Each wait after a reset holds its stream until the next set, in many rounds. Another thread may call one verb."""
    backend = lab.backend
    a, b, x, y = lab.two_streams()
    flag, done = backend.create_flag("f"), backend.create_event("done")

    def call(verb: str, stream: Stream) -> None:
        act = partial(getattr(flag, verb), stream)
        call_on_new_thread(act) if verb == other_thread else act()

    for turn in map(float, range(1, CALLS + 1)):
        call("wait", b)
        lab.copy(b, y, x)
        call("reset", b)
        b.record(done)
        lab.fill_late(a, x, turn)
        call("set", a)
        a.wait(done)
        expect(lab.read_tensor(b, y), turn, "what was read in a round")


@needs("flags")
@promise("Flag", "A set of a flag that is already up is lost.")
@in_every_order()
def test_a_second_set_is_lost(lab: Lab) -> None:
    """A flag that was set twice and reset once is down."""
    a, b, x, y = lab.two_streams()
    flag = lab.backend.create_flag("f")
    flag.set(a)
    flag.set(a)
    flag.reset(a)
    b.wait(lab.record(a))
    flag.wait(b)
    lab.copy(b, y, x)
    assert not b.query(), "a wait passed a flag that was set twice and reset once"
    lab.fill_late(a, x, 1)
    flag.set(a)
    expect(lab.read_tensor(b, y), 1.0, "what was read after the set that came after the reset")


@needs("flags")
@promise("Flag", "``set``, ``wait`` and ``reset`` are device operations in the order of their stream.")
@in_every_order(schedules=4)
def test_each_of_several_flags_is_its_own(lab: Lab) -> None:
    """Twenty streams wait for one flag each; each set, after its own write, releases one stream."""
    backend = lab.backend
    setter, *waiters = lab.streams("setter", *(f"waiter {n}" for n in range(_SEVERAL)))
    x, passed = lab.full(setter, -1), backend.create_event("passed")
    found = [lab.full(waiter, -1) for waiter in waiters]
    flags = [backend.create_flag(f"f{n}") for n in range(_SEVERAL)]
    for flag, waiter, tensor in zip(flags, waiters, found, strict=True):
        flag.wait(waiter)
        lab.copy(waiter, tensor, x)
    for number, (flag, waiter) in enumerate(zip(flags, waiters, strict=True)):
        lab.fill_late(setter, x, number)
        flag.set(setter)
        waiter.record(passed)
        setter.wait(passed)
    setter.synchronize()
    expect(
        [lab.current_values(tensor) for tensor in found],
        [float(n) for n in range(_SEVERAL)],
        "what was read behind each flag",
    )


@needs("flags")
@promise("Backend.create_flag")
@in_every_order(schedules=2)
def test_a_new_flag_is_down_whatever_others_are(lab: Lab) -> None:
    """A new flag is down while 150 other flags are up, after as many raised ones were dropped, and rises at its own set."""
    a, b, x, y = lab.two_streams()
    flags = [lab.backend.create_flag("same") for _ in range(_VERY_MANY)]
    for flag in flags:
        flag.set(a)
    a.synchronize()
    del flags[::2], flag
    last = lab.backend.create_flag("same")
    last.wait(b)
    lab.copy(b, y, x)
    assert not b.query(), "a wait passed a new flag that wasn't set"
    lab.fill_late(a, x, 1)
    last.set(a)
    expect(lab.read_tensor(b, y), 1.0, f"what was read after flag {_VERY_MANY + 1}, of which {len(flags)} others are up")


@needs("flags")
@promise("Flag", "``set``, ``wait`` and ``reset`` are device operations in the order of their stream.")
@in_every_order(schedules=8)
def test_flags_work_behind_much_that_is_pending(lab: Lab) -> None:
    """Wait, set and reset work after dozens of pending operations."""
    a, b, x, y = lab.two_streams()
    flag = lab.backend.create_flag("f")

    def pile(stream: Stream, tensor: Tensor) -> None:
        lab.slow(stream)
        for value in range(_MANY):
            lab.fill(stream, tensor, -value)

    pile(b, y)
    flag.wait(b)
    lab.copy(b, y, x)
    for _ in range(2):
        lab.slow(a)
    lab.fill_late(a, x, 1)
    flag.set(a)
    expect(lab.read_tensor(b, y), 1.0, "what was read after a wait that came after many operations")
    pile(b, y)
    flag.reset(b)
    a.wait(lab.record(b, "lowered"))
    flag.wait(b)
    lab.copy(b, y, x)
    assert not b.query(), "a wait passed a flag whose reset came after many operations"
    pile(a, x)
    lab.fill(a, x, 2)
    flag.set(a)
    expect(lab.read_tensor(b, y), 2.0, "what was read after a set that came after many operations")


@needs("flags", "captures_graphs")
@promise("Flag", "All three may be captured where the backend declares ``flags`` and ``captures_graphs``.")
@in_every_order()
def test_flags_work_inside_a_graph(lab: Lab) -> None:
    """A graph waits for a flag and resets it, and each replay is released by its own set."""
    backend = lab.backend
    a, b, x, y = lab.two_streams()
    flag = backend.create_flag("f")

    def fn(context: CaptureContext) -> None:
        if backend.active_capture is not None:  # a warm-up would wait forever
            flag.wait(b)
            flag.reset(b)
        context.outputs["y"].copy_(context.inputs["x"])

    graph = backend.capture("waits", fn, stream=b, inputs={"x": x}, outputs={"y": y})
    for turn in map(float, range(1, _ROUNDS + 1)):
        graph.replay(b)
        assert not b.query(), "a graph that waits for a flag ran before the flag was set"
        lab.fill_late(a, x, turn)
        flag.set(a)
        expect(lab.read_tensor(b, y), turn, "what the graph read after the flag")


@needs("flags", "captures_graphs")
@promise("Flag", "``set``, ``wait`` and ``reset`` are device operations in the order of their stream.")
@in_every_order(schedules=8)
def test_a_graph_sets_and_waits_between_its_operations(lab: Lab) -> None:
    """Each replay sets a flag after its first copy, and waits for another flag, which follows the first, before its second
    copy.
    """
    backend = lab.backend
    a, b = lab.streams("a", "b")
    seen = lab.full(a, 0)
    inputs, outputs = ({name: lab.full(b, 0) for name in names} for names in (("x", "reply"), ("y", "z")))
    ready, answered = backend.create_flag("ready"), backend.create_flag("answered")

    def fn(context: CaptureContext) -> None:
        context.outputs["y"].copy_(context.inputs["x"])
        if backend.active_capture is not None:  # a warm-up would wait forever
            ready.set(b)
            answered.wait(b)
            answered.reset(b)
        context.outputs["z"].copy_(context.inputs["reply"])

    graph = backend.capture("asks", fn, stream=b, inputs=inputs, outputs=outputs)
    for turn in map(float, range(1, _ROUNDS + 1)):
        ready.wait(a)
        ready.reset(a)
        lab.copy(a, seen, outputs["y"])
        lab.fill_late(a, inputs["reply"], 10 * turn)
        answered.set(a)
        lab.fill_late(b, inputs["x"], turn)
        graph.replay(b)
        found = [lab.read_tensor(b, outputs["z"]), lab.read_tensor(a, seen)]
        expect(found, [10 * turn, turn], f"the second copy of replay {turn:.0f}, and the first one as another stream saw it")


def drop_result(_: object) -> None:
    """Drop a result, so that a lambda returns None."""


def scaled(lab: Lab, stream: Stream) -> Graph:
    """Capture a graph of ``y = x * n`` with the host parameter ``n``, which is 1 at the capture; x is 10."""
    x, y = lab.full(stream, 10), lab.full(stream, 0)

    def fn(context: CaptureContext) -> None:
        source, result = context.inputs["x"], context.outputs["y"]
        lab.backend.reissue(context.params["n"], lambda values: drop_result(torch.mul(source, values[0], out=result)))

    return lab.backend.capture(
        "scaled", fn, stream=stream, inputs={"x": x}, outputs={"y": y}, params={"n": [1], "unused": [7, 8]}
    )


def _rebindable(backend: Backend) -> None:
    if backend.capabilities.captures_graphs and not backend.capabilities.updates_graph_params:
        not_applicable("updates_graph_params isn't declared, and captured graphs can't be rebound without it")


@promise("Graph.update_params")
@in_every_order()
def test_a_rebind_changes_the_next_replay(lab: Lab) -> None:
    """Each replay uses the values that were bound last."""
    _rebindable(lab.backend)
    (stream,) = lab.streams("s")
    graph = scaled(lab, stream)
    found = []
    for values in (None, 4, 5, 5):
        if values is not None:
            graph.update_params({"n": [values]}, stream=stream)
        lab.slow(stream)
        graph.replay(stream)
        found.append(lab.read_tensor(stream, graph.outputs["y"]))
    expect(found, [10.0, 40.0, 50.0, 50.0], "outputs with the parameter as captured, 4, 5 and 5 again")


@promise("Graph.update_params")
def test_each_value_of_each_parameter_is_rebound(lab: Lab) -> None:
    """A rebind changes all operations that read its parameters, and each of their values. Other parameters keep theirs."""
    _rebindable(lab.backend)
    (stream,) = lab.streams("s")
    x, outputs = lab.full(stream, 1), {name: lab.full(stream, 0) for name in ("first", "second", "other")}
    params = {"n": [2, 3], "m": [4]}

    def fn(context: CaptureContext) -> None:
        for out, (param, at) in zip(context.outputs.values(), (("n", 0), ("n", 1), ("m", 0)), strict=True):

            def issue(values: tuple[int, ...], out: Tensor = out, at: int = at) -> None:
                torch.mul(context.inputs["x"], values[at], out=out)

            lab.backend.reissue(context.params[param], issue)

    graph = lab.backend.capture("several", fn, stream=stream, inputs={"x": x}, outputs=outputs, params=params)
    for bound in ({}, {"n": [5, 6]}, {"m": [70_000]}, {"n": [7, -8], "m": [9]}):
        graph.update_params(bound, stream=stream)
        params |= bound
        graph.replay(stream)
        stream.synchronize()
        found = [lab.current_values(out) for out in outputs.values()]
        expect(found, [float(n) for n in (*params["n"], *params["m"])], f"outputs with the parameters {params}")


@promise(
    "Graph.update_params",
    "The rebinding is work on ``stream``. The caller orders it after the last replay has finished reading its parameters, "
    "and the next replay after it. The values are copied before the call returns.",
)
@in_every_order()
def test_a_rebind_leaves_earlier_replays_alone(lab: Lab) -> None:
    """A queued replay keeps its value when a later call rebinds the parameter on another stream, and when the caller changes
    its list of values after the call.
    """
    _rebindable(lab.backend)
    backend = lab.backend
    forward, update = lab.streams("forward", "update")
    graph = scaled(lab, forward)
    kept = [lab.full(forward, 0) for _ in range(3)]
    free, bound = backend.create_event("free"), backend.create_event("bound")
    forward.record(free)
    for turn, keep in enumerate(kept, 2):
        update.wait(free)
        lab.slow(update)
        values = [turn]
        graph.update_params({"n": values}, stream=update)
        values[0] = 100
        update.record(bound)
        forward.wait(bound)
        lab.slow(forward)
        graph.replay(forward)
        forward.record(free)
        lab.copy(forward, keep, graph.outputs["y"])
    forward.synchronize()
    expect([lab.current_values(keep) for keep in kept], [20.0, 30.0, 40.0], "outputs of three replays, each rebound before")


@promise("Backend", "*Names* are for reports: two objects with one name share nothing.")
def test_a_rebind_leaves_other_graphs_alone(lab: Lab) -> None:
    """A rebind of one of three graphs, all with one name, changes no other graph."""
    _rebindable(lab.backend)
    (stream,) = lab.streams("s")
    graphs = [scaled(lab, stream) for _ in range(3)]
    for turn, rebound in enumerate(graphs, 2):
        rebound.update_params({"n": [turn]}, stream=stream)
        for graph in graphs:
            graph.replay(stream)
        stream.synchronize()
        wanted = [10.0 * (index + 2 if index + 2 <= turn else 1) for index in range(len(graphs))]
        found = [lab.current_values(graph.outputs["y"]) for graph in graphs]
        expect(found, wanted, f"outputs of three graphs after graph {turn - 1} was rebound")


@needs("captures_graphs")
@promise("Graph.update_params", "where a captured graph can't be rebound")
def test_a_rebind_is_refused_where_it_is_not_declared(lab: Lab) -> None:
    """A rebind raises an error, since the replay would silently use the old values."""
    if lab.backend.capabilities.updates_graph_params:
        not_applicable("updates_graph_params is declared")
    (stream,) = lab.streams("s")
    graph = scaled(lab, stream)
    with pytest.raises(CapabilityError):
        graph.update_params({"n": [2]}, stream=stream)


@promise("Graph.update_params")
def test_random_programs_with_flags_and_parameters(random_programs: Callable[[str], None]) -> None:
    """Programs use flags and host parameters as far as the backend declares them."""
    random_programs("bound")
