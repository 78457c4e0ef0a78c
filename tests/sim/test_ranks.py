"""Groups of simulated devices: values, order across ranks, deadlocks, and what belongs to a rank."""

import pytest
import torch

from outrider.device import BackendLoadError, CollectiveError, ConfigError, DeadlockError, Reduction
from outrider.registry import Registry
from outrider_sanitizer import FindingKind, watch, watch_ranks
from outrider_sanitizer.races.race import order
from outrider_sim.exploration import explore


@pytest.fixture(scope="module")
def devices():
    registry = Registry()
    return [registry.create(f"sim:{rank}") for rank in range(3)]


@pytest.fixture(autouse=True)
def fresh(devices):
    devices[0].control.reset()


def run(devices, body, count=None):
    """``body(rank, backend, group, stream)`` on each device; raises what failed first."""
    used = devices[:count]
    store = devices[0].control.create_store()

    def rank(index):
        def thread():
            backend = used[index]
            group = backend.create_group("all", ranks=range(len(used)), rank=index, store=store)
            body(index, backend, group, backend.create_stream("forward"))
            backend.synchronize()

        return thread

    devices[0].control.run_threads(*map(rank, range(len(used))))


def full(backend, stream, value, *shape, dtype=torch.float32):
    with backend.on(stream):
        return torch.full(shape or (4,), value, dtype=dtype, device=backend.device)


def test_every_verb_computes_in_every_schedule(devices):
    found = {}

    def body(rank, backend, group, stream):
        x, top = full(backend, stream, rank + 1.0), full(backend, stream, rank, dtype=torch.int64)
        group.all_reduce(x, stream=stream)
        group.all_reduce(top, reduction=Reduction.MAX, stream=stream)
        gathered = full(backend, stream, 0.0, 3, 4)
        group.all_gather(gathered, full(backend, stream, float(rank)), stream=stream)
        part = full(backend, stream, 0.0, 4)
        group.reduce_scatter(part, full(backend, stream, rank + 1.0, 3, 4), stream=stream)
        swapped = full(backend, stream, 0.0, 3, 2)
        group.all_to_all(swapped, full(backend, stream, float(rank), 3, 2), stream=stream)
        group.broadcast(x, root=1, stream=stream)
        if rank == 0:
            group.send(part, to=2, stream=stream)
        elif rank == 2:
            group.receive(part, source=0, stream=stream)
        stream.synchronize()
        assert x.device == torch.device("sim", rank)
        found[rank] = [t.flatten().tolist() for t in (x, top, gathered, part, swapped)]

    def program(_):
        found.clear()
        run(devices, body)
        for each in range(3):
            x, top, gathered, part, swapped = found[each]
            assert (x, top, part) == ([6.0] * 4, [2] * 4, [6.0] * 4)
            assert gathered == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
            assert swapped == [0.0] * 2 + [1.0] * 2 + [2.0] * 2

    failure = explore(devices[0], program, iterations=8).failure
    assert failure is None, failure.error


def test_a_graph_makes_its_calls_anew_in_each_replay(devices):
    def body(rank, backend, group, stream):
        x = full(backend, stream, 1.0)
        graph = backend.capture(
            "step", lambda _: group.all_reduce(x, stream=stream), inputs={"x": x}, outputs={"x": x}, stream=stream
        )
        for _ in range(3):
            graph.replay(stream=stream)
        stream.synchronize()
        assert x.tolist() == [27.0] * 4

    with watch_ranks(devices) as report:
        run(devices, body)
    assert report.clean, str(report)


def test_order_comes_across_ranks_and_only_from_who_contributes(devices):
    """Rank 1's second stream is ordered behind rank 0's first by two messages; without the second it isn't."""

    def body(answered):
        def rank_body(rank, backend, group, stream):
            side = backend.create_stream("side")
            x = full(backend, stream, 1.0)
            if rank == 0:
                group.send(x, to=1, stream=stream)
                if answered:
                    y = full(backend, side, 0.0)
                    group.receive(y, source=1, stream=side)
                with backend.on(side):
                    x.add_(1.0)
            elif rank == 1:
                group.receive(x, source=0, stream=stream)
                if answered:
                    group.send(x, to=0, stream=stream)

        return rank_body

    for answered in (True, False):
        devices[0].control.reset()
        with watch_ranks(devices) as report:
            run(devices, body(answered), 2)
        kinds = {finding.kind for finding in report}
        # What the send itself reads isn't over because its receiver went on: only what came before it is.
        assert FindingKind.WRITE_AFTER_READ in kinds
        assert (FindingKind.WRITE_AFTER_WRITE in kinds) is not answered, str(report)


def test_one_rank_alone_is_watched_as_before(devices):
    def body(rank, backend, group, stream):
        x, side = full(backend, stream, 1.0), backend.create_stream("side")
        group.all_reduce(x, stream=stream)
        with backend.on(side):
            x.add_(1.0)

    with watch(devices[0]) as report:
        run(devices, body)
    assert {finding.kind for finding in report} <= {FindingKind.READ_AFTER_WRITE, FindingKind.WRITE_AFTER_WRITE}
    assert not report.clean


def test_a_deadlock_is_told_with_who_waits_for_whom(devices):
    def body(rank, backend, group, stream):
        other = backend.create_group("other", ranks=range(2), rank=rank, store=None)
        x = full(backend, stream, 1.0)
        for each in (group, other) if rank == 0 else (other, group):
            each.all_reduce(x, stream=stream)
        stream.synchronize()

    with pytest.raises(CollectiveError, match="rank 0 → rank 1 → rank 0") as caught:
        run(devices, body, 2)
    assert isinstance(caught.value, DeadlockError)
    assert (caught.value.kind, caught.value.sequence) == ("all_reduce", 1)


def test_two_streams_of_one_group_hang_where_one_collective_runs_at_a_time():
    registry = Registry()
    narrow = [registry.create("sim:resident=1"), registry.create("sim:1")]

    def body(rank, backend, group, stream):
        side = backend.create_stream("side")
        x, y = full(backend, stream, 1.0), full(backend, stream, 2.0)
        order(stream, side)
        group.all_reduce(x, stream=stream)
        group.all_reduce(y, stream=side)

    failure = explore(narrow[0], lambda _: run(narrow, body), iterations=40).failure
    assert failure is not None
    assert isinstance(failure.error, CollectiveError)
    assert "needs a place on the device" in str(failure.error)


@pytest.mark.parametrize("end", ["ends", "closes", "fails"])
def test_a_rank_that_is_gone_is_named(devices, end):
    def body(rank, backend, group, stream):
        x = full(backend, stream, 1.0)
        group.all_reduce(x, stream=stream)
        stream.synchronize()
        if rank == 1:
            if end == "closes":
                group.close()
            if end == "fails":
                raise ValueError("rank 1 is out of patience")
            return
        group.all_reduce(x, stream=stream)
        stream.synchronize()

    expected = ValueError if end == "fails" else CollectiveError
    with pytest.raises(expected, match="out of patience" if end == "fails" else "rank 1, which has (ended|closed)"):
        run(devices, body, 2)


def test_a_rank_that_never_comes_is_named(devices):
    def alone():
        devices[0].create_group("pair", ranks=(0, 1), rank=0, store=None)

    with pytest.raises(CollectiveError, match="rank 1 of the world didn't join"):
        devices[0].control.run_threads(alone)


def test_devices_of_a_host_are_told_apart():
    held = [Registry().create(f"sim:{rank}") for rank in range(3)]
    with pytest.raises(ConfigError, match="strategy"):
        Registry().create("sim:3,strategy=lazy")
    one, two = (torch.zeros(2, device=f"sim:{rank}") for rank in (1, 2))
    with pytest.raises(RuntimeError, match="another simulated device"):
        one + two
    with pytest.raises(RuntimeError, match="devices meet in collectives"):
        one.to("sim:2")
    with pytest.raises(RuntimeError, match="there is no device"):
        torch.zeros(2, device="sim:7")
    with pytest.raises(BackendLoadError, match="in use"):
        Registry().create("sim:1")
    del held
