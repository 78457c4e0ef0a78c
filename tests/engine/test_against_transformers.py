"""Greedy tokens and logits against transformers on the bundled model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import SamplingParams
from outrider.device import AttentionMetadata
from outrider.model import ForwardInput, KVCache

PROMPTS, NEW_TOKENS = 50, 32


@pytest.fixture(scope="module")
def reference(bundled_dir):
    return AutoModelForCausalLM.from_pretrained(bundled_dir / "target", dtype=torch.float32).eval()


@pytest.mark.parametrize("count", [6, pytest.param(PROMPTS, marks=pytest.mark.slow)])
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


def test_logits_agree_within_1e_4(bundle32, reference, prompt_tokens):
    worst = 0.0
    for prompt in prompt_tokens[:PROMPTS]:
        tokens, count = torch.tensor(prompt), len(prompt)
        config = bundle32.target.config
        pages = -(-count // 16)
        cache = KVCache.allocate(
            config.num_layers,
            config.num_kv_heads,
            config.head_size,
            pages=pages + 1,
            page_size=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        attention = AttentionMetadata(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_table=torch.arange(1, pages + 1, dtype=torch.int32).unsqueeze(0),
            max_query=count,
            max_kv=count,
        )
        positions = torch.arange(count)
        with torch.no_grad():
            hidden = bundle32.target.forward(ForwardInput(tokens, positions, positions + 16, attention), cache)
            logits = bundle32.target.logits(hidden)
            expected = reference(tokens.unsqueeze(0)).logits[0]
        worst = max(worst, float((logits - expected).abs().max()))
    assert worst <= 1e-4
