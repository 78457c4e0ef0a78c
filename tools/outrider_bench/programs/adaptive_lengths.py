"""Adaptive lengths of drafts against every fixed length, at each size of batch, with the bundled model and its EAGLE head.

``python -m outrider_bench.programs.adaptive_lengths --prompts tests/data/heldout_prompts.json [--backend cuda]``

One engine for each fixed length and one that adapts serve the same prompts in turn, in an order that turns around from round
to round: what slows the host for a while slows all of them. The ratio is that of the adaptive engine to the fixed one with
the highest median, in the same round; its median counts, and the middle half of the rounds says how much that is worth.

Behind that, for single lengths, what an iteration costs that has another length than those before and behind it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider import Engine, EngineConfig, SamplingParams
from outrider.cli.models import bundled
from outrider.engine.requests.draft_length import DraftLengthPolicy, LengthSchedule, adaptive_lengths
from outrider.registry import Registry

_CALLS = 8  # prompts of a measurement, at least


@dataclass
class Rates:
    """Tokens a second of each engine, by size of batch and round."""

    names: tuple[str, ...]
    of: dict[int, list[dict[str, float]]] = field(default_factory=dict)

    def median(self, batch: int, name: str) -> float:
        """Over the rounds."""
        return statistics.median(each[name] for each in self.of[batch])

    def best(self, batch: int) -> str:
        """The fixed length with the highest median."""
        return max((name for name in self.names if name != "adaptive"), key=lambda name: self.median(batch, name))

    def ratios(self, batch: int) -> tuple[float, float, float]:
        """Adaptive to the best fixed one: the first quarter, the median, and the third."""
        best = self.best(batch)
        found = sorted(each["adaptive"] / each[best] for each in self.of[batch])
        return found[len(found) // 4], statistics.median(found), found[(3 * len(found)) // 4]


def main() -> None:
    """Measure and print; one JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help='{"prompts": [{"text": …}]}')
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=80, help="for the rounds; at least three are run")
    parser.add_argument("--changes", default="1,64", help="batches for which changes of the length are measured; empty: none")
    given = parser.parse_args()
    texts = [prompt["text"] for prompt in json.loads(given.prompts.read_text(encoding="utf-8"))["prompts"]]
    batches = [int(batch) for batch in given.batches.split(",")]
    engines = _engines(given.backend, given.dtype, given.draft_tokens, max(batches), given.new_tokens + 512)
    tokenizer = engines["adaptive"].tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in texts]
    rates = Rates(tuple(engines))
    began, rounds = time.perf_counter(), -1  # the first one warms up
    while rounds < 3 or time.perf_counter() - began < given.seconds:
        rounds += 1
        names = list(engines) if rounds % 2 else list(reversed(engines))
        names = names[rounds % len(names) :] + names[: rounds % len(names)]
        for batch in batches:
            groups = _groups(prompts, batch, rounds)
            found = {name: _rate(engines[name], groups, given.new_tokens) for name in names}
            if rounds:
                rates.of.setdefault(batch, []).append(found)
    print(f"{rounds} rounds in {time.perf_counter() - began:.0f} s", flush=True)
    _print(rates)
    for batch in (int(each) for each in given.changes.split(",") if each):
        _changes(engines["adaptive"], prompts, batch, given.new_tokens)
    ratios = {batch: rates.ratios(batch)[1] for batch in batches}
    print(f"worst ratio {min(ratios.values()):.3f}, 0.970 or more is wanted")
    medians = {batch: {name: rates.median(batch, name) for name in rates.names} for batch in batches}
    print(json.dumps({"rounds": rounds, "tokens_per_s": medians, "ratios": ratios}))


def _engines(backend: str, dtype: str, most: int, requests: int, context: int) -> dict[str, Engine]:
    device, engines = Registry().create(backend), {}
    ways = [(f"fixed {length}", length, "fixed") for length in adaptive_lengths(most) if length]
    for name, length, how in [*ways, ("adaptive", most, "adaptive")]:
        began = time.perf_counter()
        engines[name] = Engine.from_checkpoint(
            bundled("target"),
            device,
            draft_dir=bundled("eagle"),
            speculate="eagle",
            config=EngineConfig(
                max_requests=requests,
                max_context=context,
                dtype=dtype,
                draft_tokens=length,
                draft_length="adaptive" if how == "adaptive" else "fixed",
                prefix_cache=False,
            ),
        )
        print(f"{name}: made in {time.perf_counter() - began:.1f} s", flush=True)
    return engines


def _groups(prompts: Sequence[Sequence[int]], batch: int, rounds: int) -> list[list[Sequence[int]]]:
    """Batches of a measurement: others in each round, the same for all engines."""
    calls = max(1, _CALLS // batch)
    return [
        [prompts[(rounds * calls * batch + call * batch + i) % len(prompts)] for i in range(batch)] for call in range(calls)
    ]


def _rate(engine: Engine, groups: Sequence[Sequence[Sequence[int]]], tokens: int) -> float:
    """Tokens a second."""
    began = time.perf_counter()
    for group in groups:
        engine.generate(group, SamplingParams(max_tokens=tokens, ignore_eos=True))
    return tokens * sum(len(group) for group in groups) / (time.perf_counter() - began)


def _print(rates: Rates) -> None:
    print("| batch | " + " | ".join(rates.names) + " | best fixed | ratio | middle half |")
    print("|" + "---|" * (len(rates.names) + 4))
    for batch in rates.of:
        low, middle, high = rates.ratios(batch)
        cells = " | ".join(f"{rates.median(batch, name):,.0f}" for name in rates.names)
        print(f"| {batch} | {cells} | {rates.best(batch)} | {middle:.3f} | {low:.3f} to {high:.3f} |", flush=True)


def _changes(engine: Engine, prompts: Sequence[Sequence[int]], batch: int, tokens: int) -> None:
    """What one iteration of another length in 24 costs, and three in a row, beyond what they take among their like."""
    lengths = engine.draft_length.lengths
    longest, group = lengths[-1], _groups(prompts, batch, 0)

    def each(schedule: Sequence[int]) -> float:
        """Milliseconds of an iteration."""
        found = []
        for _ in range(3):
            began, before = time.perf_counter(), engine.stats.iterations
            with_policy(LengthSchedule(schedule))
            _rate(engine, group, tokens)
            found.append(1e3 * (time.perf_counter() - began) / (engine.stats.iterations - before))
        return statistics.median(found)

    def with_policy(policy: DraftLengthPolicy) -> None:
        engine._scheduler._draft_length = policy

    usual = each([longest])
    print(f"batch {batch}: an iteration of {longest} drafted tokens takes {usual:.3f} ms", flush=True)
    for length in lengths[:-1]:
        alone = each([length, longest])  # LengthSchedule takes the longest for what may be drafted
        single, three = each([longest] * 23 + [length]), each([longest] * 21 + [length] * 3)
        costs = 24 * single - 23 * usual, 24 * three - 21 * usual
        found = f"one in 24 costs {costs[0]:.3f} ms, three in a row {costs[1]:.3f}"
        print(f"  {length}: {alone:.3f} ms in turn with {longest}; {found}", flush=True)
    with_policy(engine._draft_length)


if __name__ == "__main__":
    main()
