"""What a run of ``bench peers`` counts, by a clock of its own."""

from dataclasses import replace

import pytest

from bench.test_bench_peers import WORKED
from outrider_bench.child import BenchFailed
from outrider_bench.peers.measuring import DraftCounts, Peer, PeerRuns


class Late(Peer):
    """By hand: 100 ms of prefill, of which 30 come behind the first token, and iterations of 10 ms, each of 2 tokens. What it
    leaves on its device delays the next call.
    """

    version = settings = "by hand"

    def __init__(self, clock):
        self.clock, self.busy_until, self.verified, self.calls = clock, 0.0, 0, []

    def generate(self, prompts, counts):
        del prompts
        self.calls.append(list(counts))
        begun = max(self.clock.now, self.busy_until)
        verified = (counts[0] - 1) / 2 if counts[0] > 2 else counts[0] - 1
        self.busy_until = begun + 0.1 + 0.01 * (verified + 1)  # one more that nobody needs
        self.clock.now = begun + (0.07 if counts[0] == 1 else 0.1 + 0.01 * verified)
        self.verified += verified
        return list(counts)

    def draft_counts(self):
        return DraftCounts(self.verified, 3 * self.verified, self.verified)


def test_iterations_are_told_from_prefill_and_from_what_is_left_behind_it(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr("outrider_bench.peers.measuring.time", clock)
    peer = Late(clock)
    found = PeerRuns(peer, replace(WORKED, new_tokens=41, prompt_tokens=8)).measure({"phase": "decode", "case": 3})
    assert peer.calls[-2:] == [[2] * 3, [41] * 3]
    assert (found["acceptance_length"], found["drafted"]) == (2, 3)
    assert found["iteration_ms"] == pytest.approx(10)
    assert found["tokens_per_s"] == pytest.approx(3 * 2 / 0.01)
    with pytest.raises(BenchFailed, match="2 new tokens took no longer than the first two; ask for more"):
        PeerRuns(peer, replace(WORKED, new_tokens=2, prompt_tokens=8)).measure({"phase": "decode", "case": 3})
