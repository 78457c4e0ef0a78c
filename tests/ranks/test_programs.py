"""Drawn programs on several ranks give what one rank gives: every layout, proposer and mode."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from programs import LAYOUTS, MODES, compare, drawn, together

from outrider import SamplingParams
from outrider.device import ConfigError
from outrider.engine.ranks.decision_log import RankedDecisionLog

SOME, MANY, ALL = (0, 3, 5, 10), 160, 400
"""Seeds: some have each layout once, and each mode; all of both are among the first twelve."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", SOME)
def test_a_drawn_program_gives_the_same_on_several_ranks(seed):
    compare(drawn(seed))


def test_graphs_of_ranks_need_not_cover_guided_requests():
    program = drawn(4)
    assert program.config["graphs"]
    assert all(each.guide for each in program.params)
    compare(program)


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.slow if first < MANY else pytest.mark.soak) for first in range(0, ALL, 8)]
)
def test_many_drawn_programs_give_the_same_on_several_ranks(first):
    for seed in range(first, min(first + 8, ALL)):
        compare(drawn(seed))


@pytest.mark.parametrize("mode", MODES)
def test_ranks_verify_the_same_drafts_of_each_request(mode):
    """Only the leading rank's policy decides: those of the other ranks repeat its record."""
    program = drawn(0)
    greedy = tuple(SamplingParams(max_tokens=9, ignore_eos=True) for _ in program.params)
    config = program.config | mode | {"max_requests": 3}
    program = replace(program, proposer="eagle", params=greedy, config=config, aborts={}, lengths=(3, 0, 1, 2, 2))
    published, publish = [], RankedDecisionLog.publish_batch

    def noted(self, batch, shape):
        published.append(() if batch is None else batch.draft_lengths)
        publish(self, batch, shape)

    with patch.object(RankedDecisionLog, "publish_batch", noted):
        compare(replace(program, layout=LAYOUTS[0]))
    assert any(len(set(lengths)) > 1 for lengths in published)


def test_data_parallel_ranks_refuse_a_length_for_each_request():
    with pytest.raises(ConfigError, match="data-parallel groups share the width"):
        together(replace(drawn(0), proposer="eagle", layout=LAYOUTS[1], lengths=(3, 0)))
