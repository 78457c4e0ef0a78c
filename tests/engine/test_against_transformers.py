"""Greedy tokens and logits against transformers on the bundled model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.harness import Driver
from outrider import SamplingParams

PROMPTS, NEW_TOKENS = 50, 32


@pytest.fixture(scope="module")
def reference(bundled_dir):
    return AutoModelForCausalLM.from_pretrained(bundled_dir / "target", dtype=torch.float32).eval()


COUNTS = pytest.mark.parametrize("count", [4, pytest.param(PROMPTS, marks=pytest.mark.slow)])


@COUNTS
def test_greedy_tokens_equal_generate(bundle32, reference, prompt_tokens, count):
    prompts = [tokens[:96] for tokens in prompt_tokens[:count]]
    assert len(prompts) == count
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            made = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(tuple(made[0, len(prompt) :].tolist()))
    for speculate in ("eagle", "none"):
        engine = bundle32.engine(speculate=speculate, max_requests=8, max_context=160)
        results = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
        assert [result.token_ids for result in results] == expected, speculate


@COUNTS
def test_logits_agree_within_1e_4(bundle32, reference, prompt_tokens, count):
    worst = 0.0
    for prompt in prompt_tokens[:count]:
        driver = Driver(bundle32.target, page_size=16)
        logits = driver.logits([(driver.sequence(), prompt)])
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        worst = max(worst, float((logits - expected).abs().max()))
    assert worst <= 1e-4
