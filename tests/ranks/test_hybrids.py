"""Ranks that share the heads of recurrent layers and of gated attention out among them."""

import pytest
from threads import run

from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.model import Shard, Shards
from outrider_proof import tiny
from outrider_proof.engine_setups import with_short_intervals
from outrider_proof.proposers import CHAINED, MAKERS, decoder
from outrider_proof.tiny import plain_config

PROMPTS = [(3, 1, 4, 1, 5, 9), (7, 7, 2), (1,), (3, 1, 4, 1, 5, 8)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
CONFIG = plain_config(max_context=40, max_requests=3, page_size=4, prefill_chunk=4, dtype="float64")


@pytest.mark.sample(1)
@pytest.mark.parametrize("proposer", ["mtp-chain", "ngram", "none"])
@pytest.mark.parametrize("tensor", [2, 1], ids=["tensor", "data"])
def test_tokens_are_those_of_one_rank(tensor, proposer):
    def make(ranks):
        model = decoder(tiny.hybrid(), ranks.backend, ranks.model, kernels=with_short_intervals(ranks.backend))
        assert model.config.recurrent.value_heads == 4 // tensor
        drafts = {**MAKERS, **CHAINED}[proposer](model, ranks.backend)
        return Engine(model, ranks.backend, proposer=drafts, config=CONFIG, ranks=ranks)

    def tokens(engine):
        made = [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]
        return made + [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]

    layout = ParallelConfig(tensor=tensor, data=2 // tensor)
    assert run(layout, make, tokens) == tokens(Engine(tiny.hybrid(), tiny.BACKEND, config=CONFIG))


def test_ranks_that_do_not_divide_the_key_heads_are_refused():
    shards = Shards(attention=Shard(0, 4), mlp=Shard(0, 4), vocabulary=Shard(0, 4))
    with pytest.raises(ConfigError, match="2 key heads can't be shared out among 4 ranks"):
        shards.local(tiny.hybrid().config, "the model")
