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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from block_model import BlockHead, BlockShape
from decoding import mark_repeated
from eagle3 import Eagle3Head
from instruct import Conversations, Pieces
from optim import Optimizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import DraftHead, Shape, Target, round_to_bfloat16, save_head, target_states

_DEPTH_DECAY = 0.9
"""Factor of the weight of each further EAGLE-3 depth in the loss: later positions are reached less often."""
_POSITION_DECAY = 4.0
"""Number of block positions over which the weight in the loss falls by a factor of e."""
_MIN_POSITION_WEIGHT = 0.25
"""Factor of a block position's weight if the preceding draft tokens would all be rejected."""
_SHORT_BLOCK_SHARE = 0.5
"""Share of blocks that are shorter than the full width, so that shorter drafts are trained as well."""
_SHARES = {"eagle3": 0.45, "dflash": 0.55}
"""Share of the training time of each head."""
_MEASURED_LENGTH = 3
"""Draft tokens for which every head is measured."""


def load_pretrained(path: Path) -> tuple[Target, Any, int]:
    """Load a Llama with tied embeddings, its tokenizer and the token that ends an answer, from a GGUF file or a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = path.name if path.suffix == ".gguf" else None
    folder = path if gguf is None else path.parent
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, gguf_file=gguf, trust_remote_code=False)
    config = model.config.to_dict()
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    target = Target(Shape(**{k: config[k] for k in asdict(Shape()) if k != "rope_theta"}, rope_theta=theta))
    target.load_state_dict(model.model.state_dict())
    end = config["eos_token_id"]  # of a tokenizer made from GGUF, some versions of transformers return another token
    return target, AutoTokenizer.from_pretrained(folder, gguf_file=gguf, trust_remote_code=False), end


@dataclass(frozen=True)
class Texts:
    """Prompts with their answers, and the target's states of them."""

    tokens: Tensor
    """[B, S]."""
    starts: Tensor
    """Position of each answer's first token [B]."""
    stops: Tensor
    """Position after each answer's last token [B]."""
    states: Tensor
    """Outputs of the target's layers that the heads read, side by side [B, S, A H]."""
    final: Tensor
    """The target's states after its final norm [B, S, H]."""

    def take(self, rows: Tensor) -> Texts:
        return Texts(*(each[rows] for each in vars(self).values()))


def mismatch(logits: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence of a draft distribution from the target's ``log_p``, and its probability of a rejection at
    temperature 1.
    """
    log_q = logits.float().log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), 0.5 * (p - log_q.exp()).abs().sum(-1)


class Drafter(Protocol):
    """A head with its loss and its drafts."""

    head: DraftHead
    lengths: tuple[int, ...]
    """Numbers of draft tokens for which the head is measured."""

    def loss(self, texts: Texts) -> Tensor:
        """Return the loss, then for each draft position the share of greedy drafts that are right."""

    def hits(self, head: Any, texts: Texts, count: int) -> Tensor:
        """Return whether each of ``count`` draft tokens after each position of one row is right, [at most S, count].

        A position is that of the last known token, whose states the head doesn't see.
        """


class Eagle3Drafter:
    """An EAGLE-3 head over the most frequent tokens ``ids``."""

    def __init__(self, target: Target, taps: tuple[int, ...], ids: Tensor, depth: int, compare: Callable[..., Any]) -> None:
        first, second, third = (tap + 1 for tap in taps)
        self.target, self.depth, self.compare = target, depth, compare
        self.lengths = (_MEASURED_LENGTH, 7)
        self.head = Eagle3Head(target.shape, (first, second, third), ids).to(target.embed_tokens.weight.device)
        with torch.no_grad():  # start with the last of the three states, which the target's output head can read
            self.head.norm.weight.copy_(target.norm.weight)
            self.head.fc.weight.zero_()[:, -target.shape.hidden_size :].fill_diagonal_(1.0)

    def loss(self, texts: Texts) -> Tensor:
        embedded = self.target.embed_tokens(texts.tokens[:, 1:-1])
        outputs = self.head.unroll(embedded, self.head.condition(texts.states[:, :-2]), self.depth)
        logits = self.target.logits(texts.final[:, 1:-1])
        log_p, best = logits[..., self.head.ids].float().log_softmax(-1), logits.argmax(-1)
        index = torch.arange(logits.shape[1], device=logits.device)
        answered = (index + 2 >= texts.starts.unsqueeze(1)) & (index + 2 < texts.stops.unsqueeze(1))
        total, facts = torch.zeros((), device=logits.device), []
        for depth, out in enumerate(outputs):
            valid = (answered & (index >= depth)).float()
            draft = self.head.logits(self.target, out)
            divergence, rejected = self.compare(draft, log_p)
            total = total + ((divergence + rejected) * valid).sum() / valid.sum().clamp_min(1) * _DEPTH_DECAY**depth
            right = self.head.ids[draft.argmax(-1)] == best
            facts.append((right * valid).sum() / valid.sum().clamp_min(1))
        return torch.stack([total, *(fact.detach() for fact in facts)])

    def hits(self, head: Eagle3Head, texts: Texts, count: int) -> Tensor:
        embedded = self.target.embed_tokens(texts.tokens[:, 1:-1])
        outputs = head.unroll(embedded, head.condition(texts.states[:, :-2]), count)
        right = [head.ids[head.logits(self.target, out).argmax(-1)][0] == texts.tokens[0, 2:] for out in outputs]
        # Pair i joins token i + 1 and the states before it. Draft d after token i + 1 is output d at pair i + d.
        found = torch.zeros(texts.tokens.shape[1], count, dtype=torch.bool, device=texts.tokens.device)
        for depth, each in enumerate(right):
            found[1 : 1 + len(each) - depth, depth] = each[depth:]
        return found


class BlockDrafter:
    """A DFlash head whose blocks are ``mask`` tokens after the last known one."""

    def __init__(
        self, target: Target, taps: tuple[int, ...], mask: int, args: argparse.Namespace, compare: Callable[..., Any]
    ) -> None:
        self.target, self.mask, self.blocks, self.compare = target, mask, args.blocks, compare
        self.lengths = tuple(sorted({min(_MEASURED_LENGTH, args.width - 1), args.width - 1}))
        shape = replace(target.shape, intermediate_size=args.intermediate)
        self.head = BlockHead(shape, BlockShape(layers=args.layers, width=args.width, taps=taps, mask=mask))
        self.head.to(target.embed_tokens.weight.device)
        with torch.no_grad():  # the target's output head reads the drafter's states
            self.head.norm.weight.copy_(target.norm.weight)

    def embed(self, known: Tensor, width: int) -> Tensor:
        """Return the embeddings [B, N, W, H] of the blocks after the tokens ``known`` [B, N]."""
        block = torch.full((*known.shape, width), self.mask, device=known.device)
        block[..., 0] = known
        return self.target.embed_tokens(block)

    def loss(self, texts: Texts) -> Tensor:
        tokens, device, width = texts.tokens, texts.tokens.device, self.head.block.width
        size = (len(tokens), self.blocks)
        room = (texts.stops - texts.starts - 1).clamp_min(1).unsqueeze(1)
        anchors = texts.starts.unsqueeze(1) + (torch.rand(size, device=device) * room).long()
        anchors = anchors.clamp(max=tokens.shape[1] - 2)
        shorter = torch.randint(2, width + 1, size, device=device)
        widths = torch.where(torch.rand(size, device=device) < _SHORT_BLOCK_SHARE, shorter, width)
        offsets = torch.arange(width, device=device)
        positions = anchors.unsqueeze(2) + offsets
        valid = ((offsets < widths.unsqueeze(2)) & (positions < texts.stops.view(-1, 1, 1)))[..., 1:].float()
        rows = torch.arange(len(tokens), device=device).view(-1, 1, 1)
        states = texts.final[rows, positions[..., :-1].clamp(max=tokens.shape[1] - 1)]
        logits = self.target.logits(states).float()
        hidden = self.head(texts.states, self.embed(tokens[rows[..., 0], anchors], width), anchors, widths)
        draft = self.target.logits(hidden[..., 1:, :])
        divergence, rejected = self.compare(draft, logits.log_softmax(-1))
        with torch.no_grad():
            kept = (1.0 - rejected).clamp_min(1e-6)
            reached = torch.cat((torch.ones_like(kept[..., :1]), kept[..., :-1]), dim=-1).cumprod(-1)
            weights = torch.exp(-offsets[:-1] / _POSITION_DECAY)
            weights = valid * weights * (_MIN_POSITION_WEIGHT + (1.0 - _MIN_POSITION_WEIGHT) * reached)
            right = (draft.argmax(-1) == logits.argmax(-1)) * valid
            facts = right.sum((0, 1)) / valid.sum((0, 1)).clamp_min(1)
        total = ((divergence + rejected) * weights).sum() / weights.sum().clamp_min(1e-6)
        return torch.cat((total.unsqueeze(0), facts))

    def hits(self, head: BlockHead, texts: Texts, count: int) -> Tensor:
        anchors = torch.arange(texts.tokens.shape[1] - count, device=texts.tokens.device)
        hidden = head(texts.states, self.embed(texts.tokens[:, anchors], count + 1), anchors[None])
        guesses = self.target.logits(hidden[0, :, 1:]).argmax(-1)
        return guesses == texts.tokens[0][anchors.unsqueeze(1) + torch.arange(1, count + 1, device=anchors.device)]


class HeadTraining:
    """One training run: the target, its answers, the heads and the log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start_time = args, time.monotonic()
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.log: list[dict[str, object]] = []
        args.out.mkdir(parents=True, exist_ok=True)
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

    def note(self, event: str, **facts: object) -> None:
        """Print a line and append it to log.json."""
        self.log.append({"event": event, "seconds": round(time.monotonic() - self.start_time, 1), **facts})
        print(" ".join(f"{k} {v}" for k, v in self.log[-1].items()), flush=True)
        (self.args.out / "log.json").write_text(json.dumps(self.log, indent=1) + "\n")

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

    def drafter(self, kind: str) -> Drafter:
        compare = torch.compile(mismatch, dynamic=False) if self.cuda and self.args.compile else mismatch
        if kind == "eagle3":
            return Eagle3Drafter(self.target, self.taps, self.frequent(self.args.vocabulary), self.args.depth, compare)
        return BlockDrafter(self.target, self.taps, self.mask_token(), self.args, compare)

    def mask_token(self) -> int:
        """Return the last added token of the tokenizer that no text of the pool has."""
        used = set(self.pool.tokens.unique().tolist())
        return max(set(self.talk.tokenizer.get_added_vocab().values()) - used)

    def batch(self, rows: int) -> Texts:
        return self.pool.take(torch.randint(len(self.pool.tokens), (rows,), device=self.device))

    @torch.no_grad()
    def measure(self, drafter: Drafter, count: int) -> dict[str, list[float]]:
        """Return the accepted share of each draft position on held-out answers, for each kind of text.

        A position counts where all earlier positions of the draft were accepted.
        """
        head = copy.deepcopy(drafter.head).eval()
        round_to_bfloat16(head)
        reached = {kind: [0] * (count + 1) for kind in self.talk.kinds}
        for row, kind in enumerate(self.kinds):
            texts = self.held_out.take(torch.tensor([row], device=self.device))
            at, stop = int(texts.starts[0]), int(texts.stops[0])
            if stop - at <= count + 1:
                continue
            texts = replace(texts, **{name: getattr(texts, name)[:, :stop] for name in ("tokens", "states", "final")})
            with self.autocast():
                runs = drafter.hits(head, texts, count).long().cumprod(1).sum(1).tolist()
            while at + count < stop:
                for position in range(runs[at] + 1):
                    reached[kind][position] += 1
                at += runs[at] + 1
        return {kind: [round(b / max(a, 1), 3) for a, b in pairwise(counts)] for kind, counts in reached.items()}

    def train(self, kind: str) -> None:
        """Train a head until its time or the steps are over; then save it with its acceptance."""
        args, drafter = self.args, self.drafter(kind)
        rows = {"eagle3": args.rows, "dflash": args.block_rows}[kind]
        optimizer = Optimizer(drafter.head, muon_lr=args.muon, adam_lr=args.adam, weight_decay=0.05)
        minutes = args.minutes * _SHARES[kind] / sum(_SHARES[each] for each in args.heads)
        began, step, queued = 0.0, -2, []
        self.note(f"begin {kind}", parameters=sum(each.numel() for each in drafter.head.parameters()))
        while (done := self.done(step, began, minutes)) < 1.0:
            with self.autocast():
                facts = drafter.loss(self.batch(rows))
            facts[0].backward()
            if step < 0:  # the first two steps compile, before the clock starts
                drafter.head.zero_grad()
                began, step = time.monotonic(), step + 1
                continue
            optimizer.step(min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))))
            if step % 200 == 0:
                loss, *hits = (round(each, 3) for each in facts.tolist())
                self.note("step", step=step, loss=loss, hits=hits, done=round(done, 3))
            step += 1
            if self.cuda:  # launch at most four steps ahead of the device, so that the clock measures its progress
                queued.append(torch.cuda.Event())
                queued[-1].record()
                if len(queued) > 4:
                    queued.pop(0).synchronize()
        folder = args.out / kind
        save_head(drafter.head, folder, eos=self.end)
        found = {str(count): self.measure(drafter, count) for count in drafter.lengths}
        (folder / "acceptance.json").write_text(json.dumps(found, indent=1) + "\n")
        for count, shares in found.items():
            tokens = {name: round(1 + sum(math.prod(of[: i + 1]) for i in range(len(of))), 2) for name, of in shares.items()}
            self.note(f"end {kind}", step=step, draft_tokens=int(count), by_position=shares, tokens=tokens)

    def done(self, step: int, began: float, minutes: float) -> float:
        """Return the finished share of a head's training."""
        if step < 0:
            return 0.0
        return step / self.args.steps if self.args.steps else (time.monotonic() - began) / (60 * minutes)


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
