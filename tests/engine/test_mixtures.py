"""A mixture of experts under every proposer, with few pages, and out of the prefix cache."""

import pytest

from outrider import Engine, SamplingParams
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS
from outrider_proof.tiny import plain_config

PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (7, 7, 2)]
NEW = 12
FEW = {"max_context": 48, "max_requests": 3, "page_size": 2, "num_pages": 30, "prefill_chunk": 3, "dtype": "float64"}


@pytest.fixture(scope="module")
def plain():
    engine = Engine(tiny.mixture(), tiny.BACKEND, config=plain_config(max_context=48, max_requests=1, dtype="float64"))
    return [engine.generate([prompt], SamplingParams(max_tokens=NEW))[0].token_ids for prompt in PROMPTS]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MAKERS)
def test_every_proposer_gives_plain_tokens(plain, name):
    proposer = MAKERS[name](tiny.mixture(), tiny.BACKEND)
    engine = Engine(tiny.mixture(), tiny.BACKEND, proposer=proposer, config=plain_config(**FEW))
    for _ in range(2):  # the second time out of the prefix cache
        results = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW))
        assert [result.token_ids for result in results] == plain
    assert engine.stats.prefix_hits > 0
    if name.startswith("eagle"):
        assert engine.stats.acceptance_length > 1.2


def test_pages_that_run_out(plain):
    fields = FEW | {"num_pages": 20}
    engine = Engine(tiny.mixture(), tiny.BACKEND, config=plain_config(**fields))
    assert [result.token_ids for result in engine.generate(PROMPTS, SamplingParams(max_tokens=NEW))] == plain
    assert engine.stats.preemptions > 0
