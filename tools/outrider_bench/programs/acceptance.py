"""What proposers accept, and tokens a second, on held-out prompts with the bundled model: one table for all of them.

``python -m outrider_bench.programs.acceptance --prompts tests/data/heldout_prompts.json [--backend cuda] [--dflash DIR]``

Ways: plain decoding; the EAGLE head, the block drafter, suffix decoding and the heads behind suffix decoding, with
fixed lengths; with ``--output-heads fp8 int4``, EAGLE and the block drafter also draw with a
copy of the output head in these formats, with ``--vocabularies FILE 512`` from these tokens alone. Greedy. Tokens of each
way are compared with those of plain decoding: where two logits are nearly equal, another shape of batch may turn them around,
so in float32 there should be none. The ways of one proposer run in turn, ``--rounds`` times as far as there are prompts, and
the fastest round of each counts; then their engines go, since a device has few streams. No prompt comes twice: suffix
decoding's past outputs are those of other prompts.
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
from outrider.cli.models import bundled, vocabulary_of
from outrider.device import ConfigError
from outrider.registry import Registry


@dataclass(frozen=True)
class Way:
    """A proposer, the number of tokens that it drafts, and the format of the copy
    of the output head that they're drawn with, or the tokens that they're drawn from.
    """

    speculate: str
    draft_tokens: int = 0
    draft: Path | None = None
    output_head: str | None = None
    vocabulary: str | None = None

    @property
    def name(self) -> str:
        """As the table has it."""
        if not self.draft_tokens:
            return self.speculate
        drawn = "" if self.output_head is None else f", drawn in {self.output_head}"
        drawn += "" if self.vocabulary is None else f", drawn from {Path(self.vocabulary).name}"
        return f"{self.speculate} {self.draft_tokens}{drawn}"


def ways(eagle: Path, dflash: Path, output_heads: Sequence[str] = (), vocabularies: Sequence[str] = ()) -> list[list[Way]]:
    """All that are compared, by proposer; plain decoding first."""

    def drawn(speculate: str, draft: Path) -> list[Way]:
        rounded = [Way(speculate, 4, draft=draft, output_head=format) for format in output_heads]
        return rounded + [Way(speculate, 4, draft=draft, vocabulary=each) for each in vocabularies]

    def of(speculate: str, lengths: Sequence[int], draft: Path | None = None) -> list[Way]:
        return [Way(speculate, count, draft=draft) for count in lengths]

    return [
        [Way("none")],
        of("eagle", (1, 2, 4, 7), eagle) + drawn("eagle", eagle),
        of("dflash", (1, 2, 4, 7), dflash) + drawn("dflash", dflash),
        of("ngram", (4,)),
        of("suffix", (1, 4, 7)),
        of("suffix+eagle", (1, 2, 4, 7), eagle),
        of("suffix+dflash", (2, 4, 7), dflash),
    ]


def main() -> None:
    """Measure and print; one JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help='{"prompts": [{"text": …}]}')
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eagle", type=Path, default=bundled("eagle"), help="another EAGLE head of the bundled model")
    parser.add_argument("--dflash", type=Path, default=bundled("dflash"), help="another block drafter of the bundled model")
    parser.add_argument("--output-heads", nargs="*", default=[], help="formats of output heads to draw drafts with: fp8 int4")
    parser.add_argument("--vocabularies", nargs="*", default=[], help="tokens to draw drafts from: files, or the first N")
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
    print(json.dumps({"backend": given.backend, "dtype": given.dtype, "new_tokens": given.new_tokens, "batches": tables}))


def _batch(given: argparse.Namespace, backend: Any, texts: Sequence[str], batch: int) -> list[dict[str, Any]]:
    """The rows of one batch size; each proposer's are printed when they're there."""
    print(f"\n| batch {batch} | tokens an iteration | tokens/s | to plain | prompts that differ |\n|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    plain: list[list[tuple[int, ...]]] = []
    for group in ways(given.eagle, given.dflash, given.output_heads, given.vocabularies):
        found = _group(given, backend, texts, batch, group, plain)
        rows += found
        for row in found:
            row["ratio"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        _show(found)
    return rows


def _group(
    given: argparse.Namespace,
    backend: Any,
    texts: Sequence[str],
    batch: int,
    group: Sequence[Way],
    plain: list[list[tuple[int, ...]]],
) -> list[dict[str, Any]]:
    """One proposer's rows. ``plain``: the tokens of plain decoding by round, which the first call leaves there."""
    engines = [_engine(given, backend, batch, way) for way in group]
    tokenizer = engines[0].tokenizer
    prompts = [tokenizer.encode(text) for text in texts]
    params = SamplingParams(max_tokens=given.new_tokens, ignore_eos=True)
    rounds = max(1, min(given.rounds, len(prompts) // batch))
    each = len(prompts) // rounds
    best: list[float] = [0.0] * len(engines)
    differ = [0] * len(engines)
    for number in range(rounds):
        part = prompts[number * each : (number + 1) * each]
        for index, engine in enumerate(engines):
            if not number:
                engine.generate(part[:1], SamplingParams(max_tokens=8, ignore_eos=True))
            started = time.perf_counter()
            results = engine.generate(part, params)
            rate = len(part) * given.new_tokens / (time.perf_counter() - started)
            best[index] = max(best[index], rate)
            found = [result.token_ids for result in results]
            if len(plain) == number:
                plain.append(found)
            differ[index] += sum(one != other for one, other in zip(found, plain[number], strict=True))
    return [
        {"way": way.name, "acceptance": engine.stats.acceptance_length, "tokens_per_s": rate, "differ": wrong}
        for way, engine, rate, wrong in zip(group, engines, best, differ, strict=True)
    ]


def _engine(given: argparse.Namespace, backend: Any, batch: int, way: Way) -> Engine:
    config = EngineConfig(
        max_requests=batch,
        max_context=256 + given.new_tokens,
        dtype=given.dtype,
        mode=given.mode,
        draft_tokens=way.draft_tokens or 1,
        draft_length="fixed",
        prefix_cache=False,
    )
    return Engine.from_checkpoint(
        bundled("target"),
        backend,
        draft_dir=way.draft,
        speculate=way.speculate,
        draft_output_head=way.output_head,
        draft_vocabulary=vocabulary_of(way.vocabulary),
        config=config,
    )


def _show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"| {row['way']} | {row['acceptance']:.2f} | {row['tokens_per_s']:.0f} | {row['ratio']:.2f} | {row['differ']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
