"""Drawn programs on several ranks give what one rank gives: every layout, proposer and mode."""

import pytest
from programs import compare, drawn

SOME, MANY, ALL = (0, 3, 5, 10), 160, 400
"""Seeds: some have each layout once, and each mode; all of both are among the first twelve."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", SOME)
def test_a_drawn_program_gives_the_same_on_several_ranks(seed):
    compare(drawn(seed))


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.slow if first < MANY else pytest.mark.soak) for first in range(0, ALL, 8)]
)
def test_many_drawn_programs_give_the_same_on_several_ranks(first):
    for seed in range(first, min(first + 8, ALL)):
        compare(drawn(seed))
