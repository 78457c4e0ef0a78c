"""vLLM, unmodified, on the simulated device: each case is a process of its own. Not run where vLLM isn't installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="not run: vLLM isn't installed (docs/vllm.md)"),
]


def start(*arguments):
    search = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": os.pathsep.join(search)}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip


def run(*args):
    done = start("-m", "foreign.vllm_on_sim", *args)
    found = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    assert found, done.stderr[-3000:]
    return json.loads(found[0].removeprefix("OUTCOME "))


def test_asynchronous_steps_with_speculation_are_right_and_clean():
    seen = run("--tokens", "8", "--speculate")
    assert seen["right"], seen["tokens"]
    assert seen["steps"] >= 5
    assert seen["launches"] > 50
    assert seen["streams"] >= 2
    assert seen["operations"] > 200
    assert seen["findings"] == []
    assert seen["nowhere"] == {}


FIRST = ("--first-runner", "--speculate")
CASES = [
    ("offload-store-waits", ("--work", "offload"), "copy_backend.py"),
    ("blocks-are-freed-late", ("--work", "scarce", "--tokens", "8"), "copy_backend.py"),
    ("ids-have-own-buffers", ("--work", "zeroing"), "vllm_on_sim/reverts.py"),
    ("counts-are-awaited", ("--work", "recurrent", *FIRST), "gpu_model_runner.py:2082"),
    ("output-is-awaited", ("--speculate",), "async_utils.py"),
    ("output-copy-waits", ("--speculate",), "async_utils.py"),
]


@pytest.mark.parametrize(("name", "work", "where"), CASES, ids=[c[0] for c in CASES])
def test_an_ordering_that_is_taken_out_is_missed(name, work, where):
    seen = run("--tokens", "6", *work, "--revert", name)
    assert seen["skipped"] > 0
    assert any(where in finding for finding in seen["findings"]), seen["findings"]


@pytest.mark.parametrize("work", ["offload", "scarce", "zeroing", "recurrent"])
def test_with_every_ordering_nothing_is_found(work):
    seen = run("--tokens", "8" if work == "scarce" else "6", "--work", work, *(FIRST if work == "recurrent" else ()))
    assert seen["right"], seen["tokens"]
    assert seen["findings"] == []


def test_a_draft_model_may_be_given_the_seeds_of_the_next_request_in_its_row_and_nobody_takes_its_proposals():
    """`docs/findings/vllm-temperatures-rewritten.md`."""
    done = start("-m", "foreign.drafter_rows", "lazy")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")] or [done.stderr[-3000:]]
    seen = json.loads(line.removeprefix("OUTCOME "))
    assert seen["judged"]["vllm-temperatures-rewritten"] > 0
    assert seen["others"] > 0
    assert seen["late"] == 0


def test_a_draft_model_in_the_second_runner_is_right():
    seen = run("--draft-model", "--tokens", "6")
    assert seen["right"], seen["tokens"]
    assert seen["findings"] == []
    assert set(seen["judged"]) == {"vllm-unwritten-tail-of-sampled", "vllm-temperatures-rewritten"}
