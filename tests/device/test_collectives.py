"""Groups: the rules that the backend interface checks itself, and torch's process groups of the host."""

import pickle
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from outrider.device import (
    CapabilityError,
    CaptureContext,
    Collective,
    CollectiveError,
    ConfigError,
    Graph,
    InterfaceError,
    KernelSet,
    Observer,
    Reduction,
)
from outrider_cpu.backend import CpuBackend


def on_ranks(body, size=2, *, timeout_s=5.0, name="pair"):
    """``body(group, stream)`` of each rank on a thread of its own; what each returned, or the first error by rank."""
    store = HashStore()
    came = {}

    def run(rank):
        try:
            backend = CpuBackend()
            group = backend.create_group(name, ranks=range(size), rank=rank, store=store, timeout_s=timeout_s)
            try:
                came[rank] = body(group, backend.create_stream("main"))
            finally:
                group.close()
        except BaseException as error:  # handed to the caller
            came[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [came[rank] for rank in range(size)]


def right(body, size=2, **options):
    """As ``on_ranks``, where every rank must come through."""
    for came in (results := on_ranks(body, size, **options)):
        if isinstance(came, BaseException):
            raise came
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_verb_moves_what_it_says(size):
    def body(group, stream):
        own = torch.arange(size * 3.0).reshape(size, 3) + 100 * group.rank
        every = [torch.arange(size * 3.0).reshape(size, 3) + 100 * rank for rank in range(size)]
        for reduction, expected in (
            (Reduction.SUM, torch.stack(every).sum(0)),
            (Reduction.MAX, torch.stack(every).amax(0)),
            (Reduction.MIN, torch.stack(every).amin(0)),
        ):
            reduced = own.clone()
            group.all_reduce(reduced, stream=stream, reduction=reduction)
            assert torch.equal(reduced, expected)
            part = torch.empty(3)
            group.reduce_scatter(part, own.clone(), stream=stream, reduction=reduction)
            assert torch.equal(part, expected[group.rank])
        gathered = torch.empty(size, size, 3)
        group.all_gather(gathered, own, stream=stream)
        assert torch.equal(gathered, torch.stack(every))
        swapped = torch.empty(size, 3)
        group.all_to_all(swapped, own, stream=stream)
        assert torch.equal(swapped, torch.stack([tensor[group.rank] for tensor in every]))
        group.broadcast(own, root=size - 1, stream=stream)
        assert torch.equal(own, every[-1])
        if size > 1 and group.rank == 0:
            group.send(every[0][0], to=size - 1, stream=stream)
        elif size > 1 and group.rank == size - 1:
            received = torch.empty(3)
            group.receive(received, source=0, stream=stream)
            assert torch.equal(received, every[0][0])

    right(body, size)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.complex64, torch.bfloat16, torch.int16])
def test_what_is_only_moved_may_have_any_dtype(dtype):
    def body(group, stream):
        own = torch.tensor([0, 1, 1]).add(group.rank).bool().to(dtype)
        gathered = torch.empty(2, 3, dtype=dtype)
        group.all_gather(gathered, own, stream=stream)
        scalar = own[group.rank].clone()
        group.broadcast(scalar, root=1, stream=stream)
        return gathered.to(torch.complex64).abs().tolist(), scalar.to(torch.complex64).abs().item()

    assert right(body) == [([[0, 1, 1], [1, 1, 1]], 1.0)] * 2


def test_no_elements_is_a_call_as_any_other():
    calls = []

    def body(group, stream):
        group.all_reduce(torch.empty(0, 4), stream=stream)
        group.all_gather(torch.empty(2, 0), torch.empty(0), stream=stream)
        calls.append(group.last_call.sequence)

    right(body)
    assert calls == [2, 2]


def test_sub_groups_have_indexes_of_their_own():
    def body(group, stream):
        if group.rank == 0:
            return None
        backend = group.backend
        store = stores[0]
        pair = backend.create_group("pair", ranks=(2, 1), rank=group.rank, store=store)
        tensor = torch.tensor([group.rank])
        pair.broadcast(tensor, root=0, stream=stream)
        pair.close()
        again = backend.create_group("pair", ranks=(2, 1), rank=group.rank, store=store)
        again.all_reduce(tensor, stream=stream)
        again.close()
        return pair.rank, tensor.item()

    stores = [HashStore()]
    assert right(body, 3) == [None, (1, 4), (0, 4)]


WRONG = {
    "another shape": lambda g, s: g.all_gather(torch.empty(3, 2), torch.empty(2), stream=s),
    "another dtype": lambda g, s: g.all_gather(torch.empty(2, 2), torch.empty(2, dtype=torch.int32), stream=s),
    "halves that aren't": lambda g, s: g.all_to_all(torch.empty(3), torch.empty(3), stream=s),
    "a scalar in halves": lambda g, s: g.all_to_all(torch.empty(()), torch.empty(()), stream=s),
    "gaps": lambda g, s: g.all_reduce(torch.empty(4, 4)[:, :2], stream=s),
    "a dtype without sums": lambda g, s: g.all_reduce(torch.empty(3, dtype=torch.bool), stream=s),
    "no such root": lambda g, s: g.broadcast(torch.empty(3), root=2, stream=s),
    "a root from behind": lambda g, s: g.broadcast(torch.empty(3), root=-1, stream=s),
    "itself": lambda g, s: g.send(torch.empty(3), to=g.rank, stream=s),
    "another device": lambda g, s: g.all_reduce(torch.empty(3, device="meta"), stream=s),
    "another's stream": lambda g, s: g.all_reduce(torch.empty(3), stream=CpuBackend().create_stream("other")),
}


def test_wrong_operands_raise_before_anything_is_sent():
    def body(group, stream):
        for call in WRONG.values():
            with pytest.raises(InterfaceError):
                call(group, stream)
        tensor = torch.ones(3)
        group.all_reduce(tensor, stream=stream)  # the group works on
        return tensor.tolist()

    assert right(body) == [[2.0] * 3] * 2


def test_a_closed_group_is_refused_and_closes_twice():
    def body(group, stream):
        group.close()
        group.close()
        with pytest.raises(InterfaceError, match="closed"):
            group.all_reduce(torch.ones(1), stream=stream)

    right(body)


def test_a_peer_that_left_is_named_and_the_group_stays_broken():
    def body(group, stream):
        group.all_reduce(torch.ones(3), stream=stream)
        if group.rank == 1:
            return None
        with pytest.raises(CollectiveError) as raised:
            group.all_reduce(torch.ones(3), stream=stream)
        with pytest.raises(CollectiveError, match="failed before"):
            group.broadcast(torch.ones(3), root=0, stream=stream)
        return [raised.value]

    (error,) = right(body)[0]
    assert (error.group, error.rank, error.sequence, error.kind) == ("pair", 0, 2, "all_reduce")
    assert not error.device_lost
    assert "all_reduce #2 (3 of float32, sum) failed on rank 0 of group 'pair'" in str(error)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_a_late_peer_is_an_error_within_the_limit():
    failed = threading.Event()

    def body(group, stream):
        if group.rank == 1:
            assert failed.wait(60)
        with pytest.raises(CollectiveError):
            group.all_reduce(torch.ones(3), stream=stream)
        failed.set()

    right(body, timeout_s=1.0)


def test_a_rank_that_never_comes_is_an_error_of_the_creation():
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="create_group") as raised:
        CpuBackend().create_group("alone", ranks=(0, 1), rank=0, store=HashStore(), timeout_s=0.2)
    assert time.monotonic() - began < 30
    assert (raised.value.kind, raised.value.sequence) == ("create_group", 0)


@pytest.mark.parametrize(("ranks", "rank", "timeout_s"), [((0, 1), 2, 1), ((0, 0), 0, 1), ((), 0, 1), ((0,), 0, 0)])
def test_ranks_must_be_distinct_and_hold_this_one(ranks, rank, timeout_s):
    with pytest.raises(ConfigError):
        CpuBackend().create_group("odd", ranks=ranks, rank=rank, store=HashStore(), timeout_s=timeout_s)


def test_without_the_ability_there_is_no_group():
    backend = CpuBackend().with_capabilities(collectives=False)
    with pytest.raises(CapabilityError, match="one rank"):
        backend.create_group("none", ranks=(0,), rank=0, store=HashStore())


def test_an_observer_hears_of_calls_and_decisions_in_order():
    class Watching(Observer):
        def __init__(self):
            self.heard = []

        def collective(self, group, call, stream, reads, writes):
            self.heard.append((group.name, call, stream.name, len(reads), len(writes)))

        def decided(self, group, name, value):
            self.heard.append((group.name, name, value))

    def body(group, stream):
        watching = Watching()
        group.backend.attach(watching)
        group.decide("bucket", 8)
        group.broadcast(torch.ones(2, 3), root=1, stream=stream)
        if group.rank == 0:
            group.send(torch.ones(1), to=1, stream=stream)
        else:
            group.receive(torch.ones(1), source=0, stream=stream)
        group.all_reduce(torch.ones(4), stream=stream, reduction=Reduction.MAX)
        return watching.heard, group.progress

    for rank, (heard, progress) in enumerate(right(body)):
        bucket, root, sent, reduced = heard
        assert bucket == ("pair", "bucket", 8)
        reads, writes = (0, 1) if rank == 0 else (1, 0)
        assert root == ("pair", Collective("broadcast", 1, torch.float32, 6, root=1), "main", reads, writes)
        assert sent[1].sequence == 1
        assert (sent[1].kind, sent[1].peer) == (("send", 1), ("receive", 0))[rank]
        assert reduced[1] == Collective("all_reduce", 2, torch.float32, 4, reduction=Reduction.MAX)
        assert progress == (
            f"rank {rank} of 2 in group 'pair': last decided bucket = 8, last called all_reduce #2 (4 of float32, max)"
        )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("invariant", [False, True])
def test_the_fused_norm_is_the_sum_and_its_norm(size, invariant):
    kernels = KernelSet().batch_invariant() if invariant else KernelSet()
    weight = torch.linspace(0.5, 1.5, 8)
    parts = torch.randn(size, 5, 8, generator=torch.Generator().manual_seed(1))

    def body(group, stream):
        residual = torch.ones(5, 8)
        normed = kernels.all_reduce_rms_norm(parts[group.rank].clone(), residual, weight, 1e-6, group=group, stream=stream)
        return normed, residual

    expected = torch.ones(5, 8)
    normed = KernelSet().add_rms_norm(parts.sum(0), expected, weight, 1e-6)
    came = right(body, size)
    for made, residual in came:
        assert torch.equal(made, came[0][0])
        torch.testing.assert_close(made, normed)
        torch.testing.assert_close(residual, expected)


def test_an_eager_replay_makes_the_calls_anew():
    def body(group, stream):
        tensor = torch.ones(2)
        graph = group.backend.capture(
            "sum", lambda _: group.all_reduce(tensor, stream=stream), stream=stream, inputs={}, outputs={"sum": tensor}
        )
        for _ in range(3):
            graph.replay(stream)
        return tensor.tolist()

    assert right(body) == [[8.0, 8.0]] * 2


def test_the_calls_that_all_ranks_make_are_counted():
    def body(group, stream):
        for _ in range(3):
            group.all_reduce(torch.ones(2), stream=stream)
        if group.rank == 0:
            group.send(torch.ones(2), to=1, stream=stream)
        else:
            group.receive(torch.ones(2), source=0, stream=stream)
        return group.call_count

    assert right(body) == [3, 3]


class Library:
    """Ends as NCCL does: it waits for the end of every graph that holds its calls."""

    def __init__(self):
        self.graphs_are_gone = threading.Event()

    def shutdown(self):
        self.graphs_are_gone.wait(20)


class Captured(Graph):
    def __init__(self, backend, library):
        super().__init__(backend, "calls", CaptureContext({}, {}, {}, {}))
        self.library = library

    def _replay(self, stream):
        raise AssertionError(f"replayed on {stream}")

    def _release(self):
        self.library.graphs_are_gone.set()


def of_a_library(monkeypatch):
    """A group of one rank whose calls a library carries out beside the host."""
    backend, library = CpuBackend(), Library()
    group = backend.create_group("alone", ranks=(0,), rank=0, store=HashStore())
    backend._declarations["capabilities"] = replace(
        backend.capabilities, asynchronous=True, captures_graphs=True, captures_collectives=True
    )
    group._native = library
    monkeypatch.setattr("outrider.device.torch_collectives._SHUTDOWN_TIMEOUT_S", 5.0)
    return group, library


def test_graphs_are_released_before_the_library_ends(monkeypatch):
    group, library = of_a_library(monkeypatch)
    backend = group.backend
    graph = Captured(backend, library)
    with backend.capturing(graph, stream := backend.create_stream("main")):
        group._call("all_reduce", stream, torch.ones(2), reads=(), writes=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a library that isn't done in time
        group.close()
    with pytest.raises(InterfaceError, match="'calls' .*can't be replayed any more: group 'alone'.* is closed"):
        graph.replay(stream)


def test_a_library_that_does_not_end_is_left_alone(monkeypatch):
    group, library = of_a_library(monkeypatch)
    monkeypatch.setattr("outrider.device.torch_collectives._SHUTDOWN_TIMEOUT_S", 0.05)
    with pytest.warns(RuntimeWarning, match="'alone': the library .* hasn't ended its side on rank 0 within 0.05 s"):
        group.close()
    library.graphs_are_gone.set()
