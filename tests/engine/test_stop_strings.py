"""Stop strings: found across token boundaries, in text that comes in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.engine.requests.request import FinishReason
from outrider.engine.requests.sampling import StopText
from outrider.model import StreamDecoder, Tokenizer
from outrider.speculative.eagle import EagleProposer
from outrider_proof.tiny import plain_config

pieces = st.lists(st.text("abc", max_size=3), max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces, stops, st.integers(0, 3))
def test_the_text_ends_before_the_first_stop_that_is_completed(parts, wanted, overlook):
    watch = StopText(StreamDecoder(lambda ids: "".join(parts[i] for i in ids)), wanted, overlook=overlook)
    given_out, used, stopped = "", 0, False
    for index in range(len(parts)):
        stopped, used = watch.push(index), index + 1
        given_out += watch.pop_certain_text()
        assert "".join(parts[:used]).startswith(given_out)
        if stopped:
            break
    stopped = watch.finish() or stopped
    given_out += watch.pop_certain_text()
    start = len("".join(parts[:overlook]))
    text = ""
    for index, part in enumerate(parts):
        text += part
        found = [at for stop in wanted if (at := text.find(stop, start)) >= 0]
        if found and index >= overlook:
            assert (given_out, used, stopped) == (text[: min(found)], index + 1, True)
            return
    assert (given_out, stopped) == ("".join(parts), False)


@pytest.fixture(scope="module")
def engine(bundle64, bundled_dir):
    return Engine(
        bundle64.target,
        bundle64.backend,
        proposer=EagleProposer(bundle64.head, draft_tokens=4),
        config=plain_config(dtype="float64", max_context=160, overlap=True),
        tokenizer=Tokenizer.from_checkpoint(bundled_dir / "target"),
    )


def test_a_stop_string_across_tokens_ends_the_request(engine, bundle64, prompt_tokens):
    checked = 0
    for tokens in prompt_tokens[:6]:
        prompt = tokens[:40]
        plain = bundle64.plain(prompt, 40).token_ids
        text = engine.tokenizer.decode(plain)
        middle = len(text) // 2
        stop = text[middle : middle + 9]
        if len(stop) < 9 or text.find(stop) != middle:
            continue
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=40, stop=stop))
        assert result.text == text[:middle]
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids == plain[: len(result.token_ids)]
        assert stop in engine.tokenizer.decode(result.token_ids)
        assert stop not in engine.tokenizer.decode(result.token_ids[:-1])
        checked += 1
        if checked == 2:
            return
    pytest.fail(f"only {checked} texts have a stop string of their own")


def test_a_stop_that_never_comes_changes_nothing(engine, bundle64, prompt_tokens):
    prompt = prompt_tokens[0][:40]
    outputs = list(engine.stream(prompt, SamplingParams(max_tokens=30, stop=("\N{SNOWMAN}", "zzzzzz"))))
    plain = bundle64.plain(prompt, 30).token_ids
    assert tuple(token for output in outputs for token in output.tokens) == plain
    assert "".join(output.text for output in outputs) == engine.tokenizer.decode(plain)


def test_an_aborted_request_gives_out_what_it_held_back(engine, prompt_tokens):
    prompt = prompt_tokens[0][:40]
    plain = engine.generate([prompt], SamplingParams(max_tokens=6))[0]
    text = engine.tokenizer.decode(plain.token_ids)
    request = engine.add_request(prompt, SamplingParams(max_tokens=30, stop=text[-3:] + "\N{SNOWMAN}"))
    collected, tokens = "", []
    while len(tokens) < 4:
        for output in engine.step():
            collected += output.text
            tokens += output.tokens
    engine.abort(request)
    collected += "".join(output.text for output in engine.step() if output.request_id == request)
    assert collected == engine.tokenizer.decode(tokens)


def test_stop_strings_need_a_tokenizer(bundle64):
    with pytest.raises(ConfigError, match="without a tokenizer"):
        bundle64.engine(max_context=96).add_request((1, 2), SamplingParams(stop="x"))
