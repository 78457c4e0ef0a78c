"""Whatever a caller asks for, it gets tokens or an error of ours, and a neighbour in the batch gets its own tokens."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fuzz.requests import params_of, requests
from outrider import SamplingParams
from outrider.device import OutriderError
from outrider_proof import tiny

NEIGHBOUR = (1, 2, 3, 4, 5)
SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(None, overlap=True, max_requests=4, page_size=4)


def serve(engine, prompt, keywords, others):
    """The request beside an honest one; both go to their ends."""
    rows, pages = engine.free_rows, engine.free_pages
    neighbour = engine.add_request(NEIGHBOUR, SamplingParams(max_tokens=6))
    before = engine.open_requests
    params = params_of(keywords)
    if isinstance(params, TypeError):
        assert "best_of" in keywords, keywords
        params = None
    if isinstance(params, Exception):
        assert isinstance(params, OutriderError), (keywords, params)
        params = None
    taken, refused = None, None
    try:
        taken = engine.add_request(prompt, params or SamplingParams(max_tokens=4), **others)
    except OutriderError as error:
        refused = str(error)
    if taken is None:
        assert refused
        assert "internal" not in refused
        assert engine.open_requests == before
    got, ended = {}, {}
    for _ in range(400):
        if not engine.has_unfinished:
            break
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
    engine.drain()
    assert tuple(got[neighbour]) == tiny.plain(NEIGHBOUR, 6)
    if taken is not None:
        assert taken in ended
        assert all(0 <= token < tiny.VOCABULARY for token in got.get(taken, ()))
    assert engine.open_requests == {}
    assert (engine.free_rows, engine.free_pages) == (rows, pages)


@settings(max_examples=15, derandomize=True, **SETTINGS)
@given(request=requests())
def test_a_sample(engine, request):
    serve(engine, *request)


FOUND = [
    ([0], {}, {"media": torch.tensor(2)}),
    ([0], {"top_k": 10**30}, {}),
    ([0], {"temperature": 1e39}, {}),
    ({1: 2}, {}, {}),
    ([0], {}, {"priority": "high"}),
]
"""What was answered wrongly once: by an error of Python's, for the whole batch, or by a ghost among the open requests."""


@pytest.mark.parametrize("request_", FOUND, ids=repr)
def test_found_before(engine, request_):
    serve(engine, *request_)


@pytest.mark.slow
@settings(max_examples=5000, **SETTINGS)
@given(request=requests())
def test_five_thousand(engine, request):
    serve(engine, *request)
