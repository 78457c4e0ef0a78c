"""Parts of other engines, unmodified, with a merged ordering fix and without it: each case is a process of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PARTS = Path(__file__).parent / "parts"
CASES = [
    pytest.param(
        program, where,
        marks=pytest.mark.skipif(find_spec(package) is None, reason=f"not run: {package} isn't installed (docs/vllm.md)"),
        id=program,
    )
    for program, package, where in (
        ("sglang_war_barrier", "sglang", ("swa_memory_pool.py", "allocator/swa.py", "has never waited")),
        ("vllm_mask_of_embeddings", "vllm", ("interfaces.py", "host write")),
    )
]  # fmt: skip


def run(program, *args):
    done = subprocess.run(
        [sys.executable, str(PARTS / f"{program}.py"), *args], capture_output=True, text=True, timeout=300, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    assert found, done.stderr[-3000:]
    return json.loads(found[0].removeprefix("OUTCOME "))


@pytest.mark.slow
@pytest.mark.parametrize(("program", "where"), CASES)
def test_a_fix_is_missed_when_it_is_taken_out(program, where):
    kept, taken = run(program), run(program, "--revert")
    assert kept["met"] == taken["met"] > 0
    assert kept["findings"] == []
    assert len(taken["findings"]) == 1
    for text in where:
        assert text in taken["findings"][0]
