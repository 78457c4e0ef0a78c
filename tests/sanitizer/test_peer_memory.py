"""One rank reads another rank's memory, and graphs whose collectives registered pages that were mapped anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.registry import Registry
from outrider_proof.rank_exploration import simulated_hosts
from outrider_sanitizer import FindingKind, watch_ranks
from outrider_sanitizer.races.race import ProgramRank, RankRace
from outrider_sim.torch_device.launches import peer_view, remap

HOSTS = simulated_hosts(Registry())


def kinds_of(body: Any, fixed: bool) -> tuple[set[FindingKind], Any]:
    race = RankRace(name="program", category="C", about="", body=body, kinds=frozenset())
    devices = HOSTS(race, 2)
    devices[0].control.reset()
    with watch_ranks(devices) as report:
        race.run_race(devices, fixed=fixed)
    return {finding.kind for finding in report}, report


@pytest.mark.parametrize("fixed", [False, True])
def test_a_read_of_a_peers_memory_is_ordered_by_collectives_alone(fixed: bool) -> None:
    shared: dict[int, torch.Tensor] = {}

    def body(rank: ProgramRank, fixed: bool) -> None:
        shared[rank.index] = rank.filled(float(rank.index))
        token = rank.filled(1.0)
        rank.everyone.all_reduce(token, stream=rank.stream)
        if rank.index == 1:
            theirs = peer_view(shared[0], rank.backend)
            with rank.backend.on(rank.stream):
                theirs + 1
        if fixed:
            rank.everyone.all_reduce(token, stream=rank.stream)
        if rank.index == 0:
            with rank.backend.on(rank.stream):
                shared[0].fill_(7.0)
        rank.everyone.all_reduce(token, stream=rank.stream)

    kinds, report = kinds_of(body, fixed)
    if fixed:
        assert report.clean, str(report)
        return
    (finding,) = report
    assert kinds <= {FindingKind.WRITE_AFTER_READ, FindingKind.READ_AFTER_WRITE}, str(report)
    assert {finding.first.operation, finding.second.operation} == {"aten::add.Tensor", "aten::fill_.Scalar"}


@pytest.mark.parametrize("fixed", [False, True])
def test_a_captured_collective_uses_the_pages_that_it_registered(fixed: bool) -> None:
    def body(rank: ProgramRank, fixed: bool) -> None:
        backend, x = rank.backend, rank.filled(1.0)

        def capture() -> Any:
            backend.synchronize()

            def reduce(context: Any) -> None:
                rank.everyone.all_reduce(context.inputs["x"], stream=rank.stream)

            return backend.capture("reduce", reduce, stream=rank.stream, inputs={"x": x}, outputs={})

        graph = capture()
        graph.replay(rank.stream)
        backend.synchronize()
        remap(x)
        with backend.on(rank.stream):
            x.fill_(2.0)
        if fixed:
            graph = capture()
        graph.replay(rank.stream)

    kinds, report = kinds_of(body, fixed)
    assert kinds == (set() if fixed else {FindingKind.REUSE}), str(report)
    for finding in report:
        assert "test_peer_memory.py" in finding.first.location
        assert "reduce" in finding.second.operation
