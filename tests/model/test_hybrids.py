"""Hybrid models against transformers: logits and greedy tokens of random configs, with prompts in chunks."""

import random

import pytest
import torch

from model.harness import Driver
from model.hybrid_checkpoints import FAMILIES, MtpOracle, greedy, logits, random_model, save
from outrider import Engine, SamplingParams
from outrider.model import KVCache, load_decoder
from outrider_proof import tiny

LENGTHS = (1, 2, 3, 5, 63, 64, 65, 130)
CHUNKS = (1, 3, 64, 130)


def check(family, seed, directory, backend, *, lengths=LENGTHS, chunks=CHUNKS, count=6):
    model = random_model(family, seed)
    model.save_pretrained(directory)
    ours = load_decoder(directory, backend=backend, dtype=torch.float32)
    draw = random.Random(seed)
    lengths = draw.sample(lengths, 3)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]
    driver = Driver(ours, pages=512)
    together = [(driver.sequence(), prompt) for prompt in prompts]
    made = driver.logits(together, padding=2)[: sum(lengths)].split(lengths)
    for prompt, each in zip(prompts, made, strict=True):
        torch.testing.assert_close(each, logits(model, prompt), rtol=1e-3, atol=1e-3)
        chunk = draw.choice(chunks)
        tokens, _ = driver.greedy(prompt, count, chunk=chunk)
        assert tokens == greedy(model, prompt, count), (prompt, chunk)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_config_of_each_family(family, tmp_path, backend):
    check(family, 1, tmp_path, backend, lengths=(1, 3, 66), chunks=(2, 64), count=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 25))
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_configs(family, seed, tmp_path, backend):
    check(family, seed, tmp_path, backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_in_the_checkpoint(family, tmp_path, backend):
    """Its results over a whole text equal transformers' parts, and what it drafts doesn't change the tokens."""
    model = random_model(family, 3)
    oracle, nested = MtpOracle(model, 4), family != "qwen3_next"
    save(model, tmp_path, head=oracle, nested=nested)
    config = tiny.plain_config(dtype="float32", max_context=128, page_size=4, prefill_chunk=9, draft_tokens=3)
    engine = Engine.from_checkpoint(tmp_path, backend, speculate="mtp", config=config)
    head = engine.proposer.head
    prompt = [number % model.config.vocab_size for number in range(3, 60, 5)]
    driver = Driver(engine.model)
    states = driver.hidden([(driver.sequence(), prompt)])
    cache = KVCache.allocate(
        1, head.config.num_kv_heads, head.config.head_size, pages=64, page_size=4, dtype=torch.float32, device=states.device
    )
    with torch.no_grad():
        made = head.forward(driver.inputs([(driver.sequence(), prompt[1:])]), states[:-1], cache)
    torch.testing.assert_close(made, oracle(model, prompt), rtol=1e-3, atol=1e-3)
    (found,) = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    assert list(found.token_ids) == greedy(model, prompt, 12)
