"""Train a block drafter (DFlash) for a stored target.

python train_block.py --model ../core/outrider/bundled --out OUT --device cuda --minutes 3
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import corpus
import torch
from block_model import BlockHead, BlockShape, save_block, tapped
from decoding import Generator
from optim import Optimizer
from tokenizers import Tokenizer
from torch import Tensor

from model import Target, load_target, round_to_bfloat16

_FORGET = 5.0  # a place's weight in the loss falls by e in so many places: what comes later is reached less often


def loss_of(target: Target, head: BlockHead, tokens: Tensor, anchors: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """The loss of all blocks at ``anchors`` [B, N] of ``tokens`` [B, S], and how often each place hits [W - 1]."""
    width = head.block.width
    with torch.no_grad():
        taps, final = tapped(target, tokens, head.block.taps)
        places = anchors.unsqueeze(2) + torch.arange(width, device=tokens.device)
        batch = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
        text = tokens[batch, places]
        goal = target.logits(final)[batch, places[..., :-1]].log_softmax(-1)
        block = torch.full_like(text, mask)
        block[..., 0] = text[..., 0]
        embedded = target.embed_tokens(block)
    made = target.logits(head(taps, embedded, anchors)[..., 1:, :]).float().log_softmax(-1)
    divergence = (goal.exp() * (goal - made)).sum(-1)
    missed = -made.gather(-1, text[..., 1:, None])[..., 0]
    weights = torch.exp(-torch.arange(width - 1, device=tokens.device) / _FORGET)
    loss = ((divergence + missed) * weights).mean() / weights.mean()
    return loss, (made.argmax(-1) == text[..., 1:]).float().mean((0, 1))


@torch.no_grad()
def acceptance(target: Target, head: BlockHead, tokens: Tensor, start: int, mask: int) -> float:
    """Tokens per verification, bonus included, over greedy text of the target; by the blocks at every position of it."""
    width, rounds, total = head.block.width, 0, 0
    anchors = torch.arange(start, tokens.shape[1] - width, device=tokens.device)
    for row in tokens:
        taps, _ = tapped(target, row[None], head.block.taps)
        block = torch.full((1, len(anchors), width), mask, device=tokens.device)
        block[..., 0] = row[anchors]
        guesses = target.logits(head(taps, target.embed_tokens(block), anchors[None])[0, :, 1:]).argmax(-1)
        text = row[anchors.unsqueeze(1) + torch.arange(1, width, device=tokens.device)]
        passed = (guesses == text).long().cumprod(1).sum(1).tolist()
        at = 0
        while at < len(anchors):
            total, rounds = total + passed[at] + 1, rounds + 1
            at += passed[at] + 1
    return total / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with target/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter and the log")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=0, help="instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=8, help="tokens of a block, the last known one included")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a step")
    parser.add_argument("--length", type=int, default=384, help="tokens of a sequence")
    parser.add_argument("--blocks", type=int, default=48, help="blocks of a sequence in a step")
    parser.add_argument("--pool", type=int, default=1024, help="sequences that the target writes at a time")
    parser.add_argument("--refresh", type=int, default=300, help="steps between two pools")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    target = load_target(args.model / "target", device).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(args.model / "target" / "tokenizer.json"))
    eos, mask = tokenizer.token_to_id(corpus.END), tokenizer.token_to_id(corpus.PAD)
    train, held_out, _ = corpus.split(corpus.read_sources(args.stdlib))
    streams = [torch.from_numpy(corpus.encode(tokenizer, part).astype("int64")).to(device) for part in (train, held_out)]

    def pieces(stream: Tensor, rows: int, length: int) -> Tensor:
        at = torch.randint(len(stream) - length, (rows, 1), device=device)
        return stream[at + torch.arange(length, device=device)]

    head = BlockHead(target.shape, BlockShape(layers=args.layers, width=args.width)).to(device)
    with torch.no_grad():  # what comes out is read by the target's output head
        head.norm.weight.copy_(target.norm.weight)
    optimizer = Optimizer(head, muon_lr=0.02, adam_lr=0.002, weight_decay=0.05)
    prefix, most = 64, args.length
    generator = Generator(target, args.pool, most, 0.0, torch.bfloat16 if cuda else torch.float32)
    probe = generator.run(pieces(streams[1], args.pool, prefix), most - prefix)[: 128 if cuda else 16]
    log: list[dict[str, object]] = []
    began, step, pool = time.monotonic(), 0, torch.empty(0)

    def progress() -> float:
        return step / args.steps if args.steps else (time.monotonic() - began) / (60 * args.minutes)

    def note(event: str, **facts: object) -> None:
        log.append({"event": event, "step": step, "seconds": round(time.monotonic() - began, 1), **facts})
        print(log[-1], flush=True)

    note("begin", parameters=sum(p.numel() for p in head.parameters()), device=str(device))
    while (done := progress()) < 1.0:
        if step % args.refresh == 0:
            pool = generator.run(pieces(streams[0], args.pool, prefix), most - prefix)
        # Three quarters are what the target writes, as in greedy decoding; the rest is text.
        own = max(1, 3 * args.rows // 4)
        tokens = pool[torch.randint(len(pool), (own,), device=device)]
        tokens = torch.cat((tokens, pieces(streams[0], args.rows - own, most)))
        anchors = torch.randint(8, most - args.width, (len(tokens), args.blocks), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss, hits = loss_of(target, head, tokens, anchors, mask)
        loss.backward()
        optimizer.step(min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))))
        if step % 50 == 0:
            note("step", loss=round(loss.item(), 3), hits=[round(v, 3) for v in hits.tolist()], done=round(done, 3))
        step += 1
    round_to_bfloat16(head)
    head.eval()
    note("held-out greedy text", tokens_per_verification=round(acceptance(target, head, probe, prefix, mask), 3))
    save_block(head, args.out, mask, eos)
    (args.out / "log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
