"""The search that tuners share: what is kept, and what is noise."""

import pytest

from outrider_tune.search import Search, fastest

TIMES = {"slow": 12.0, "fast": 8.0, "also fast": 8.0, "broken": float("inf"), "hardly faster": 9.999, "now": 10.0}


def test_the_first_among_the_fastest():
    assert fastest(TIMES.__getitem__, ["slow", "fast", "also fast", "broken"]) == ("fast", 8.0)
    assert fastest(TIMES.__getitem__, ["broken"]) == ("broken", float("inf"))


def test_a_start_stays_where_nothing_is_faster():
    assert fastest(TIMES.__getitem__, ["slow", "broken"], ("now", 10.0)) == ("now", 10.0)
    with pytest.raises(ValueError, match="nothing to choose from"):
        fastest(TIMES.__getitem__, [])


def test_a_gain_within_noise_isnt_kept():
    search = Search(TIMES.__getitem__, "now", 10.0, print)
    assert not search.offer("hardly faster", TIMES["hardly faster"])
    assert (search.table, search.us) == ("now", 10.0)
    assert search.offer(*search.best(["slow", "fast"]))
    assert (search.table, search.us, search.before_us) == ("fast", 8.0, 10.0)
