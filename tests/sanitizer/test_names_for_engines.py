"""Names of `torch.cuda` that engines use work on the simulated device; others raise by name."""

from __future__ import annotations

import pytest
import torch

from outrider.device import CapabilityError
from outrider_sanitizer.cuda_names import map_cuda_names
from outrider_sim.backend import SimBackend


@pytest.fixture
def backend() -> object:
    made = SimBackend()
    with map_cuda_names(made):
        yield made


def test_storages_are_released_and_refilled(backend: SimBackend) -> None:
    x = torch.ones(8, device="cuda")
    view, before = x[:4], torch.cuda.memory_allocated()
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == x.storage().size() == 0
    assert torch.cuda.memory_allocated() < before
    x.storage().resize_(8)
    x.fill_(3)
    assert view.tolist() == [3.0] * 4
    with pytest.raises(RuntimeError, match="can't be resized to 64"):
        x.untyped_storage().resize_(64)
    other = torch.empty(0, device="cuda").set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    other.fill_(5)
    assert x.tolist() == [3.0, 3.0, 5.0, 5.0, 5.0, 5.0, 3.0, 3.0]


def test_graphed_callables_copy_their_arguments(backend: SimBackend) -> None:
    double = torch.cuda.make_graphed_callables(lambda x: x * 2, (torch.ones(4, device="cuda"),))
    assert double(torch.full((4,), 3.0, device="cuda")).tolist() == [6.0] * 4
    assert double(torch.full((4,), 4.0, device="cuda")).tolist() == [8.0] * 4
    with pytest.raises(CapabilityError, match="make_graphed_callables with gradients"):
        torch.cuda.make_graphed_callables(lambda x: x, (torch.ones(4, device="cuda", requires_grad=True),))


def test_streams_events_and_pools(backend: SimBackend) -> None:
    side = torch.cuda.Stream()
    assert side.cuda_stream != 0 == torch.cuda.default_stream().cuda_stream
    assert torch.cuda.ExternalStream(side.cuda_stream) == side
    event = torch.cuda.Event(external=True)
    event.record(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(None)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(4, device="cuda")
    with torch.cuda.graph(graph, pool=pool.id):
        torch.cuda._sleep(1000)
        y = x + 1
        with pytest.raises(CapabilityError, match=r"Event\(external=True\) in a capture"):
            event.record()
    graph.replay()
    assert y.tolist() == [2.0] * 4
    assert x.is_cuda
    assert not torch.ones(1).is_cuda
    assert torch.cuda.get_device_properties(0).total_memory > 0
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("here")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torch.cuda.cudart(), "cudart"),
        (lambda: torch.cuda.ipc_collect(), "ipc_collect"),
        (lambda: torch.cuda.utilization(), "torch.cuda.utilization"),
        (lambda: torch.cuda.Event(interprocess=True), "interprocess"),
        (lambda: torch.compile(lambda x: x, mode="reduce-overhead"), "reduce-overhead"),
        (lambda: torch.ones(1, device="cuda").untyped_storage().share_memory_(), "shares no memory"),
        (lambda: torch.cuda.ExternalStream(12345), "no stream has the handle 12345"),
    ],
)
def test_others_raise_by_name(backend: SimBackend, call: object, name: str) -> None:
    with pytest.raises(Exception, match=name):
        call()


def test_torchs_names_are_back_afterwards() -> None:
    before = (torch.compile, torch.cuda.utilization)
    with map_cuda_names(SimBackend()):
        pass
    assert (torch.compile, torch.cuda.utilization) == before
    assert not torch.ones(1).is_cuda
