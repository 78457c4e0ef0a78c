"""Messages between the server and its engine's process come out as they went in."""

import math

import pytest
import torch

from outrider import SamplingParams
from outrider.disaggregation.connections import MessageDecoder
from outrider.engine import ChoiceGuide, Ebnf, JsonObject, JsonSchema, Regex
from outrider.engine.loop import EngineLoad, EngineStats
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.sampling import TokenLogprobs
from outrider.model import Media, MediaGrid
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
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, n=3, seed=-(2**63), stop=("a", "\n"), logit_bias={3: -math.inf, 1: 0.1}, logprobs=0),
    *(
        SamplingParams(guide=guide)
        for guide in (
            JsonSchema({"type": "object"}),
            JsonObject(),
            Regex("a+"),
            Ebnf('root ::= "a"'),
            ChoiceGuide(["a", "b"]),
        )
    ),
]


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events(event, size):
    assert over(event, size) == event


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_requests(params):
    command = SubmitRequest(6, (1, 2, 3), params, -1, ())
    assert over(command, 64) == command
    assert over(AbortRequest(6), 64) == AbortRequest(6)
    assert over(StopEngine(), 64) == StopEngine()


def test_images():
    grid = MediaGrid(kind="video", frames=2, rows=2, columns=4, seconds_per_frame=0.5)
    media = Media(grid, torch.randn(16, 12), b"\x00\xff")
    (found,) = over(SubmitRequest(1, [1], SamplingParams(), 0, [media]), 999).media
    assert (found.grid, found.digest) == (grid, media.digest)
    assert torch.equal(found.pixels, media.pixels)
