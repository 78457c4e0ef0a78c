"""When a rank counts as lost: its silence is measured by the signs of life of the rank that listens."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from threads import failing
from torch.distributed import HashStore

from outrider.device import CollectiveError
from outrider.engine.ranks import processes
from outrider.engine.ranks.heartbeats import (
    STORE_LOST,
    Heartbeat,
    KeyValueStore,
    RankWatch,
    first_rank_is_lost,
    is_stopped,
    is_stopped_here,
    process_name,
)
from outrider.engine.ranks.processes import ChildRanks
from outrider.engine.ranks.ranks import ParallelConfig

ENDED = Heartbeat(number=0)
HERE = f"{process_name().rpartition('/')[0]}/%d"


def watch_of(rank, room, *, decided=True, process="-", **named):
    """A watch whose beats the test makes."""

    def heartbeat(number):
        return Heartbeat(number=number, has_decided=decided, process=process, progress=f"rank {rank} at call 7")

    progress = f"rank {rank} at call 7"
    ranks = SimpleNamespace(rank=rank, config=ParallelConfig(tensor=2), heartbeat=heartbeat, progress=progress)
    return RankWatch(ranks, room, speaks=False, **named)


def beat(watch, room, times=1, *, silent=False):
    """What it notices while it gives so many signs of life; ``silent``: it gives none, and listens alone."""
    for _ in range(times):
        watch._num_heartbeats += 1
        if not silent:
            room.publish_heartbeat(watch._ranks.rank, watch._ranks.heartbeat(watch._num_heartbeats))
        found = watch._check_heartbeats()
        if found is not None:
            return found
    return None


@pytest.fixture
def stopped():
    """A process that a signal has stopped, by its number."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 10
        while not is_stopped(child.pid) and time.monotonic() < until:
            time.sleep(0.01)
        yield child.pid
        child.kill()


def test_a_heartbeat_is_read_as_it_was_written():
    written = Heartbeat(
        number=3, has_decided=False, calls=12, process=process_name(), progress="rank 1: last decided x = 'a b'"
    )
    room = KeyValueStore(HashStore(), "test")
    room.publish_heartbeat(1, written)
    assert room.last_heartbeat(1) == written


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


def test_a_rank_that_is_stopped_has_no_longer_at_its_start(stopped):
    room = KeyValueStore(HashStore(), "test")
    first, second = watch_of(0, room), watch_of(1, room, decided=False, process=HERE % stopped)
    assert beat(second, room) is None
    assert beat(first, room, 10) is None
    assert "rank 1 hangs" in beat(first, room)


def test_a_process_is_stopped_only_on_its_own_host(stopped):
    assert is_stopped_here(HERE % stopped)
    assert not is_stopped_here(process_name())
    assert not is_stopped_here(f"another/pid:[1]/{stopped}")
    assert not is_stopped_here("-")


def test_a_process_counts_as_stopped_after_several_checks_in_a_row(stopped, monkeypatch):
    def children_of(*processes):
        children = ChildRanks(stopped_checks=3)
        children.processes += [SimpleNamespace(pid=process, poll=lambda: None) for process in processes]
        return children

    children = children_of(os.getpid(), stopped)
    lost = 2, "rank 2 hangs: a signal has stopped its process"
    assert [children.find_lost() for _ in range(3)] == [None, None, lost]
    answers = iter([True, True, False, True, True, True])
    monkeypatch.setattr(processes, "is_stopped", lambda _: next(answers))
    children = children_of(stopped)
    assert [children.find_lost() is not None for _ in range(6)] == [False] * 5 + [True]


def test_a_rank_that_gives_signs_or_has_ended_or_has_not_begun_is_not_lost():
    room = KeyValueStore(HashStore(), "test")
    first, second = watch_of(0, room), watch_of(1, room)
    assert beat(first, room, 200) is None
    for _ in range(5):
        assert beat(second, room) is None
        assert beat(first, room, 9) is None
    room.publish_heartbeat(1, ENDED)
    assert beat(first, room, 200) is None


def test_a_rank_whose_starter_has_gone_says_so():
    room = KeyValueStore(HashStore(), "test")
    assert watch_of(0, room, starter=os.getppid())._check_starter() is None
    said = watch_of(0, room, starter=os.getppid() + 1)._check_starter()
    assert said == "rank 0 lost the process that started it; rank 0 at call 7"
    assert first_rank_is_lost(said)
    assert first_rank_is_lost(f"{STORE_LOST}: closed")
    assert not first_rank_is_lost("rank 1 hangs: no sign of life for 4 s")


def test_all_groups_of_a_rank_are_closed_where_one_fails_to_end():
    def body(ranks):
        def fail():
            raise ranks.data.failed("it doesn't end")

        ranks.data._close = fail
        with pytest.raises(CollectiveError, match="it doesn't end"):
            ranks.close()
        return [group.closed for group in ranks.groups]

    found, errors = failing(ParallelConfig(tensor=2, data=2), body)
    assert not errors
    assert set(map(tuple, found.values())) == {(True, True)}


@pytest.mark.parametrize("beats", [True, False])
@pytest.mark.slow
def test_a_rank_that_is_late_and_lives_is_named_by_the_rank_that_waited(beats):
    over = threading.Event()

    def body(ranks):
        stream = ranks.backend.create_stream("main")
        x = torch.ones(4)
        ranks.tensor.all_reduce(x, stream=stream)
        if ranks.rank == 1:
            for number in range(1, 100):
                if beats or number == 1:
                    ranks.key_value_store.publish_heartbeat(1, ranks.heartbeat(number))
                if over.wait(0.05):
                    return None
            raise AssertionError("rank 0 waits for ever")
        try:
            ranks.tensor.all_reduce(x, stream=stream)
        except Exception as error:
            return ranks.report_failure(error)
        finally:
            over.set()

    found, errors = failing(ParallelConfig(tensor=2, timeout_s=2.0), body)
    assert not errors
    if beats:
        assert found[0].startswith("rank 1 hangs: it lives, and didn't make the call that rank 0 waited for (limit 2 s)")
        assert "last called all_reduce #1 " in found[0]
    else:
        assert found[0].startswith("rank 0 failed: CollectiveError")
