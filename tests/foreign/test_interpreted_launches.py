"""What a launch of a Triton kernel touched, as its interpreter says it; vLLM isn't needed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from outrider_sim.torch_device.row_accesses import merge_adjacent
from outrider_vllm.interpreted_launches import MAX_RANGES, RecordedAccesses, StorageRange

HERE = Path(__file__).parent


def at(*addresses):
    return np.array(addresses, dtype=np.uint64)


def place(base=1000, nbytes=100_000, storage=7):
    return StorageRange(base=base, nbytes=nbytes, storage=storage, argument="x")


def test_neighbours_are_one_range():
    starts, ends = merge_adjacent(at(16, 8, 12, 40, 44, 8), 4)
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == [(8, 20), (40, 48)]
    assert [bounds.tolist() for bounds in merge_adjacent(at(), 4)] == [[], []]


def test_only_what_the_mask_lets_through_is_touched():
    touched = RecordedAccesses()
    touched.record_access(at(1000, 1004, 1008, 1012), np.array([True, False, False, True]), 4, write=True)
    touched.record_access(at(1100), np.array(False), 4, write=False)
    found, nowhere = touched.accesses([place()])
    assert [(a.start, a.end, a.write) for a in found] == [(0, 4, True), (12, 16, True)]
    assert nowhere == 0


def test_elements_of_different_sizes_are_joined_where_they_lie_over_each_other():
    touched = RecordedAccesses()
    touched.record_access(at(1000, 1008), True, 8, write=False)
    touched.record_access(at(1012, 1016), True, 4, write=False)
    found, _ = touched.accesses([place()])
    assert [(a.start, a.end) for a in found] == [(0, 20)]


def test_ranges_go_to_the_storage_that_they_lie_in():
    touched = RecordedAccesses()
    touched.record_access(at(1000, 2000, 5000, 500), True, 4, write=True)
    found, nowhere = touched.accesses([place(base=2000, nbytes=8, storage=2), place(base=1000, nbytes=8, storage=1)])
    assert sorted((a.storage, a.start, a.end) for a in found) == [(1, 0, 4), (2, 0, 4)]
    assert nowhere == 2  # 5000 lies behind the last, 500 before the first


def test_ranges_alike_at_one_distance_are_one_strided_access():
    touched = RecordedAccesses()
    touched.record_access(np.arange(1000, 1000 + 64 * 50, 64, dtype=np.uint64), True, 8, write=True)
    found, _ = touched.accesses([place()])
    assert len(found) == 1
    assert (found[0].shape, found[0].stride, found[0].start, found[0].end) == ((50, 8), (64, 1), 0, 64 * 49 + 8)


def test_many_ranges_are_joined_at_the_smallest_gaps():
    touched = RecordedAccesses()
    starts = np.cumsum(np.tile([8, 40], MAX_RANGES), dtype=np.uint64) + np.uint64(1000)  # gaps of 4 and 36 bytes in turn
    touched.record_access(starts, True, 4, write=True)
    found, _ = touched.accesses([place()])
    assert len(found) == MAX_RANGES
    covered = sum(a.end - a.start for a in found)
    assert covered <= 2 * 4 * MAX_RANGES + 4 * MAX_RANGES + 40
    assert (found[0].start, found[-1].end) == (8, int(starts[-1]) - 1000 + 4)


@pytest.fixture(scope="module")
def seen():
    """The kernels of `touching_kernels.py` on the simulated device; the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton", reason="not run: Triton isn't installed")
    done = subprocess.run(
        [sys.executable, str(HERE / "touching_kernels.py")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_kernel_that_writes_one_block_leaves_a_copy_of_another_alone(seen):
    assert seen["other block"] == []
    assert len(seen["same block"]) == 1
    assert "bytes 64 to 128" in seen["same block"][0]


@pytest.mark.slow
def test_memory_behind_a_table_of_addresses_is_seen(seen):
    assert len(seen["through a table"]) == 1
    assert "read after write" in seen["through a table"][0]
    assert seen["nowhere"] == {}


@pytest.mark.slow
def test_a_result_that_is_read_before_the_kernel_ran_isn_t_called_unwritten(seen):
    assert seen["queued"] == []


@pytest.mark.slow
def test_what_a_kernel_leaves_out_is_unwritten(seen):
    assert [text.partition("\n")[0] for text in seen["left out"]] == ["read before it was written"]


@pytest.mark.slow
def test_an_atomic_reads_and_writes(seen):
    assert len(seen["atomic"]) == 1
    assert "write" in seen["atomic"][0]
