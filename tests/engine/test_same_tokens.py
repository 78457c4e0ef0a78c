"""Speculative greedy output equals plain greedy output, on drawn host programs: batch mixes, chunks, pages, aborts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import Tiny

from drawing import some_and_many
from outrider import Engine, SamplingParams
from outrider_proof.tiny import plain_config
from speculative.programs import ENGINES, LONGEST, check, programs


@pytest.fixture(scope="module")
def tiny_ends():
    """Tiny, with a token that ends a request, which comes often."""
    return Tiny(eos=(5,))


DRAWN = given(
    program=programs(st.tuples(st.integers(0, 5), st.integers(1, 60))),  # few prompts, so that prefixes are shared
    draft_tokens=st.integers(1, 5),
    extra_pages=st.one_of(st.none(), st.integers(0, 12)),
    **ENGINES,
)


def any_program(tiny_ends, tiny_tokens, speculate, program, extra_pages, **config):
    if extra_pages is not None:  # few enough pages that requests wait and are preempted
        config["num_pages"] = 1 + -(-(60 + LONGEST) // config["page_size"]) + extra_pages
    engine = tiny_ends.engine(speculate=speculate, max_context=96, **config)
    cut = [replace(each, prompt=tiny_tokens[each.prompt[0]][: each.prompt[1]]) for each in program]
    check(engine, cut, lambda prompt, count: tiny_ends.plain(prompt, count).token_ids)


test_any_program_gives_plain_greedy_tokens, test_many_programs_give_plain_greedy_tokens = some_and_many(
    any_program, DRAWN, pytest.mark.parametrize("speculate", ["eagle", "none"]), some=5, many=25
)


def test_a_cache_smaller_than_the_load_makes_requests_wait(bundle64, prompt_tokens):
    engine = bundle64.engine(max_requests=4, page_size=4, num_pages=12, max_context=40)
    prompts = [tokens[:12] for tokens in prompt_tokens[:6]]
    results = engine.generate(prompts, SamplingParams(max_tokens=12))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == bundle64.plain(prompt, LONGEST).token_ids[:12]


def test_the_bundled_head_really_accepts(bundle32, prompt_tokens):
    """So that a broken draft shows: most of what the head drafts is accepted."""
    engine = bundle32.engine(max_requests=8, draft_tokens=4)
    results = engine.generate([tokens[:64] for tokens in prompt_tokens[:16]], SamplingParams(max_tokens=48))
    total = sum(result.iterations * result.acceptance_length for result in results)
    assert total / sum(result.iterations for result in results) >= 2.2
    assert engine.stats.acceptance_length == pytest.approx(total / sum(r.iterations for r in results))


def test_the_bundled_block_drafter_accepts_more_than_the_head(bundle32, prompt_tokens, bundled_dir):
    """With as many drafted tokens, over the same prompts; and the tokens are the same."""
    prompts, params = [tokens[:64] for tokens in prompt_tokens[:16]], SamplingParams(max_tokens=32)
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
