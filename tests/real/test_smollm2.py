"""A real model: what SmolLM2-135M answers equals transformers' answers, with and without speculation."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest

from model.gguf_files import write_gguf
from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import SMOLLM2_HEADS, bundled
from outrider.engine import JsonSchema
from outrider.model import find_checkpoint
from outrider.model.media.chat_template import ChatTemplate
from real.conftest import Judge

pytestmark = pytest.mark.slow
TEXT = "The river Thames flows through London. It is the longest river in England, and it has carried trade for ages."
CODE = "def add(a, b):\n    return a + b\n"
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "What is 12 plus 30? Show your work.",
    f"Quote this text: {TEXT}",
    f"Add a docstring to this function:\n\n```python\n{CODE}```",
    "Répète : « naïve café, où est l'été ? »",
    "Repeat: 日本語 🙂 Ünïcödé",
    "Give me a list of three fruits.",
)
CITIES = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Delhi", "Tokyo", "Quito", "Accra", "Berne")
TASKS = ("Where is {}?", "Name a river near {}.", "Write a sentence about {}.", "Spell {}.", "Is {} large?")
FIFTY = tuple(task.format(city) for task in TASKS for city in CITIES)
HEADS = {kind: name for name, kind in SMOLLM2_HEADS.items()}
PROPOSERS = ("none", "ngram", "suffix", *HEADS)
TOKENS = 24


def load_engine(directory, speculate="none", **settings):
    draft = bundled(HEADS[speculate]) if speculate in HEADS else None
    config = EngineConfig(max_requests=8, max_context=512, dtype="float32", draft_tokens=3, **settings)
    return Engine.from_checkpoint(directory, "cpu", draft_dir=draft, speculate=speculate, config=config)


@pytest.fixture(scope="module")
def engines(checkpoint):
    """One engine for each proposer, made when it's asked for."""
    made = {}

    def engine(kind):
        if kind not in made:
            made[kind] = load_engine(checkpoint, kind)
        return made[kind]

    yield engine
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def answers(judge):
    """Transformers' answers to :data:`QUESTIONS`: prompt, tokens, log-probabilities."""
    prompts = [judge.prompt(question) for question in QUESTIONS]
    return [(prompt, *judge.answer(prompt, TOKENS)) for prompt in prompts]


def test_the_model_knows_the_capital_of_france(judge, answers):
    assert "The capital of France is Paris." in judge.tokenizer.decode(answers[0][1])


def test_the_chat_template_gives_the_same_tokens(checkpoint, judge):
    template = ChatTemplate.from_checkpoint(checkpoint)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🙂"}]
    turns += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "  Bye\n"}]
    for messages in (turns[1:2], turns[:2], turns):
        expected = judge.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert template.tokens(messages) == expected
    for question in QUESTIONS:
        assert template.tokens([{"role": "user", "content": question}]) == judge.prompt(question)


@pytest.mark.parametrize("kind", PROPOSERS)
def test_answers_are_transformers_answers(engines, answers, kind):
    found = engines(kind).generate([prompt for prompt, _, _ in answers], SamplingParams(max_tokens=TOKENS))
    assert [list(each.token_ids) for each in found] == [tokens for _, tokens, _ in answers]
    if kind in HEADS:
        assert sum(each.acceptance_length for each in found) / len(found) > 1.3


@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_logprobs(engines, answers, kind):
    found = engines(kind).generate([prompt for prompt, _, _ in answers], SamplingParams(max_tokens=TOKENS, logprobs=5))
    for each, (_, tokens, rows) in zip(found, answers, strict=True):
        for entry, token, row in zip(each.logprobs, tokens, rows, strict=True):
            assert entry.logprob == pytest.approx(row[token].item(), abs=5e-3)  # activations have 16 bits
            best = row.topk(5)
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=5e-3)


@pytest.mark.parametrize("kind", ["none", "ngram", "eagle3"])
@pytest.mark.parametrize("stop", [" Paris", "is", "capital of", "."])
def test_stop_strings_cut_where_they_begin(engines, judge, answers, kind, stop):
    prompt, tokens, _ = answers[0]
    whole = judge.tokenizer.decode(tokens, skip_special_tokens=True)
    (found,) = engines(kind).generate([prompt], SamplingParams(max_tokens=TOKENS, stop=(stop,)))
    assert stop in whole
    assert found.text == whole[: whole.index(stop)]


@pytest.mark.parametrize("kind", PROPOSERS)
def test_streamed_pieces_hold_whole_characters(engines, judge, answers, kind):
    for prompt, tokens, _ in answers[5:7]:
        pieces = [output.text or "" for output in engines(kind).stream(prompt, SamplingParams(max_tokens=TOKENS))]
        whole = judge.tokenizer.decode(tokens, skip_special_tokens=True)
        assert "".join(pieces) == whole
        assert len([piece for piece in pieces if piece]) > 2


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def test_a_schema_gives_valid_json_with_every_proposer(engines, judge):
    prompt = judge.prompt("Describe Paris as JSON with the keys city and people.")
    params = SamplingParams(max_tokens=60, guide=JsonSchema(SCHEMA))
    texts = {kind: engines(kind).generate([prompt], params)[0].text for kind in PROPOSERS}
    assert set(texts.values()) == {texts["none"]}
    jsonschema.validate(json.loads(texts["none"]), SCHEMA)


def test_quoting_a_text_accepts_most_drafts(engines, judge):
    """What n-gram drafts are for, and the task of the demo: the answer is in the prompt."""
    task = (Path(__file__).parents[2] / "examples" / "demo" / "task.txt").read_text()
    (found,) = engines("ngram").generate([judge.prompt(task)], SamplingParams(max_tokens=TOKENS))
    assert found.acceptance_length > 2.5


@pytest.mark.parametrize("kind", ["file", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_0"])
def test_fifty_prompts_for_each_type(tmp_path, monkeypatch, checkpoint, judge, kind):
    """The library gguf quantizes and dequantizes; transformers gets its values."""
    directory, other = checkpoint, judge
    if kind != "file":
        monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
        monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
        other = Judge(judge.tokenizer, copy.deepcopy(judge.model))
        write_gguf(tmp_path / "m.gguf", other.model, kind=kind)
        directory = find_checkpoint(tmp_path / "m.gguf")
    prompts = [judge.prompt(question) for question in FIFTY]
    engine = load_engine(directory, "ngram")
    end = judge.model.config.eos_token_id  # a written file names none
    found = engine.generate(prompts, SamplingParams(max_tokens=8, stop_token_ids=(end,)))
    engine.close()
    assert [list(each.token_ids) for each in found] == [other.answer(prompt, 8)[0] for prompt in prompts]
