"""An exception in the middle of a launch loses no row, no page and no token."""

import pytest

from outrider import SamplingParams
from outrider.device import DeviceFault


class Interrupt(BaseException):
    """As Ctrl-C: no Exception."""


@pytest.mark.sample(1, per="overlap,error")
@pytest.mark.parametrize("error", [Interrupt, DeviceFault])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", range(1, 9))
def test_the_next_step_goes_on(tiny64, tiny_tokens, monkeypatch, when, overlap, error):
    engine = tiny64.engine(max_requests=2, max_context=64, page_size=4, prefill_chunk=8, overlap=overlap)
    pages, rows = engine.free_pages, engine.free_rows
    prompts = [tokens[:11] for tokens in tiny_tokens[:3]]
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=12)) for prompt in prompts]
    honest, calls = tiny64.target.forward_with_aux_hidden_states, 0

    def forward(*arguments):
        nonlocal calls
        calls += 1
        if calls == when:
            raise error
        return honest(*arguments)

    monkeypatch.setattr(tiny64.target, "forward_with_aux_hidden_states", forward)
    got, raised = {i: [] for i in ids}, 0
    while engine.has_unfinished:
        try:
            for output in engine.step():
                got[output.request_id].extend(output.tokens)
        except error:
            raised += 1
    assert raised == 1
    for prompt, request in zip(prompts, ids, strict=True):
        assert tuple(got[request]) == tiny64.plain(prompt, 20).token_ids[:12]
    assert (engine.free_pages, engine.free_rows) == (pages, rows)
