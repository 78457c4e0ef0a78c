"""Mean number of tokens per verification, for a block drafter and an EAGLE head, on greedy continuations of given prompts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from block_model import BlockHead, target_states
from tokenizers import Tokenizer
from torch import Tensor

from model import EagleHead, Target


def read_prompts(file: Path, tokenizer: Tokenizer, limit: int = 0) -> list[list[int]]:
    """Return the prompts of a JSON file as tokens. The file holds a list of ``{"text": ...}``, or ``{"prompts": [...]}``."""
    content = json.loads(file.read_text(encoding="utf-8"))
    texts = [each["text"] for each in (content["prompts"] if isinstance(content, dict) else content)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts[: limit or None]]


@torch.no_grad()
def continue_greedily(target: Target, prompts: list[list[int]], count: int) -> tuple[Tensor, Tensor]:
    """Return prompts of any lengths, each followed by ``count`` greedy tokens [B, S], and the end of each prompt [B].

    Runs without a cache, in the precision of the weights. Values after a row's last token are meaningless.
    """
    device = target.embed_tokens.weight.device
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.zeros(len(prompts), int(ends.max()) + count, dtype=torch.long, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    for step in range(count):
        hidden = target(tokens[:, : int(ends.max()) + step])
        tokens[rows, ends + step] = target.logits(hidden[rows, ends + step - 1]).argmax(-1)
    return tokens, ends


def mean_tokens_per_verification(hits: list[list[int]], ends: list[int], count: int, depth: int) -> float:
    """Return the mean number of tokens per verification, bonus token included, for chains of ``depth`` tokens.

    ``hits[row][a]`` is the number of correct draft tokens after position ``a``, the last known token. The first such position
    is the first token after the prompt.
    """
    total = rounds = 0
    for row, end in zip(hits, ends, strict=True):
        at = end
        while at + depth < end + count:
            total += min(row[at], depth) + 1
            rounds += 1
            at += min(row[at], depth) + 1
    return total / max(1, rounds)


@torch.no_grad()
def count_block_hits(target: Target, head: BlockHead, tokens: Tensor, mask: int, width: int) -> list[list[int]]:
    """Return, for blocks of ``width`` tokens at every position of ``tokens`` [B, S], the number of leading correct tokens."""
    device, length = tokens.device, tokens.shape[1]
    anchors = torch.arange(1, length - width + 1, device=device)
    found = []
    for row in tokens:
        taps, _ = target_states(target, row[None], head.block.taps)
        block = torch.full((1, len(anchors), width), mask, device=device)
        block[..., 0] = row[anchors]
        guesses = target.logits(head(taps, target.embed_tokens(block), anchors[None])[0, :, 1:]).argmax(-1)
        text = row[anchors.unsqueeze(1) + torch.arange(1, width, device=device)]
        hits = (guesses == text).long().cumprod(1).sum(1).tolist()
        found.append([0, *hits, *[0] * (length - 1 - len(hits))])
    return found


@torch.no_grad()
def count_eagle_hits(target: Target, head: EagleHead, tokens: Tensor, depth: int) -> list[list[int]]:
    """Return, for chains of ``depth`` tokens of an EAGLE head at every position, the number of leading correct tokens."""
    length = tokens.shape[1]
    found = []
    for row in tokens.split(16):
        hidden = target(row)
        outputs = head.unroll(target.embed_tokens(row[:, 1:-1]), hidden[:, :-2], depth)
        # Output d at pair i, which joins token i + 1 and the preceding state, predicts token i + 2. The d-th token of the
        # chain that begins at pair i is therefore predicted at pair i + d.
        hits = torch.stack([target.logits(out).argmax(-1) == row[:, 2:] for out in outputs], dim=-1)
        padded = torch.nn.functional.pad(hits, (0, 0, 0, depth))
        chain = torch.stack([padded[:, d : d + hits.shape[1], d] for d in range(depth)], dim=-1)
        runs = chain.long().cumprod(-1).sum(-1).tolist()
        found += [[0, *each, *[0] * (length - 1 - len(each))] for each in runs]
    return found
