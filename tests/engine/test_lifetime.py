"""What an engine leaves when nobody refers to it any more."""

import gc
import weakref

import pytest

from outrider import SamplingParams


@pytest.fixture(autouse=True)
def accounted():
    """In the place of the check that every other test ends with, which refers to all engines until then."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "mode", [{}, {"overlap": True}, {"overlap": True, "graphs": True}, {"overlap": True, "mode": "fused"}], ids=str
)
def test_nobody_but_the_backend_refers_to_streams_of_an_engine_that_is_gone(bundle32, mode, collects_little):
    """A device has only so many, and in a notebook engines come and go."""
    before = set(bundle32.backend.streams)
    engine = bundle32.engine(max_requests=2, max_context=64, **mode)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    made = [weakref.ref(stream) for stream in bundle32.backend.streams if stream not in before]
    assert made
    del engine
    gc.collect()
    others = bundle32.backend._streams
    others[:] = [stream for stream in others if stream in before]
    assert [each() for each in made] == [None] * len(made)
