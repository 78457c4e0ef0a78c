"""Sampling options and the rest of the engine with trees: the same as with plain decoding."""

import pytest

from outrider import SamplingParams
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
