"""Where one request of a batch can't be served further, it ends with an error and the others give their tokens."""

import pytest

from outrider import SamplingParams
from outrider.engine.requests.request import FinishReason
from outrider.engine.state.input_upload import InputUpload
from outrider_proof import tiny

PROMPTS = [(3,), (1, 2, 3, 4, 5), (7, 7)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("value", [2**70, "a word", None])
def test_what_cant_be_packed(overlap, value):
    engine = tiny.engine(None, overlap=overlap, max_requests=3)
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=6)) for prompt in PROMPTS]
    # As a value that no check has found: it's in the record of the request when the batch is packed.
    object.__setattr__(engine._requests[ids[1]].params, "seed", value)
    got, ended = {i: [] for i in ids}, {}
    while engine.has_unfinished:
        for output in engine.step():
            got[output.request_id].extend(output.tokens)
            if output.finish_reason is not None:
                ended[output.request_id] = output
    assert ended[ids[1]].finish_reason is FinishReason.ERROR
    assert f"request {ids[1]}: " in ended[ids[1]].error
    for index in (0, 2):
        assert tuple(got[ids[index]]) == tiny.plain(PROMPTS[index], 6)
    assert engine.open_requests == {}
    assert engine.free_rows == 3


def test_an_error_that_is_nobodys_own_reaches_the_caller(monkeypatch):
    honest = InputUpload._packed

    def together(upload, batch, bucket=None):
        if len(batch.requests) > 1:
            raise ZeroDivisionError
        return honest(upload, batch, bucket)

    monkeypatch.setattr(InputUpload, "_packed", together)
    engine = tiny.engine(None, prefill_chunk=16)
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=2)) for prompt in PROMPTS[:2]]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert list(engine.open_requests) == ids
    engine.abort(ids[1])
    got = [token for _ in range(4) for output in engine.step() if output.request_id == ids[0] for token in output.tokens]
    assert tuple(got) == tiny.plain(PROMPTS[0], 2)
