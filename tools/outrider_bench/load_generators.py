"""Load on a server by a generator that isn't ours: vLLM's ``bench serve``, as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.registry.children import started
from outrider_bench.child import ChildFailed, how_it_ended
from outrider_bench.environment import with_variables
from outrider_bench.http_load import HttpLoad, ServerFailed

_PERCENTILES = (50, 95, 99)


def run_vllm_bench(load: HttpLoad, tokenizer: Path, *, limit_s: float) -> dict[str, Any]:
    """The figures of :func:`outrider_bench.http_load.summary`, as vLLM's generator reads them; one round warms up.

    It draws its own prompts of ``load.prompt_tokens`` tokens from the vocabulary of ``tokenizer`` (a directory) and sends
    them as text. ``load.rounds`` times ``load.clients`` requests, so many clients at a time. Raises :class:`ChildFailed`
    where the generator doesn't run, :class:`ServerFailed` where a request fails.
    """
    if find_spec("vllm") is None:
        raise ChildFailed("vLLM isn't installed here: its load generator can't run; use --generator own, or install vllm")
    with tempfile.TemporaryDirectory(prefix="outrider-load-") as kept, tempfile.TemporaryFile() as said:
        result = Path(kept) / "result.json"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *vllm_arguments(load, tokenizer, result)]
        with started(command, environment=with_variables({}), stdout=said, stderr=said) as child:
            try:
                code = child.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise ChildFailed(f"vLLM's load generator wasn't done within {limit_s:g} s") from None
        if code or not result.exists():
            said.seek(0)
            told = said.read().decode(errors="replace").strip().splitlines()
            raise ChildFailed(how_it_ended("vLLM's load generator", code, told))
        return figures(json.loads(result.read_text(encoding="utf-8")))


def vllm_arguments(load: HttpLoad, tokenizer: Path, result: Path) -> list[str]:
    """What ``vllm`` is called with. Random prompts, greedy, each answer to its full length; the figures go to ``result``."""
    options = {
        "backend": "openai",
        "base-url": load.url,
        "endpoint": "/v1/completions",
        "model": load.model,
        "tokenizer": tokenizer,
        "dataset-name": "random",
        "random-input-len": load.prompt_tokens,
        "random-output-len": load.new_tokens,
        "random-range-ratio": 0,
        "num-prompts": load.clients * load.rounds,
        "max-concurrency": load.clients,
        "num-warmups": load.clients,
        "seed": load.seed,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl",
        "metric-percentiles": ",".join(map(str, _PERCENTILES)),
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["bench", "serve", *given, "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """The generator's result under the names of the benchmark's own. Raises :class:`ServerFailed` for failed requests."""
    if found["failed"] or not found["completed"]:
        why = next((error for error in found.get("errors", ()) if error), "it says nothing more")
        raise ServerFailed(f"{found['failed']} of {found['failed'] + found['completed']} requests failed: {str(why)[:400]}")

    def quantiles(name: str) -> dict[str, float]:
        return {f"p{share}": float(found[f"p{share}_{name}_ms"]) for share in _PERCENTILES}

    return {
        "requests": found["completed"],
        "tokens": found["total_output_tokens"],
        "seconds": found["duration"],
        "tokens_per_s": found["output_throughput"],
        "first_token_ms": quantiles("ttft"),
        "between_outputs_ms": quantiles("itl"),
        "a_token_ms": quantiles("tpot"),
        "tokens_an_output": found["total_output_tokens"] / (found["completed"] + sum(len(gaps) for gaps in found["itls"])),
    }
