"""Calls of tools, read from what a model writes."""

import json

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from outrider.serve.api.format_reader import FormatReader
from outrider.serve.api.model_formats import ModelFormat
from outrider.serve.api.request_fields import ChatRequest
from outrider.serve.api.responses import ApiError
from outrider.serve.api.tool_calls import (
    NamedToolReader,
    ParsedResponseReader,
    RequestToolCalls,
)
from serve.reading import cut, put_together
from serve.response_templates import TOOL_CALL_FORMATS

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
NO_FORMAT = ModelFormat("none", "none")
WRITTEN = {
    "hermes": (
        "<|im_start|>assistant\n",
        '<think>let me see</think>\n<tool_call>\n{"name": "look", "arguments": {"n": 3}}\n</tool_call>\n'
        '<tool_call>{"name": "look", "arguments": {"n": 4}}</tool_call>',
    ),
    "mistral": ("[/INST]", '[TOOL_CALLS][{"name": "look", "arguments": {"n": 3}}, {"name": "look", "arguments": {"n": 4}}]'),
    "llama3-json": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '{"name": "look", "parameters": {"n": 3}}',
    ),
}


def read(reader, text, size):
    return put_together(reader, cut(text, size))[0]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_known_formats(name, size):
    prompt, text = WRITTEN[name]
    reader = ParsedResponseReader(TOOL_CALL_FORMATS[name], f"before{prompt}", [TOOL])
    made = read(reader, text, size)
    arguments = [3] if name == "llama3-json" else [3, 4]
    assert [(call["name"], json.loads(call["arguments"])) for call in made["calls"]] == [
        ("look", {"n": n}) for n in arguments
    ]
    assert made["content"].strip() == ""
    assert made["reasoning_content"] == ("let me see" if name == "hermes" else "")
    assert reader.has_calls


def test_a_call_that_was_cut_off_is_content():
    reader = FormatReader(ModelFormat("json", "none"), "", [TOOL])
    assert reader.feed('[{"name": "lo', last=True) == {"content": '[{"name": "lo'}
    assert not reader.has_calls


@pytest.mark.parametrize("size", [1, 4, 100])
def test_the_arguments_of_a_named_call_come_as_they_are_written(size):
    made = read(NamedToolReader("look"), '{"n": 12}', size)
    assert made["calls"] == [{"name": "look", "arguments": '{"n": 12}'}]


def asked(**more):
    return ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], **more)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("tool_format", [ModelFormat("hermes", "think"), TOOL_CALL_FORMATS["hermes"]])
def test_an_answer_in_a_format_or_calls(tool_format, size):
    """Agents offer their tools in the request that names the format of the answer."""
    calls = RequestToolCalls(asked(tools=[TOOL], response_format={"type": "json_object"}), tool_format)
    assert calls.guide.unless == ("<tool_call>",)
    call = WRITTEN["hermes"][1].partition("\n")[2]
    calls.read_prompt("<|im_start|>assistant\n<think>\n")
    made = read(calls.create_reader("<|im_start|>assistant\n<think>\n"), f"so</think>\n{call}", size)
    assert [each["arguments"] for each in made["calls"]] == ['{"n": 3}', '{"n": 4}']
    assert made["reasoning_content"] == "so"
    if isinstance(tool_format, ModelFormat):
        text = f'{{"a": "{call}"}}'
        assert read(calls.create_reader(""), f"</think>\n\n{text}", size) == {
            "content": text,
            "reasoning_content": "",
            "calls": [],
        }
    for none in (
        RequestToolCalls(asked(tools=[TOOL], tool_choice="none", response_format={"type": "json_object"}), tool_format),
        RequestToolCalls(asked(tools=[TOOL], response_format={"type": "json_object"}), ModelFormat("harmony", "harmony")),
        RequestToolCalls(asked(tools=[TOOL], response_format={"type": "json_object"}), ModelFormat("json", "none")),
    ):
        assert none.guide.unless == ()


def test_what_is_asked_for_by_a_choice_of_tools():
    assert RequestToolCalls(asked(), NO_FORMAT).guide is None
    assert '"minItems": 1' in RequestToolCalls(asked(tools=[TOOL], tool_choice="required"), NO_FORMAT).guide.schema
    named = {"type": "function", "function": {"name": "look"}}
    assert json.loads(RequestToolCalls(asked(tools=[TOOL], tool_choice=named), NO_FORMAT).guide.schema)["properties"] == {
        "n": {"type": "integer"}
    }
    for wrong in (
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ):
        with pytest.raises(ApiError) as refused:
            RequestToolCalls(asked(**wrong), NO_FORMAT)
        assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {"description": "no type"},
        {"anyOf": [{"description": "no type"}, {"type": "object"}]},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"description": "no type"}}},
    ],
)
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=["required", "named"]
)
def test_arguments_of_an_enforced_call_are_an_object(parameters, choice):
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    guide = RequestToolCalls(asked(tools=[tool], tool_choice=choice), NO_FORMAT).guide
    grammar = xgrammar.Grammar.from_json_schema(guide.compiler_text)
    for arguments in ("{}", "null", "1", '"a"', "[]"):
        text = f'[{{"name": "look", "arguments": {arguments}}}]' if choice == "required" else arguments
        assert _is_grammar_accept_string(grammar, text) == (arguments == "{}"), arguments
