"""Train a block drafter (DFlash) for a stored target.

python train_block.py --model ../core/outrider/bundled --out OUT --device cuda --minutes 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import corpus
import numpy as np
import torch
from accepted import continue_greedily, count_block_hits, count_eagle_hits, mean_tokens_per_verification, read_prompts
from block_model import BlockHead, BlockShape, save_block, target_states
from decoding import Generator
from optim import Optimizer
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import Target, load_head, load_target, round_to_bfloat16

_POSITION_DECAY = 4.0
"""Number of positions over which the weight in the loss falls by a factor of e: later positions are reached less often."""
_MIN_POSITION_WEIGHT = 0.25
"""Factor of a position's weight if the head gives no probability to the preceding tokens."""
_SHORT_BLOCK_SHARE = 0.2
"""Fraction of blocks that are shorter than the full width, so that shorter drafts are trained as well."""
_POOL_PARTS = 8
"""Number of parts of the pool. One part is rewritten at a time, after prompts of a new length."""


def load_streams(tokenizer: Tokenizer, stdlib: Path, data: Path | None) -> list[Tensor]:
    """Return the tokens of the training files and of the held-out files. ``data``, if given, caches them."""
    names = ("train", "held_out")
    if data is not None and all((data / f"{name}.npy").exists() for name in names):
        found = [np.load(data / f"{name}.npy") for name in names]
    else:
        train, held_out, _ = corpus.split(corpus.read_sources(stdlib))
        found = [corpus.encode(tokenizer, part) for part in (train, held_out)]
        if data is not None:
            data.mkdir(parents=True, exist_ok=True)
            for name, tokens in zip(names, found, strict=True):
                np.save(data / f"{name}.npy", tokens)
    return [torch.from_numpy(tokens.astype(np.int64)) for tokens in found]


class Pool:
    """A pool of texts with the target's states: pieces of files with greedy continuations, and unchanged pieces."""

    def __init__(self, target: Target, stream: Tensor, rows: int, length: int, taps: tuple[int, ...]) -> None:
        self.target, self.stream, self.length, self.tap_layers = target, stream, length, taps
        device = stream.device
        self.cuda = device.type == "cuda"
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.part_rows = max(1, rows // _POOL_PARTS)
        self.generator = Generator(target, self.part_rows, length, 0.0, dtype)
        size, rows = target.shape.hidden_size, self.part_rows * _POOL_PARTS
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.taps = torch.zeros(rows, length, len(taps) * size, dtype=dtype, device=device)
        self.final = torch.zeros(rows, length, size, dtype=dtype, device=device)
        self.begins = torch.zeros(rows, dtype=torch.long, device=device)
        self.next_part = 0
        for _ in range(_POOL_PARTS):
            self.rewrite_oldest_part()

    @torch.no_grad()
    def rewrite_oldest_part(self) -> None:
        """Rewrite the oldest part with new texts. One part of eight is unchanged text."""
        part = slice(self.next_part * self.part_rows, (self.next_part + 1) * self.part_rows)
        unchanged = self.next_part == 0
        self.next_part = (self.next_part + 1) % _POOL_PARTS
        longest = min(self.length // 2, 192)
        size = self.length if unchanged else int(torch.randint(min(16, longest - 1), longest, ()))
        starts = torch.randint(len(self.stream) - size, (self.part_rows, 1), device=self.stream.device)
        tokens = self.stream[starts + torch.arange(size, device=self.stream.device)]
        if not unchanged:
            tokens = self.generator.run(tokens, self.length - size)
        self.tokens[part] = tokens
        self.begins[part] = 8 if unchanged else size - 1
        for rows in torch.arange(part.start, part.stop, device=tokens.device).split(128):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.cuda):
                taps, final = target_states(self.target, self.tokens[rows], self.tap_layers)
            self.taps[rows], self.final[rows] = taps.to(self.taps.dtype), final.to(self.final.dtype)

    def batch(self, rows: int, blocks: int, width: int) -> tuple[Tensor, ...]:
        """Return tokens, taps and final states of random rows, random block positions [rows, blocks], and their widths."""
        device = self.stream.device
        picked = torch.randint(len(self.tokens), (rows,), device=device)
        begins = self.begins[picked].unsqueeze(1)
        num_positions = self.length - width - begins
        anchors = begins + (torch.rand(rows, blocks, device=device) * num_positions).long()
        shorter = torch.randint(2, width + 1, (rows, blocks), device=device)
        short = torch.rand(rows, blocks, device=device) < _SHORT_BLOCK_SHARE
        return self.tokens[picked], self.taps[picked], self.final[picked], anchors, torch.where(short, shorter, width)


def block_loss(
    target: Target, head: BlockHead, mask: int, tokens: Tensor, taps: Tensor, final: Tensor, anchors: Tensor, widths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of all blocks at ``anchors`` [B, N] of ``tokens`` [B, S], and the accuracy of each position [W - 1].

    The loss of a position is the divergence from the target's distribution plus the cross entropy of the text. Later
    positions weigh less, and so do positions that the head makes unlikely to be reached.
    """
    width = head.block.width
    with torch.no_grad():
        offsets = torch.arange(width, device=tokens.device)
        positions = anchors.unsqueeze(2) + offsets
        batch = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
        text = tokens[batch, positions]
        target_log_p = target.logits(final[batch, positions[..., :-1]]).float().log_softmax(-1)
        block = torch.full_like(text, mask)
        block[..., 0] = text[..., 0]
        embedded = target.embed_tokens(block)
    predicted = target.logits(head(taps, embedded, anchors, widths)[..., 1:, :]).float().log_softmax(-1)
    divergence = (target_log_p.exp() * (target_log_p - predicted)).sum(-1)
    text_log_p = predicted.gather(-1, text[..., 1:, None])[..., 0]
    with torch.no_grad():
        preceding = torch.cat((torch.zeros_like(text_log_p[..., :1]), text_log_p[..., :-1]), dim=-1)
        reached = preceding.cumsum(-1).exp()
        weights = torch.exp(-offsets[:-1] / _POSITION_DECAY) * (_MIN_POSITION_WEIGHT + (1.0 - _MIN_POSITION_WEIGHT) * reached)
        weights = weights * (offsets[1:] < widths.unsqueeze(2))
    loss = ((divergence - text_log_p) * weights).sum() / weights.sum()
    return loss, (predicted.argmax(-1) == text[..., 1:]).float().mean((0, 1)).detach()


class Training:
    """One training run: the head, its texts, its measurements and its log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start_time = args, time.monotonic()
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.log: list[dict[str, object]] = []
        args.out.mkdir(parents=True, exist_ok=True)
        self.target = load_target(args.model / "target", self.device).requires_grad_(False)
        tokenizer = Tokenizer.from_file(str(args.model / "target" / "tokenizer.json"))
        self.eos, self.mask = tokenizer.token_to_id(corpus.END), tokenizer.token_to_id(corpus.PAD)
        prompts = read_prompts(args.prompts, tokenizer, args.limit)
        self.texts, self.ends = continue_greedily(self.target, prompts, args.tokens)
        self.note("held-out text", prompts=len(prompts))
        train, _ = load_streams(tokenizer, args.stdlib, args.data)
        self.note("text", tokens=len(train))
        shape = BlockShape(layers=args.layers, width=args.width, taps=tuple(args.taps))
        self.head = BlockHead(self.target.shape, shape).to(self.device)
        with torch.no_grad():  # the target's output head reads the drafter's states
            self.head.norm.weight.copy_(self.target.norm.weight)
        self.optimizer = Optimizer(self.head, muon_lr=args.muon, adam_lr=args.adam, weight_decay=0.05)
        self.pool = Pool(self.target, train.to(self.device), args.pool, args.length, shape.taps)
        if self.cuda:
            torch.cuda.synchronize()
        self.note("pool", rows=len(self.pool.tokens), parameters=sum(p.numel() for p in self.head.parameters()))
        self.best = 0.0

    def note(self, event: str, **facts: object) -> None:
        """Print a line and append it to log.json."""
        self.log.append({"event": event, "seconds": round(time.monotonic() - self.start_time, 1), **facts})
        print(" ".join(f"{k} {v}" for k, v in self.log[-1].items()), flush=True)
        (self.args.out / "log.json").write_text(json.dumps(self.log, indent=1) + "\n")

    def backward_batch(self, step: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy of one batch, and leave the gradients at the parameters."""
        batch = self.pool.batch(self.args.rows, self.args.blocks, self.args.width)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            loss, hits = step(self.target, self.head, self.mask, *batch)
        loss.backward()
        return loss.detach(), hits

    def compiled_loss(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the function :func:`block_loss`, compiled on CUDA if compilation succeeds."""
        if self.cuda and self.args.compile:
            function: Callable[..., tuple[Tensor, Tensor]] = torch.compile(block_loss, dynamic=False)
            try:
                for _ in range(3):
                    self.backward_batch(function)
                torch.cuda.synchronize()
            except Exception as error:  # training continues without compilation, whatever the error
                self.note("not compiled", error=str(error)[:300])
            else:
                self.head.zero_grad()
                return function
            self.head.zero_grad()
        return block_loss

    def measure(self, *, eagle: bool = False, prompts: int = 0) -> dict[str, float]:
        """Return the mean tokens per verification of the stored weights, for blocks of the full width and of five tokens."""
        head = BlockHead(self.head.shape, self.head.block).to(self.device).eval()
        head.load_state_dict(self.head.state_dict())
        round_to_bfloat16(head)
        texts, ends = self.texts[: prompts or None], self.ends[: prompts or None].tolist()
        found = {}
        for width in sorted({min(5, head.block.width), head.block.width}):
            hits = count_block_hits(self.target, head, texts, self.mask, width)
            found[f"block {width - 1}"] = round(mean_tokens_per_verification(hits, ends, self.args.tokens, width - 1), 3)
        if eagle and (self.args.model / "eagle").exists():
            eagle_head = load_head(self.args.model / "eagle", self.device)
            for depth in (3, 4, 7):
                hits = count_eagle_hits(self.target, eagle_head, texts, depth)
                found[f"eagle {depth}"] = round(mean_tokens_per_verification(hits, ends, self.args.tokens, depth), 3)
        return found

    def measure_and_save(self, *, eagle: bool = False, prompts: int = 0) -> None:
        """Measure the head, and save it if it is the best so far or if all prompts were used."""
        found = self.measure(eagle=eagle, prompts=prompts)
        full_width = found[f"block {self.head.block.width - 1}"]
        self.note("held-out prompts", **found)
        if full_width >= self.best or not prompts:
            self.best = full_width
            save_block(self.head, self.args.out, self.mask, self.eos)

    def run(self) -> None:
        args = self.args
        step_of = self.compiled_loss()
        self.note("begin", device=torch.cuda.get_device_name() if self.cuda else "cpu", torch=torch.__version__)
        start_time, step, queued = time.monotonic(), 0, []
        last_shown = last_saved = time.monotonic()
        while True:
            done = step / args.steps if args.steps else (time.monotonic() - start_time) / (60 * args.minutes)
            if done >= 1.0:
                break
            if step and step % args.refresh == 0:
                self.pool.renew()
            loss, hits = self.backward_batch(step_of)
            self.optimizer.step(min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))))
            step += 1
            if self.cuda:  # launch at most four steps ahead of the device, so that the clock measures its progress
                queued.append(torch.cuda.Event())
                queued[-1].record()
                if len(queued) > 4:
                    queued.pop(0).synchronize()
            now = time.monotonic()
            if now - last_shown > args.show or step == args.steps:
                last_shown = now
                values = [round(v, 3) for v in hits.tolist()]
                self.note("step", step=step, loss=round(loss.item(), 3), hits=values, done=round(done, 3))
            if now - last_saved > args.save:
                self.measure_and_save(prompts=32)
                last_saved = time.monotonic()
                start_time += last_saved - now  # exclude the measurement
        self.note("end", step=step)
        self.measure_and_save(eagle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--model", type=Path, required=True, help="folder with target/, and eagle/ for comparison")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter and the log")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="text")
    parser.add_argument("--data", type=Path, help="folder that caches the tokens of the text")
    parser.add_argument(
        "--prompts", type=Path, default=root / "tests/data/heldout_prompts.json", help="held-out prompts, a JSON file"
    )
    parser.add_argument("--limit", type=int, default=0, help="maximum number of prompts; 0 for all")
    parser.add_argument("--tokens", type=int, default=128, help="number of measured tokens after each prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=3.0, help="training time without compilation and measurements")
    parser.add_argument("--steps", type=int, default=0, help="number of steps, instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=8, help="tokens per block, the last known one included")
    parser.add_argument(
        "--taps", type=int, nargs="+", default=[0, 1, 2, 3], help="the target's layers whose outputs are read"
    )
    parser.add_argument("--rows", type=int, default=64, help="sequences per step")
    parser.add_argument("--length", type=int, default=320, help="tokens per sequence")
    parser.add_argument("--blocks", type=int, default=48, help="blocks per sequence and step")
    parser.add_argument("--pool", type=int, default=4096, help="number of sequences in the pool")
    parser.add_argument("--refresh", type=int, default=60, help="number of steps between rewrites of an eighth of the pool")
    parser.add_argument("--muon", type=float, default=0.02, help="peak learning rate of the matrices")
    parser.add_argument("--adam", type=float, default=0.002, help="peak learning rate of the other parameters")
    parser.add_argument("--show", type=float, default=5.0, help="seconds between two log lines")
    parser.add_argument("--save", type=float, default=45.0, help="seconds between two measurements; the best head is saved")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    # These two implementations of masked attention have correct gradients everywhere.
    kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if args.device != "cpu" else None
    with kernels or contextlib.nullcontext():
        Training(args).run()


if __name__ == "__main__":
    main()
