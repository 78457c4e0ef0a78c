"""Measure SmolLM2's drafters by kind of text and number of draft tokens, each in turn with plain decoding.

    python draft_table.py --backend cpu
    python draft_table.py --backend cuda --dtype bfloat16 --json

Each cell has the tokens of an iteration, and the speed in relation to non-speculative decoding: medians over the prompts of
its kind. Prompts are not counted. Each prompt is decoded once by an engine, because suffix lookup would know it afterwards.
"""

import argparse
import json
import statistics
import sys
from itertools import product

import torch
from demo import TASK
from timing import HEADS, load_outrider, open_smollm2, time_outrider

FUNCTION = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)"""
TEXT = TASK.read_text(encoding="utf-8").split("\n\n", 1)[1]
PROMPTS = {
    "chat": ("Why is the sky blue?", "How do I learn to swim?", "Tell me about the moon."),
    "code": (
        "Write a Python function that reverses a string.",
        "Write a Python class for a stack.",
        f"Explain this function.\n\n{FUNCTION}",
    ),
    "maths": (
        "What is 17 times 23? Show each step.",
        "Solve 3x + 5 = 20.",
        "A train travels 60 km in 45 minutes. What is its speed?",
    ),
    "summary": (f"Summarise this text in one sentence.\n\n{TEXT}", f"What is this text about?\n\n{TEXT}"),
    "quote": (
        TASK.read_text(encoding="utf-8"),
        f"Add a docstring to this function and write it again.\n\n{FUNCTION}",
        f"Correct the spelling of this text and write it again.\n\n{TEXT}",
    ),
}
DRAFTERS = (*HEADS, "ngram", "suffix")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="default: all")
    parser.add_argument("--draft-tokens", default="1,3,5,7")
    parser.add_argument("--draft-length", choices=("fixed", "load"), default="fixed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _, directory, template = open_smollm2()
    warm_up = template.tokens([{"role": "user", "content": "Count to one hundred in English words."}])
    prompts = {
        kind: [template.tokens([{"role": "user", "content": text}]) for text in texts] for kind, texts in PROMPTS.items()
    }
    plain = load_outrider(directory, "none", 1, args.dtype, args.backend)
    rows: list[dict[str, object]] = []
    drafters = list(product(args.drafters.split(","), map(int, args.draft_tokens.split(","))))
    for drafter, count in drafters:
        engine = load_outrider(directory, drafter, count, args.dtype, args.backend, args.draft_length)
        time_outrider(plain, warm_up, args.tokens), time_outrider(engine, warm_up, args.tokens)
        for kind, each in prompts.items():
            accepted, ratios = [], []
            for prompt in each:
                plain_speed = time_outrider(plain, prompt, args.tokens)[0]
                speed, _, length = time_outrider(engine, prompt, args.tokens)
                accepted.append(length)
                ratios.append(speed / plain_speed)
            row = {
                "drafter": drafter,
                "draft_tokens": count,
                "kind": kind,
                "tokens_per_iteration": round(statistics.median(accepted), 2),
                "speed": round(statistics.median(ratios), 2),
            }
            rows.append(row)
            sys.stderr.write(f"draft_table: {row}\n")
        engine.close()
    plain.close()
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return 0
    sys.stdout.write(f"| drafter, draft tokens | {' | '.join(PROMPTS)} |\n|---{'|---' * len(PROMPTS)}|\n")
    for drafter, count in drafters:
        found = [row for row in rows if (row["drafter"], row["draft_tokens"]) == (drafter, count)]
        cells = " | ".join(f"{row['tokens_per_iteration']}, {row['speed']}" for row in found)
        sys.stdout.write(f"| {drafter}, {count} | {cells} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
