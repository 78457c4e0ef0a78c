"""Losing a rank, many times in a row: see killing.py."""

import os
import signal
import subprocess
import time

import pytest
from killing import LOSSES, children, limit_s, lose_one

from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import bundled
from outrider.device import EngineStopped
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.ranks.records import RanksFailed
from outrider_cpu.backend import CpuBackend

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", range(2 * len(LOSSES)))
def test_the_other_ranks_end_in_time_and_nothing_is_left(number):
    loss = lose_one(number)
    assert f"rank {loss.victim} " in loss.said


def engine_and_its_rank():
    """An engine of two ranks, and the process of its second rank."""
    before = set(children(os.getpid()))
    config = EngineConfig(dtype="float32", max_requests=1, max_context=64)
    engine = Engine.from_checkpoint(bundled("target"), CpuBackend(), config=config, parallel=ParallelConfig(tensor=2))
    (child,) = set(children(os.getpid())) - before
    return engine, child


@pytest.mark.parametrize(
    ("number", "match"),
    [
        (signal.SIGKILL, "rank 1 was ended by SIGKILL; rank 0 waited for it: .*last decided"),
        (signal.SIGSTOP, "rank 1 hangs: .*last decided"),
    ],
)
def test_an_engine_of_python_code_names_the_rank_that_was_lost(number, match):
    engine, child = engine_and_its_rank()
    stream = engine.stream((5, 6, 7), SamplingParams(max_tokens=32, ignore_eos=True))
    next(stream)
    started = time.monotonic()
    os.kill(child, number)
    with pytest.raises(RanksFailed, match=match):
        list(stream)
    with pytest.raises(EngineStopped):
        engine.step()
    engine.close()
    assert time.monotonic() - started < limit_s()
    assert child not in children(os.getpid())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_before_it_has_joined_ends_the_start_of_an_engine(number, monkeypatch):
    started = []

    class Lost(subprocess.Popen):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.send_signal(number)
            started.append(time.monotonic())

    monkeypatch.setattr("outrider.registry.children.subprocess.Popen", Lost)
    with pytest.raises(RanksFailed, match=r"rank 1 (was ended by SIGKILL|hangs: a signal has stopped its process)"):
        engine_and_its_rank()
    assert time.monotonic() - started[0] < limit_s()
    assert not children(os.getpid())


def test_a_closed_engine_has_released_its_graphs_and_groups():
    engine, child = engine_and_its_rank()
    engine.generate([(5, 6, 7)], SamplingParams(max_tokens=4, ignore_eos=True))
    groups = engine._decision_log.ranks.groups
    engine.close()
    assert all(group.closed for group in groups)
    assert child not in children(os.getpid())
