"""What the programs about adaptive draft lengths make of what they measure."""

import random

import pytest

from outrider_bench.programs.adaptive_host import host_costs
from outrider_bench.programs.adaptive_lengths import Pairs, interval


def test_an_interval_holds_the_median_and_shrinks_with_rounds():
    rng = random.Random(1)
    few, many = ([rng.gauss(0.98, 0.05) for _ in range(count)] for count in (8, 200))
    for quotients in (few, many):
        low, high = interval(quotients)
        assert low < 0.98 < high
    assert interval(many)[1] - interval(many)[0] < 0.5 * (interval(few)[1] - interval(few)[0])
    assert interval([*[1.0] * 29, 0.5]) == (1.0, 1.0), "one bad round decides nothing"


def test_the_fixed_length_that_adaptive_is_slowest_beside_counts():
    pairs = Pairs(
        {8: {"fixed 1": [90.0] * 3, "fixed 4": [100.0] * 3, "fixed 7": [99.0] * 3, "adaptive": [101.0] * 3}},
        {8: {"fixed 4": [1.01] * 9, "fixed 7": [0.99] * 9}},
    )
    assert pairs.near(8) == ["fixed 4", "fixed 7"]
    assert pairs.result(8) == ("fixed 7", 0.99, 0.99, 0.99)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("batch", "most"), [(1, 12), (8, 15), (64, 40)])
def test_calls_that_adaptive_lengths_add_to_an_iteration(batch, most):
    """Counted, not timed. Thinking in every eighth iteration added 30, 50 and 185."""
    adaptive, fixed = host_costs(batch, 2000, 2000, noise=0.15, repeat=0)
    assert 0 < adaptive.calls - fixed.calls < most
