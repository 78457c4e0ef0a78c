"""First tokens leave for the host before a draft reads the prompts; and what the host says of a prompt's tokens."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import Tiny

from outrider import SamplingParams
from outrider.engine import prefill
from outrider.engine.requests.batch import PrefillChunk
from outrider.engine.state.staging import _range_array, _slots
from outrider.registry import get_backend
from outrider_proof import tiny
from outrider_trace.timeline import record_timeline

PROMPT = [index % tiny.VOCABULARY for index in range(1, 40)]


@pytest.mark.parametrize("mode", ["staged", "fused"])
def test_a_first_token_does_not_wait_for_the_draft(mode, monkeypatch):
    monkeypatch.setattr(prefill, "max_graph_tokens", lambda _: 0)
    backend = get_backend("sim")
    engine = Tiny(backend).engine(max_requests=2, max_context=128, mode=mode)
    engine.add_request(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    with record_timeline(backend) as found:
        while engine.has_unfinished:
            engine.step()
        engine.drain()
    copied = found.spans_of("copy")[-1].end
    behind = [span.name for span in found.spans_of("forward") if span.start >= copied]
    assert behind.count("aten::mm") >= 5  # the fusion, a layer, the output head


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 60), st.data())
def test_slots_of_a_chunk(page_size, start, count, data):
    end = start + count
    pages = data.draw(st.permutations(range(1, -(-end // page_size) + 1)))
    chunk = PrefillChunk(SimpleNamespace(pages=pages), start, end)
    expected = [pages[place // page_size] * page_size + place % page_size for place in range(start, end)]
    assert list(_slots(chunk, page_size)) == expected
    assert list(_range_array(start, end)) == list(range(start, end))


def test_slots_are_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert list(_slots(PrefillChunk(SimpleNamespace(pages=[4, 2]), 3, 6), 4)) == [19, 8, 9]
        assert list(_range_array(3, 6)) == [3, 4, 5]
