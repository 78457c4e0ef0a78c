"""OpenAI's Responses and Anthropic's Messages by the official clients, and in the request shapes of two coding agents."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import httpx
import openai
import pytest
from openai.types.chat.chat_completion_content_part_image_param import ImageURL
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from outrider.model import Tokenizer
from outrider.serve.api.messages_api import MessagesRequest
from outrider.serve.api.request_fields import ChatRequest, ImageUrl, MessagePart, Tool, ToolFunction
from outrider.serve.api.responses import ApiError
from outrider.serve.api.responses_api import ResponsesRequest, ResponseStore
from outrider.serve.connection.engine_messages import SampleOutput
from serve.conftest import BUNDLED
from serve.running import running
from serve.scripted import ScriptedEngine

LOOK = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"], "additionalProperties": False}
TALK = "<think>where is it?</think>I look.\n<tool_call>\n" + json.dumps({"name": "look", "arguments": {"path": "a.py"}})
TALK += "\n</tool_call>"
CHATML = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


AGENTS = json.loads((Path(__file__).resolve().parents[1] / "data/requests_of_coding_agents.json").read_text())
"""Bodies of requests as Codex and Claude Code send them."""


@pytest.fixture(scope="module")
def scripted():
    """A server whose answers the test writes. Its chat template shows the format of Hermes."""
    engine = ScriptedEngine(Tokenizer.from_checkpoint(BUNDLED / "target"))
    with running(
        engine, BUNDLED / "target", chat_template=CHATML, api_keys=("key",), allow_origins=("http://page",)
    ) as server:
        server.engine = engine
        yield server


@pytest.fixture
def gpt(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(scripted):
    import anthropic  # four seconds, which a worker that runs none of these tests is spared

    with anthropic.Anthropic(base_url=scripted.url, api_key="key", max_retries=0) as client:
        yield client


def prompt_of(scripted):
    return scripted.engine.tokenizer.decode(scripted.engine.prompts[-1])


# -- Responses ---------------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "name": "look", "description": "Look.", "parameters": LOOK, "strict": True}


def test_a_response_has_reasoning_text_and_calls_whole_and_as_a_stream(scripted, gpt):
    asked = {"model": "m", "input": "go", "instructions": "Be short.", "tools": [FUNCTION], "temperature": 0}
    scripted.engine.texts = [TALK, TALK]
    scripted.engine.cached = 3
    whole = gpt.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "where is it?"
    assert whole.output_text.strip() == "I look."
    assert (whole.output[2].name, json.loads(whole.output[2].arguments)) == ("look", {"path": "a.py"})
    assert (whole.status, whole.usage.input_tokens_details.cached_tokens) == ("completed", 3)
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    with gpt.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"

    def shape(response):
        dumped = [item.model_dump(exclude={"id", "call_id", "parsed_arguments", "content"}) for item in response.output]
        return dumped, [[part.text for part in getattr(item, "content", None) or ()] for item in response.output]

    assert shape(final)[1] == shape(whole)[1]
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(arguments)) == {"path": "a.py"}
    assert "<|im_start|>system\nBe short.<|im_end|>" in prompt_of(scripted)


def test_arguments_of_an_earlier_call_are_an_object(scripted, gpt):
    """An empty text too: templates go through the names of the arguments."""
    for given, read in (("", {}), (" ", {}), ('{"a": 1}', {"a": 1})):
        scripted.engine.texts = ["yes"]
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": given}}
        messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
        gpt.chat.completions.create(model="m", messages=messages)
        assert json.dumps({"name": "look", "arguments": read}) in prompt_of(scripted)


def test_the_effort_none_turns_reasoning_off(scripted, gpt):
    scripted.engine.texts = ["1", "2", "3"]
    chat = {"model": "m", "messages": [{"role": "user", "content": "go"}], "reasoning_effort": "none"}
    gpt.responses.create(model="m", input="go", reasoning={"effort": "none"})
    assert prompt_of(scripted).endswith("assistant\n<think></think>")
    gpt.chat.completions.create(**chat)
    assert prompt_of(scripted).endswith("assistant\n<think></think>")
    gpt.chat.completions.create(**chat, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert prompt_of(scripted).endswith("assistant\n")


def test_a_response_continues_a_stored_one(scripted, gpt):
    scripted.engine.texts = [TALK, "Done.", "x", "y"]
    first = gpt.responses.create(model="m", input="go", tools=[FUNCTION])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "print()"}
    second = gpt.responses.create(model="m", input=[result], previous_response_id=first.id, tools=[FUNCTION])
    prompt = prompt_of(scripted)
    for part in ("user\ngo<", "<think>where is it?</think>", "I look.", '"path": "a.py"', "tool\nprint()<"):
        assert part in prompt, part
    assert second.output_text == "Done."
    assert gpt.responses.retrieve(second.id).output_text == "Done."
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        gpt.responses.retrieve(second.id, stream=True)
    # The client's own round trip: the output as input.
    sent = [{"role": "user", "content": "go"}, *[item.model_dump() for item in first.output], result]
    gpt.responses.create(model="m", input=sent, tools=[FUNCTION], store=False)
    assert prompt_of(scripted) == prompt
    # The round trip of Vercel's client: references to the stored items.
    scripted.engine.texts = ["z"]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    gpt.responses.create(model="m", input=[sent[0], *references, result], tools=[FUNCTION])
    assert prompt_of(scripted) == prompt
    gpt.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="send the item itself") as refused:
        gpt.responses.create(model="m", input=[sent[0], references[0]])
    assert refused.value.param == "input[1].id"
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.responses.create(model="m", input="x", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"


def test_the_input_of_a_stored_response_is_listed(scripted, gpt):
    """By the official client, whose models check the form of each item, page by page in both orders."""
    scripted.engine.texts = [TALK, "Done."]
    first = gpt.responses.create(model="m", input="go", instructions="Be brief.", tools=[FUNCTION])
    added = [{"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "print()"}]
    added += [{"id": None, "role": "user", "content": [{"type": "input_text", "text": "and?"}]}]
    second = gpt.responses.create(model="m", input=added, previous_response_id=first.id)
    items = list(gpt.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == [
        *("message", "reasoning", "message", "function_call", "function_call_output", "message")
    ]
    assert (items[0].role, items[0].content[0].text, items[-1].content[0].text) == ("user", "go", "and?")
    assert [item.id for item in items[1:4]] == [item.id for item in first.output]
    assert len({item.id for item in items}) == 6
    assert all(TypeAdapter(ResponseItem).validate_python(item.model_dump()) for item in items)
    listed = [item.id for limit in (1, 2, 3, 100) for item in gpt.responses.input_items.list(second.id, limit=limit)]
    assert listed == [item.id for item in items][::-1] * 4
    assert [item.type for item in gpt.responses.input_items.list(first.id)] == ["message"]
    for wrong, field in (({"after": "x"}, "after"), ({"limit": 0}, "limit"), ({"order": "up"}, "order")):
        with pytest.raises(openai.BadRequestError) as refused:
            gpt.responses.input_items.list(second.id, **wrong)
        assert refused.value.param == field
    with pytest.raises(openai.NotFoundError):
        gpt.responses.input_items.list("resp_other")


def test_half_a_character_in_a_stored_response_is_returned(scripted):
    """No template reads these fields, so they are no reason to refuse the request."""
    scripted.engine.texts = ["Done."]
    body = {"model": "m", "input": [{"role": "user", "content": "go", "id": "\ud800"}], "metadata": {"a": "\ud800"}}
    headers = {"authorization": "Bearer key", "content-type": "application/json"}
    made = httpx.post(f"{scripted.url}/v1/responses", content=json.dumps(body), headers=headers).json()
    url = f"{scripted.url}/v1/responses/{made['id']}"
    assert httpx.get(url, headers=headers).json() == made
    assert httpx.get(f"{url}/input_items", headers=headers).json()["last_id"] == "\ud800"


def test_a_stored_response_can_not_be_cancelled_and_a_draft_of_one_is_counted(scripted, gpt):
    scripted.engine.texts = ["Done."]
    made = gpt.responses.create(model="m", input="go")
    with pytest.raises(openai.BadRequestError, match="has ended"):
        gpt.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.cancel("resp_other")
    assert gpt.responses.input_tokens.count(model="m", input="go").input_tokens == made.usage.input_tokens
    longer = gpt.responses.input_tokens.count(model="m", input="more", previous_response_id=made.id)
    assert (longer.object, longer.input_tokens > made.usage.input_tokens) == ("response.input_tokens", True)


def test_a_response_that_max_output_tokens_ends_is_incomplete(scripted, gpt):
    scripted.engine.texts = ["one two three four five"]
    found = gpt.responses.create(model="m", input="x", max_output_tokens=2)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def events_of(answer):
    pieces = [part.split("\n") for part in answer.text.strip().split("\n\n")]
    found = [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in pieces]
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found]


def test_the_requests_of_codex(scripted):
    patch = {"name": "apply_patch", "arguments": {"input": "*** Begin Patch\n"}}
    find = {"name": "find", "arguments": {"path": "b"}}
    scripted.engine.texts = [f"<tool_call>{json.dumps(patch)}</tool_call><tool_call>{json.dumps(find)}</tool_call>"]
    answer = httpx.post(f"{scripted.url}/v1/responses", json=AGENTS["codex"], headers={"authorization": "Bearer key"})
    assert answer.status_code == 200, answer.text
    events = events_of(answer)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["name"]) for item in done] == [("custom_tool_call", "apply_patch"), ("function_call", "find")]
    assert done[0]["input"] == "*** Begin Patch\n"
    assert done[1]["namespace"] == "mcp__docs"
    assert events[-1]["type"] == "response.completed"
    assert set(events[-1]["response"]["usage"]) >= {"input_tokens", "input_tokens_details", "output_tokens", "total_tokens"}
    assert [tool["type"] for tool in events[-1]["response"]["tools"]] == ["function", "custom", "namespace"]
    prompt = prompt_of(scripted)
    assert prompt.startswith("<|im_start|>system\nYou are a coding agent.\n\n<permissions><|im_end|>")
    assert prompt.count("<|im_start|>assistant") == 3
    assert '{"input": "*** Begin"}' in prompt


# -- Messages ----------------------------------------------------------------------------------------------------------

TOOL = {"name": "look", "description": "Look.", "input_schema": LOOK}


def test_a_message_has_thinking_text_and_tool_use_whole_and_as_a_stream(scripted, claude):
    asked = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "go"}], "tools": [TOOL]}
    asked |= {"system": "Be short.", "thinking": {"type": "enabled", "budget_tokens": 1024}}
    scripted.engine.texts = [TALK, TALK]
    scripted.engine.cached = 3
    whole = claude.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[0].thinking, whole.content[2].input) == ("where is it?", {"path": "a.py"})
    assert whole.content[0].signature
    assert whole.stop_reason == "tool_use"
    assert whole.usage.cache_read_input_tokens == 3
    counted = {key: value for key, value in asked.items() if key != "max_tokens"}
    assert claude.messages.count_tokens(**counted).input_tokens == whole.usage.input_tokens + 3
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"

    def contents(message):
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert contents(final) == contents(whole)
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert "system\nBe short.<" in prompt_of(scripted)


def test_stop_sequences_and_limits_end_a_message(scripted, claude):
    asked = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "go"}]}
    scripted.engine.texts, scripted.engine.stopped_by = ["one two", "one two"], "END"
    stopped = claude.messages.create(**asked, stop_sequences=["END"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "END", "one two")
    with claude.messages.stream(**asked, stop_sequences=["END"]) as stream:
        assert stream.get_final_message().stop_sequence == "END"
    scripted.engine.texts, scripted.engine.stopped_by = ["one two three four"] * 2, None
    assert claude.messages.create(**{**asked, "max_tokens": 2}).stop_reason == "max_tokens"
    assert claude.messages.create(**asked).stop_reason == "end_turn"
    scripted.engine.texts = ["x " * 5000]
    beyond = claude.messages.create(**{**asked, "max_tokens": 9000})
    assert beyond.stop_reason == "model_context_window_exceeded"


def test_the_requests_of_claude_code(scripted):
    scripted.engine.texts = ["There is a.py."]
    url = f"{scripted.url}/v1/messages?beta=true"
    headers = {"authorization": "Bearer key", "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    answer = httpx.post(url, json=AGENTS["claude-code"], headers=headers)
    assert answer.status_code == 200, answer.text
    events = events_of(answer)
    assert [event["type"] for event in events if "block" not in event["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == len(scripted.engine.prompts[-1])
    assert "".join(event["delta"].get("text", "") for event in events if "delta" in event) == "There is a.py."
    prompt = prompt_of(scripted)
    assert prompt.startswith("<|im_start|>system\nYou are a CLI.\nBe terse.\n\nAgents: explore<|im_end|>")
    assert "<think>hm</think>I list.<tool_call>" in prompt
    assert "<|im_start|>tool\na.py<|im_end|>" in prompt
    count = {key: AGENTS["claude-code"][key] for key in ("model", "messages", "tools", "system", "thinking")}
    counted = httpx.post(f"{scripted.url}/v1/messages/count_tokens?beta=true", json=count, headers={"x-api-key": "key"})
    assert counted.json()["input_tokens"] == len(scripted.engine.prompts[-1])


def test_the_tool_runner_of_the_official_client_goes_on_without_a_thread(scripted, claude):
    import anthropic

    def look(path: str) -> str:
        """Look."""
        return f"found {path}"

    scripted.engine.texts = [TALK, "done"]
    messages = [{"role": "user", "content": "go"}]
    runner = claude.beta.messages.tool_runner(model="m", max_tokens=200, tools=[anthropic.beta_tool(look)], messages=messages)
    assert [message.content[-1].type for message in runner] == ["tool_use", "text"]
    assert "tool\nfound a.py<|im_end|>" in prompt_of(scripted)


def test_documents_and_search_results_are_texts(scripted, claude):
    scripted.engine.texts = ["ok"]
    text = {"type": "text", "text": "found"}
    blocks = [
        {
            "type": "document",
            "title": "T",
            "context": "C",
            "source": {"type": "text", "media_type": "text/plain", "data": "D"},
        },
        {"type": "document", "source": {"type": "content", "content": [text]}},
        {"type": "search_result", "title": "page", "source": "http://a", "content": [text], "citations": {"enabled": True}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "look"}]}
    call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": [call]}]
    claude.messages.create(model="m", max_tokens=5, messages=[*messages, {"role": "user", "content": [result]}])
    prompt = prompt_of(scripted)
    assert "user\nT\nC\nD\nfound\npage\nhttp://a\nfound<|im_end|>" in prompt
    assert "tool\nlook<|im_end|>" in prompt
    sources = [
        {"type": "base64", "data": ""},
        {"type": "url", "url": "http://a"},
        {"type": "file", "file_id": "f"},
        {"type": []},
    ]
    for block in (*({"type": "document", "source": source} for source in sources), {"type": "search_result", "title": "T"}):
        url, asked = (
            f"{scripted.url}/v1/messages",
            {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]},
        )
        refused = httpx.post(url, json=asked, headers={"x-api-key": "key"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("messages[0].content[0].")


def test_a_message_continues_the_text_of_the_assistant(scripted, claude):
    scripted.engine.texts = ["3"]
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "It is "}]
    assert claude.messages.create(model="m", max_tokens=5, messages=messages).content[0].text == "3"
    assert prompt_of(scripted).endswith("assistant\nIt is ")


def test_the_tokens_of_reasoning_are_counted_by_every_api(scripted, gpt, claude):
    """The tokens of its marks may be counted, too."""
    reasoning = "where is it, and what is it for?" * 4
    scripted.engine.texts = [f"<think>{reasoning}</think>There. {reasoning}"] * 4
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    whole = gpt.chat.completions.create(**asked)
    *_, last = gpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    counts = [each.usage.completion_tokens_details.reasoning_tokens for each in (whole, last)]
    counts.append(gpt.responses.create(model="m", input="x").usage.output_tokens_details.reasoning_tokens)
    counts.append(claude.messages.create(**asked, max_tokens=400).usage.output_tokens_details.thinking_tokens)
    expected = [len(scripted.engine.tokenizer.encode(text)) for text in (reasoning, f"<think>{reasoning}</think>")]
    assert all(expected[0] - 1 <= count <= expected[1] for count in counts), (counts, expected)


ODD_ARGUMENTS = {"deep": "[" * 900 + "]" * 900, "too deep": "[" * 1200 + "]" * 1200, "NaN": "NaN", "infinite": "1e999"}


@pytest.mark.parametrize("value", ODD_ARGUMENTS.values(), ids=ODD_ARGUMENTS)
def test_odd_arguments_of_a_call_are_no_internal_error(scripted, gpt, value):
    """In a conversation, and written by the model: neither makes a body that is no JSON."""
    arguments = f'{{"path": {value}}}'
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    scripted.engine.texts = ["Done."]
    assert gpt.chat.completions.create(model="m", messages=messages).choices[0].message.content == "Done."
    written = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    scripted.engine.texts = [written] * 3
    tool = {**TOOL, "input_schema": LOOK}
    asked = {"model": "m", "max_tokens": 4000, "messages": messages[:1], "tools": [tool]}
    answer = httpx.post(f"{scripted.url}/v1/messages", json=asked, headers={"x-api-key": "key"})
    assert (answer.status_code, json.loads(answer.text, parse_constant=pytest.fail)["content"][0]["input"]) == (200, {})
    custom = {"type": "custom", "name": "look"}
    assert gpt.responses.create(model="m", input="x", tools=[custom]).output[0].input == arguments
    chat = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
    made = gpt.chat.completions.create(model="m", messages=messages[:1], tools=[chat]).choices[0].message.tool_calls
    assert made[0].function.arguments == arguments


# -- errors, and the engine ----------------------------------------------------------------------------------------------


def test_models_of_both_apis(gpt, claude):
    assert [model.id for model in gpt.models.list()] == [model.id for model in claude.models.list()] == ["m"]
    assert claude.models.retrieve("m").display_name == "m"


def test_errors_of_both_apis(scripted, gpt, claude):
    import anthropic

    talk = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    for kind, changed in (
        (anthropic.NotFoundError, {"model": "other"}),
        (anthropic.BadRequestError, {"messages": []}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "x1 y2 " * 5000}]}),
        (anthropic.BadRequestError, {"extra_body": {"container": "c"}}),
        (anthropic.BadRequestError, {"extra_body": {"wings": 2}}),
        (anthropic.BadRequestError, {"tool_choice": {"type": "most"}}),
    ):
        with pytest.raises(kind) as refused:
            claude.messages.create(**{**talk, **changed})
        assert refused.value.body["type"] == "error"
        assert refused.value.request_id
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(**talk)
    for changed in (
        {"input": [{"type": "computer_call"}]},
        {"input": [{"type": "message", "role": "user", "content": 5}]},
        {"extra_body": {"background": True}},
        {"extra_body": {"wings": 2}},
        {"tool_choice": {"type": "web_search_preview"}},
        {"truncation": "auto"},
        {"max_output_tokens": 0},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            gpt.responses.create(**{"model": "m", "input": "x", **changed})
        assert refused.value.param


def test_a_page_may_read_the_request_id_and_when_to_come_back(scripted):
    answer = httpx.get(f"{scripted.url}/v1/models", headers={"origin": "http://page", "authorization": "Bearer key"})
    exposed = answer.headers["access-control-expose-headers"].lower()
    assert {"x-request-id", "retry-after"} <= {name.strip() for name in exposed.split(",")}


def test_an_error_after_the_start_is_an_event(scripted, gpt, claude):
    import anthropic

    scripted.engine.texts = [[5] * 40, [5] * 40]
    original = scripted.engine._handle

    def broken(event):
        return event._replace(output=replace(event.output, error="broken")) if isinstance(event, SampleOutput) else event

    def failing(events):
        original([broken(event) for event in events])

    scripted.engine._handle = failing
    try:
        with gpt.responses.create(model="m", input="x", stream=True) as stream:
            (failed,) = [event for event in stream if event.type == "response.failed"]
        assert "broken" in failed.response.error.message
        talk = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(anthropic.APIStatusError, match="broken"), claude.messages.stream(**talk) as stream:
            stream.get_final_message()
    finally:
        scripted.engine._handle = original


def test_both_apis_have_the_tokens_of_the_engine(server, client, reference):
    import anthropic

    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    talk = {"model": "m", "messages": [{"role": "user", "content": "write a loop"}]}
    asked = {**talk, "extra_body": {"temperature": 0}}  # today's client has no argument for it
    text = client.chat.completions.create(**asked, max_tokens=12).choices[0].message.content
    message = claude.messages.create(**asked, max_tokens=12)
    assert "".join(block.text for block in message.content) == text
    response = client.responses.create(model="m", input="write a loop", temperature=0, max_output_tokens=12)
    assert response.output_text == text
    named = {"type": "tool", "name": "look"}
    tool = {**TOOL, "input_schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}}
    called = claude.messages.create(**asked, max_tokens=100, tools=[tool], tool_choice=named)
    assert [block.type for block in called.content] == ["tool_use"]
    assert called.content[0].input["n"] in (1, 2)
    stop = text[len(text) // 2 :][:3]
    stopped = claude.messages.create(**asked, max_tokens=12, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    long = {"model": "m", "messages": [{"role": "user", "content": "def f(a):\n    return a\n" * 8}], "max_tokens": 2}
    for _ in range(2):
        usage = client.chat.completions.create(**long).usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < usage.prompt_tokens
    assert cached % 16 == 0, "whole pages"
    counted = claude.messages.create(**long).usage
    assert (counted.cache_read_input_tokens, counted.input_tokens) == (cached, usage.prompt_tokens - cached)
    claude.close()


def test_tokens_of_texts_and_texts_of_tokens(server, http, reference):
    text = "def read(path):\n    return 'é'"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == reference.tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), server.service.engine.info.longest_request)
    assert len(found["token_strs"]) == found["count"]
    assert http.post("/detokenize", json={"model": "m", "tokens": found["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["tokens"] == reference.tokenizer.encode("user: hi\nassistant:")
    for wrong in ({}, {"prompt": "x", "messages": []}, {"prompt": "x", "model": "other"}):
        assert http.post("/tokenize", json=wrong).status_code in (400, 404)
    assert http.post("/detokenize", json={"tokens": [10**7]}).json()["error"]["param"] == "tokens"


def test_the_store_of_responses_is_bounded():
    store = ResponseStore(max_responses=3, max_bytes=400)
    for number in range(3):
        store.add({"id": f"r{number}"}, [{"text": "x" * 50}])
    store.find("r0")
    store.add({"id": "r3"}, [])
    with pytest.raises(ApiError, match="'r1' isn't stored"):
        store.find("r1")
    store.add({"id": "r4"}, [{"text": "x" * 300}])
    kept = [name for name in ("r0", "r2", "r3", "r4") if name in store._stored]
    assert kept == ["r3", "r4"], "the least recently used ones left, as many as the bytes required"
    store.add({"id": "r5", "output": [{"id": "m", "text": "x" * 500}]}, [])
    assert not store._stored
    assert not store._items
    assert store._size == 0


@pytest.mark.parametrize(
    ("module", "name", "request_class"),
    [
        ("openai.types.responses.response_create_params", "ResponseCreateParamsBase", ResponsesRequest),
        ("anthropic.types.beta.message_create_params", "MessageCreateParamsBase", MessagesRequest),
        ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase", ChatRequest),
        ("openai.types.chat", "ChatCompletionContentPartTextParam", MessagePart),
        ("openai.types.chat", "ChatCompletionContentPartImageParam", MessagePart),
        ("openai.types.chat.chat_completion_content_part_image_param", "ImageURL", ImageUrl),
        ("openai.types.chat", "ChatCompletionFunctionToolParam", Tool),
        ("openai.types.shared_params", "FunctionDefinition", ToolFunction),
    ],
)
def test_every_field_of_the_official_client_is_known(module, name, request_class):
    params = getattr(import_module(module), name)
    elsewhere = {*getattr(request_class, "refused", ()), *getattr(request_class, "ignored", ())}
    assert params.__annotations__.keys() <= request_class.model_fields.keys() | elsewhere


@pytest.mark.parametrize(
    ("request_class", "path", "module", "names"),
    [
        (ResponsesRequest, "text", "openai.types.responses", ["ResponseTextConfigParam"]),
        (ResponsesRequest, "text.format", "openai.types.responses", ["ResponseFormatTextJSONSchemaConfigParam"]),
        (ResponsesRequest, "reasoning", "openai.types.shared_params", ["Reasoning"]),
        (MessagesRequest, "output_config", "anthropic.types.beta", ["BetaOutputConfigParam"]),
        (MessagesRequest, "output_config.format", "anthropic.types.beta", ["BetaJSONOutputFormatParam"]),
        (
            MessagesRequest,
            "thinking",
            "anthropic.types.beta",
            [f"BetaThinkingConfig{n}Param" for n in ("Enabled", "Adaptive")],
        ),
        (MessagesRequest, "tool_choice", "anthropic.types", [f"ToolChoice{kind}Param" for kind in ("Auto", "Any", "Tool")]),
    ],
)
def test_every_nested_field_of_the_official_client_is_known(request_class, path, module, names):
    known = [getattr(import_module(module), name).__annotations__ for name in names]
    assert set(request_class.nested[path]) == set().union(*known)


def test_the_error_of_a_query_names_its_field(scripted):
    answer = httpx.get(f"{scripted.url}/v1/responses/r?stream=often", headers={"authorization": "Bearer key"})
    assert answer.json()["error"]["param"] == "stream"


def test_parts_may_have_hints_that_have_no_effect(gpt, scripted):
    scripted.engine.texts = ["yes"]
    part = {
        "type": "text",
        "text": "go",
        "cache_control": {"type": "ephemeral"},
        "prompt_cache_breakpoint": {"mode": "explicit"},
    }
    hint = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "look", "parameters": LOOK}, **hint}
    gpt.chat.completions.create(model="m", messages=[{"role": "user", "content": [part], **hint}], tools=[tool])
    assert "user\ngo<" in prompt_of(scripted)
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "x", **hint}], tools=[tool])
    assert not any("cache_control" in each.model_dump() for each in (*request.messages, *request.tools)), "for no template"
    for detail in get_args(get_type_hints(ImageURL)["detail"]):
        assert ImageUrl(url="data:", detail=detail).detail == detail
