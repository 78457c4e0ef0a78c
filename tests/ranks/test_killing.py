"""Losing a rank, many times in a row: see killing.py."""

import pytest
from killing import HOW, TIMES, lose_one


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TIMES))
def test_the_other_ranks_end_in_time_and_nothing_is_left(number):
    how, victim, _, said = lose_one(number)
    assert how in HOW
    assert f"rank {victim} " in said
