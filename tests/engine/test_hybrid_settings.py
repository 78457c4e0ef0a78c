"""Hybrid checkpoints under random engine settings against transformers: long prompts whose prefixes have cached states."""

import math
import random

import pytest
import torch

from model.hybrid_checkpoints import FAMILIES, MtpOracle, random_model, save
from outrider import Engine, SamplingParams
from outrider_proof.tiny import BACKEND, plain_config

TIE = 2e-3
"""Maximum distance of a chosen logit from the largest one, relative to it: kernels and transformers sum in other orders."""


def greedy_ends(model, prompt, tokens):
    """The positions at which the oracle would have chosen another token."""
    with torch.no_grad():
        rows = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    behind = rows.max(1).values - rows.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    return torch.nonzero(behind > TIE * rows.abs().max(1).values.clamp(min=1)).flatten().tolist()


def random_prompts(draw, vocabulary, interval):
    """Prompts that share beginnings and end near multiples of 64 tokens, or of the interval of checkpoints."""
    text, prompts = [draw.randrange(vocabulary) for _ in range(420)], []
    for _ in range(draw.randint(2, 5)):
        length = draw.choice((interval, 2 * interval, 64, 128, 192, draw.randint(1, 300))) + draw.choice((-1, 0, 1, 2))
        length = min(length, 400)
        shared = draw.choice((length, length, draw.randint(0, length)))
        prompts.append(text[:shared] + [draw.randrange(vocabulary) for _ in range(length - shared)])
    return prompts


@pytest.mark.parametrize("seed", [3, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 40))])
def test_tokens_under_random_settings(seed, tmp_path):
    """Page sizes that do not divide 64, few checkpoints, few pages, one request at a time, and every kind of draft."""
    draw = random.Random(seed)
    family, head = draw.choice(FAMILIES), draw.random() < 0.7
    model = random_model(family, seed)
    save(model, tmp_path / "model", head=MtpOracle(model, 4) if head else None, nested=family != "qwen3_next")
    speculate = draw.choice(("none", "ngram", "suffix", "draft-model", *(("mtp", "suffix+mtp") if head else ())))
    options = {}
    if speculate == "draft-model":
        options["draft_dir"] = tmp_path / "draft"
        save(random_model(draw.choice(FAMILIES), seed + 1, vocab_size=model.config.vocab_size), tmp_path / "draft")
    page, new = draw.choice((1, 2, 3, 5, 7, 8, 16, 24, 48, 64)), draw.randint(1, 24)
    prompts = random_prompts(draw, model.config.vocab_size, math.lcm(64, page))
    longest = max(map(len, prompts)) + new
    config = plain_config(
        max_context=longest + draw.randint(1, 40),
        page_size=page,
        prefill_chunk=draw.choice((1, 5, 17, 64, 70, 128, 256)),
        max_requests=draw.choice((1, 2, 3)),
        state_checkpoints=draw.choice((0, 1, 2, 5)),
        num_pages=draw.choice((None, 2 + -(-(longest + 48) // page) + draw.randint(0, 6))),
        overlap=draw.random() < 0.6,
        mode=draw.choice(("staged", "fused")),
        draft_tokens=draw.choice((1, 2, 3, 5)),
    )
    engine = Engine.from_checkpoint(tmp_path / "model", BACKEND, speculate=speculate, config=config, **options)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    for round_ in range(2):
        for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
            assert len(done.token_ids) == new
            assert greedy_ends(model, prompt, done.token_ids) == [], (round_, len(prompt))
