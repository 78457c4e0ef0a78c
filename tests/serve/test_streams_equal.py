"""A stream has the text, the reasoning and the calls of the whole answer, for every reader, every text and every cut."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outrider.serve.api.model_formats import ModelFormat
from outrider.serve.api.request_fields import ChatRequest
from outrider.serve.api.tool_calls import RequestToolCalls
from serve.reading import cut, put_together
from serve.response_templates import TOOL_CALL_FORMATS
from serve.test_calls import NO_FORMAT, TOOL, WRITTEN

OTHER = {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "look"}}
FORMAT = {"type": "json_object"}
CHOICES = [
    {},
    {"tools": [TOOL, OTHER]},
    {"tools": [TOOL, OTHER], "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": NAMED},
    {"response_format": FORMAT},
    {"tools": [TOOL], "response_format": FORMAT},
]
PROMPTS = {name: [f"before{anchor}" for anchor in {WRITTEN[name][0]}] for name in TOOL_CALL_FORMATS}
PROMPTS["hermes"].append("before<|im_start|>assistant\n<think>\n")
PROMPTS["family"] = PROMPTS["hermes"]
FORMATS = {**TOOL_CALL_FORMATS, "family": ModelFormat("hermes", "think"), None: NO_FORMAT}
CASES = [(name, prompt, fields) for name, prompts in PROMPTS.items() for prompt in prompts for fields in CHOICES] + [
    (None, "", fields) for fields in CHOICES
]
CODE = "class TestHandlerCompiler(unittest.TestCase):\n    <tool_call>not a call</tool_call> and more"
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "<", "</", "[", "{", "\n", " "),
    *(
        '{"name": "look", "arguments": {"n": 3}}',
        '{"name": "write", "parameters": {}}',
        '{"name": 5}',
        '{"type": "function"',
        "[]",
    ),
    *('[{"name": "look", "arguments": {}}]', '[{"name": "look"', '{"arguments": {}}', "null", "class A(B):", CODE),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=8).map("".join)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def pieces_of(text, sizes):
    """The text in pieces of these sizes, again and again; the last is empty for an even number of sizes."""
    pieces, start, number = [], 0, 0
    while start < len(text):
        size = sizes[number % len(sizes)]
        pieces.append(text[start : start + size])
        start, number = start + size, number + 1
    return pieces if len(sizes) % 2 and pieces else [*pieces, ""]


def read(case, pieces):
    """What a client puts together, and whether the finish reason is one of calls."""
    name, prompt, fields = case
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], **fields)
    calls = RequestToolCalls(request, FORMATS[name])
    calls.read_prompt(prompt)
    reader = calls.create_reader(prompt)
    made, _ = put_together(reader, pieces)
    return {**made, "called": reader.has_calls}


@pytest.mark.parametrize("examples", [60, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_stream_equals_the_whole(examples):
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @example(case=("hermes", PROMPTS["hermes"][0], {"tools": [TOOL]}), text=CODE, sizes=[4])
    @example(case=("hermes", PROMPTS["hermes"][1], {"response_format": FORMAT}), text="so </think>\n{}", sizes=[4])
    @given(case=st.sampled_from(CASES), text=TEXTS, sizes=CUTS)
    def run(case, text, sizes):
        whole = read(case, [text])
        assert read(case, pieces_of(text, sizes)) == whole
        if case[2].get("parallel_tool_calls") is False:
            assert len(whole["calls"]) <= 1

    run()


@pytest.mark.parametrize("name", ["hermes", "family"])
def test_without_parallel_calls_an_answer_has_one(name):
    text = '<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>' * 2
    for parallel, count in ((True, 2), (False, 1)):
        found = read((name, PROMPTS[name][0], {"tools": [TOOL], "parallel_tool_calls": parallel}), [text])
        assert [call["name"] for call in found["calls"]] == ["look"] * count


@pytest.mark.parametrize("examples", [25, pytest.param(5000, marks=pytest.mark.slow)])
def test_text_without_a_call_or_reasoning_is_content_to_the_letter(examples):
    """What can't be read as a call stays, with its markers."""

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @example(name="hermes", text=CODE, sizes=[4])
    @given(name=st.sampled_from([*TOOL_CALL_FORMATS]), text=TEXTS.filter(lambda text: "<think>" not in text), sizes=CUTS)
    def run(name, text, sizes):
        found = read((name, PROMPTS[name][0], {"tools": [TOOL]}), pieces_of(text, sizes))
        if not found["calls"]:
            assert found["content"] == text
        assert not found["calls"] or '"name": "' in text

    run()


# -- reasoning ---------------------------------------------------------------------------------------------------------

OPENED = PROMPTS["hermes"][1]


@pytest.mark.parametrize("name", ["hermes", "family"])
@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("fields", "written", "content", "called"),
    [
        ({}, "the answer", "the answer", False),
        ({}, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", False),
        ({"tools": [TOOL]}, "the answer", "the answer", False),
        ({"tools": [TOOL]}, '<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>', "", True),
        ({"tools": [TOOL], "tool_choice": "none"}, "the answer", "the answer", False),
        ({"tools": [TOOL], "tool_choice": "required"}, '[{"name": "look", "arguments": {"n": 1}}]', "", True),
        ({"tools": [TOOL], "tool_choice": NAMED}, '{"n": 1}', "", True),
        ({"response_format": FORMAT}, '{"a": "<think>"}', '{"a": "<think>"}', False),
        ({"tools": [TOOL], "response_format": FORMAT}, '{"a": 1}', '{"a": 1}', False),
        (
            {"tools": [TOOL], "response_format": FORMAT},
            '<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>',
            "",
            True,
        ),
    ],
)
def test_reasoning_that_the_prompt_opens_is_no_content(fields, written, content, called, size, name):
    case, text = (name, OPENED, fields), f"let me see</think>{written}"
    found = read(case, cut(text, size))
    assert found["reasoning_content"] == "let me see"
    assert found["content"] == content
    assert [json.loads(call["arguments"]) for call in found["calls"]] == ([{"n": 1}] if called else [])


def test_a_guide_begins_after_reasoning_only_if_the_prompt_opens_it():
    for prompt, after in ((OPENED, "</think>"), (PROMPTS["hermes"][0], ""), (f"{OPENED}x</think>", "")):
        for fields in CHOICES[4:]:
            request = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], **fields)
            for name in ("hermes", "family"):
                calls = RequestToolCalls(request, FORMATS[name])
                calls.read_prompt(prompt)
                assert calls.guide.after == after


def test_without_a_template_text_is_content():
    assert read((None, "", {"tools": [TOOL]}), [f"<think>{CODE}", "[TOOL_CALLS]"])["content"] == f"<think>{CODE}[TOOL_CALLS]"
