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
from accepted import block_passed, continued, eagle_passed, read_prompts, verifications
from block_model import BlockHead, BlockShape, save_block, tapped
from decoding import Generator
from optim import Optimizer
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import Target, load_head, load_target, round_to_bfloat16

_FORGET = 4.0  # a place's weight in the loss falls by e in so many places: what comes later is reached less often
_UNREACHED = 0.25  # of a place's weight, where the head itself gives no chance to the tokens before it
_SHORT = 0.2  # of the blocks are shorter than the whole width, so that shorter drafts are good as well
_PARTS = 8  # of the pool; one of them is written anew at a time, each behind prompts of another length


def streams(tokenizer: Tokenizer, stdlib: Path, data: Path | None) -> list[Tensor]:
    """Tokens of the training files and of the held-out ones; kept under ``data``, where given."""
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
    """Texts with what the target's layers make of them: pieces of files, gone on with greedily, and pieces as they are.

    ``tokens`` [R, S]; ``taps`` [R, S, taps * H] and ``final`` [R, S, H] in the precision of training; ``begins`` [R]: where
    the target's own text begins, less one.
    """

    def __init__(self, target: Target, stream: Tensor, rows: int, length: int, taps: tuple[int, ...]) -> None:
        self.target, self.stream, self.length, self.layers = target, stream, length, taps
        device = stream.device
        self.cuda = device.type == "cuda"
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.each = max(1, rows // _PARTS)
        self.generator = Generator(target, self.each, length, 0.0, dtype)
        size, rows = target.shape.hidden_size, self.each * _PARTS
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.taps = torch.zeros(rows, length, len(taps) * size, dtype=dtype, device=device)
        self.final = torch.zeros(rows, length, size, dtype=dtype, device=device)
        self.begins = torch.zeros(rows, dtype=torch.long, device=device)
        self.next = 0
        for _ in range(_PARTS):
            self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Write the oldest part anew; one part in eight is text as it stands."""
        part = slice(self.next * self.each, (self.next + 1) * self.each)
        whole = self.next == 0
        self.next = (self.next + 1) % _PARTS
        longest = min(self.length // 2, 192)
        size = self.length if whole else int(torch.randint(min(16, longest - 1), longest, ()))
        at = torch.randint(len(self.stream) - size, (self.each, 1), device=self.stream.device)
        tokens = self.stream[at + torch.arange(size, device=self.stream.device)]
        if not whole:
            tokens = self.generator.run(tokens, self.length - size)
        self.tokens[part] = tokens
        self.begins[part] = 8 if whole else size - 1
        for rows in torch.arange(part.start, part.stop, device=tokens.device).split(128):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.cuda):
                taps, final = tapped(self.target, self.tokens[rows], self.layers)
            self.taps[rows], self.final[rows] = taps.to(self.taps.dtype), final.to(self.final.dtype)

    def batch(self, rows: int, blocks: int, width: int) -> tuple[Tensor, ...]:
        """Tokens, taps and final states of random rows; blocks at random places [rows, blocks], and how wide each is."""
        device = self.stream.device
        picked = torch.randint(len(self.tokens), (rows,), device=device)
        begins = self.begins[picked].unsqueeze(1)
        room = self.length - width - begins
        anchors = begins + (torch.rand(rows, blocks, device=device) * room).long()
        shorter = torch.randint(2, width + 1, (rows, blocks), device=device)
        short = torch.rand(rows, blocks, device=device) < _SHORT
        return self.tokens[picked], self.taps[picked], self.final[picked], anchors, torch.where(short, shorter, width)


def loss_of(
    target: Target, head: BlockHead, mask: int, tokens: Tensor, taps: Tensor, final: Tensor, anchors: Tensor, widths: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of all blocks at ``anchors`` [B, N] of ``tokens`` [B, S], and how often each place hits [W - 1].

    Each place: the divergence from the target's distribution, and the cross entropy of the text. A place weighs less the
    further back it is, and less where the head gives no chance to the tokens before it, so that it won't be reached.
    """
    width = head.block.width
    with torch.no_grad():
        offsets = torch.arange(width, device=tokens.device)
        places = anchors.unsqueeze(2) + offsets
        batch = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
        text = tokens[batch, places]
        goal = target.logits(final[batch, places[..., :-1]]).float().log_softmax(-1)
        block = torch.full_like(text, mask)
        block[..., 0] = text[..., 0]
        embedded = target.embed_tokens(block)
    made = target.logits(head(taps, embedded, anchors, widths)[..., 1:, :]).float().log_softmax(-1)
    divergence = (goal.exp() * (goal - made)).sum(-1)
    right = made.gather(-1, text[..., 1:, None])[..., 0]
    with torch.no_grad():
        before = torch.cat((torch.zeros_like(right[..., :1]), right[..., :-1]), dim=-1)
        reached = before.cumsum(-1).exp()
        weights = torch.exp(-offsets[:-1] / _FORGET) * (_UNREACHED + (1.0 - _UNREACHED) * reached)
        weights = weights * (offsets[1:] < widths.unsqueeze(2))
    loss = ((divergence - right) * weights).sum() / weights.sum()
    return loss, (made.argmax(-1) == text[..., 1:]).float().mean((0, 1)).detach()


class Training:
    """A run: the head, its texts, its measures, its log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.log: list[dict[str, object]] = []
        args.out.mkdir(parents=True, exist_ok=True)
        self.target = load_target(args.model / "target", self.device).requires_grad_(False)
        tokenizer = Tokenizer.from_file(str(args.model / "target" / "tokenizer.json"))
        self.eos, self.mask = tokenizer.token_to_id(corpus.END), tokenizer.token_to_id(corpus.PAD)
        prompts = read_prompts(args.prompts, tokenizer, args.limit)
        self.texts, self.ends = continued(self.target, prompts, args.tokens)
        self.note("held-out text", prompts=len(prompts))
        train, _ = streams(tokenizer, args.stdlib, args.data)
        self.note("text", tokens=len(train))
        shape = BlockShape(layers=args.layers, width=args.width, taps=tuple(args.taps))
        self.head = BlockHead(self.target.shape, shape).to(self.device)
        with torch.no_grad():  # what comes out is read by the target's output head
            self.head.norm.weight.copy_(self.target.norm.weight)
        self.optimizer = Optimizer(self.head, muon_lr=args.muon, adam_lr=args.adam, weight_decay=0.05)
        self.pool = Pool(self.target, train.to(self.device), args.pool, args.length, shape.taps)
        if self.cuda:
            torch.cuda.synchronize()
        self.note("pool", rows=len(self.pool.tokens), parameters=sum(p.numel() for p in self.head.parameters()))
        self.best = 0.0

    def note(self, event: str, **facts: object) -> None:
        """Print a line and keep it in log.json."""
        self.log.append({"event": event, "seconds": round(time.monotonic() - self.began, 1), **facts})
        print(" ".join(f"{k} {v}" for k, v in self.log[-1].items()), flush=True)
        (self.args.out / "log.json").write_text(json.dumps(self.log, indent=1) + "\n")

    def one(self, step: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Loss and hits of one batch, gradients left at the parameters."""
        batch = self.pool.batch(self.args.rows, self.args.blocks, self.args.width)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            loss, hits = step(self.target, self.head, self.mask, *batch)
        loss.backward()
        return loss.detach(), hits

    def compiled(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The loss, compiled on CUDA; as it is where that fails."""
        if self.cuda and self.args.compile:
            fast: Callable[..., tuple[Tensor, Tensor]] = torch.compile(loss_of, dynamic=False)
            try:
                for _ in range(3):
                    self.one(fast)
                torch.cuda.synchronize()
            except Exception as error:  # whatever the compiler meets, training goes on without it
                self.note("not compiled", error=str(error)[:300])
            else:
                self.head.zero_grad()
                return fast
            self.head.zero_grad()
        return loss_of

    def measured(self, *, eagle: bool = False, prompts: int = 0) -> dict[str, float]:
        """Tokens of a verification by the weights as they are stored: blocks of the whole width, and of five tokens."""
        head = BlockHead(self.head.shape, self.head.block).to(self.device).eval()
        head.load_state_dict(self.head.state_dict())
        round_to_bfloat16(head)
        texts, ends = self.texts[: prompts or None], self.ends[: prompts or None].tolist()
        found = {}
        for width in sorted({min(5, head.block.width), head.block.width}):
            passed = block_passed(self.target, head, texts, self.mask, width)
            found[f"block {width - 1}"] = round(verifications(passed, ends, self.args.tokens, width - 1), 3)
        if eagle and (self.args.model / "eagle").exists():
            other = load_head(self.args.model / "eagle", self.device)
            for depth in (3, 4, 7):
                passed = eagle_passed(self.target, other, texts, depth)
                found[f"eagle {depth}"] = round(verifications(passed, ends, self.args.tokens, depth), 3)
        return found

    def keep(self, *, eagle: bool = False, prompts: int = 0) -> None:
        """Measure, and store what is best so far."""
        found = self.measured(eagle=eagle, prompts=prompts)
        whole = found[f"block {self.head.block.width - 1}"]
        self.note("held-out prompts", **found)
        if whole >= self.best or not prompts:
            self.best = whole
            save_block(self.head, self.args.out, self.mask, self.eos)

    def run(self) -> None:
        args = self.args
        step_of = self.compiled()
        self.note("begin", device=torch.cuda.get_device_name() if self.cuda else "cpu", torch=torch.__version__)
        began, step, queued = time.monotonic(), 0, []
        shown = kept = time.monotonic()
        while True:
            done = step / args.steps if args.steps else (time.monotonic() - began) / (60 * args.minutes)
            if done >= 1.0:
                break
            if step and step % args.refresh == 0:
                self.pool.renew()
            loss, hits = self.one(step_of)
            self.optimizer.step(min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))))
            step += 1
            if self.cuda:  # at most four steps ahead of the device, so that the clock tells the truth
                queued.append(torch.cuda.Event())
                queued[-1].record()
                if len(queued) > 4:
                    queued.pop(0).synchronize()
            now = time.monotonic()
            if now - shown > args.show or step == args.steps:
                shown = now
                values = [round(v, 3) for v in hits.tolist()]
                self.note("step", step=step, loss=round(loss.item(), 3), hits=values, done=round(done, 3))
            if now - kept > args.save:
                self.keep(prompts=32)
                kept = time.monotonic()
                began += kept - now  # measuring is no training
        self.note("end", step=step)
        self.keep(eagle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--model", type=Path, required=True, help="folder with target/, and eagle/ to compare with")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter and the log")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="text")
    parser.add_argument("--data", type=Path, help="folder to keep the text's tokens in, and to find them in")
    parser.add_argument(
        "--prompts", type=Path, default=here / "tests/data/heldout_prompts.json", help="held-out prompts, a JSON file"
    )
    parser.add_argument("--limit", type=int, default=0, help="only the first so many prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens after each prompt, to measure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, without compiling and measuring")
    parser.add_argument("--steps", type=int, default=0, help="instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=8, help="tokens of a block, the last known one included")
    parser.add_argument("--taps", type=int, nargs="+", default=[0, 1, 2, 3], help="layers of the target whose output is read")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a step")
    parser.add_argument("--length", type=int, default=320, help="tokens of a sequence")
    parser.add_argument("--blocks", type=int, default=48, help="blocks of a sequence in a step")
    parser.add_argument("--pool", type=int, default=4096, help="sequences to draw from")
    parser.add_argument("--refresh", type=int, default=60, help="steps until an eighth of the pool is written anew")
    parser.add_argument("--muon", type=float, default=0.02, help="peak learning rate of the matrices")
    parser.add_argument("--adam", type=float, default=0.002, help="peak learning rate of the rest")
    parser.add_argument("--show", type=float, default=5.0, help="seconds between two lines")
    parser.add_argument("--save", type=float, default=45.0, help="seconds between two measures, the best of which is stored")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    # Of attention with a mask these two are known to have gradients everywhere.
    kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if args.device != "cpu" else None
    with kernels or contextlib.nullcontext():
        Training(args).run()


if __name__ == "__main__":
    main()
