"""Ranks of the kit in processes, as on GPUs: one that leaves, and a device that never finishes a call."""

from types import SimpleNamespace

import pytest

from outrider_conformance.ranks.runner import RankHandle, TaskProcesses, call_task

PEER_DIES = "outrider_conformance.ranks.faults:peer_dies"


@pytest.mark.slow  # two processes for each way
@pytest.mark.parametrize("how", ["closes", "hangs", "exits"])
def test_a_rank_in_a_process_names_the_call_of_a_peer_that_left(how):
    with TaskProcesses("cpu", 2) as ranks:
        ranks.run_task(PEER_DIES, args=[how], timeout_s=3.0, limit_s=60, leaving=1 if how == "exits" else None)


def finishes(rank):
    return rank.index


def never_finishes(rank):
    rank.lost_calls.append("all_reduce #2")
    return rank.index


@pytest.mark.parametrize(("program", "waits"), [("finishes", 1), ("never_finishes", 0)])
def test_nothing_waits_for_a_device_with_a_call_that_never_ends(program, waits):
    waited = []
    backend = SimpleNamespace(synchronize=lambda: waited.append(1))
    rank = RankHandle(index=3, size=4, backend=backend, store=None)
    assert call_task(f"{__name__}:{program}", rank) == 3
    assert len(waited) == waits
