"""Chats with reasoning, tools, formats and stop strings in every combination, and what clients send back."""

import json

import pytest

from outrider import SamplingParams
from outrider.engine.guides.grammars import Grammars
from outrider.serve.api.model_formats import ModelFormat
from outrider.serve.api.request_fields import ChatRequest
from outrider.serve.api.tool_calls import RequestToolCalls
from serve.reading import chunks_of
from serve.test_api import ASKED, CHAT

TOOL = {
    "type": "function",
    "function": {
        "name": "pick",
        "strict": True,
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    },
}
NAMED = {"type": "function", "function": {"name": "pick"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["yes", "no"]}}}

# The prompt opens the reasoning, and the model ends it by itself.
REASONS = {
    "start_anchor": "user: ",
    "fields": {
        "reasoning_content": {"open": "assistant:", "close": "simple"},
        "content": {},
        "tool_calls": {"open": "<|never|>", "close": "<|/never|>", "content": "json", "transform": {"function": "{content}"}},
    },
}


@pytest.fixture
def template(server, monkeypatch):
    """Gives the server another response template."""

    def use(fields):
        prompter = server.service.prompter
        monkeypatch.setattr(prompter, "answer_format", fields)
        monkeypatch.setattr(prompter, "marker_tokens", prompter.tokenizer.spelled_in(json.dumps(fields["fields"])))

    return use


def streamed(http, body):
    """The message of a stream, put together."""
    message = {"content": "", "reasoning_content": "", "arguments": ""}
    answer = http.post("/v1/chat/completions", json={**body, "stream": True})
    for chunk in chunks_of(answer):
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            message["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "text"),
        pytest.param({"tools": [TOOL], "tool_choice": "none"}, "text", marks=pytest.mark.slow),
        pytest.param({"tools": [TOOL]}, "text", marks=pytest.mark.slow),
        pytest.param(
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, "call", marks=pytest.mark.slow
        ),
        pytest.param({"tools": [TOOL], "tool_choice": NAMED}, "call", marks=pytest.mark.slow),
        pytest.param({"response_format": FORMAT}, "json", marks=pytest.mark.slow),
        ({"tools": [TOOL], "response_format": FORMAT}, "json"),
    ],
    ids=["free", "none", "auto", "required", "named", "format", "auto, format"],
)
def test_reasoning_and_content_are_apart(http, reference, template, fields, kind):
    template(REASONS)
    body = {
        **CHAT,
        "temperature": 0,
        "max_tokens": 16 if kind == "text" else 60,
        "messages": [{"role": "user", "content": "write a loop"}],
        **fields,
    }
    prompt = reference.tokenizer.encode("user: write a loop\nassistant:")
    (free,) = reference.generate([prompt], SamplingParams(max_tokens=16))
    reasoning, _, rest = reference.tokenizer.decode(free.token_ids).partition("simple")
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    calls = message.get("tool_calls", ())
    assert message["reasoning_content"] == reasoning
    if kind == "text":
        assert message["content"] == rest
    elif kind == "json":
        assert json.loads(message["content"]) in ("yes", "no")
    else:
        assert [json.loads(call["function"]["arguments"])["n"] in (1, 2) for call in calls]
    assert bool(calls) == (kind == "call")
    told = streamed(http, body)
    assert told["reasoning_content"] == reasoning
    assert told["content"] == (message["content"] or "")
    assert told["arguments"] == "".join(call["function"]["arguments"] for call in calls)


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}])
def test_a_stop_string_changes_no_markers(http, reference, template, fields):
    """Special tokens that the template names have text, whatever else the request asks for."""
    marker = reference.tokenizer.spellings()[1]
    template(
        {"start_anchor": "user: ", "fields": {"content": {}, "reasoning_content": {"open": f"{marker}think", "close": "x"}}}
    )
    body = {**CHAT, "temperature": 0, "max_tokens": 3, "logit_bias": {"1": 100}, **fields}

    def content(**more):
        answer = http.post("/v1/chat/completions", json={**body, **more})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    assert content() == content(stop=["never"]) == (marker * 3, "length")
    assert content(stop=[marker]) == ("", "stop")


def test_special_tokens_without_a_template_have_no_text(http):
    body = {**CHAT, "temperature": 0, "max_tokens": 3, "logit_bias": {"1": 100}}
    for more in ({}, {"stop": ["never"]}, {"tools": [TOOL]}):
        assert http.post("/v1/chat/completions", json={**body, **more}).json()["choices"][0]["message"]["content"] == ""


@pytest.fixture(scope="module")
def nested_tools():
    """A tool of nested pydantic models, and one whose parameters refer to themselves and have properties with odd names."""
    import openai
    from pydantic import BaseModel

    class Inner(BaseModel):
        a: int

    class Outer(BaseModel):
        inner: list[Inner]

    following = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    chain = {"type": "object", "properties": {"default": following}, "required": ["default"], "additionalProperties": False}
    return [openai.pydantic_function_tool(Outer), {"type": "function", "function": {"name": "chain", "parameters": chain}}]


CALLS = {
    '{"name": "Outer", "arguments": {"inner": [{"a": 3}]}}': True,
    '{"name": "Outer", "arguments": {"inner": [{"b": 3}]}}': False,
    '{"name": "chain", "arguments": {"default": {"default": null}}}': True,
    '{"name": "chain", "arguments": {"default": [{"name": "chain", "arguments": {"default": null}}]}}': False,
}


def test_references_of_a_required_tool_stay_its_own(reference, nested_tools):
    import xgrammar

    request = ChatRequest(**CHAT, tools=nested_tools, tool_choice="required")
    grammars = Grammars(reference.tokenizer, vocabulary=reference.tokenizer.vocab_size, ends=(0,))
    compiled = grammars.compile(RequestToolCalls(request, ModelFormat("none", "none")).guide)
    for call, fits in CALLS.items():
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        assert (matcher.accept_string(f"[{call}]") and matcher.is_terminated()) == fits, call


def test_tools_of_nested_models_are_served(http, nested_tools):
    for choice in ("required", {"type": "function", "function": {"name": "Outer"}}):
        body = {**CHAT, "tools": nested_tools, "tool_choice": choice}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_the_rest_of_required_calls_that_a_limit_cut_off_is_no_content():
    request = ChatRequest(**CHAT, tools=[TOOL], tool_choice="required")
    reader = RequestToolCalls(request, ModelFormat("none", "none")).create_reader("")
    pieces = ['[{"name": "pick", "arguments": {"n": 1}}', ",\n", '{"na']
    deltas = [reader.feed(piece, last=piece is pieces[-1]) for piece in pieces]
    assert "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())) == '{"n": 1}'
    assert not any("content" in delta for delta in deltas)


def test_what_the_official_client_dumps_is_accepted(client):
    messages = [{"role": "user", "content": "x"}]
    asked = {"model": "m", "max_tokens": 20, "temperature": 0, "tools": [TOOL]}
    for choice in (NAMED, "none"):
        answer = client.chat.completions.create(messages=messages, tool_choice=choice, **asked).choices[0].message
        messages.append(answer.model_dump())
        if answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "3"})
    parsed = client.chat.completions.parse(messages=messages, tool_choice=NAMED, **asked).choices[0].message
    messages += [parsed.model_dump(), answer.to_dict(), {**answer.model_dump(), "annotations": []}]
    assert client.chat.completions.create(messages=messages, **asked).choices[0].finish_reason


def test_null_is_absent(http):
    body = {**CHAT, **dict.fromkeys(("tools", "n", "stop", "audio", "stream_options", "no_such_field"))}
    body["messages"] = [{"role": "user", "content": "x", "annotations": None, "tool_calls": None}]
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    body["messages"][0]["annotations"] = []
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["code"] == "unknown_parameter"
    assert http.post("/v1/chat/completions", json={**CHAT, "no-such": 1}).json()["error"]["param"] == "no-such"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_may_allow_some_of_the_tools(http, mode):
    other = {"type": "function", "function": {**TOOL["function"], "name": "other"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    body = {**CHAT, "max_tokens": 80, "temperature": 0, "tools": [TOOL, other], "tool_choice": choice}
    assert [tool.function.name for tool in ChatRequest.model_validate(body).tools] == ["pick"]
    calls = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"].get("tool_calls") or ()
    assert {call["function"]["name"] for call in calls} == ({"pick"} if mode == "required" else set())
    choice["allowed_tools"]["tools"] = []
    assert http.post("/v1/chat/completions", json=body).status_code == (400 if mode == "required" else 200)
    choice["allowed_tools"]["tools"] = [NAMED, {"type": "function", "function": {"name": "othr"}}]
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], "'othr', which isn't among the tools" in error["message"]) == ("tool_choice", True)


def test_auto_without_tools_has_no_effect(http):
    for tools in ({}, {"tools": []}):
        assert http.post("/v1/chat/completions", json={**CHAT, **tools, "tool_choice": "auto"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "body", "said"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, b'{"model": "m"}', "Content-Type: application/json"),
        ({"content-type": "application/json"}, b"[1]", "no JSON object"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, b"\x1f\x8b\x08\xff", "without Content-Encoding"),
        ({"content-type": "application/json"}, b'{"max_tokens": %s}' % (b"9" * 5000), "huge numbers"),
    ],
    ids=["form", "list", "gzip", "huge"],
)
def test_the_refusal_of_a_body_says_what_to_send(http, headers, body, said):
    answer = http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_is_the_prompt_as_sent(http, reference, stream):
    def text(prompt):
        body = {**ASKED, "prompt": prompt, "max_tokens": 1, "echo": True, "stream": stream}
        answer = http.post("/v1/completions", json=body)
        return "".join(chunk["choices"][0]["text"] for chunk in (chunks_of(answer) if stream else [answer.json()]))

    prompt = "<|endoftext|>after"
    assert text(prompt).startswith(prompt)
    assert text(reference.tokenizer.encode(prompt)) == text(prompt)
