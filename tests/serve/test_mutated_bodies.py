"""Valid bodies with one or two values replaced, at any depth: each answer is a result, or an error in the API's form."""

import copy
import json
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.model import Tokenizer
from serve.conftest import BUNDLED
from serve.running import running
from serve.scripted import ScriptedEngine
from serve.test_translated_apis import CHATML, TALK

CHAT, TOOLS, RESPONSE, MESSAGE, SCHEMA = json.loads(
    (Path(__file__).resolve().parents[1] / "data/request_bodies.json").read_text()
).values()
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
BODIES = [
    ("/v1/chat/completions", CHAT | TOOLS),
    ("/v1/chat/completions", CHAT | TOOLS | {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}),
    ("/v1/chat/completions", CHAT | TOOLS | {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ("/v1/chat/completions", CHAT | {"response_format": FORMAT, "stream": False, "stream_options": None}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 1, "stop": "q", "response_format": FORMAT}),
    ("/v1/completions", {"prompt": [[3, 4]], "max_tokens": 4, "echo": True, "stop_token_ids": [3], "logit_bias": {"3": 1}}),
    ("/v1/responses", RESPONSE),
    (
        "/v1/responses",
        RESPONSE | {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "stream": True},
    ),
    ("/v1/responses", RESPONSE | {"tool_choice": {"type": "function", "name": "look"}}),
    (
        "/v1/responses",
        RESPONSE
        | {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}},
    ),
    ("/v1/messages", MESSAGE | {"tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}}),
    ("/v1/messages", MESSAGE | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "stream": True}),
    ("/v1/messages/count_tokens", {name: MESSAGE[name] for name in ("system", "messages", "tools", "thinking")}),
    ("/tokenize", {"messages": CHAT["messages"], "tools": TOOLS["tools"], "chat_template_kwargs": {"a": 1}}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [3, 4]}),
]
VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 0.5, float("nan"), float("inf"), 1e308),
    *("", "x", "none", "auto", "é\x00\u2028", "\ud800", "{{ x }}", "q" * 5000, "#/$defs/k", "("),
    *([], [[]], {}, {"": {}}, {"type": []}, {"type": {}}, {"type": "text"}, [None], ["x"], [{}], [[{}]], [{"type": []}]),
]
DELETE = object()


def places(value, path=()):
    """The path of every value in a body."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(body, path, value):
    """The body with another value at ``path``, or without it; unchanged if an earlier change took the place away."""
    changed = holder = copy.deepcopy(body)
    try:
        for key in path[:-1]:
            holder = holder[key]
        if value is DELETE:
            del holder[path[-1]]
        else:
            holder[path[-1]] = copy.deepcopy(value)
    except (TypeError, KeyError, IndexError):
        return body
    return changed


@st.composite
def requests(draw):
    """A path and a body that differs from a valid one in one or two places, in values or in an added field."""
    path, body = draw(st.sampled_from(BODIES))
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from([each for each in places(body) if each]))
        if draw(st.integers(0, 5)) == 0:
            place = (*place[:-1], draw(st.sampled_from(["type", "name", "text", "content", "extra", "\ud800"])))
        body = replaced(body, place, draw(st.sampled_from([DELETE, *VALUES])))
    return path, body


@pytest.fixture(scope="module")
def scripted():
    engine = ScriptedEngine(Tokenizer.from_checkpoint(BUNDLED / "target"))
    with running(engine, BUNDLED / "target", chat_template=CHATML, request_timeout_s=5) as server:
        server.engine = engine
        yield server


def check(scripted, path, body, statuses=(200, 400, 404, 413)):
    scripted.engine.texts[:] = [TALK] * 300
    data = json.dumps({"model": "m", **body}).encode()
    answer = httpx.post(
        scripted.url + path, content=data, headers={"content-type": "application/json"}, timeout=30, verify=False
    )
    assert answer.status_code in statuses, (path, data, answer.text)
    if answer.status_code == 200:
        assert "application/json" not in answer.headers["content-type"] or json.loads(answer.text, parse_constant=pytest.fail)
        return None
    error = answer.json()["error"]
    assert set(error) - {"details"} == {"message", "type", "param", "code"}
    assert error["type"] in ("invalid_request_error", "not_found_error")
    return error


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_unchanged_bodies_are_served(scripted, path, body):
    scripted.engine.texts[:] = [TALK] * 9
    answer = httpx.post(scripted.url + path, json={"model": "m", **body}, timeout=30, verify=False)
    assert answer.status_code == 200, answer.text
    assert '"error": {' not in answer.text


@settings(max_examples=80, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(requests())
def test_no_changed_body_is_an_internal_error(scripted, request):
    check(scripted, *request)
