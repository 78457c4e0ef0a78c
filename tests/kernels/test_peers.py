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
from outrider_conformance.ranks.processes import TaskProcesses
from outrider_cpu.backend import CpuBackend
from outrider_cuda import plugin

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")]))
    with TaskProcesses("cpu", 2) as ranks:
        yield ranks


@pytest.fixture
def folder():
    """Where the ranks' memory lies; asked for ahead of ``two``, so that it's removed behind the ranks' end."""
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as made:
        yield made


@pytest.mark.slow
def test_groups_of_gpus_exchange_small_tensors_by_the_peers_memory(folder, two):
    said, same = two.run_task("kernels.peers_stand_in:check", {"folder": folder}, limit_s=100)
    assert said == same
    assert said[0] == "ways ('nccl', 'one shot', 'exchange'), peer memory True"
    assert len(said) == 4


def test_a_tool_is_told_of_all_that_the_fused_norm_reads_and_writes(folder, two):
    for rank in two.run_task("kernels.peers_stand_in:told", {"folder": folder}, limit_s=60):
        assert rank[:3] == ("all_reduce", True, True)
        assert rank[3] == pytest.approx([1.0, 1.0])


@pytest.mark.slow
def test_where_memory_of_the_peers_fails_the_library_carries_everything(folder, two):
    for rank, found in enumerate(two.run_task("kernels.peers_stand_in:fall_back", {"folder": folder}, limit_s=60)):
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
    monkeypatch.setattr(plugin, "backend_info", lambda: SimpleNamespace(usable=True))
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
