"""Callers of one engine, interleaved: drawn histories (:mod:`fuzz.histories`)."""

import pytest

from fuzz.histories import History
from outrider import SamplingParams
from outrider.speculative.eagle import EagleProposer
from outrider.speculative.lookup import NgramProposer
from outrider_proof import tiny

SETUPS = {
    "plain": (lambda: None, {}),
    "eagle, overlapped": (lambda: EagleProposer(tiny.eagle_head(), draft_tokens=3), {"overlap": True}),
    "ngram, few pages": (
        lambda: NgramProposer(vocab_size=tiny.VOCABULARY, draft_tokens=2),
        {"overlap": True, "num_pages": 24, "max_requests": 2, "prefix_cache": False},
    ),
    "eagle, fused": (lambda: EagleProposer(tiny.eagle_head(), draft_tokens=2), {"overlap": True, "mode": "fused"}),
}


def histories(name, seeds, **options):
    make, config = SETUPS[name]
    engine = tiny.engine(make(), **{"max_requests": 3, "page_size": 4, "prefill_chunk": 6} | config)
    for seed in seeds:
        history = History(engine, f"{name} {seed}", **options)
        try:
            history.run()
        except BaseException:
            print(f"history {seed} of {name!r}: {' '.join(history.done)}")
            raise


@pytest.mark.parametrize("name", SETUPS)
def test_a_sample(name):
    histories(name, range(2))


@pytest.mark.parametrize("count", [pytest.param(400, marks=pytest.mark.slow), pytest.param(2500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SETUPS)
def test_many(name, count):
    histories(name, range(count))


def test_a_fork_has_no_engine():
    engine = tiny.engine(None)
    History(engine, 0).fork()
    assert engine.generate([(1, 2, 3)], SamplingParams(max_tokens=4))[0].token_ids == tiny.plain((1, 2, 3), 4)
