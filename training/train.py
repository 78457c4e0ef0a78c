"""Train the bundled target and its EAGLE head on Python's standard library.

    python train.py --out OUT --device cuda --minutes 5

The stages are data, target, unlikelihood and head, in this order. Each stage writes its result under --out. --stages selects
some of them, so that a later stage can be repeated alone.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
from collections.abc import Callable
from pathlib import Path

import corpus
import numpy as np
import torch
import torch.nn.functional as F
from decoding import Generator, find_loops, mark_repeated, mean_acceptance_length
from log import Log, start_clock
from optim import Optimizer
from tokenizers import Tokenizer
from torch import Tensor

from model import EagleHead, Shape, Target, load_target, mismatch, round_to_bfloat16, save_head, save_target

STAGES = ("data", "target", "unlikelihood", "head")
TIME_SHARES = {"target": 0.4, "unlikelihood": 0.22, "head": 0.38}


class Run:
    """State that the stages share: the arguments, the token streams and the log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.tokenizer = Tokenizer.from_file(str(self.out / "data" / "tokenizer.json"))
        self.eos, self.pad = self.tokenizer.token_to_id(corpus.END), self.tokenizer.token_to_id(corpus.PAD)
        self.train = self.stream("train")
        self.held_out = self.stream("held_out")
        self.facts = json.loads((self.out / "data" / "facts.json").read_text())
        self.note = Log(self.out / "log.json").note  # later calls append to the file
        self.note(
            "start",
            device=torch.cuda.get_device_name() if self.cuda else platform.machine(),
            python=platform.python_version(),
            torch=torch.__version__,
            settings={k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        )

    def stream(self, name: str) -> Tensor:
        tokens = np.load(self.out / "data" / f"{name}.npy").astype(np.int64)
        return torch.from_numpy(tokens).to(self.device)

    def batch(self, rows: int, length: int, stream: Tensor | None = None) -> Tensor:
        """Return random pieces [rows, length] of a token stream, by default of the training stream."""
        stream = self.train if stream is None else stream
        starts = torch.randint(len(stream) - length, (rows, 1), device=self.device)
        return stream[starts + torch.arange(length, device=self.device)]

    def rows(self, length: int) -> int:
        return max(1, self.args.batch_tokens // length)

    def compile_on_cuda(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the compiled function on CUDA, and the function itself on a CPU."""
        return torch.compile(function, dynamic=False) if self.cuda and self.args.compile else function

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)

    def clock(self, stage: str) -> Callable[[int], float]:
        """Return a function from a step number to a stage's progress, from 0 to 1."""
        return start_clock(self.device, minutes=self.args.minutes * TIME_SHARES[stage], steps=self.args.steps)

    @torch.no_grad()
    def loss(self, target: Target, stream: Tensor, length: int = 1024, max_pieces: int = 512) -> float:
        """Return the target's loss in nats per token over consecutive pieces of ``length`` tokens of a stream, at most
        ``max_pieces``.
        """
        length = min(length, len(stream) - 1)
        count = min(max_pieces if self.cuda else 8, (len(stream) - 1) // length)
        target.eval()
        total = 0.0
        for i in range(0, count, 64):
            indices = torch.arange(i, min(count, i + 64), device=self.device)[:, None] * length
            piece = stream[indices + torch.arange(length + 1, device=self.device)]
            with self.autocast():
                logits = target.logits(target(piece[:, :-1]))
            loss = F.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten(), reduction="sum")
            total += loss.item()
        return total / (count * length)

    def loops(self, target: Target, count: int, rows: int = 256, prefix: int = 64) -> float:
        """Return the share of greedy continuations of held-out pieces that fall into a loop."""
        rows = rows if self.cuda else 8
        generator = Generator(target, rows, prefix + count, 0.0, self.dtype)
        starts = torch.linspace(0, len(self.held_out) - prefix - 1, rows, device=self.device).long()[:, None]
        generated = generator.run(self.held_out[starts + torch.arange(prefix, device=self.device)], count)
        return len(find_loops(generated[:, prefix:].tolist(), self.tokenizer, self.eos)) / rows

    def report(self, target: Target, stage: str) -> None:
        """Log losses and loop rates of the weights as rounded to bfloat16."""
        stored = Target(target.shape).to(self.device).eval()
        stored.load_state_dict(target.state_dict())
        round_to_bfloat16(stored)
        sizes = self.facts["held_out"]
        held_out = self.loss(stored, self.held_out)
        self.note(
            stage,
            train=self.loss(stored, self.train),
            held_out=held_out,
            held_out_per_byte=held_out * sizes["tokens"] / sizes["bytes"],
            held_out_2048=self.loss(stored, self.held_out, 2048),
            loops_128=self.loops(stored, 128),
            loops_512=self.loops(stored, 512),
        )

    def save(self, target: Target) -> None:
        save_target(target, self.out / "target", self.eos, self.pad)
        corpus.save_tokenizer(self.tokenizer, self.out / "target", target.shape.max_position_embeddings)

    # -- stages ---------------------------------------------------------------------------------------

    def likelihood(self, target: Target) -> Callable[[Tensor], Tensor]:
        def loss_of(piece: Tensor) -> Tensor:
            with self.autocast():
                logits = target.logits(target(piece[:, :-1]))
            return F.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten())

        return loss_of

    def train_target(self) -> Target:
        """Train the target on next-token prediction over pieces of --length tokens, save it and return it."""
        target = Target(Shape(), dropout=self.args.dropout).to(self.device).train()
        optimizer = Optimizer(target, muon_lr=0.02, adam_lr=0.004, weight_decay=0.1)

        length = self.args.length
        loss_of_batch = self.compile_on_cuda(self.likelihood(target))
        for _ in range(2):  # compile before the clock starts
            loss_of_batch(self.batch(self.rows(length), length + 1)).backward()
        target.zero_grad()
        self.note("compiled", parameters=sum(p.numel() for p in target.parameters()))
        progress, step = self.clock("target"), 0
        while (done := progress(step)) < 1.0:
            # Linear warm-up, then a cosine down to a tenth. The unlikelihood stage continues down to zero.
            factor = min(1.0, (step + 1) / 100) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
            loss = loss_of_batch(self.batch(self.rows(length), length + 1))
            loss.backward()
            optimizer.step(factor)
            if step % 500 == 0:
                epochs = step * self.args.batch_tokens / len(self.train)
                self.note("target", step=step, epochs=epochs, done=done, loss=loss.item())
            step += 1
        self.report(target, f"target after {step} steps")
        self.save(target)
        return target

    def train_unlikelihood(self, target: Target) -> Target:
        """Train likelihood on text, and unlikelihood on repetitions in the target's own greedy continuations.

        Sequence-level unlikelihood after Welleck et al. (2019). It is applied to tokens that continue a block already copied
        completely (see `mark_repeated`) instead of repeated 4-grams, which are frequent in code.
        """
        rows, total, longest = (self.args.greedy_rows, 608, 256) if self.cuda else (8, 80, 32)
        generator = Generator(target, rows, total, 0.0, self.dtype)
        # The size of Muon's step is its learning rate, whatever the gradient, so the rate is low.
        optimizer = Optimizer(target, muon_lr=0.002, adam_lr=0.0004, weight_decay=0.1)
        length, parts = self.args.length, 8
        target.train()
        loss_of_batch = self.compile_on_cuda(self.likelihood(target))
        loss_of_batch(self.batch(self.rows(length), length + 1)).backward()
        target.zero_grad()
        progress, step = self.clock("unlikelihood"), 0
        while (done := progress(step)) < 1.0:
            if step % parts == 0:
                size = longest >> int(torch.randint(4, ()))
                generated = generator.run(self.batch(rows, size), total - size)
                marks = mark_repeated(generated)
                marks[:, :size] = False
                order = torch.randperm(rows, device=self.device)
            part = order[step % parts :: parts]
            likelihood = loss_of_batch(self.batch(self.rows(length), length + 1))
            with self.autocast():
                logits = target.logits(target(generated[part, :-1]))
            marked = marks[part, 1:]
            log_p = logits.float().log_softmax(-1).gather(-1, generated[part, 1:, None])[..., 0]
            penalties = -torch.log1p(-log_p.exp().clamp(max=1 - 1e-5)) * marked
            unlikelihood = penalties.sum() / marked.sum().clamp_min(0.02 * marked.numel())
            (likelihood + self.args.alpha * unlikelihood).backward()
            optimizer.step(min(1.0, (step + 1) / 20) * (1.0 - done))
            if step % 100 == 0:
                share = marked.float().mean().item() * total / (total - size)
                self.note("unlikelihood", step=step, done=done, loss=likelihood.item(), marked=share)
            step += 1
        round_to_bfloat16(target)
        self.report(target, f"unlikelihood after {step} steps")
        self.save(target)
        return target

    def train_head(self, target: Target) -> EagleHead:
        """Train the head to match the frozen target's distributions, several tokens deep as in decoding."""
        target.eval().requires_grad_(False)
        head = EagleHead(target.shape).to(self.device)
        size = target.shape.hidden_size
        with torch.no_grad():  # start with the identity of the hidden state, and embeddings scaled to unit variance
            head.fc.weight[:, size:] = torch.eye(size)
            head.fc.weight[:, :size] *= 1.0 / target.embed_tokens.weight.std()
        optimizer = Optimizer(head, muon_lr=0.02, adam_lr=0.002, weight_decay=0.05)
        prefix, count = (64, 448) if self.cuda else (16, 48)
        rows = self.args.head_rows if self.cuda else 4
        pool_rows = 1024 if self.cuda else 4
        greedy = Generator(target, pool_rows, prefix + count, 0.0, self.dtype)
        sampled = Generator(target, pool_rows, prefix + count, 1.0, self.dtype)
        probe = self.batch(128 if self.cuda else 4, prefix, self.held_out)

        def loss_of(tokens: Tensor) -> Tensor:
            """Return the loss, then per depth the divergence from the target and the probability of a rejection."""
            with torch.no_grad(), self.autocast():
                hidden = target(tokens)
                target_states = hidden[:, 1:-1]
                log_p = target.logits(target_states).float().log_softmax(-1)
                embedded = target.embed_tokens(tokens[:, 1:-1])
            with self.autocast():
                outputs = head.unroll(embedded, hidden[:, :-2], self.args.depth)
            facts = []
            loss = torch.zeros((), device=self.device)
            for depth, out in enumerate(outputs):
                with self.autocast():
                    logits = target.logits(out[:, depth:])
                divergence, rejected = (each.mean() for each in mismatch(logits, log_p[:, depth:]))
                regression = F.smooth_l1_loss(out[:, depth:].float(), target_states[:, depth:])
                loss = loss + (divergence + rejected + 0.1 * regression) * 0.9**depth
                facts += [divergence.detach(), rejected.detach()]
            return torch.stack([loss, *facts])

        compiled = self.compile_on_cuda(loss_of)
        third = max(1, rows // 3)
        for _ in range(2):
            compiled(self.batch(3 * third, prefix + count))[0].backward()
        head.zero_grad()
        self.note("compiled", parameters=sum(p.numel() for p in head.parameters()))
        pools: list[Tensor] = []
        progress, step = self.clock("head"), 0
        while (done := progress(step)) < 1.0:
            if step % (200 if self.cuda else 10) == 0:
                pools = [g.run(self.batch(pool_rows, prefix), count) for g in (greedy, sampled)]
            # One third each: text, greedy text of the target, sampled text of the target.
            picks = [pool[torch.randint(pool_rows, (third,), device=self.device)] for pool in pools]
            facts = compiled(torch.cat([*picks, self.batch(third, prefix + count)]))
            facts[0].backward()
            optimizer.step(min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))))
            if step % 250 == 0:
                per_depth = [round(v, 3) for v in facts[1:].tolist()]
                self.note("head", step=step, done=done, divergence=per_depth[::2], rejected=per_depth[1::2])
            step += 1
        round_to_bfloat16(head)
        head.eval()
        rates: dict[str, object] = {}
        for name, generator, temperature in (("greedy", greedy, 0.0), ("sampled", sampled, 1.0)):
            prefixes = probe.repeat(pool_rows // len(probe), 1)
            tokens = generator.run(prefixes, count)[: len(probe), : prefix + 128]
            rates[name] = mean_acceptance_length(target, head, tokens, prefix - 1, 4, temperature)
        self.note(f"head after {step} steps", **rates)
        save_head(head, self.out / "eagle", eos=self.eos)
        return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for data, checkpoints and log")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="text")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to run, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=5.0, help="total time of the training stages")
    parser.add_argument("--steps", type=int, default=0, help="number of steps of each stage, instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=2048, help="tokens per training piece")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--alpha", type=float, default=0.3, help="weight of the unlikelihood loss")
    parser.add_argument("--greedy-rows", type=int, default=512, help="number of concurrent greedy continuations")
    parser.add_argument("--head-rows", type=int, default=48, help="sequences per step of the head")
    parser.add_argument("--depth", type=int, default=4, help="draft depth in the training of the head, in tokens")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    stages = args.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}, there are {STAGES}")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True  # functions that fail to compile run eagerly
    if "data" in stages:
        corpus.build(args.stdlib, args.out / "data", Shape().vocab_size, args.seed)
    if stages == ["data"]:
        return
    run = Run(args)
    if "target" in stages:
        target = run.train_target()
    else:
        target = load_target(args.out / "target", run.device)
        target.dropout = args.dropout
    if "unlikelihood" in stages:
        target = run.train_unlikelihood(target)
    if "head" in stages:
        run.train_head(target)


if __name__ == "__main__":
    main()
