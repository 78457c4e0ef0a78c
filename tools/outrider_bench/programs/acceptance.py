"""What proposers accept, and tokens a second, on held-out prompts with the bundled model: one table for all of them.

``python -m outrider_bench.programs.acceptance --prompts tests/data/heldout_prompts.json [--backend cuda] [--dflash DIR]``

Ways: plain decoding; the EAGLE head with 1, 2, 4 and 7 tokens, and with each request's own length (adaptive); suffix
decoding; suffix decoding with the head; with ``--dflash`` a block drafter, alone and behind suffix decoding. Greedy. Tokens
of each way are compared with those of plain decoding: where two logits are nearly equal, another shape of batch may turn them
around, so in float32 there should be none. All ways run in turn, ``--rounds`` times as far as there are prompts, and the
fastest round of each counts. No prompt comes twice: suffix decoding's past outputs are those of other prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import Engine, EngineConfig, SamplingParams
from outrider.cli.models import bundled
from outrider.device import ConfigError
from outrider.registry import Registry


@dataclass(frozen=True)
class Way:
    """A proposer, the number of tokens that it drafts, and what decides their number in an iteration."""

    speculate: str
    draft_tokens: int = 0
    length: str = "fixed"
    draft: Path | None = None

    @property
    def name(self) -> str:
        """As the table has it."""
        if not self.draft_tokens:
            return self.speculate
        return f"{self.speculate} {'adaptive, up to ' if self.length == 'adaptive' else ''}{self.draft_tokens}"


def ways(dflash: Path | None) -> list[Way]:
    """All that are compared, plain decoding first."""
    head = bundled("eagle")
    made = [Way("none")]
    made += [Way("eagle", count, draft=head) for count in (1, 2, 4, 7)]
    made += [Way("eagle", 4, "adaptive", head), Way("eagle", 7, "adaptive", head)]
    made += [Way("ngram", 4), Way("suffix", 4), Way("suffix", 7), Way("suffix", 7, "adaptive")]
    made += [Way("suffix+eagle", 4, draft=head), Way("suffix+eagle", 7, draft=head)]
    made += [Way("suffix+eagle", 7, "adaptive", head)]
    if dflash is not None:
        made += [Way("dflash", 4, draft=dflash), Way("dflash", 7, draft=dflash), Way("dflash", 7, "adaptive", dflash)]
        made += [Way("suffix+dflash", 7, draft=dflash)]
    return made


def main() -> None:
    """Measure and print; one JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help='{"prompts": [{"text": …}]}')
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--dflash", type=Path, help="a block drafter of the bundled model, as training/train_block.py makes it"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=96, help="prompts in all; each round has its own")
    parser.add_argument("--mode", default=None, help="staged or fused; default: what the backend runs fastest")
    parser.add_argument("--seconds", type=float, default=1500.0, help="no batch size is begun after so long")
    given = parser.parse_args()
    backend, began, tables = Registry().create(given.backend), time.perf_counter(), {}
    texts = [each["text"] for each in json.loads(given.prompts.read_text(encoding="utf-8"))["prompts"]][: given.most]
    if len(texts) < max(given.batches):
        raise ConfigError(
            f"{given.prompts} has {len(texts)} prompts, and a batch of {max(given.batches)} is asked for; expected a prompt "
            "for each request: past outputs of the same prompt would be no measure"
        )
    for batch in given.batches:
        if time.perf_counter() - began > given.seconds:
            print(f"batch {batch} and what follows is left out: {given.seconds:.0f} s are over", flush=True)
            break
        tables[batch] = _batch(given, backend, texts, batch)
        _show(batch, tables[batch])
    print(json.dumps({"backend": given.backend, "dtype": given.dtype, "new_tokens": given.new_tokens, "batches": tables}))


def _batch(given: argparse.Namespace, backend: Any, texts: Sequence[str], batch: int) -> list[dict[str, Any]]:
    engines = []
    for way in ways(given.dflash):
        config = EngineConfig(
            max_requests=batch,
            max_context=256 + given.new_tokens,
            dtype=given.dtype,
            mode=given.mode,
            draft_tokens=way.draft_tokens or 1,
            draft_length=way.length,
            prefix_cache=False,
        )
        engines.append(
            Engine.from_checkpoint(bundled("target"), backend, draft_dir=way.draft, speculate=way.speculate, config=config)
        )
    tokenizer = engines[0].tokenizer
    prompts = [tokenizer.encode(text) for text in texts]
    params = SamplingParams(max_tokens=given.new_tokens, ignore_eos=True)
    rounds = max(1, min(given.rounds, len(prompts) // batch))
    each = len(prompts) // rounds
    best: list[float] = [0.0] * len(engines)
    differ = [0] * len(engines)
    for number in range(rounds):
        part = prompts[number * each : (number + 1) * each]
        plain: list[tuple[int, ...]] = []
        for index, engine in enumerate(engines):
            if not number:
                engine.generate(part[:1], SamplingParams(max_tokens=8, ignore_eos=True))
            started = time.perf_counter()
            results = engine.generate(part, params)
            rate = len(part) * given.new_tokens / (time.perf_counter() - started)
            best[index] = max(best[index], rate)
            found = [result.token_ids for result in results]
            plain = plain or found
            differ[index] += sum(one != other for one, other in zip(found, plain, strict=True))
    return [
        {
            "way": way.name,
            "acceptance": engine.stats.acceptance_length,
            "tokens_per_s": rate,
            "ratio": rate / best[0],
            "differ": wrong,
        }
        for way, engine, rate, wrong in zip(ways(given.dflash), engines, best, differ, strict=True)
    ]


def _show(batch: int, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n| batch {batch} | tokens an iteration | tokens/s | to plain | prompts that differ |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['way']} | {row['acceptance']:.2f} | {row['tokens_per_s']:.0f} | {row['ratio']:.2f} | {row['differ']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
