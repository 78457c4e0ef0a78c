"""Ranks that torchrun starts, on one host and on two: the same tokens, one voice, and no rank that outlives another."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killing import limit_s
from torchrun import ENDED_S, PROMPT, torchrun

pytestmark = pytest.mark.slow

SHORT = ["generate", "--prompt", PROMPT, "--max-tokens", "16", "--backend", "cpu", "--dtype", "float32"]
LONG = ["generate", "--prompt", "def f(n):", "--max-tokens", "1500", "--backend", "cpu", "--dtype", "float32"]
LONG += ["--max-context", "1600"]


@pytest.fixture(scope="module")
def alone():
    command = [sys.executable, "-m", "outrider.cli.main", *SHORT, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["token_ids"]


@pytest.mark.parametrize(("hosts", "each", "layout"), [(1, 2, ["--tensor-parallel", "2"]), (2, 1, ["--data-parallel", "2"])])
def test_torchrun_gives_the_tokens_of_one_process_and_one_rank_speaks(tmp_path, alone, hosts, each, layout):
    with torchrun(tmp_path, hosts, each, *SHORT, *layout, "--json") as agents:
        assert agents.wait() == [0] * hosts, agents.text(agents.errors)
        out = agents.text(agents.said)
        assert out.count("\n") == 1
        assert json.loads(out)["token_ids"] == alone


def test_an_error_of_the_user_s_is_told_once(tmp_path):
    with torchrun(tmp_path, 1, 2, *SHORT, "--tensor-parallel", "2", "--data-parallel", "2") as agents:
        assert agents.wait() == [1]
        # torchrun ends the other rank, perhaps before it has got as far as the error.
        said = [line for line in agents.own_errors() if line != "outrider: terminated"]
        assert len(said) == 1, agents.text(agents.errors)
        assert "are 4 ranks, and this process is one of 2" in said[0]


def ended(processes):
    """How long until none of them is there."""
    began = time.monotonic()
    while any(Path(f"/proc/{number}").exists() for number in processes):
        assert time.monotonic() - began < 4 * limit_s(), f"left: {processes}"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("lost", ["a rank of the first host", "a rank of the second", "the first agent", "the second agent"])
def test_whoever_is_killed_on_two_hosts_the_others_end(tmp_path, lost):
    with torchrun(tmp_path, 2, 1, *LONG, "--tensor-parallel", "2") as agents:
        agents.wait_for_token()
        ranks = agents.ranks()
        assert len(ranks) == 2
        host = int("second" in lost)
        os.kill(agents.processes[host].pid if "agent" in lost else ranks[host], signal.SIGKILL)
        assert ended(ranks) < limit_s(), agents.text(agents.errors)
        assert all(agents.wait())
        said = agents.own_errors()
        # An agent may take along what the ranks tell each other by, and the other one then interrupts its rank.
        assert 1 <= len(said) <= 1 + ("agent" in lost), agents.text(agents.errors)
        # Whoever notices first says it: the watch, the call that the lost rank should have joined, or the agent, which heard
        # of it from the other host's.
        told = "last decided" in said[0] and "last called" in said[0]
        told |= "failed on rank" in said[0] and "a rank died" in said[0]
        assert "agent" in lost or told or "interrupted after" in said[0], said[0]


def test_torchrun_starts_ranks_again(tmp_path, alone):
    """What the first ranks said lies in the store still; the others must not read it."""
    with torchrun(tmp_path, 1, 2, *LONG, "--tensor-parallel", "2", restarts=1) as agents:
        agents.wait_for_token()
        first = agents.ranks()
        os.kill(first[1], signal.SIGKILL)
        ended(first)
        before = agents.said[0].stat().st_size
        until = time.monotonic() + ENDED_S
        while agents.said[0].stat().st_size <= before:
            assert time.monotonic() < until, agents.text(agents.errors)
            assert agents.processes[0].poll() is None, agents.text(agents.errors)
            time.sleep(0.05)
        assert not set(first) & set(agents.ranks())
