"""Messages between the server and its engine's process come out as they went in."""

import math

import pytest

from outrider import SamplingParams
from outrider.disaggregation.connections import MessageDecoder
from outrider.engine import Regex
from outrider.engine.loop import EngineLoad, EngineStats
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.sampling import TokenLogprobs
from outrider.serve.connection.engine_messages import (
    AbortRequest,
    EngineFailed,
    EngineInfo,
    EngineSnapshot,
    RequestAdmitted,
    RequestRefused,
    SampleOutput,
    StopEngine,
    SubmitRequest,
    decode_messages,
    encode_messages,
)


def over(item, size):
    data = encode_messages([item, StopEngine()])
    decoder = MessageDecoder(1 << 30)
    (frame,) = [each for start in range(0, len(data), size) for each in decoder.feed(data[start : start + size])]
    found, end = decode_messages(frame)
    assert end == StopEngine()
    return found


INFO = EngineInfo(
    cache_dtype="float8_e4m3fn",
    backend="cpu",
    device="cpu",
    dtype="float32",
    vocab_size=9,
    bos_token_id=None,
    eos_token_ids=(1, 2),
    longest_request=99,
    max_requests=4,
    max_logprobs=20,
    page_size=16,
    num_pages=3,
    prefix_cache=True,
    draft_tokens=4,
    image_token=None,
)
EVENTS = [
    INFO,
    RequestAdmitted(3),
    RequestRefused(4, 'no "room" \ud800'),
    SampleOutput(5, 1, StepOutput(5, (7, 8), None, drafted=1, proposed=4)),
    SampleOutput(
        5,
        0,
        StepOutput(
            5,
            (7,),
            FinishReason.STOP,
            (TokenLogprobs(7, -0.25, ((7, -0.25), (8, -math.inf))),),
            searched_text="text\0",
            error="wrong",
            refused=True,
            cached=3,
            stopped_by="x",
        ),
    ),
    EngineSnapshot(EngineStats(1, 2, 3, 4, 0.5, 6, 7, 8), EngineLoad(1, 2, 3, 4, 5), 1.5),
    EngineFailed("gone"),
]


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events(event, size):
    assert over(event, size) == event


def test_requests():
    """Random parameters, guides and images of the same codec are in ``tests/ranks/test_codec.py``."""
    params = SamplingParams(temperature=0.7, n=3, seed=-(2**63), logit_bias={3: -math.inf}, guide=Regex("a+"))
    for command in (SubmitRequest(6, (1, 2, 3), params, -1, ()), AbortRequest(6), StopEngine()):
        assert over(command, 64) == command
