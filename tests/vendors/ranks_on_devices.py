"""Engines of two ranks on two devices against an engine of one: ``ranks_on_devices.py BACKEND [PROMPTS] [TOKENS]``.

The bundled model with its EAGLE head in float32, under tensor parallelism and under data parallelism, fused and overlapped.
Tokens are those of one device; a difference passes only where that one's two best logits lie within 1e-5, and is counted.
Then a few of the requests again with the sanitizer watching each rank, from the engine's making on. One line of JSON each.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
import time
from contextlib import nullcontext
from typing import Any

NEAR = 1e-5
LAYOUTS = ((2, 1), (1, 2))
WATCHED = 4


def texts(count: int) -> list[str]:
    """Beginnings of functions of the standard library."""
    found = [inspect.getsource(each) for _, each in inspect.getmembers(textwrap, inspect.isroutine)]
    found += [inspect.getsource(each) for _, each in inspect.getmembers(json.JSONDecoder, inspect.isfunction)]
    found += [inspect.getsource(each) for _, each in inspect.getmembers(inspect, inspect.isfunction)]
    return [each[: 20 + 7 * (number % 30)] for number, each in enumerate(found[:count])]


def outputs(backend: Any, count: int, tokens: int, ranks: Any) -> list[tuple[list[int], list[float]]] | None:
    """Of each prompt its tokens, and how far its two best tokens lay apart at each; None: this rank follows."""
    from outrider import Engine, EngineConfig, SamplingParams
    from outrider.bundled import bundled

    config = EngineConfig(dtype="float32", max_requests=8, max_context=512, draft_tokens=4)
    engine = Engine.from_checkpoint(
        bundled("target"), backend, draft_dir=bundled("eagle"), speculate="eagle", config=config, ranks=ranks
    )
    if engine.follows:
        engine.follow()
        return None
    prompts = [engine.tokenizer.encode(text) for text in texts(count)]
    made = engine.generate(prompts, SamplingParams(max_tokens=tokens, logprobs=2, ignore_eos=True))
    engine.close()
    return [(list(each.token_ids), [_gap(place) for place in each.logprobs]) for each in made]


def _gap(place: Any) -> float:
    (_, first), (_, second) = place.top
    return float(first - second)


def alone(place: Any, *, count: int, tokens: int) -> Any:
    """One device's, on the first rank."""
    return outputs(place.backend, count, tokens, None) if place.index == 0 else None


def together(place: Any, *, count: int, tokens: int, tensor: int, data: int, watched: bool) -> Any:
    """What two ranks make, and what the sanitizer found on this one."""
    from outrider.engine.ranks.ranks import ParallelConfig, Ranks
    from outrider_sanitizer import watch

    ranks = Ranks(
        place.backend, ParallelConfig(tensor=tensor, data=data, timeout_s=60.0), rank=place.index, store=place.store
    )
    try:
        with watch(place.backend) if watched else nullcontext() as report:
            found = outputs(place.backend, count, tokens, ranks)
            place.backend.synchronize()
        peers = [group.has_peer_memory for group in ranks.groups]
    finally:
        ranks.close()
    findings = [] if report is None else [str(each) for each in report]
    return {"outputs": found, "findings": findings, "operations": report and report.operations, "peers": peers}


def main() -> int:
    """Each part in turn."""
    from outrider_conformance.ranks.runner import TaskProcesses

    spec, *numbers = sys.argv[1:]
    count, tokens = (int(each) for each in (*numbers, "32", "64")[:2])
    wrong = 0
    with TaskProcesses(spec, 2) as ranks:

        def run(task: str, **work: Any) -> list[Any]:
            began = time.monotonic()
            found = ranks.run_task(f"ranks_on_devices:{task}", work, limit_s=150)
            print(json.dumps({"part": task, **work, "seconds": round(time.monotonic() - began, 1)}), flush=True)
            return found

        expected = run("alone", count=count, tokens=tokens)[0]
        for tensor, data in LAYOUTS:
            made = run("together", count=count, tokens=tokens, tensor=tensor, data=data, watched=False)[0]
            equal = near = 0
            for (ours, _), (theirs, gaps) in zip(made["outputs"], expected, strict=True):
                apart = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1), None)
                equal += apart is None
                near += apart is not None and gaps[apart] < NEAR
            wrong += count - equal - near
            told = {"tensor": tensor, "data": data, "equal": equal, "near_ties": near, "of": count, "peers": made["peers"]}
            print(json.dumps(told), flush=True)
        for tensor, data in LAYOUTS:
            both = run("together", count=min(count, WATCHED), tokens=16, tensor=tensor, data=data, watched=True)
            wrong += sum(len(each["findings"]) for each in both)
            for rank, each in enumerate(both):
                told = {"rank": rank, "operations": each["operations"], "findings": len(each["findings"])}
                print(json.dumps({"tensor": tensor, "data": data, **told}), flush=True)
                print(*each["findings"][:2], sep="\n", file=sys.stderr)
                wrong += not each["operations"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
