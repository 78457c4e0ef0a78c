"""How many tokens a verification emits, of a block drafter and of an EAGLE head, on the greedy text behind given prompts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from block_model import BlockHead, tapped
from tokenizers import Tokenizer
from torch import Tensor

from model import EagleHead, Target


def read_prompts(file: Path, tokenizer: Tokenizer, limit: int = 0) -> list[list[int]]:
    """The prompts of a JSON file, as tokens: a list, or ``{"prompts": [...]}``, of ``{"text": …}``."""
    read = json.loads(file.read_text(encoding="utf-8"))
    texts = [each["text"] for each in (read["prompts"] if isinstance(read, dict) else read)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts[: limit or None]]


@torch.no_grad()
def continued(target: Target, prompts: list[list[int]], count: int) -> tuple[Tensor, Tensor]:
    """Prompts of any lengths, each followed by ``count`` greedy tokens [B, S], and where each prompt ends [B].

    Without a cache, in the precision of the weights; what stands behind a row's last token means nothing.
    """
    device = target.embed_tokens.weight.device
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.zeros(len(prompts), int(ends.max()) + count, dtype=torch.long, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    for made in range(count):
        hidden = target(tokens[:, : int(ends.max()) + made])
        tokens[rows, ends + made] = target.logits(hidden[rows, ends + made - 1]).argmax(-1)
    return tokens, ends


def verifications(passed: list[list[int]], ends: list[int], count: int, depth: int) -> float:
    """Mean tokens of a verification, bonus included. ``passed[row][a]``: tokens that hit behind position ``a``, the last
    known one; the first such position is the first token behind the prompt. Chains are of ``depth`` tokens.
    """
    total = rounds = 0
    for row, end in zip(passed, ends, strict=True):
        at = end
        while at + depth < end + count:
            total += min(row[at], depth) + 1
            rounds += 1
            at += min(row[at], depth) + 1
    return total / max(1, rounds)


@torch.no_grad()
def block_passed(target: Target, head: BlockHead, tokens: Tensor, mask: int, width: int) -> list[list[int]]:
    """Of blocks of ``width`` tokens at every position of ``tokens`` [B, S]: how many of their tokens hit, in a row."""
    device, length = tokens.device, tokens.shape[1]
    anchors = torch.arange(1, length - width + 1, device=device)
    found = []
    for row in tokens:
        taps, _ = tapped(target, row[None], head.block.taps)
        block = torch.full((1, len(anchors), width), mask, device=device)
        block[..., 0] = row[anchors]
        guesses = target.logits(head(taps, target.embed_tokens(block), anchors[None])[0, :, 1:]).argmax(-1)
        text = row[anchors.unsqueeze(1) + torch.arange(1, width, device=device)]
        hits = (guesses == text).long().cumprod(1).sum(1).tolist()
        found.append([0, *hits, *[0] * (length - 1 - len(hits))])
    return found


@torch.no_grad()
def eagle_passed(target: Target, head: EagleHead, tokens: Tensor, depth: int) -> list[list[int]]:
    """The same of chains of ``depth`` tokens of an EAGLE head."""
    length = tokens.shape[1]
    found = []
    for row in tokens.split(16):
        hidden = target(row)
        outputs = head.unroll(target.embed_tokens(row[:, 1:-1]), hidden[:, :-2], depth)
        # Output d at pair i, which joins token i + 1 and the state before it, is for token i + 2; the chain that begins at
        # pair i has its d-th token there at pair i + d.
        hits = torch.stack([target.logits(out).argmax(-1) == row[:, 2:] for out in outputs], dim=-1)
        padded = torch.nn.functional.pad(hits, (0, 0, 0, depth))
        chain = torch.stack([padded[:, d : d + hits.shape[1], d] for d in range(depth)], dim=-1)
        runs = chain.long().cumprod(-1).sum(-1).tolist()
        found += [[0, *each, *[0] * (length - 1 - len(each))] for each in runs]
    return found
