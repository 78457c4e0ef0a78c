"""The lost wake-up of vllm-ascend's issue 4233, by exhaustive exploration of the protocol in which it happened.

A graph holds ``wait(flag); reset(flag); attention``. For each step the host rebinds the attention's lengths on a stream of
its own, records the flag there and replays the graph. Historically nothing ordered the next record after the replay before.
So it fires while the flag is still up and is lost, the replay's reset lowers the flag, and the next replay waits for ever. Or
it fires in time, and the next update changes the arguments of a replay that still runs.
"""

import emulation
import pytest
import torch

from outrider.device import DeadlockError

STEPS = 3
MOST = 20_000


@pytest.fixture(scope="module")
def backend():
    return emulation.make()


def protocol(backend, *, flag_inside, ordered, host_waits=False, values=True, steps=STEPS):
    """``flag_inside``: the graph waits for a flag and lowers it. ``ordered``: the fences *params free* and *params bound*.
    ``values``: the results count too, not only that the device comes to an end.
    """
    forward, update = backend.create_stream("forward"), backend.create_stream("update")
    with backend.on(forward):
        x = torch.full((1,), 1.0, device=backend.device)
        y = torch.zeros((steps,), device=backend.device)
        at = torch.zeros((1,), dtype=torch.int64, device=backend.device)
        out = torch.zeros((1,), device=backend.device)
    flag = backend.create_flag("updated")

    def fn(context):
        if flag_inside:
            flag.wait(forward)
            flag.reset(forward)
        backend.reissue(context.params["n"], lambda n: torch.mul(x, n[0], out=out))
        y.index_copy_(0, at, out)
        at.add_(1)

    graph = backend.capture("step", fn, stream=forward, inputs={"x": x}, outputs={"y": y}, params={"n": [1]})
    with backend.on(forward):
        at.zero_()  # a rehearsal counted
    backend.synchronize()
    free, bound = backend.create_event("params free"), backend.create_event("params bound")
    forward.record(free)
    for step in range(steps):
        if ordered:
            update.wait(free)
        if host_waits:
            forward.synchronize()
        graph.update_params({"n": [step + 2]}, stream=update)
        if flag_inside:
            flag.set(update)
        if ordered or not flag_inside:
            update.record(bound)
            forward.wait(bound)
        graph.replay(forward)
        forward.record(free)
    backend.synchronize()
    assert not values or y.cpu().tolist() == [float(step + 2) for step in range(steps)]


def explored(backend, **kinds):
    found = backend.control.explore(lambda b: protocol(b, **kinds), strategy="exhaustive", iterations=MOST, seed=0)
    shown = "every order passes" if found.failure is None else f"{type(found.failure.error).__name__}: {found.failure.shrunk}"
    print(f"{kinds}: {found.runs} runs, {found.pruned} cut short, exhausted {found.exhausted}; {shown}")
    return found


def test_the_historical_order_loses_a_wake_up(backend):
    """A record that fires before the reset of the replay before is lost: that one order is all that it takes."""
    found = explored(backend, flag_inside=True, ordered=False, values=False)
    assert isinstance(found.failure.error, DeadlockError)
    assert "is down (1 sets were lost)" in str(found.failure.error)
    (ordering,) = found.failure.orderings
    assert "(reset " in ordering
    assert "runs only after update" in ordering
    assert "(set " in ordering


def test_the_historical_order_changes_a_replay_in_flight(backend):
    found = explored(backend, flag_inside=True, ordered=False)
    assert isinstance(found.failure.error, AssertionError | DeadlockError)


def test_without_fences_and_without_a_flag_a_replay_is_overtaken(backend):
    """The explorer isn't blind where our fences are left out: *params free* alone is missing here."""
    found = explored(backend, flag_inside=False, ordered=False)
    assert isinstance(found.failure.error, AssertionError)


def test_our_order_has_none(backend):
    """Events around the graph alone: the host runs ahead. One order is left, since each update and replay wait for the one
    before, and it's right.
    """
    found = explored(backend, flag_inside=False, ordered=True)
    assert found.failure is None
    assert found.exhausted


def test_the_historical_protocol_behind_our_fences_has_none_either(backend):
    """What was missing is the edge from a replay to the next update, not the flag's absence."""
    found = explored(backend, flag_inside=True, ordered=True, steps=2)
    assert found.failure is None
    assert found.exhausted


def test_waiting_on_the_host_works_and_gives_launch_ahead_away(backend):
    """The fix that was made: right in every order, with the host blocked in each step."""
    found = explored(backend, flag_inside=True, ordered=False, host_waits=True)
    assert found.failure is None
    assert found.exhausted
