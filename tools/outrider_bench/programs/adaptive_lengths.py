"""Adaptive lengths of drafts against fixed ones, at several sizes of batch, with the bundled model and its EAGLE head.

``python -m outrider_bench.programs.adaptive_lengths --backend cuda [--json]``, in the directory of the source

One engine for each fixed length and one that adapts. A host's speed changes from one second to the next, so that a second of
one engine says little beside a later second of another. What counts here is the quotient of neighbours:

1. A few rounds in which all engines serve the same prompts in turn tell which fixed lengths are near the fastest.
2. Many rounds, each of one batch: the adaptive engine and one of those fixed ones, one directly behind the other, the order
   alternating, some tenths of a second each. A round is a quotient of rates over the same prompts.

The median of the quotients counts, with an interval in which it lies in 95 of 100 resamples of the rounds. Of several fixed
lengths that are near, the one that adaptive is slowest beside counts, so that no choice of ours helps it.

Behind that, with ``--changes``, what an iteration costs that has another length than those before and behind it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider import Engine, EngineConfig, SamplingParams
from outrider.cli.models import bundled
from outrider.cli.streams import note
from outrider.engine.requests.draft_length import DraftLengthPolicy, LengthSchedule, adaptive_lengths
from outrider.registry import Registry

_PROMPTS = Path("tests/data/heldout_prompts.json")
_RESAMPLES = 2000
_NEAR = 0.97  # of the fastest fixed length, in the first rounds: others aren't compared further


@dataclass
class Pairs:
    """Quotients of the adaptive engine's rate to a fixed one's, by batch and fixed length; and rates of the first rounds."""

    first: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    found: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def near(self, batch: int) -> list[str]:
        """Fixed lengths that are near the fastest, which comes first."""
        rates = {name: statistics.median(each) for name, each in self.first[batch].items() if name != "adaptive"}
        best = max(rates.values())
        return sorted((name for name, rate in rates.items() if rate >= _NEAR * best), key=lambda name: -rates[name])

    def result(self, batch: int) -> tuple[str, float, float, float]:
        """The fixed length that adaptive is slowest beside: the median quotient, and its interval."""
        found = {name: statistics.median(each) for name, each in self.found[batch].items() if each}
        name = min(found, key=found.__getitem__)
        return (name, found[name], *interval(self.found[batch][name]))


def interval(quotients: Sequence[float], *, share: float = 0.95, seed: int = 1) -> tuple[float, float]:
    """In which the median lies in so many of all resamples: as many quotients, drawn with replacement."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(quotients, k=len(quotients))) for _ in range(_RESAMPLES))
    outside = round((1 - share) / 2 * _RESAMPLES)
    return medians[outside], medians[-1 - outside]


def main() -> None:
    """Measure and print; the table comes last, and with ``--json`` one object behind it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=_PROMPTS, help='{"prompts": [{"text": …}]}')
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=75, help="for all rounds, behind the start of the engines")
    parser.add_argument("--part", type=float, default=0.4, help="seconds of one engine in a round, about")
    parser.add_argument("--rounds", type=int, default=30, help="of each batch, at most")
    parser.add_argument("--changes", default="", help="batches for which changes of the length are measured, as 1,64")
    parser.add_argument("--json", action="store_true", help="one JSON object behind the table")
    given = parser.parse_args()
    texts = [prompt["text"] for prompt in json.loads(given.prompts.read_text(encoding="utf-8"))["prompts"]]
    batches = [int(batch) for batch in given.batches.split(",")]
    engines = _engines(given.backend, given.dtype, given.draft_tokens, max(batches), given.new_tokens + 512)
    tokenizer = engines["adaptive"].tokenizer
    assert tokenizer is not None
    rounds = _Rounds(engines, [tokenizer.encode(text) for text in texts], given.new_tokens, given.part)
    pairs, began = Pairs(), time.perf_counter()
    rounds.all(pairs, batches)
    rounds.pairs(pairs, batches, most=given.rounds, until=began + given.seconds)
    for batch in (int(each) for each in given.changes.split(",") if each):
        _changes(engines["adaptive"], rounds.groups(batch, 1), batch, given.new_tokens)
    _print(pairs, time.perf_counter() - began)
    if given.json:
        results = {batch: dict(zip(("fixed", "ratio", "low", "high"), pairs.result(batch), strict=True)) for batch in batches}
        print(json.dumps({"results": results, "first": pairs.first, "quotients": pairs.found}))


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
                draft_length=how,
                prefix_cache=False,
            ),
        )
        note(f"{name}: made in {time.perf_counter() - began:.1f} s\n")
    return engines


class _Rounds:
    """Serves prompts by engines, others in each round and the same for all of them."""

    def __init__(self, engines: dict[str, Engine], prompts: Sequence[Sequence[int]], tokens: int, part: float) -> None:
        self._engines, self._prompts, self._tokens, self._part = engines, prompts, tokens, part
        self._next = 0
        self._calls: dict[int, int] = {}  # calls of a part, by batch

    def groups(self, batch: int, calls: int) -> list[list[Sequence[int]]]:
        """Batches of the next round."""
        found = []
        for _ in range(calls):
            found.append([self._prompts[(self._next + each) % len(self._prompts)] for each in range(batch)])
            self._next += batch
        return found

    def rate(self, name: str, groups: Sequence[Sequence[Sequence[int]]]) -> float:
        """Tokens a second."""
        began = time.perf_counter()
        for group in groups:
            self._engines[name].generate(group, SamplingParams(max_tokens=self._tokens, ignore_eos=True))
        return self._tokens * sum(len(group) for group in groups) / (time.perf_counter() - began)

    def all(self, pairs: Pairs, batches: Sequence[int], rounds: int = 3) -> None:
        """All engines in turn; the first round warms up, and says how many calls fill a part."""
        for batch in batches:
            pairs.found[batch] = {}
            pairs.first[batch] = {name: [] for name in self._engines}
            group = self.groups(batch, 1)
            for name in self._engines:
                self.rate(name, group)
            began = time.perf_counter()
            self.rate("adaptive", group)
            self._calls[batch] = max(1, round(self._part / (time.perf_counter() - began)))
            for turn in range(rounds):
                groups = self.groups(batch, self._calls[batch])
                for name in list(self._engines) if turn % 2 else list(reversed(self._engines)):
                    pairs.first[batch][name].append(self.rate(name, groups))

    def pairs(self, pairs: Pairs, batches: Sequence[int], *, most: int, until: float) -> None:
        """Adaptive and a fixed one, directly behind each other; three rounds at least, of whatever length was fastest."""
        against = {batch: _in_turn(pairs.near(batch)) for batch in batches}
        for _ in range(most * max(len(pairs.near(batch)) for batch in batches)):
            for batch in batches:
                name = next(against[batch])
                found = pairs.found[batch].setdefault(name, [])
                if len(found) >= most:
                    continue
                if time.perf_counter() > until and all(len(each) >= 3 for each in pairs.found[batch].values()):
                    continue
                groups = self.groups(batch, self._calls[batch])
                order = ("adaptive", name) if len(found) % 2 else (name, "adaptive")
                rates = {each: self.rate(each, groups) for each in order}
                found.append(rates["adaptive"] / rates[name])


def _in_turn(names: Sequence[str]) -> Iterator[str]:
    while True:
        yield from names


def _print(pairs: Pairs, seconds: float) -> None:
    rounds = sum(len(each) for found in pairs.found.values() for each in found.values())
    print(f"{rounds} pairs in {seconds:.0f} s; adaptive to fixed, the median and where it lies in 95 of 100 resamples")
    print("| batch | fixed lengths, tokens/s | beside | pairs | ratio | interval |\n|---|---|---|---|---|---|")
    worst = []
    for batch, found in pairs.found.items():
        rates = ", ".join(
            f"{name.removeprefix('fixed ')}: {statistics.median(each):,.0f}" for name, each in pairs.first[batch].items()
        )
        name, ratio, low, high = pairs.result(batch)
        worst.append((ratio, low))
        print(f"| {batch} | {rates} | {name} | {len(found[name])} | {ratio:.3f} | {low:.3f} to {high:.3f} |")
    print(f"worst ratio {min(worst)[0]:.3f}, 0.970 or more is wanted; its interval begins at {min(worst)[1]:.3f}", flush=True)


def _changes(engine: Engine, group: Sequence[Sequence[Sequence[int]]], batch: int, tokens: int) -> None:
    """What one iteration of another length in 24 costs, and three in a row, beyond what they take among their like."""
    lengths = engine.draft_length.lengths
    longest = lengths[-1]

    def each(schedule: Sequence[int]) -> float:
        """Milliseconds of an iteration."""
        found = []
        for _ in range(3):
            began, before = time.perf_counter(), engine.stats.iterations
            with_policy(LengthSchedule(schedule))
            for prompts in group:
                engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
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
