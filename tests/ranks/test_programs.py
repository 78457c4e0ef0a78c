"""Drawn programs on several ranks give what one rank gives: every layout, proposer and mode."""

import pytest
from programs import compare, drawn

SOME, ALL = (0, 3, 5, 10), 400
"""Each layout once, and each mode; all of both are among the first twelve."""


@pytest.mark.parametrize("seed", SOME)
def test_a_drawn_program_gives_the_same_on_several_ranks(seed):
    compare(drawn(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, 8))
def test_many_drawn_programs_give_the_same_on_several_ranks(first):
    for seed in range(first, min(first + 8, ALL)):
        compare(drawn(seed))
