"""Bugs between host and device: mirrors, staging, lifetime. Numbers are those of docs/findings/scenarios.md."""

from dataclasses import replace

import pytest
import torch

from engine.scenarios.historical import TWO, Historical, after, program, request
from outrider.device import CaptureError, DeviceLost, InterfaceError, StreamOrderError
from outrider.engine.requests.request import Request
from outrider.registry import get_backend
from outrider_proof.decode_program import WrongTokens
from outrider_sanitizer import RaceError
from outrider_sanitizer.report import FindingKind
from outrider_sim.exploration import run_once
from outrider_sim.plugin import create_backend
from outrider_sim.strategies import make_strategy
from outrider_sim.streams import SimGraph


@pytest.fixture(scope="module")
def sim():
    return get_backend("sim")


@pytest.mark.slow
def test_18_memory_goes_back_while_another_stream_reads_it(sim):
    """What another engine handed over is let go as soon as its use is enqueued; its memory is the giver's again."""
    moving = program(request(6, 12, moves=(3,)), request(3, 14, start=40))

    def lets_go(batch):
        gone = {"keys_values": (), "draft_caches": (), "relay": {}}
        object.__setattr__(batch, "arrivals", tuple((each, replace(handed, **gone)) for each, handed in batch.arrivals))

    def change(engine):
        after(engine._step, "launch", lets_go)

    findings = Historical(sim, change=change).races(moving, FindingKind.REUSE)
    assert all(finding.first.actor.startswith("forward") for finding in findings)
    assert any("rows.py" in finding.first.location for finding in findings)
    Historical(sim).passes(moving, "program", "lazy")


def test_19_a_host_length_without_what_is_in_flight(sim, monkeypatch):
    """The host plans with the lengths that it knows, not with the most that they can be by now."""
    monkeypatch.setattr(Request, "length_bound", lambda self, growth: self.known_length)
    long = program(request(6, 14), request(3, 14, start=40), page_size=2)
    error = Historical(sim).fails(long, "program", "lazy")
    assert isinstance(error, WrongTokens | DeviceLost | RaceError), error


def test_22_the_host_reads_before_the_copy_has_landed(sim):
    """Accepted tokens are read from pinned memory with nothing between the copy and the reading."""
    explorer = Historical(sim, drop="results_copied")
    findings = explorer.races(TWO)
    assert explorer.implied() == ("results_copied",)
    assert FindingKind.READ_AFTER_WRITE in {finding.kind for finding in findings}


def test_23_staging_is_filled_again_before_it_was_copied(sim):
    """One slot in place of a ring: the next iteration's inputs overwrite those that are still to be copied."""

    def change(engine):
        staging = engine._parts.staging
        honest = staging.upload
        staging.upload = lambda slot, values, stream: honest(0, values, stream)

    explorer = Historical(sim, change=change)
    findings = explorer.races(TWO, FindingKind.WRITE_AFTER_READ)
    assert all(finding.second.host and "staging.py" in finding.second.location for finding in findings)
    assert not isinstance(explorer.once(TWO, "lazy"), type(None))


def test_25_an_event_from_before_the_capture_in_a_graph(sim):
    """The backend interface refuses the wait: what it would mean differs between drivers."""
    sim.control.reset()
    forward, plan = sim.create_stream("forward"), sim.create_stream("plan")
    event = sim.create_event("draft_done")
    forward.record(event)
    with sim.on(forward):
        x = torch.zeros(4, device=sim.device)

    def waits(context):
        forward.wait(event)
        context.outputs["x"].add_(1.0)

    with pytest.raises(CaptureError, match="waits_inside_graphs"):
        sim.capture("verify", waits, stream=forward, inputs={}, outputs={"x": x})

    edge = sim.create_event("edge")

    def forks(context):
        forward.record(edge)
        plan.wait(edge)
        with sim.on(plan):
            context.outputs["x"].add_(1.0)
        back = sim.create_event("back")
        plan.record(back)
        forward.wait(back)

    graph = sim.capture("verify", forks, stream=forward, inputs={}, outputs={"x": x})
    graph.replay(forward)
    forward.synchronize()
    assert x.tolist() == [1.0] * 4
    with pytest.raises(StreamOrderError, match="edge inside a captured graph"):
        plan.wait(edge)


class _Stale(SimGraph):
    """A graph of a device that reads its input as it was when the replay before ended."""

    def _replay(self, stream):
        x = self.context.inputs["x"]
        with self.backend.on(stream):
            fresh = x.clone()
            x.copy_(self.seen if hasattr(self, "seen") else fresh)
        super()._replay(stream)
        with self.backend.on(stream):
            x.copy_(fresh)
            self.seen = fresh


def _copies_then_replays(backend):
    """What a stream copied to the device is what its next replay reads; the kit has the same program (level 2)."""
    stream = backend.create_stream("forward")
    pinned = backend.empty_pinned("staging", (4,), torch.float32)
    with backend.on(stream):
        x, y = torch.zeros(4, device=backend.device), torch.zeros(4, device=backend.device)
    stream.synchronize()

    def double(context):
        torch.mul(context.inputs["x"], 2.0, out=context.outputs["y"])

    graph = backend.capture("verify", double, stream=stream, inputs={"x": x}, outputs={"y": y})
    for value in (1.0, 2.0):
        pinned.tensor.fill_(value)
        backend.copy_async(x, pinned.tensor, stream=stream)
        graph.replay(stream)
        stream.synchronize()
        assert y.tolist() == [2.0 * value] * 4


def test_26_a_replay_reads_what_the_stream_copied_before(sim, monkeypatch):
    """No ordering is missing, so it's the device that is wrong, and values show it."""
    for strategy in ("program", "lazy", "random"):
        assert run_once(sim, _copies_then_replays, make_strategy(strategy, 0, {})) is None
    monkeypatch.setattr("outrider_sim.backend.SimGraph", _Stale)
    assert isinstance(run_once(sim, _copies_then_replays, make_strategy("program", 0, {})), AssertionError)


def test_27_lengths_that_a_graph_holds_are_rebound_all_or_not_at_all():
    """A rebinding that leaves one out, or has one too many, is refused; one that doesn't come is a finding (the corpus)."""
    device = create_backend(0, {"like": "npu"})
    stream = device.create_stream("forward")
    with device.on(stream):
        y = torch.zeros(2, device=device.device)

    def body(context):
        context.outputs["y"].fill_(float(sum(context.params["lengths"].value)))

    graph = device.capture("verify", body, stream=stream, inputs={}, outputs={"y": y}, params={"lengths": [1, 2]})
    for wrong in ({"lengths": [3]}, {"lengths": [3, 4, 5]}, {"lens": [3, 4]}):
        with pytest.raises(InterfaceError):
            graph.update_params(wrong, stream=stream)
    graph.update_params({"lengths": [3, 4]}, stream=stream)
    graph.replay(stream)
    stream.synchronize()
    assert y.tolist() == [7.0] * 2
