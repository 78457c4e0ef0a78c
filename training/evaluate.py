"""Recompute the figures of a stored target and EAGLE head on held-out text, in float32.

python evaluate.py --model OUT --prompts prompts.json
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import corpus
import torch
import torch.nn.functional as F
from decoding import Generator, chain_decode, find_loops
from tokenizers import Tokenizer

from model import Target, load_head, load_target


@torch.no_grad()
def losses(target: Target, tokenizer: Tokenizer, stdlib: Path, length: int, device: torch.device) -> str:
    """Return the held-out loss in nats per token and per byte, over consecutive pieces of all held-out files."""
    _, held_out, _ = corpus.split(corpus.read_sources(stdlib))
    stream = torch.from_numpy(corpus.encode(tokenizer, held_out).astype("int64")).to(device)
    total, tokens = 0.0, 0
    for at in range(0, len(stream) - 1, length):
        piece = stream[None, at : at + length + 1]
        logits = target.logits(target(piece[:, :-1]))[0]
        total += F.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
        tokens += logits.shape[0]
    size = sum(len(s.text.encode()) for s in held_out)
    return (
        f"held-out loss, pieces of {length}: {total / tokens:.4f} nats per token, "
        f"{total / size:.4f} per byte ({len(held_out)} files, {size} bytes, {tokens} tokens)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with target/ and eagle/")
    parser.add_argument("--prompts", type=Path, required=True, help="held-out prompts, a JSON file")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--device", default="cpu", help="device of the loss and the loop rate; drafting runs on the CPU")
    parser.add_argument("--tokens", type=int, default=128, help="number of tokens to generate after each prompt")
    parser.add_argument("--loop-tokens", type=int, nargs="*", default=[128], help="lengths in which loops are counted")
    parser.add_argument("--limit", type=int, default=0, help="maximum number of prompts; 0 for all")
    parser.add_argument("--depth", type=int, default=4, help="drafts per verification")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=2, help="number of greedy texts to print")
    parser.add_argument("--loss", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    cpu, device = torch.device("cpu"), torch.device(args.device)
    tokenizer = Tokenizer.from_file(str(args.model / "target" / "tokenizer.json"))
    eos = tokenizer.token_to_id(corpus.END)
    content = json.loads(args.prompts.read_text(encoding="utf-8"))
    texts = [p["text"] for p in (content["prompts"] if isinstance(content, dict) else content)]
    prompts = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts[: args.limit or None]]
    target = load_target(args.model / "target", device)

    if args.loss:
        print(losses(target, tokenizer, args.stdlib, 1024, device), flush=True)

    max_tokens = max(args.loop_tokens, default=0)
    if max_tokens:
        generator = Generator(target, 1, max(map(len, prompts)) + max_tokens, 0.0, torch.float32)
        generated = [generator.run(torch.tensor([p], device=device), max_tokens)[0, len(p) :].tolist() for p in prompts]
        for count in args.loop_tokens:
            loops = find_loops([row[:count] for row in generated], tokenizer, eos)
            print(
                f"greedy loops in {count} tokens: {len(loops)} of {len(generated)} prompts "
                f"({100 * len(loops) / len(generated):.1f} %): {loops}",
                flush=True,
            )
        for i in range(min(args.samples, len(generated))):
            print(f"--- prompt {i}\n{texts[i]}\n--- greedy\n{tokenizer.decode(generated[i][: args.tokens])}\n---")

    target, head = target.to(cpu), load_head(args.model / "eagle", cpu)
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        rng = torch.Generator().manual_seed(args.seed)
        start, emitted, num_equal = time.monotonic(), [], 0
        for i, prompt in enumerate(prompts):
            text, rounds = chain_decode(target, head, prompt, args.tokens, args.depth, temperature, eos, rng)
            emitted += rounds
            if temperature == 0.0 and max_tokens:
                size = min(len(text), args.tokens, max_tokens)
                num_equal += text[:size] == generated[i][:size]
        note = (
            f", {num_equal} of {len(prompts)} texts equal to non-speculative decoding"
            if temperature == 0.0 and max_tokens
            else ""
        )
        print(
            f"{name}: {sum(emitted) / len(emitted):.3f} tokens per verification, {args.depth} drafted, "
            f"{len(emitted)} verifications{note} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
