"""When a rank counts as lost: its silence is measured by the signs of life of the rank that listens."""

import os
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from outrider.engine.ranks.ranks import STORE_LOST, KeyValueStore, ParallelConfig
from outrider.engine.ranks.watch import RankWatch, first_rank_is_lost


def watch_of(rank, room, *, decided=True, **named):
    """A watch whose beats the test makes."""
    group = SimpleNamespace(last_decision=("drafted", 3) if decided else None)
    ranks = SimpleNamespace(rank=rank, config=ParallelConfig(tensor=2), groups=(group,), progress=f"rank {rank} at call 7")
    return RankWatch(ranks, room, speaks=False, **named)


def beat(watch, room, times=1, *, silent=False):
    """What it notices while it gives so many signs of life; ``silent``: it gives none, and listens alone."""
    for _ in range(times):
        watch._num_heartbeats += 1
        if not silent:
            room.publish_heartbeat(watch._ranks.rank, f"{watch._num_heartbeats}{watch._start_suffix} {watch._ranks.progress}")
        found = watch._check_heartbeats()
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(("decided", "patience"), [(True, 10), (False, 100)])
def test_a_rank_is_silent_for_as_many_beats_as_it_may(decided, patience):
    room = KeyValueStore(HashStore(), "test")
    first, second = watch_of(0, room), watch_of(1, room, decided=decided)
    assert beat(second, room) is None
    assert beat(first, room, patience) is None
    said = beat(first, room)
    assert "rank 1 hangs: no sign of life for" in said
    assert "rank 1 at call 7" in said
    assert room.failure == said


def test_a_rank_that_gives_signs_or_has_ended_or_has_not_begun_is_not_lost():
    room = KeyValueStore(HashStore(), "test")
    first, second = watch_of(0, room), watch_of(1, room)
    assert beat(first, room, 200) is None
    for _ in range(5):
        assert beat(second, room) is None
        assert beat(first, room, 9) is None
    room.publish_heartbeat(1, KeyValueStore.ENDED)
    assert beat(first, room, 200) is None


def test_a_rank_whose_starter_has_gone_says_so():
    room = KeyValueStore(HashStore(), "test")
    assert watch_of(0, room, starter=os.getppid())._check_starter() is None
    said = watch_of(0, room, starter=os.getppid() + 1)._check_starter()
    assert said == "rank 0 lost the process that started it; rank 0 at call 7"
    assert first_rank_is_lost(said)
    assert first_rank_is_lost(f"{STORE_LOST}: closed")
    assert not first_rank_is_lost("rank 1 hangs: no sign of life for 4 s")
