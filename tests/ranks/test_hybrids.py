"""Ranks that share the heads of recurrent layers and of gated attention out among them."""

from copy import copy
from dataclasses import replace

import pytest
from threads import run

from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.model import Shard, Shards
from outrider.registry import Registry
from outrider_proof import tiny
from outrider_proof.engine_setups import WIDE_HYBRID, random_host_program, with_short_intervals
from outrider_proof.proposers import CHAINED, MAKERS, decoder
from outrider_proof.rank_engine import RankExplorer, RankSetup
from outrider_proof.tiny import plain_config
from outrider_sanitizer import RaceError
from outrider_sim.exploration import run_once
from outrider_sim.strategies import make_strategy

PROMPTS = [(3, 1, 4, 1, 5, 9), (7, 7, 2), (1,), (3, 1, 4, 1, 5, 8)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
CONFIG = plain_config(max_context=40, max_requests=3, page_size=4, prefill_chunk=4, dtype="float64")


@pytest.mark.sample(1, per="layout")
@pytest.mark.parametrize("mode", [{}, {"graphs": True}, {"mode": "fused"}], ids=["staged", "graphs", "fused"])
@pytest.mark.parametrize("proposer", ["mtp-chain", "ngram", "none", "hybrid-draft, itself"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((2, 1), id="tensor2"),
        pytest.param((1, 2), id="data2"),
        pytest.param((4, 1), id="tensor4", marks=pytest.mark.slow),
        pytest.param((2, 2), id="tensor2-data2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_tokens_are_those_of_one_rank(layout, proposer, mode):
    """The second round continues prefixes that the first one cached."""
    tensor, data = layout
    target = tiny.hybrid(recurrent=tiny.WIDE_RECURRENT)
    config = replace(CONFIG, **mode)

    def make(ranks):
        model = decoder(target, ranks.backend, ranks.model, kernels=with_short_intervals(ranks.backend))
        assert model.config.recurrent.value_heads == 8 // tensor
        drafts = {**MAKERS, **CHAINED}[proposer](model, ranks.backend)
        return Engine(model, ranks.backend, proposer=drafts, config=config, ranks=ranks)

    def tokens(engine):
        made = [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]
        made += [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]
        return made, engine.stats.prefix_hits > 0

    made, hits = run(ParallelConfig(tensor=tensor, data=data), make, tokens)
    assert made == tokens(Engine(target, tiny.BACKEND, config=CONFIG))[0]
    assert hits


def explored(setup, number, change=None):
    """The error of one random program on simulated ranks that the sanitizer watches, or None."""
    explorer = RankExplorer(Registry())
    explorer.change = change
    program, device = random_host_program(number), explorer.devices(setup)[0]
    return run_once(device, lambda _: explorer.run_program(setup, program), make_strategy("mixed", number, {}))


@pytest.mark.parametrize(
    ("layout", "proposer", "mode", "number"),
    [
        pytest.param((2, 1), "mtp-chain", "fused", 8, marks=pytest.mark.slow),
        pytest.param((4, 1), "mtp-chain", "graphs", 9, marks=pytest.mark.slow),
        ((2, 1), "hybrid-draft", "staged", 2),
        pytest.param((2, 2), "ngram", "staged", 6, marks=pytest.mark.slow),
        pytest.param((4, 1), "none", "graphs", 2, marks=pytest.mark.slow),
    ],
)
def test_the_sanitizer_is_silent_on_simulated_ranks(layout, proposer, mode, number):
    setup = RankSetup(tensor=layout[0], data=layout[1], proposer=proposer + WIDE_HYBRID, mode=mode, like="cuda")
    error = explored(setup, number)
    assert error is None, str(error)


@pytest.mark.slow
def test_a_copy_of_states_on_another_stream_of_one_rank_is_found():
    def change(rank, engine):
        if rank == 1:
            elsewhere = copy(engine._step.step)
            elsewhere._streams = replace(elsewhere._streams, forward=engine.backend.create_stream("elsewhere"))
            engine._step.step._copy_states = elsewhere._copy_states

    setup = RankSetup(tensor=2, data=1, proposer="none" + WIDE_HYBRID, mode="staged", like="cuda")
    error = explored(setup, 0, change)
    assert isinstance(error, RaceError), error
    assert "on stream 'elsewhere'" in str(error)


def test_ranks_that_do_not_divide_the_key_heads_are_refused():
    shards = Shards(attention=Shard(0, 4), mlp=Shard(0, 4), vocabulary=Shard(0, 4))
    with pytest.raises(ConfigError, match="2 key heads can't be shared out among 4 ranks"):
        shards.local(tiny.hybrid().config, "the model")
