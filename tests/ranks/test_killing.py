"""Losing a rank, many times in a row: see killing.py."""

import os
import signal

import pytest
from killing import HOW, TIMES, children, lose_one

from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import bundled
from outrider.device import EngineStopped
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.ranks.records import RanksFailed
from outrider_cpu.backend import CpuBackend

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", range(TIMES))
def test_the_other_ranks_end_in_time_and_nothing_is_left(number):
    how, victim, _, said = lose_one(number)
    assert how in HOW
    assert f"rank {victim} " in said


def test_an_engine_of_python_code_names_the_rank_that_was_killed():
    before = set(children(os.getpid()))
    config = EngineConfig(dtype="float32", max_requests=1, max_context=64)
    engine = Engine.from_checkpoint(bundled("target"), CpuBackend(), config=config, parallel=ParallelConfig(tensor=2))
    (child,) = set(children(os.getpid())) - before
    stream = engine.stream((5, 6, 7), SamplingParams(max_tokens=32, ignore_eos=True))
    next(stream)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(RanksFailed, match="rank 1 was ended by SIGKILL; rank 0 waited for it: .*last decided"):
        list(stream)
    with pytest.raises(EngineStopped):
        engine.step()
    engine.close()
    assert not set(children(os.getpid())) - before
