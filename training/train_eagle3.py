"""Train an EAGLE-3 head for an instruction-tuned Llama, from text that the target writes itself.

    python train_eagle3.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out OUT --device cuda --minutes 4

The target answers prompts of four kinds: chat (questions that it writes itself), code and summaries (of Python's standard
library), and maths. The head is measured on answers to held-out prompts, for each kind and each position of the draft.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sysconfig
import time
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from block_model import target_states
from decoding import mark_repeated
from eagle3 import Eagle3Head, save_eagle3
from instruct import KINDS, Conversations
from optim import Optimizer
from torch import Tensor

from model import Shape, Target, round_to_bfloat16


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


class Eagle3Training:
    """One training run: the target, its answers, the head and the log."""

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
        self.talk = Conversations(
            self.target,
            tokenizer,
            args.stdlib,
            prompt=args.prompt,
            total=args.length,
            end=self.end,
            batch=args.batch,
        )
        self.rng = random.Random(args.seed)
        held_out = self.talk.draw(args.measured, random.Random(args.seed + 1), held_out=True)
        self.kinds = [prompt.kind for prompt in held_out]
        self.texts, self.ends, self.lasts = self.answer([prompt.tokens for prompt in held_out], 0.0)
        self.note("held-out answers", tokens=int((self.lasts - self.ends).sum()), example=self.show(0))
        self.pool, self.starts, self.stops = self.write_pool()
        depth = self.target.shape.num_hidden_layers
        self.head = Eagle3Head(self.target.shape, (2, depth // 2, depth - 3), self.frequent(args.vocabulary))
        self.head.to(self.device)
        with torch.no_grad():  # start with the last of the three states, which the target's output head can read
            self.head.norm.weight.copy_(self.target.norm.weight)
            self.head.fc.weight.zero_()[:, -self.target.shape.hidden_size :].fill_diagonal_(1.0)
        self.optimizer = Optimizer(self.head, muon_lr=args.muon, adam_lr=args.adam, weight_decay=0.05)

    def note(self, event: str, **facts: object) -> None:
        """Print a line and append it to log.json."""
        self.log.append({"event": event, "seconds": round(time.monotonic() - self.start_time, 1), **facts})
        print(" ".join(f"{k} {v}" for k, v in self.log[-1].items()), flush=True)
        (self.args.out / "log.json").write_text(json.dumps(self.log, indent=1) + "\n")

    def show(self, row: int) -> str:
        """Return the text of row ``row`` of the held-out answers."""
        return str(self.talk.tokenizer.decode(self.texts[row, : int(self.lasts[row])].tolist()))[-400:]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)

    def answer(self, prompts: list[list[int]], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the prompts with their answers [B, S], the ends of the prompts [B] and of the answers [B].

        An answer ends where it begins to loop, since loops are easy to draft.
        """
        rows = self.talk.write(prompts, temperature=temperature)
        ends = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        index = torch.arange(rows.shape[1], device=self.device)
        finished = ((rows == self.end) | mark_repeated(rows)) & (index >= ends.unsqueeze(1))
        lasts = torch.where(finished.any(1), finished.long().argmax(1) + 1, rows.shape[1])
        return rows, ends, lasts

    def write_pool(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return answers to training prompts, three quarters greedy and a quarter sampled at temperature 0.8."""
        parts = []
        for number in range(self.args.pool):
            prompts = [prompt.tokens for prompt in self.talk.draw(self.args.batch, self.rng, held_out=False)]
            parts.append(self.answer(prompts, 0.8 if number % 4 == 3 else 0.0))
            if number % 4 == 0:
                self.note("pool", part=number)
        rows, ends, lasts = (torch.cat(each) for each in zip(*parts, strict=True))
        self.note("pool", rows=len(rows), answered=int((lasts - ends).sum()))
        return rows, ends, lasts

    def frequent(self, count: int) -> Tensor:
        """Return the ``count`` most frequent tokens of the pool, ascending; unseen tokens by their number."""
        seen: Counter[int] = Counter()
        for row, stop in zip(self.pool.tolist(), self.stops.tolist(), strict=True):
            seen.update(row[:stop])
        ordered = sorted(range(self.target.shape.vocab_size), key=lambda token: (-seen[token], token))[:count]
        covered = sum(seen[token] for token in ordered) / seen.total()
        self.note("draft vocabulary", tokens=count, covered=round(covered, 4))
        return torch.tensor(sorted(ordered))

    @torch.no_grad()
    def observe(self, tokens: Tensor, starts: Tensor, stops: Tensor) -> tuple[Tensor, ...]:
        """Return the operands of :meth:`loss` for rows of the pool.

        These are the target's states [B, S, 3 H] and the embeddings of the following tokens [B, S, H]. Then follow the
        target's log probabilities over the draft vocabulary [B, S, Vd] and its best tokens [B, S]. The last tensor [B, S] is
        1 where a pair predicts a token of the answer, else 0.
        """
        with self.autocast():
            states, final = target_states(self.target, tokens, self.head.taps)
            logits = torch.nn.functional.linear(final[:, 1:-1], self.target.embed_tokens.weight)
        index = torch.arange(tokens.shape[1] - 2, device=tokens.device)
        counts = (index + 2 >= starts.unsqueeze(1)) & (index + 2 < stops.unsqueeze(1))
        log_p = logits[..., self.head.ids].float().log_softmax(-1)
        return states[:, :-2], self.target.embed_tokens(tokens[:, 1:-1]), log_p, logits.argmax(-1), counts.float()

    def loss(self, states: Tensor, embedded: Tensor, log_p: Tensor, best: Tensor, counts: Tensor) -> Tensor:
        """Return the loss, then for each depth the share of greedy drafts that are right.

        The loss of a depth is the divergence from the target's distribution over the draft vocabulary, plus the probability
        of a rejection at temperature 1.
        """
        with self.autocast():
            outputs = self.head.unroll(embedded, self.head.condition(states), self.args.depth)
        index = torch.arange(counts.shape[1], device=counts.device)
        total, facts = torch.zeros((), device=counts.device), []
        for depth, out in enumerate(outputs):
            valid = counts * (index >= depth)
            with self.autocast():
                draft = self.head.logits(self.target, out)
            log_q = draft.float().log_softmax(-1)
            p = log_p.exp()
            divergence = (p * (log_p - log_q)).sum(-1)
            rejected = 0.5 * (p - log_q.exp()).abs().sum(-1)
            total = total + ((divergence + rejected) * valid).sum() / valid.sum().clamp_min(1) * 0.9**depth
            right = self.head.ids[draft.argmax(-1)] == best
            facts.append((right * valid).sum() / valid.sum().clamp_min(1))
        return torch.stack([total, *(fact.detach() for fact in facts)])

    def batch(self) -> tuple[Tensor, ...]:
        """Return the operands of :meth:`loss` for random rows of the pool."""
        rows = torch.randint(len(self.pool), (self.args.rows,), device=self.device)
        return self.observe(self.pool[rows], self.starts[rows], self.stops[rows])

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Return acceptance on held-out answers, for each kind: by position, and tokens per iteration for 3 draft tokens."""
        head = Eagle3Head(self.head.shape, self.head.read_layers, self.head.ids.cpu()).to(self.device).eval()
        head.load_state_dict(self.head.state_dict())
        round_to_bfloat16(head)
        drafted = 3
        reached: dict[str, list[int]] = {kind: [0] * (drafted + 1) for kind in KINDS}
        for row, end, last, kind in zip(self.texts, self.ends.tolist(), self.lasts.tolist(), self.kinds, strict=True):
            tokens = row[None, :last]
            with self.autocast():
                states, _ = target_states(self.target, tokens, head.taps)
                embedded = self.target.embed_tokens(tokens[:, 1:-1])
                outputs = head.unroll(embedded, head.condition(states[:, :-2]), drafted)
                guesses = [head.ids[head.logits(self.target, out).argmax(-1)][0] for out in outputs]
            hits = [(guess == tokens[0, 2:]).tolist() for guess in guesses]
            at = end - 1  # the pair that joins the first answered token with the states before it
            while at + drafted < last - 2:
                run = 0
                while run < drafted and hits[run][at + run]:
                    run += 1
                for position in range(run + 1):
                    reached[kind][position] += 1
                at += run + 1
        found: dict[str, Any] = {}
        for kind, counts in reached.items():
            rates = [round(b / max(a, 1), 3) for a, b in pairwise(counts)]
            found[kind] = {"by_position": rates, "tokens": round(sum(counts) / max(counts[0], 1), 3)}
        return found

    def train(self) -> None:
        """Train the head until the time or the steps are over; then measure and save it."""
        args = self.args
        step_of = torch.compile(self.loss, dynamic=False) if self.cuda and args.compile else self.loss
        for _ in range(2):  # compile before the clock starts
            step_of(*self.batch())[0].backward()
        self.head.zero_grad()
        self.note("begin", parameters=sum(each.numel() for each in self.head.parameters()))
        began, step, queued = time.monotonic(), 0, []
        while (done := step / args.steps if args.steps else (time.monotonic() - began) / (60 * args.minutes)) < 1.0:
            facts = step_of(*self.batch())
            facts[0].backward()
            self.optimizer.step(min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))))
            if step % 100 == 0:
                loss, *hits = (round(each, 3) for each in facts.tolist())
                self.note("step", step=step, loss=loss, hits=hits, done=round(done, 3))
            step += 1
            if self.cuda:  # launch at most four steps ahead of the device, so that the clock measures its progress
                queued.append(torch.cuda.Event())
                queued[-1].record()
                if len(queued) > 4:
                    queued.pop(0).synchronize()
        save_eagle3(self.head, args.out, bos=self.talk.tokenizer.bos_token_id, eos=self.end)
        self.note("end", step=step, **self.measure())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head and the log")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="code and texts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=4.0, help="training time, without generation and compilation")
    parser.add_argument("--steps", type=int, default=0, help="number of steps, instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=224, help="maximum tokens of a prompt")
    parser.add_argument("--length", type=int, default=448, help="tokens of a prompt with its answer")
    parser.add_argument("--batch", type=int, default=1024, help="prompts that are answered together")
    parser.add_argument("--pool", type=int, default=16, help="such batches in the training text")
    parser.add_argument("--measured", type=int, default=256, help="held-out prompts")
    parser.add_argument("--vocabulary", type=int, default=16384, help="tokens of the draft vocabulary")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens that are trained")
    parser.add_argument("--rows", type=int, default=24, help="sequences per step")
    parser.add_argument("--muon", type=float, default=0.02, help="peak learning rate of the matrices")
    parser.add_argument("--adam", type=float, default=0.002, help="peak learning rate of the other parameters")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    with contextlib.suppress(KeyboardInterrupt):
        Eagle3Training(args).train()


if __name__ == "__main__":
    main()
