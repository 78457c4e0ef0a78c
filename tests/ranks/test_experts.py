"""Ranks that share every expert of a mixture out among them."""

import pytest
from threads import run

from outrider import Engine, SamplingParams
from outrider.engine.ranks.ranks import ParallelConfig
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS, decoder
from outrider_proof.tiny import plain_config

PROMPTS = [(3, 1, 4, 1, 5, 9), (7, 7, 2), (1,)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
CONFIG = plain_config(max_context=40, max_requests=3, page_size=4, prefill_chunk=4, dtype="float64")


@pytest.mark.sample(1)
@pytest.mark.parametrize("tensor", [2, 1], ids=["tensor", "data"])
def test_tokens_are_those_of_one_rank(tensor):
    def make(ranks):
        model = decoder(tiny.mixture(), ranks.backend, ranks.model)
        assert model.config.experts.intermediate_size == 8
        return Engine(model, ranks.backend, proposer=MAKERS["eagle"](model, ranks.backend), config=CONFIG, ranks=ranks)

    def tokens(engine):
        return [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]

    layout = ParallelConfig(tensor=tensor, data=2 // tensor)
    assert run(layout, make, tokens) == tokens(Engine(tiny.mixture(), tiny.BACKEND, config=CONFIG))
