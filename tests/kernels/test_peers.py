"""Kernels that write into the peers' memory: two processes that share files, in Triton's interpreter."""

import os
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from outrider.device import ConfigError
from outrider_conformance.ranks.runner import TaskProcesses
from outrider_cpu.backend import CpuBackend
from outrider_cuda import plugin
from outrider_triton.peers import fastest

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from outrider_triton.peers import PeerExchange


@pytest.fixture(scope="module")
def interpreted():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        environment.setenv("PYTHONPATH", os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def two(interpreted):
    with TaskProcesses("cpu", 2) as ranks:
        yield ranks


@pytest.fixture
def folder():
    """The folder of the ranks' memory, which they map for as long as they use it."""
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as made:
        yield made


@pytest.mark.slow
def test_groups_of_gpus_exchange_small_tensors_by_the_peers_memory(folder, two):
    said, same = two.run_task("kernels.peers_stand_in:check", {"folder": folder}, limit_s=600)
    assert said == same
    assert said[0] == "ways ('nccl', 'one shot', 'two shot'), peer memory True"
    assert len(said) == 4


@pytest.mark.slow
def test_a_tool_is_told_of_all_that_the_fused_norm_reads_and_writes(folder, two):
    for rank in two.run_task("kernels.peers_stand_in:told", {"folder": folder}, limit_s=600):
        assert rank[:3] == ("all_reduce", True, True)
        assert rank[3] == pytest.approx([1.0, 1.0])


def one_and_two_shots(folder, ranks, **work):
    """Check that one and two shots give the same bits, on all ranks."""
    (first, taken), *others = ranks.run_task("kernels.peers_stand_in:shots", {"folder": folder, **work}, limit_s=300)
    cases = len(work["dtypes"]) * len(work["shapes"])
    assert taken == [1, 1, 2, 2, 1, 1, 2, 2] * cases
    for case in range(cases):
        one, *again = first[4 * case : 4 * case + 4]
        assert all(each == one for each in again), case
    assert all(other == (first, taken) for other in others)


@pytest.mark.slow
def test_two_shots_give_the_bits_of_one(folder, two):
    one_and_two_shots(folder, two, dtypes=["bfloat16"], shapes=[[3, 130]])


@pytest.mark.slow
def test_two_shots_of_four_ranks_give_the_bits_of_one(folder, interpreted):
    with TaskProcesses("cpu", 4) as ranks:
        one_and_two_shots(folder, ranks, dtypes=["bfloat16", "float32"], shapes=[[1, 64], [3, 130], [2, 1100]])


class Choosing:
    """A group of which a test chooses the implementations."""

    rank = 0

    def __init__(self, size, *allowed):
        self.size, self.allowed = size, allowed

    def allows_implementation(self, way):
        return not self.allowed or way in self.allowed

    def peer_buffers(self, name, shape, dtype):
        raise AssertionError(f"{name} {shape} {dtype}")


def chosen_shots(size, nbytes, words, *allowed):
    group = Choosing(size, *allowed)
    return PeerExchange(group, pdl=False)._shots(nbytes, words)


def test_the_number_of_shots_follows_from_ranks_and_size():
    assert [chosen_shots(2, 1 << exponent, 1024) for exponent in (13, 17, 20, 21, 23)] == [1, 1, 1, 0, 0]
    assert [chosen_shots(4, 1 << exponent, 1024) for exponent in (13, 17, 18, 20, 22, 23)] == [1, 1, 2, 2, 2, 0]
    assert [chosen_shots(8, 1 << exponent, 1024) for exponent in (13, 16, 20, 22, 23)] == [1, 2, 2, 2, 0]
    for ranks in (2, 4, 8):  # with more bytes, more shots, then the library
        order = [
            fastest(size << 10, ranks, ("library", "one shot", "two shot")) for size in (1, 8, 64, 256, 1024, 4096, 1 << 16)
        ]
        assert order == sorted(order, key=["one shot", "two shot", "library"].index)


def test_restricted_ranks_take_the_shots_that_they_may():
    assert chosen_shots(4, 1 << 20, 1024, "one shot") == 1
    assert chosen_shots(4, 1 << 13, 1024, "two shot") == 2
    assert chosen_shots(4, 1 << 13, 1024, "nccl") == 0
    assert chosen_shots(4, 1 << 23, 1024, "two shot") == 0


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_owns_words_where_two_shots_are_taken(size):
    taken = [words for words in range(1, 300) if chosen_shots(size, 4 * words, words, "two shot") == 2]
    assert len(taken) > 200
    for words in taken:
        share = -(-words // size)
        assert {word // share for word in range(words)} == set(range(size))


@pytest.mark.slow
def test_where_memory_of_the_peers_fails_the_library_carries_everything(folder, two):
    for rank, found in enumerate(two.run_task("kernels.peers_stand_in:fall_back", {"folder": folder}, limit_s=600)):
        ways, reached, values, said = found
        assert (ways, reached, values) == (("nccl",), False, [3.0] * 4)
        assert len(said) == 1
        assert "goes by NCCL alone, which takes longer for small tensors" in said[0]
        assert f"can't be used on rank {rank}" in said[0]
    assert "no such thing" in said[0]


@pytest.mark.parametrize(
    ("options", "match"),
    [({"peers": "maybe"}, "peers='maybe': expected one of off, on"), ({"speed": "1"}, "no option 'speed'")],
)
def test_other_options_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        plugin.create_backend(0, options)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, {"peers": True, "tuned": True}),
        ({"peers": "on"}, {"peers": True, "tuned": True}),
        ({"peers": "off"}, {"peers": False, "tuned": True}),
        ({"tuned": "off"}, {"peers": True, "tuned": False}),
    ],
)
def test_memory_of_the_peers_and_what_was_measured_are_used_unless_one_turns_them_off(options, given, monkeypatch):
    made = []
    monkeypatch.setattr("outrider_cuda.backend.CudaBackend", lambda ordinal, **switches: made.append((ordinal, switches)))
    plugin.create_backend(1, options)
    assert made == [(1, given)]


class SharedMemory:
    """Memory of the peers, which torch frees once the device is idle."""


def test_shared_memory_is_freed_only_once_the_device_is_idle(monkeypatch):
    from outrider_cuda.collectives import CudaGroup

    backend, idle = CpuBackend(), threading.Event()
    group = CudaGroup(backend, "alone", (0,), 0, HashStore(), 1.0)
    backend._declarations["capabilities"] = replace(backend.capabilities, asynchronous=True)
    group._native = SimpleNamespace(shutdown=lambda: None)
    group._kept.append(SharedMemory())
    memory = weakref.ref(group._kept[0])
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: idle.wait(20))
    monkeypatch.setattr("outrider.device.torch_collectives._SHUTDOWN_TIMEOUT_S", 0.05)
    with pytest.warns(RuntimeWarning, match="'alone': the library .* hasn't ended its side on rank 0 within 0.05 s"):
        group.close()  # returns, though a kernel on the device waits for a lost rank
    del group
    assert memory() is not None
    idle.set()
    until = time.monotonic() + 10
    while memory() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert memory() is None
