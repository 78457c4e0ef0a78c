"""Random programs on several ranks give what one rank gives: every layout, proposer and mode."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from programs import LAYOUTS, drawn
from threads import run

from outrider import Engine
from outrider.device import ConfigError
from outrider.engine.ranks.decision_log import RankedDecisionLog
from outrider.engine.requests.draft_length import LengthSchedule
from outrider_proof import tiny
from outrider_proof.decode_program import MOVING
from outrider_proof.engine_setups import MODES
from outrider_proof.proposers import MAKERS, decoder
from outrider_proof.tiny import plain_config

SOME, MANY, ALL = (0, 3, 5, 10), 160, 400
"""Seeds: some have each layout once, and each mode."""
CONFIG = plain_config(max_context=48, max_requests=3, page_size=4, dtype="float64")
FIXED = tuple(replace(arrival, moves=()) for arrival in MOVING.arrivals)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", SOME)
def test_a_drawn_program_gives_the_same_on_several_ranks(seed):
    drawn(seed).serve()


def test_graphs_of_ranks_need_not_cover_guided_requests():
    program = replace(MOVING, arrivals=tuple(replace(arrival, guided=True) for arrival in FIXED))
    replace(drawn(0), program=program, mode="graphs").serve()


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.slow if first < MANY else pytest.mark.soak) for first in range(0, ALL, 8)]
)
def test_many_drawn_programs_give_the_same_on_several_ranks(first):
    for seed in range(first, min(first + 8, ALL)):
        drawn(seed).serve()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_verify_the_same_drafts_of_each_request(mode):
    """Only the leading rank's policy decides: those of the other ranks repeat its record."""
    program = replace(MOVING, arrivals=FIXED, draft_lengths=(3, 0, 1, 2, 2), by_request=True)
    published, publish = [], RankedDecisionLog.publish_batch

    def noted(self, batch, shape):
        published.append(() if batch is None else batch.draft_lengths)
        publish(self, batch, shape)

    with patch.object(RankedDecisionLog, "publish_batch", noted):
        replace(drawn(0), program=program, layout=LAYOUTS[0], proposer="eagle", mode=mode).serve()
    assert any(len(set(lengths)) > 1 for lengths in published)


def test_prompts_and_decoding_requests_share_a_pass_on_tensor_parallel_ranks():
    """Each rank replays the graph of the mixed batch, and the record says so."""
    program = replace(MOVING, arrivals=FIXED, prefill_graphs=16)
    published, publish = [], RankedDecisionLog.publish_batch

    def noted(self, batch, shape):
        published.append(shape(batch)["mixed"])
        publish(self, batch, shape)

    with patch.object(RankedDecisionLog, "publish_batch", noted):
        replace(drawn(0), program=program, layout=LAYOUTS[0], proposer="eagle", mode="fused").serve()
    assert any(published)


def test_data_parallel_ranks_refuse_a_length_for_each_request():
    def make(ranks):
        target = decoder(tiny.target(), ranks.backend, ranks.model)
        proposer, lengths = MAKERS["eagle"](target, ranks.backend), LengthSchedule((3, 0), (2, 3, 4))
        return Engine(target, ranks.backend, proposer=proposer, config=CONFIG, ranks=ranks, draft_length=lengths)

    with pytest.raises(ConfigError, match="data-parallel groups share the width"):
        run(LAYOUTS[1], make, Engine.close)
