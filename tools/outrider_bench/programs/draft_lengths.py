"""What iterations take by the number of drafted tokens and of requests, and what the policy makes of it.

``python -m outrider_bench.programs.draft_lengths [--backend cuda] [--shape llama-3.1-8b] [--accept-length 2.98]``: random
weights, fused, overlapped; lengths 0 to 3. Without the option ``--serve`` no request is served: iterations run over keys and
values that nobody computed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from outrider.cli.models import Running
from outrider.engine.draft_costs import _Measurement
from outrider.engine.engine import Engine
from outrider.engine.requests.draft_length import FollowLoad, LengthSchedule
from outrider.registry import Registry
from outrider_bench.decoding import run_batch
from outrider_bench.random_model import RandomModel

SIZES = (1, 8, 32, 64, 128, 256)


def main() -> None:
    """Measure and print; one JSON object at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--accept-length", type=float, default=2.98)
    parser.add_argument("--cached", type=int, default=640, help="tokens of each request")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--serve", type=int, nargs="*", default=[], help="batches that are decoded with the policy, too")
    given = parser.parse_args()
    work = RandomModel(
        shape=given.shape, speculate="eagle", draft_tokens=given.draft_tokens, accept_length=given.accept_length
    )
    running = Running(mode="fused", overlap=True)
    config = work.config(running=running, max_requests=given.requests, dtype=given.dtype, max_context=given.cached + 384)
    registry = Registry()
    device = registry.create(given.backend)
    began = time.perf_counter()
    model, proposer = work.make(device, config.torch_dtype)
    lengths = tuple(range(given.draft_tokens + 1))
    engine = Engine(model, device, proposer=proposer, config=config, draft_length=LengthSchedule(lengths))
    print(f"made in {time.perf_counter() - began:.1f} s; {engine.warm_up}; {engine.captured}", flush=True)

    measurement = _Measurement(engine._parts, engine._step)
    sizes = [size for size in SIZES if size <= given.requests]
    room = 8 * (given.draft_tokens + 2)
    measurement._admit(max(sizes), given.cached + room)
    chance = _chance(given.accept_length, given.draft_tokens)
    table = {}
    print("batch: ms (thousand tokens/s) of length 0, 1, …", flush=True)
    for size in sizes:
        row = [1e3 * measurement._seconds(length, size, given.cached) for length in lengths]
        rates = [size * sum(chance**place for place in range(length + 1)) / ms for length, ms in enumerate(row)]
        table[size] = row
        cells = "  ".join(f"{ms:.3f} ({rate:.2f})" for ms, rate in zip(row, rates, strict=True))
        print(f"{size:5}: {cells}", flush=True)
    began = time.perf_counter()
    assert engine.captured is not None
    costs = measurement.costs(engine.captured.buckets)
    took = time.perf_counter() - began
    per_token = {length: f"{1e9 * seconds:.2f}" for length, seconds in costs.per_token.items()}
    print(f"all buckets measured in {took:.1f} s; ns for each cached token: {per_token}", flush=True)

    served = {}
    for size in given.serve:
        policy = _Counting(FollowLoad(costs))
        engine._scheduler._draft_length = policy
        found = run_batch(engine, size, 128, 192)
        tokens = found.tokens / sum(found.seconds)
        served[size] = {"tokens_per_s": tokens, "chosen": dict(policy.counts), "shares": policy.acceptance.shares}
        print(f"batch {size} by load: {tokens:.0f} tokens/s, {dict(policy.counts)}, {policy.acceptance.shares}", flush=True)
    buckets = {f"{length},{size}": 1e3 * seconds for (length, size), seconds in costs.base.items()}
    print(json.dumps({"ms": table, "buckets_ms": buckets, "per_token_ns": per_token, "served": served}))


class _Counting(FollowLoad):
    """Counts what it chooses."""

    def __init__(self, policy: FollowLoad) -> None:
        super().__init__(policy.costs)
        self.counts: Counter[int] = Counter()

    def choose(self, requests: int, cached: int) -> int:
        """As ever."""
        length = super().choose(requests, cached)
        self.counts[length] += 1
        return length


def _chance(length: float, drafted: int) -> float:
    """The chance of each place that makes so many tokens an iteration."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**place for place in range(drafted + 1)) < length:
            low = middle
        else:
            high = middle
    return low


if __name__ == "__main__":
    main()
