"""What the batch-invariant mode costs, measured against the ordinary kernels in the same run.

    python -m outrider_bench.programs.batch_invariance --batch 1 4 8 --tokens 48

The bundled model in float32 on one backend; both engines generate the same prompts in turns, so that a change of the
machine's speed meets both. It also checks what the mode is for: tokens and log-probabilities alone and in the batch, bit
for bit. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider import Engine, EngineConfig, SamplingParams, get_backend

if TYPE_CHECKING:
    from outrider.device import Backend

Prompts = Sequence[Sequence[int]]

BUNDLED = Path(str(files("outrider"))) / "bundled"
CONTEXT = 256


def build(backend: Backend, *, batch: int, speculate: str, invariant: bool) -> Engine:
    """An engine of the bundled model for ``batch`` requests."""
    config = EngineConfig(
        max_requests=batch,
        max_context=CONTEXT,
        batch_invariant=invariant,
        dtype="float32",
        mode="staged",
        graphs=False,
        overlap=False,
    )
    return Engine.from_checkpoint(
        BUNDLED / "target", backend, draft_dir=BUNDLED / "eagle", speculate=speculate, config=config
    )


def timed(engine: Engine, prompts: Prompts, params: SamplingParams) -> float:
    """Seconds to generate."""
    start = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - start


def same_bits(engine: Engine, prompts: Prompts, params: SamplingParams) -> bool:
    """Whether tokens and log-probabilities of each request are the same alone and in the batch."""
    together = engine.generate(prompts, params)
    alone = [engine.generate([prompt], params)[0] for prompt in prompts]
    return all((a.token_ids, a.logprobs) == (b.token_ids, b.logprobs) for a, b in zip(together, alone, strict=True))


def main() -> None:
    """Parse the options, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    backend = get_backend(arguments.backend)
    prompts = [list(range(20 + 7 * i, 52 + 7 * i)) for i in range(max(arguments.batch))]
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    rows = []
    for speculate in ("none", "eagle"):
        for batch in arguments.batch:
            engines = {
                mode: build(backend, batch=batch, speculate=speculate, invariant=mode == "invariant")
                for mode in ("ordinary", "invariant")
            }
            seconds: dict[str, list[float]] = {mode: [] for mode in engines}
            for turn in range(arguments.rounds + 1):
                for mode, engine in engines.items():
                    spent = timed(engine, prompts[:batch], params)
                    if turn:  # the first one warms up
                        seconds[mode].append(spent)
            speed = {mode: batch * arguments.tokens / statistics.median(times) for mode, times in seconds.items()}
            report = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3)
            rows.append(
                {
                    "speculate": speculate,
                    "batch": batch,
                    "tokens_per_second": {mode: round(value, 1) for mode, value in speed.items()},
                    "slower_by": round(speed["ordinary"] / speed["invariant"], 2),
                    "same_bits": {mode: same_bits(engine, prompts[:batch], report) for mode, engine in engines.items()},
                }
            )
    print(json.dumps({"backend": backend.label, "threads": arguments.threads, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
