"""What the engine refuses, and how requests end."""

from types import SimpleNamespace

import pytest

from outrider import EngineConfig, SamplingParams
from outrider.device import ConfigError
from outrider.engine import loop
from outrider.engine.requests.request import FinishReason, Request, _spans
from outrider.errors import RequestError
from outrider.speculative.eagle import EagleProposer
from outrider_proof import tiny


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_requests": 0}, "max_requests is 0"),
        ({"page_size": 1.5}, "page_size is 1.5"),
        ({"num_pages": 1}, "num_pages is 1"),
        ({"draft_tokens": True}, "draft_tokens is True"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_a_bad_config_is_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        EngineConfig(**arguments)


def test_unknown_options_raise():
    with pytest.raises(TypeError):
        EngineConfig(max_request=3)


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ((), SamplingParams(), "prompt is empty"),
        ((1,) * 90, SamplingParams(max_tokens=10), "context of 96"),
        ((1, 10**6), SamplingParams(), "outside the model's vocabulary"),
        ((1, -1), SamplingParams(), "outside the model's vocabulary"),
    ],
)
def test_bad_prompts_are_refused(bundle64, prompt, params, match):
    engine = bundle64.engine(max_context=96)
    with pytest.raises(RequestError, match=match):
        engine.add_request(prompt, params)
    assert not engine.has_unfinished


def test_a_request_that_can_never_fit_is_refused(bundle64):
    engine = bundle64.engine(max_context=96, page_size=16, num_pages=4)
    with pytest.raises(RequestError, match="needs 5 KV pages"):
        engine.add_request((1,) * 40, SamplingParams(max_tokens=40))


def test_a_context_beyond_the_model_is_refused(bundle64):
    with pytest.raises(ConfigError, match="max_context"):
        bundle64.engine(max_context=10**9)


def test_stop_tokens_end_a_request_with_the_stop_token(bundle64, prompt_tokens):
    prompt = prompt_tokens[0][:16]
    plain = bundle64.plain(prompt, 20).token_ids
    stop = plain[7]
    first = plain.index(stop)
    result = bundle64.engine().generate([prompt], SamplingParams(max_tokens=20, stop_token_ids=(stop,)))[0]
    assert result.token_ids == plain[: first + 1]
    assert result.finish_reason is FinishReason.STOP


def test_unknown_and_finished_requests_cannot_be_aborted(bundle64, prompt_tokens):
    engine = bundle64.engine(max_context=96)
    with pytest.raises(RequestError, match="request 7"):
        engine.abort(7)
    request = engine.add_request(prompt_tokens[0][:8], SamplingParams(max_tokens=1))
    while engine.has_unfinished:
        engine.step()
    with pytest.raises(RequestError):
        engine.abort(request)


def test_streaming_gives_the_tokens_as_they_come_and_leaves_others_alone(bundle64, prompt_tokens):
    engine = bundle64.engine(max_context=96)
    other = engine.add_request(prompt_tokens[1][:10], SamplingParams(max_tokens=8))
    prompt = prompt_tokens[0][:16]
    pieces = list(engine.stream(prompt, SamplingParams(max_tokens=20)))
    assert tuple(t for piece in pieces for t in piece.tokens) == bundle64.plain(prompt, 20).token_ids
    assert len(pieces) > 1
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    rest = [t for output in iter_steps(engine) for t in output.tokens if output.request_id == other]
    assert tuple(rest) == bundle64.plain(prompt_tokens[1][:10], 20).token_ids[:8]


def iter_steps(engine):
    while engine.has_unfinished:
        yield from engine.step()


def test_closing_a_stream_aborts_its_request(bundle64, prompt_tokens):
    engine = bundle64.engine(max_context=96)
    pages = engine.free_pages
    stream = engine.stream(prompt_tokens[0][:16], SamplingParams(max_tokens=20))
    next(stream)
    stream.close()
    assert not engine.has_unfinished
    assert engine.free_pages == pages


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("others", [0, 2])
def test_no_iteration_is_launched_that_adds_to_nobodys_output(overlap, others):
    """None is launched behind those that are sure to complete a request, also beside longer requests."""
    engine = tiny.engine(None, overlap=overlap, max_requests=3)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    longer = SamplingParams(max_tokens=11, ignore_eos=True)
    first = engine.add_request((1, 2, 3), params)
    record = engine._requests[first]
    for _ in range(others):
        engine.add_request((3, 1), longer)
    for _ in iter_steps(engine):
        pass
    assert tuple(record.output) == tiny.plain((1, 2, 3), 8)[: len(record.output)]
    assert record.iterations == 7, "the prompt gives a token, each iteration one more"
    assert engine.stats.iterations == (11 if others else 8)


def needless(engine_of, requests):
    """Iterations behind the last one that a request needed, and those that were needed, over many lengths of output."""
    launched = needed = 0
    for most in range(2, 14):
        engine = engine_of()
        ids = [
            engine.add_request((3, 1, 4 + each), SamplingParams(max_tokens=most, ignore_eos=True)) for each in range(requests)
        ]
        records = [engine._requests[request] for request in ids]
        for _ in iter_steps(engine):
            pass
        launched += engine.stats.iterations - 1  # but for the prompts' own
        needed += max(record.iterations for record in records)
    return launched - needed, needed


@pytest.mark.sample(1)
@pytest.mark.parametrize(("requests", "most", "blindly"), [(1, 0, 9), (2, 3, 8), (3, 3, 7)])
def test_results_that_may_be_the_last_are_waited_for(requests, most, blindly, monkeypatch):
    """An accepted draft may end a request while the next iteration is under way, which nobody needs then."""

    def engine():
        return tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=3), max_requests=4, overlap=True)

    wasted, needed = needless(engine, requests)
    assert wasted <= most
    monkeypatch.setattr(loop, "_MAX_CHANCE_OF_END", 2.0)
    assert needless(engine, requests) == (blindly, needed)


@pytest.mark.parametrize(
    ("left", "decoding", "accepted", "chance"),
    [
        (1, 1, 3.0, 1.0),  # sure
        (2, 1, 3.0, 2 / 3),
        (4, 1, 3.0, 8 / 27),
        (5, 1, 3.0, 0.0),  # more than an iteration can bring
        (2, 1, 1.0, 0.0),  # nothing was accepted so far
        (2, 1, None, 0.6),  # nothing is known: half of the drafts
        (2, 0, 3.0, 0.0),  # nothing is under way
    ],
)
def test_how_likely_a_request_ends(left, decoding, accepted, chance):
    request = Request(0, (1, 2), SamplingParams(max_tokens=10), frozenset(), output=[7] * (10 - left))
    request.tokens_in_flight = request.decodes_in_flight = decoding
    if accepted is not None:
        request.iterations, request.verified_tokens = 5, round(5 * accepted)
    assert request.chance_of_end(4) == pytest.approx(chance)


def test_only_what_a_guide_refuses_counts_as_refused():
    for most, reason in ((1, FinishReason.LENGTH), (2, None)):
        output = Request(0, (1, 2), SamplingParams(max_tokens=most), frozenset()).append_tokens((5,), ())
        assert (output.finish_reason, output.refused) == (reason, False)


@pytest.mark.parametrize("before", range(4))
def test_an_image_is_where_its_first_placeholder_is(before):
    vision = SimpleNamespace(image_token=7, video_token=8)
    media = SimpleNamespace(grid=SimpleNamespace(features=lambda _: 3))
    found = _spans([media, media], (*(1,) * before, 7, 7, 7, 2, 8, 8, 8), vision)
    assert found == (range(before, before + 3), range(before + 4, before + 7))


def test_pages_are_registered_when_they_are_full_alone(bundle64, prompt_tokens, monkeypatch):
    """Each call joins the prompt and the output: at 128k tokens this takes longer than an iteration of the device."""
    engine = bundle64.engine(max_context=96, page_size=16, prefix_cache=True)
    calls, register = [], engine._scheduler.pages.register
    monkeypatch.setattr(engine._scheduler.pages, "register", lambda *given: calls.append(given[2]) or register(*given))
    engine.generate([prompt_tokens[0][:20]], SamplingParams(max_tokens=40, ignore_eos=True))
    assert [filled // 16 for filled in calls] == [1, 2, 3]
    assert engine.load.cached_pages == 3
