"""Sampling options and the rest of the engine with trees: the same as with plain decoding."""

import pytest

from outrider import SamplingParams
from outrider.speculative.eagle import EagleTreeProposer
from outrider.speculative.tree import DynamicTree
from outrider_proof import tiny
from speculative.test_proposers import PROPOSERS

PROMPTS = [(3, 1, 4, 1, 5), (2, 7), (9, 9, 9)]

OPTIONS = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "sampled penalties": {"temperature": 1.1, "frequency_penalty": 0.8, "seed": 5},
    "truncated": {"temperature": 1.6, "top_k": 7, "top_p": 0.8, "min_p": 0.02, "seed": 6},
    "biased": {"logit_bias": {4: 1.0, 11: float("-inf")}, "min_tokens": 6},
    "logprobs": {"temperature": 0.9, "logprobs": 3, "seed": 8},
}


@pytest.mark.sample(1, per="option")
@pytest.mark.parametrize("name", ["eagle-tree", "ngram-tree", "mtp-tree", "draft-model-tree"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_do_the_same_to_trees(name, option):
    params = SamplingParams(max_tokens=18, **OPTIONS[option])
    engine = tiny.engine(PROPOSERS[name](), page_size=3)
    plain = tiny.engine(None, max_requests=1)
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        expected = plain.generate([prompt], params)[0]
        assert found.token_ids == expected.token_ids
        if params.logprobs is None:
            continue
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert (one.token, one.logprob) == (other.token, pytest.approx(other.logprob, abs=1e-5))
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    # Drafts know nothing of the options; some are accepted all the same.
    assert name == "ngram-tree" or engine.stats.acceptance_length > 1.05


def test_a_small_cache_preempts_and_changes_no_token():
    """Trees need pages for scratch slots too; when these run out, requests give way and start again."""
    proposer = EagleTreeProposer(tiny.eagle_head(), DynamicTree(topk=4, depth=4, nodes=20))
    engine = tiny.engine(proposer, page_size=4, num_pages=24, max_requests=4)
    prompts = [(i, 2, 3, i) for i in range(8)]
    total = engine.free_pages
    for prompt, result in zip(prompts, engine.generate(prompts, SamplingParams(max_tokens=20)), strict=True):
        assert result.token_ids == tiny.plain(prompt, 20)
    assert engine.free_pages == total


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PROPOSERS)
def test_preempted_requests_draft_on(name):
    engine = tiny.engine(PROPOSERS[name](), page_size=2, num_pages=22, max_requests=4, overlap=True)
    prompts = [(i, 2, 3, i) for i in range(6)]
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=20)) for prompt in prompts]
    tokens, preempted = {request: [] for request in ids}, 0
    records = [engine._requests[request] for request in ids]
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
    preempted = sum(record.preemptions for record in records)
    assert [tuple(tokens[request]) for request in ids] == [tiny.plain(prompt, 20) for prompt in prompts]
    assert preempted > 0
