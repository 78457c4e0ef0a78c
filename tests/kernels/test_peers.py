"""Kernels that write into the peers' memory: two processes that share files, in Triton's interpreter."""

import os
import uuid

import pytest

from outrider_conformance.rank_processes import RankProcesses

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")


@pytest.mark.slow
def test_groups_of_gpus_exchange_small_tensors_by_the_peers_memory(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")]))
    with RankProcesses("cpu", 2) as ranks:
        said, same = ranks.run("kernels.peers_stand_in:check", {"folder": str(uuid.uuid4())}, limit_s=100)
    assert said == same
    assert said[0] == "ways ('nccl', 'one shot', 'exchange'), peer memory True"
    assert len(said) == 4
