"""The rules of the backend interface, on the reference backend, and on the simulated one where graphs are captured."""

import gc

import pytest
import torch

from outrider.device import (
    Backend,
    CapabilityError,
    CaptureError,
    InterfaceError,
    Observer,
    Recompute,
    SpeculativeSync,
    StaleBufferError,
    StreamOrderError,
    SynchronousCopyError,
)
from outrider.registry import get_backend
from outrider_cpu.backend import CpuBackend


@pytest.fixture
def backend():
    return CpuBackend()


def test_a_declared_ability_without_its_method_is_named(backend):
    stream = backend.create_stream("s")
    with pytest.raises(
        CapabilityError, match=r"perturbs_timing but its plugin has no _delay \('s'\); implement it, or don't"
    ):
        Backend._delay(backend, stream, 1)


def test_generations_count_records(backend):
    stream, event = backend.create_stream("s"), backend.create_event("e")
    assert event.generation == 0
    assert [stream.record(event), stream.record(event)] == [1, 2]
    stream.wait(event)
    assert event.query()
    event.synchronize()


@pytest.mark.parametrize("use", [lambda s, e: s.wait(e), lambda s, e: e.query(), lambda s, e: e.synchronize()])
def test_a_never_recorded_event_is_an_error(backend, use):
    with pytest.raises(StreamOrderError, match="never recorded"):
        use(backend.create_stream("s"), backend.create_event("e"))


def test_events_of_another_backend_are_refused(backend):
    event = CpuBackend().create_event("foreign")
    with pytest.raises(StreamOrderError, match="foreign"):
        backend.create_stream("s").record(event)


def test_streams_of_another_backend_are_refused(backend):
    with pytest.raises(StreamOrderError), backend.on(CpuBackend().create_stream("foreign")):
        pass


def graph_of(backend, **changes):
    def double(context):
        context.outputs["y"].copy_(context.inputs["x"] * context.scalars["factor"])

    arguments = {"inputs": {"x": torch.ones(2)}, "outputs": {"y": torch.zeros(2)}, "scalars": {"factor": 2}}
    stream = backend.create_stream("s")
    return stream, backend.capture("double", double, stream=stream, **{**arguments, **changes})


def test_an_eager_graph_keeps_addresses_and_scalars(backend):
    stream, graph = graph_of(backend)
    storage = graph.outputs["y"]
    assert graph.replay(stream) == 1
    assert storage.tolist() == [2, 2]
    graph.inputs["x"].fill_(5)
    assert graph.replay(stream) == 2
    assert storage.tolist() == [10, 10]
    assert graph.outputs["y"] is storage


def test_update_params_checks_names_and_lengths(backend):
    seen = []
    stream = backend.create_stream("s")
    graph = backend.capture(
        "p",
        lambda context: seen.append(context.params["lens"].value),
        stream=stream,
        inputs={},
        outputs={},
        params={"lens": [1, 2]},
    )
    graph.replay(stream)
    graph.update_params({"lens": [3, 4]}, stream=stream)
    graph.replay(stream)
    assert seen == [(1, 2), (3, 4)]
    with pytest.raises(InterfaceError, match="no host parameter 'other'"):
        graph.update_params({"other": [1]}, stream=stream)
    with pytest.raises(InterfaceError, match="2 values, got 1"):
        graph.update_params({"lens": [1]}, stream=stream)


def test_static_buffers_live_on_the_device(backend):
    with pytest.raises(CaptureError, match="output 'y'"):
        graph_of(backend, outputs={"y": torch.zeros(2, device="meta")})


def test_copy_async_refuses_casts_and_reshapes(backend):
    stream = backend.create_stream("s")
    with pytest.raises(InterfaceError, match="differ"):
        backend.copy_async(torch.zeros(2), torch.zeros(2, dtype=torch.int64), stream=stream)
    with pytest.raises(InterfaceError, match="differ"):
        backend.copy_async(torch.zeros(2), torch.zeros(3), stream=stream)


def test_a_renewed_buffer_refuses_its_old_readers(backend):
    buffer = backend.empty_pinned("ring", (2,), torch.int64)
    old = buffer.renew()
    assert buffer.read_generation(old) is buffer.tensor
    buffer.renew()
    with pytest.raises(StaleBufferError, match="ring"):
        buffer.read_generation(old)


def test_keep_alive_needs_a_recorded_event(backend):
    stream, event = backend.create_stream("s"), backend.create_event("e")
    with pytest.raises(StreamOrderError):
        backend.keep_alive([object()], until=event)
    stream.record(event)
    backend.keep_alive([object()], until=event)
    assert backend.release_finished() == 0


def test_keep_alive_holds_until_the_event_completes(backend, monkeypatch):
    import weakref

    class Thing:
        pass

    stream, event = backend.create_stream("s"), backend.create_event("e")
    stream.record(event)
    thing = Thing()
    alive = weakref.ref(thing)
    backend.keep_alive([thing], until=event)
    del thing
    monkeypatch.setattr(type(event), "_query", lambda self: False)
    assert backend.release_finished() == 1
    assert alive() is not None
    monkeypatch.undo()
    assert backend.release_finished() == 0
    assert alive() is None


class Recorder(Observer):
    def __init__(self):
        self.calls = []

    def stream_created(self, stream):
        self.calls.append(("stream", stream.name))

    def recorded(self, stream, event, generation):
        self.calls.append(("record", stream.name, event.name, generation))

    def waited(self, stream, event, generation):
        self.calls.append(("wait", stream.name, event.name, generation))

    def scope_entered(self, stream):
        self.calls.append(("enter", stream.name))

    def scope_left(self, stream):
        self.calls.append(("leave", stream.name))

    def event_synchronized(self, event, generation):
        self.calls.append(("sync", event.name, generation))


def test_an_observer_sees_order_and_scopes(backend):
    first = backend.create_stream("a")
    observer = Recorder()
    backend.attach(observer)
    second, event = backend.create_stream("b"), backend.create_event("e")
    with backend.on(first):
        first.record(event)
    second.wait(event)
    event.synchronize()
    backend.detach()
    first.record(event)
    assert observer.calls == [
        ("stream", "a"),
        ("stream", "b"),
        ("enter", "a"),
        ("record", "a", "e", 1),
        ("leave", "a"),
        ("wait", "b", "e", 1),
        ("sync", "e", 1),
    ]


def test_a_scope_is_left_after_an_exception(backend):
    observer = Recorder()
    backend.attach(observer)
    stream = backend.create_stream("s")
    with pytest.raises(ZeroDivisionError), backend.on(stream):
        raise ZeroDivisionError
    assert observer.calls[-1] == ("leave", "s")


class Plan:
    def __init__(self, idle):
        self.idle = idle
        self.done = []

    def recompute(self, what):
        self.done.append(what)

    def refresh(self, buffer):
        self.done.append(buffer)


def test_after_join_does_what_the_policy_declares(backend):
    class Policy(SpeculativeSync):
        recompute_after_join = frozenset({Recompute.MROPE_POSITIONS})
        refresh_before_replay = frozenset({"mrope_positions"})

    policy, busy, idle = Policy(backend), Plan(False), Plan(True)
    policy.after_join(busy)
    policy.after_join(idle)
    assert busy.done == [Recompute.MROPE_POSITIONS, "mrope_positions"]
    assert idle.done == []
    default = Plan(False)
    SpeculativeSync(backend).after_join(default)
    assert default.done == []


def test_edges_of_a_graph_stay_inside():
    backend = get_backend("sim")
    stream, other, edge = backend.create_stream("s"), backend.create_stream("other"), backend.create_event("edge")
    recorded = []
    backend.capture("edge", lambda _: recorded.append(stream.record(edge)), stream=stream, inputs={}, outputs={})
    assert set(recorded) == {0}
    assert edge.generation == 0
    for use in (lambda: other.wait(edge), edge.query, edge.synchronize, lambda: other.record(edge)):
        with pytest.raises(StreamOrderError):
            use()


def test_garbage_is_not_collected_in_a_capture():
    backend, enabled = get_backend("sim"), []
    stream, before = backend.create_stream("s"), gc.isenabled()
    gc.enable()
    try:
        backend.capture("fresh", lambda _: enabled.append(gc.isenabled()), stream=stream, inputs={}, outputs={})
        assert enabled
        assert not any(enabled)
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()


def test_time_needs_timing_events(backend):
    start, end = backend.create_event("start"), backend.create_event("end")
    with pytest.raises(CapabilityError, match="timing=True"):
        start.elapsed_ms(end)


@pytest.mark.parametrize("kind", ["pageable", "strided", "strided device side"])
def test_copies_that_would_block_are_refused(kind):
    backend = get_backend("sim")
    stream, pinned = backend.create_stream("s"), backend.empty_pinned("p", (8,), torch.float32).tensor
    with backend.on(stream):
        ones = torch.ones(8, device=backend.device)
    there = ones[::2] if kind == "strided device side" else ones[:4]
    here = {"pageable": torch.ones(4), "strided": pinned[::2]}.get(kind, pinned[:4])
    for pair in ((there, here), (here, there)):
        with pytest.raises(SynchronousCopyError):
            backend.copy_async(*pair, stream=stream)


@pytest.mark.parametrize(
    ("use", "cause"),
    [
        (lambda backend, stream, other, event: backend.on(other).__enter__(), CapabilityError),
        (lambda backend, stream, other, event: stream.wait(event), StreamOrderError),
    ],
    ids=["a fork", "a wait for an event outside"],
)
def test_undeclared_edges_of_a_graph_are_refused(use, cause):
    backend = get_backend("sim:like=npu")
    stream, other, event = backend.create_stream("s"), backend.create_stream("other"), backend.create_event("outside")
    other.record(event)
    with pytest.raises(CaptureError) as caught:
        backend.capture("refused", lambda _: use(backend, stream, other, event), stream=stream, inputs={}, outputs={})
    assert isinstance(caught.value.__cause__, cause)


def test_a_report_survives_an_observer_that_another_thread_detaches(monkeypatch):
    attached = iter([Observer(), None])
    observer = property(lambda backend: next(attached), lambda backend, value: None)
    monkeypatch.setattr(CpuBackend, "observer", observer, raising=False)
    assert isinstance(CpuBackend().listener, Observer)
