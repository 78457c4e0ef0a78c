"""Speculative greedy output of the bundled model equals plain greedy output, and its drafts are accepted."""

import pytest

from outrider import Engine, SamplingParams
from outrider_proof.tiny import plain_config


def test_the_bundled_head_really_accepts(bundle32, prompt_tokens):
    """So that a broken draft shows: most of what the head drafts is accepted."""
    engine = bundle32.engine(max_requests=8, draft_tokens=4)
    results = engine.generate([tokens[:64] for tokens in prompt_tokens[:8]], SamplingParams(max_tokens=32))
    total = sum(result.iterations * result.acceptance_length for result in results)
    assert total / sum(result.iterations for result in results) >= 2.2
    assert engine.stats.acceptance_length == pytest.approx(total / sum(r.iterations for r in results))


def test_the_bundled_block_drafter_accepts_more_than_the_head(bundle32, prompt_tokens, bundled_dir):
    """With as many drafted tokens, over the same prompts; and the tokens are the same."""
    prompts, params = [tokens[:64] for tokens in prompt_tokens[:8]], SamplingParams(max_tokens=24)
    config = plain_config(dtype="float32", max_requests=8, draft_tokens=4)
    block = Engine.from_checkpoint(
        bundled_dir / "target", bundle32.backend, draft_dir=bundled_dir / "dflash", speculate="dflash", config=config
    )
    head = bundle32.engine(max_requests=8, draft_tokens=4)
    found, wanted = (engine.generate(prompts, params) for engine in (block, head))
    assert [result.token_ids for result in found] == [result.token_ids for result in wanted]
    assert block.stats.acceptance_length > head.stats.acceptance_length > 2.2


def test_a_broken_draft_shows_in_the_acceptance_length(bundle32, prompt_tokens, monkeypatch):
    """The oracle works: with the head's hidden states lost the tokens stay right and the acceptance falls."""
    engine = bundle32.engine(max_requests=4, draft_tokens=4)
    forward = bundle32.head.forward
    monkeypatch.setattr(bundle32.head, "forward", lambda inputs, hidden, cache: forward(inputs, hidden * 0, cache))
    prompts = [tokens[:64] for tokens in prompt_tokens[:4]]
    results = engine.generate(prompts, SamplingParams(max_tokens=24))
    assert engine.stats.acceptance_length < 2.0
    monkeypatch.undo()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == bundle32.plain(prompt, 24).token_ids
