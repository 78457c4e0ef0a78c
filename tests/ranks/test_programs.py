"""Drawn programs on several ranks give what one rank gives: every layout, proposer and mode."""

import pytest
from programs import compare, drawn

CHEAP, ALL = 12, 400


@pytest.mark.parametrize("seed", range(CHEAP))
def test_a_drawn_program_gives_the_same_on_several_ranks(seed):
    compare(drawn(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(CHEAP, ALL, 8))
def test_many_drawn_programs_give_the_same_on_several_ranks(first):
    for seed in range(first, min(first + 8, ALL)):
        compare(drawn(seed))
