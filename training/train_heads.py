"""Train draft heads, EAGLE-3 and DFlash, for a Llama with tied embeddings, from text that the target writes itself.

    python train_heads.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out OUT --device cuda --minutes 4

The target answers prompts of four kinds: chat (questions that it writes itself), code and summaries (of Python's standard
library), and maths. Both heads learn from these answers and the target's states, which are computed once. Each head is
measured on answers to held-out prompts, for each kind and each position of the draft.

Letters: B sequences, S positions, H hidden size, A states of the target, N blocks of a sequence, W tokens of a block.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import random
import sysconfig
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from block_model import BlockHead
from decoding import mark_repeated
from eagle3 import Eagle3Head
from instruct import Conversations, Pieces
from log import Log, start_clock
from optim import Optimizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import Target, Texts, mismatch, round_to_bfloat16, save_head, target_states

_SHARES = {"eagle3": 0.45, "dflash": 0.55}
"""Share of the training time of each head."""


def load_pretrained(path: Path) -> tuple[Target, Any, int]:
    """Load a Llama with tied embeddings, its tokenizer and the token that ends an answer, from a GGUF file or a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = path.name if path.suffix == ".gguf" else None
    folder = path if gguf is None else path.parent
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, gguf_file=gguf, trust_remote_code=False)
    target = Target.from_config(model.config.to_dict())
    target.load_state_dict(model.model.state_dict())
    end = model.config.eos_token_id  # of a tokenizer made from GGUF, some versions of transformers return another token
    return target, AutoTokenizer.from_pretrained(folder, gguf_file=gguf, trust_remote_code=False), end


class HeadTraining:
    """One training run: the target, its answers, the heads and the log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "log.json").unlink(missing_ok=True)
        self.note = Log(args.out / "log.json").note
        target, tokenizer, self.end = load_pretrained(args.model)
        self.target = target.to(self.device).eval().requires_grad_(False)
        if self.cuda:  # generation and training read the same rounded weights
            round_to_bfloat16(self.target)
        self.note("target", device=torch.cuda.get_device_name() if self.cuda else "cpu", torch=torch.__version__)
        layers = self.target.shape.num_hidden_layers
        self.taps = tuple(args.taps or (1, layers // 2 - 1, layers - 4))
        self.talk = (Pieces if args.pieces else Conversations)(
            self.target, tokenizer, args.stdlib, prompt=args.prompt, total=args.length, end=self.end, batch=args.batch
        )
        prompts = self.talk.draw(args.measured, random.Random(args.seed + 1), held_out=True)
        self.kinds = [prompt.kind for prompt in prompts]
        self.held_out = self.answer([prompt.tokens for prompt in prompts], 0.0)
        example = self.talk.tokenizer.decode(self.held_out.tokens[0, : int(self.held_out.stops[0])].tolist())[-400:]
        self.note("held-out answers", tokens=int((self.held_out.stops - self.held_out.starts).sum()), example=example)
        self.pool = self.write_pool()
        self.talk.writers.clear()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)

    @torch.no_grad()
    def answer(self, prompts: list[list[int]], temperature: float) -> Texts:
        """Return the prompts with their answers. An answer ends where it begins to loop, since loops are easy to draft."""
        rows = self.talk.write(prompts, temperature=temperature)
        starts = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        index = torch.arange(rows.shape[1], device=self.device)
        finished = ((rows == self.end) | mark_repeated(rows)) & (index >= starts.unsqueeze(1))
        stops = torch.where(finished.any(1), finished.long().argmax(1) + 1, rows.shape[1])
        dtype, parts = torch.bfloat16 if self.cuda else torch.float32, []
        for part in rows.split(128):
            with self.autocast():
                parts.append([each.to(dtype) for each in target_states(self.target, part, self.taps)])
        states, final = (torch.cat(each) for each in zip(*parts, strict=True))
        return Texts(rows, starts, stops, states, final)

    def write_pool(self) -> Texts:
        """Return answers to training prompts, three quarters greedy and a quarter sampled at temperature 0.8."""
        parts, rng, began = [], random.Random(self.args.seed), time.monotonic()
        for number in range(self.args.pool):
            if parts and time.monotonic() - began > 60 * self.args.pool_minutes:
                break
            prompts = [prompt.tokens for prompt in self.talk.draw(self.args.batch, rng, held_out=False)]
            parts.append(self.answer(prompts, 0.8 if number % 4 == 3 else 0.0))
            self.note("pool", part=number)
        pool = Texts(*(torch.cat(each) for each in zip(*(vars(part).values() for part in parts), strict=True)))
        self.note("pool", rows=len(pool.tokens), answered=int((pool.stops - pool.starts).sum()))
        return pool

    def frequent(self, count: int) -> Tensor:
        """Return the ``count`` most frequent tokens of the pool, ascending; unseen tokens by their number."""
        seen: Counter[int] = Counter()
        for row, stop in zip(self.pool.tokens.tolist(), self.pool.stops.tolist(), strict=True):
            seen.update(row[:stop])
        ordered = sorted(range(self.target.shape.vocab_size), key=lambda token: (-seen[token], token))[:count]
        covered = sum(seen[token] for token in ordered) / seen.total()
        self.note("draft vocabulary", tokens=count, covered=round(covered, 4))
        return torch.tensor(sorted(ordered))

    def make_head(self, kind: str) -> Eagle3Head | BlockHead:
        args, shape = self.args, self.target.shape
        head: Eagle3Head | BlockHead
        if kind == "eagle3":
            head = Eagle3Head(shape, self.taps, self.frequent(args.vocabulary), args.depth)
        else:
            sizes = {"layers": args.layers, "width": args.width, "blocks": args.blocks}
            head = BlockHead(replace(shape, intermediate_size=args.intermediate), self.taps, self.mask_token(), **sizes)
        head.to(self.device).start_from(self.target)
        return head

    def mask_token(self) -> int:
        """Return the last added token of the tokenizer that no text of the pool has."""
        used = set(self.pool.tokens.unique().tolist())
        return max(set(self.talk.tokenizer.get_added_vocab().values()) - used)

    def batch(self, rows: int) -> Texts:
        return self.pool.take(torch.randint(len(self.pool.tokens), (rows,), device=self.device))

    @torch.no_grad()
    def measure(self, trained: Eagle3Head | BlockHead, count: int) -> dict[str, list[float]]:
        """Return the accepted share of each draft position on held-out answers, for each kind of text.

        A position counts where all earlier positions of the draft were accepted.
        """
        head = copy.deepcopy(trained).eval()
        round_to_bfloat16(head)
        reached = {kind: [0] * (count + 1) for kind in self.talk.kinds}
        for row, kind in enumerate(self.kinds):
            texts = self.held_out.take(torch.tensor([row], device=self.device))
            at, stop = int(texts.starts[0]), int(texts.stops[0])
            if stop - at <= count + 1:
                continue
            texts = replace(texts, **{name: getattr(texts, name)[:, :stop] for name in ("tokens", "states", "final")})
            with self.autocast():
                runs = head.hits(self.target, texts, count).long().cumprod(1).sum(1).tolist()
            while at + count < stop:
                for position in range(runs[at] + 1):
                    reached[kind][position] += 1
                at += runs[at] + 1
        return {kind: [round(b / max(a, 1), 3) for a, b in pairwise(counts)] for kind, counts in reached.items()}

    def train(self, kind: str) -> None:
        """Train a head until its time or the steps are over; then save it with its acceptance."""
        args, head = self.args, self.make_head(kind)
        rows = {"eagle3": args.rows, "dflash": args.block_rows}[kind]
        compare = torch.compile(mismatch, dynamic=False) if self.cuda and args.compile else mismatch
        optimizer = Optimizer(head, muon_lr=args.muon, adam_lr=args.adam, weight_decay=0.05)
        minutes = args.minutes * _SHARES[kind] / sum(_SHARES[each] for each in args.heads)
        self.note(f"begin {kind}", parameters=sum(each.numel() for each in head.parameters()))

        def backward() -> Tensor:
            with self.autocast():
                facts = head.loss(self.target, self.batch(rows), compare)
            facts[0].backward()
            return facts

        for _ in range(2):  # compile before the clock starts
            backward()
        head.zero_grad()
        progress, step = start_clock(self.device, minutes=minutes, steps=args.steps), 0
        while (done := progress(step)) < 1.0:
            facts = backward()
            optimizer.step(min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))))
            if step % 200 == 0:
                loss, *hits = (round(each, 3) for each in facts.tolist())
                self.note("step", step=step, loss=loss, hits=hits, done=round(done, 3))
            step += 1
        folder = args.out / kind
        save_head(head, folder, eos=self.end)
        found = {str(count): self.measure(head, count) for count in head.lengths}
        (folder / "acceptance.json").write_text(json.dumps(found, indent=1) + "\n")
        for count, shares in found.items():
            tokens = {name: round(1 + sum(math.prod(of[: i + 1]) for i in range(len(of))), 2) for name, of in shares.items()}
            self.note(f"end {kind}", step=step, draft_tokens=int(count), by_position=shares, tokens=tokens)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="GGUF file or folder of the target")
    add("--out", type=Path, required=True, help="folder for the heads and the log")
    add("--heads", nargs="+", choices=sorted(_SHARES), default=["dflash", "eagle3"], help="heads to train")
    add("--pieces", action="store_true", help="continue pieces of functions, for a target that wasn't trained for chat")
    add("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="code and texts")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--minutes", type=float, default=4.0, help="training time of all heads, without generation and compilation")
    add("--steps", type=int, default=0, help="number of steps of each head, instead of --minutes")
    add("--seed", type=int, default=0)
    add("--prompt", type=int, default=224, help="maximum tokens of a prompt")
    add("--length", type=int, default=448, help="tokens of a prompt with its answer")
    add("--batch", type=int, default=1024, help="prompts that are answered together")
    add("--pool", type=int, default=12, help="maximum number of batches in the training text")
    add("--pool-minutes", type=float, default=3.0, help="time after which no further batch is written")
    add("--measured", type=int, default=256, help="held-out prompts")
    add("--taps", type=int, nargs="+", help="the target's layers whose outputs are read; default 1, n / 2 - 1, n - 4")
    add("--vocabulary", type=int, default=16384, help="EAGLE-3: tokens of the draft vocabulary")
    add("--depth", type=int, default=4, help="EAGLE-3: draft tokens that are trained")
    add("--rows", type=int, default=24, help="EAGLE-3: sequences per step")
    add("--block-rows", type=int, default=48, help="DFlash: sequences per step")
    add("--blocks", type=int, default=24, help="DFlash: blocks per sequence and step")
    add("--width", type=int, default=8, help="DFlash: tokens per block, the last known one included")
    add("--layers", type=int, default=3, help="DFlash: layers of the head")
    add("--intermediate", type=int, default=704, help="DFlash: intermediate size of its layers")
    add("--muon", type=float, default=0.02, help="peak learning rate of the matrices")
    add("--adam", type=float, default=0.002, help="peak learning rate of the other parameters")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    # These two implementations of masked attention have correct gradients everywhere.
    kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if args.device != "cpu" else None
    with kernels or contextlib.nullcontext():
        training = HeadTraining(args)
        for kind in args.heads:
            training.train(kind)


if __name__ == "__main__":
    main()
