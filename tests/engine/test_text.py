"""Text in the Python API: prompts and outputs as text, names instead of objects, and errors for values of a wrong type."""

import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from outrider import Engine, EngineConfig, OutriderError, SamplingParams
from outrider.bundled import BUNDLED_HEADS, bundled
from outrider.device import ConfigError, StepMode
from outrider.engine.config import DRAFT_LENGTHS, DTYPES, KV_DTYPES
from outrider.model import DRAFT_FORMATS, DraftFormat
from outrider_proof.tiny import plain_config

PROMPT = "def read("
CONFIG = plain_config(max_context=96, overlap=True)


@pytest.fixture(scope="module")
def engine():
    return Engine.from_checkpoint(str(bundled("target")), "cpu", draft_dir=bundled("eagle"), speculate="eagle", config=CONFIG)


def test_a_prompt_may_be_a_text(engine):
    params = SamplingParams(max_tokens=12)
    tokens = engine.tokenizer.encode(PROMPT)
    (expected,) = engine.generate([tokens], params)
    assert expected.text == engine.tokenizer.decode(expected.token_ids)
    for prompts in (PROMPT, [PROMPT], (tokens,)):
        (found,) = engine.generate(prompts, params)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    outputs = list(engine.stream(PROMPT, params))
    assert "".join(output.text for output in outputs) == expected.text
    request = engine.add_request(PROMPT, params)
    pieces = []
    while engine.has_unfinished:
        pieces += [output.text for output in engine.step() if output.request_id == request]
    assert "".join(pieces) == expected.text


def test_text_is_read_late_and_in_any_order(engine):
    """An output keeps its text; none is decoded that nobody reads."""
    outputs = list(engine.stream(PROMPT, SamplingParams(max_tokens=12)))
    last = outputs[-1].text
    whole = "".join(output.text for output in outputs)
    assert whole.endswith(last)
    assert whole == "".join(output.text for output in outputs)
    unread = list(engine.stream(PROMPT, SamplingParams(max_tokens=4)))
    assert unread[0].transcript._decoder is None


def test_samples_and_stop_tokens_have_text_of_their_own(engine):
    params = SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=3)
    both = engine.generate(PROMPT, params)
    assert [each.text for each in both] == [engine.tokenizer.decode(each.token_ids) for each in both]
    first = engine.generate(PROMPT, SamplingParams(max_tokens=8))[0]
    stop = first.token_ids[3]
    assert stop not in first.token_ids[:3]
    (stopped,) = engine.generate(PROMPT, SamplingParams(max_tokens=8, stop_token_ids=(stop,)))
    assert stopped.text == engine.tokenizer.decode(first.token_ids[:3])


def test_an_engine_without_a_tokenizer_has_no_text(bundle32):
    without = bundle32.engine(max_context=64)
    assert without.generate([[5, 6]], SamplingParams(max_tokens=2))[0].text is None
    assert next(without.stream([5, 6], SamplingParams(max_tokens=2))).text is None
    with pytest.raises(ConfigError, match="built without a tokenizer"):
        without.generate(PROMPT)


WRONG = [
    ({"model_dir": 5}, "model_dir is 5 .a int.; expected str or Path"),
    ({"backend": 5}, "backend is 5 .a int.; expected str or Backend"),
    ({"backend": "tpu"}, "tpu"),
    ({"draft_dir": ["x"]}, "draft_dir is .'x'. .a list."),
    ({"speculate": None}, "speculate is None .a NoneType.; expected str"),
    ({"config": {"max_requests": 1}}, "config is .* .a dict.; expected EngineConfig or None"),
    ({"quantized": 8}, "quantized is 8 .a int.; expected str"),
    ({"draft_weights": ["fp8"]}, "draft_weights is .'fp8'. .a list.; expected str or None"),
    ({"draft_vocabulary": 1.5}, "draft_vocabulary is 1.5"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_arguments_of_a_wrong_type(fields, message):
    given = {"model_dir": bundled("target"), "backend": "cpu", "speculate": "eagle", "draft_dir": bundled("eagle")} | fields
    with pytest.raises(OutriderError, match=message):
        Engine.from_checkpoint(given.pop("model_dir"), given.pop("backend"), **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "prompts is 5; expected a text, or a sequence"),
        (([1, 2, 3],), "the prompt is 1 .a int.; expected token ids"),
        ((b"text",), "the prompt is .*expected token ids"),
        ((PROMPT, {"max_tokens": 3}), "the sampling parameters are a dict; expected SamplingParams"),
        ((PROMPT, [3]), "the sampling parameters are a int; expected SamplingParams"),
    ],
)
def test_prompts_and_parameters_of_a_wrong_type(engine, arguments, message):
    with pytest.raises(OutriderError, match=message):
        engine.generate(*arguments)


@pytest.mark.parametrize("name", ["mode", "dtype", "kv_dtype", "draft_length", "draft_tokens", "buckets", "max_requests"])
def test_config_values_of_a_wrong_type(name):
    for wrong in ("nonsense", ["x"], {"y": 1}, 1.5):
        with pytest.raises(ConfigError, match=name):
            EngineConfig(**{name: wrong})


def test_a_model_a_config_and_a_part_that_are_none(bundle32):
    with pytest.raises(ConfigError, match=r"model is .*; expected LanguageModel"):
        Engine(bundled("target"), "cpu")
    with pytest.raises(ConfigError, match=r"config is .*; expected EngineConfig or None"):
        Engine(bundle32.target, bundle32.backend, config={"max_requests": 2})
    assert all((bundled(part) / "config.json").is_file() for part in ("target", *BUNDLED_HEADS))
    with pytest.raises(ConfigError, match="no part 'head'; expected target or eagle or dflash"):
        bundled("head")


def test_literal_types_are_the_values_that_are_taken():
    hints = get_type_hints(EngineConfig)

    def names(hint):
        inner = [each for each in get_args(hint) if each is not type(None)]
        return set(get_args(inner[0]) if get_args(inner[0]) else inner)

    assert names(hints["mode"]) == {str(each) for each in StepMode}
    assert names(hints["dtype"]) == set(DTYPES)
    assert names(hints["kv_dtype"]) == set(KV_DTYPES)
    assert names(hints["draft_length"]) == set(DRAFT_LENGTHS)
    assert set(get_args(DraftFormat)) == set(DRAFT_FORMATS)


@pytest.mark.slow
def test_a_type_checker_finds_nonsense(tmp_path):
    code = tmp_path / "wrong.py"
    code.write_text('from outrider import EngineConfig\n\nEngineConfig(mode="staged")\nEngineConfig(mode="nonsense")\n')
    found = subprocess.run([sys.executable, "-m", "mypy", code], capture_output=True, text=True, check=False).stdout
    assert f"{code.name}:4" in found
    assert '"mode"' in found
    assert f"{code.name}:3" not in found
