"""Requests that are wrong: the error of each names the field of its API, in words of its own."""

import json
import re
from pathlib import Path

import pytest

from serve.test_api import refused

NO_INTEGER = {"type": "integer", "minimum": 5, "maximum": 3}
"""A schema that is refused when it's compiled, after the request was sent to the engine."""
NO_ARGUMENTS = {"type": "object", "properties": {"a": NO_INTEGER}, "required": ["a"]}
ASKED = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NO_INTEGER}}}
CALL = {"tools": [{"type": "function", "function": {"name": "f", "parameters": NO_ARGUMENTS}}], "tool_choice": "required"}
TEXT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": ["string", "null"]}}}
LONG = {"model": "m", "messages": [{"role": "user", "content": "x " * 9000}], "max_tokens": 4}
WRONG = [
    *json.loads((Path(__file__).resolve().parents[1] / "data/wrong_requests.json").read_text()),
    {"route": "completions", "param": "prompt", "body": {"model": "m", "prompt": "x " * 4000, "max_tokens": 4}},
    {"route": "responses", "param": "input", "body": {"model": "m", "input": "x y " * 5000}},
    {"route": "completions", "param": "response_format", "body": {"model": "m", "prompt": "x", **FORMAT}},
    {"route": "chat/completions", "param": "response_format", "body": {**ASKED, **FORMAT}},
    {"route": "chat/completions", "param": "tools", "body": {**ASKED, **CALL}},
    *(
        {"route": "chat/completions", "param": "tools", "body": {**ASKED, "tools": [TEXT_TOOL], "tool_choice": choice}}
        for choice in ("required", {"type": "function", "function": {"name": "f"}})
    ),
    {
        "route": "responses",
        "param": "text.format",
        "body": {"model": "m", "input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": NO_INTEGER}}},
    },
    {
        "route": "messages",
        "param": "tools",
        "body": {**ASKED, "tools": [{"name": "f", "input_schema": NO_ARGUMENTS}], "tool_choice": {"type": "any"}},
    },
    *({"route": route, "param": "messages", "body": LONG} for route in ("chat/completions", "messages")),
]
"""A parameter that is null is whichever the request has."""
OTHERS_WORDS = r"response_format|max_completion_tokens|json_schema\.|image_url|^the (messages|input|prompt) ha(ve|s)"
"""Words of chats and completions, which errors of other APIs don't have."""


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong['route']} {wrong['param']}")
def test_an_error_names_the_field_of_its_api(http, wrong):
    route, param = wrong["route"], wrong["param"]
    data = json.dumps(wrong["body"])
    answer = http.post(f"/v1/{route}", content=data, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    if route.endswith("completions"):
        refused(answer, 400, param=param)
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert param in (None, error["param"])
    assert route.endswith("completions") or not re.search(OTHERS_WORDS, error["message"])
    assert not re.search(r"dictionary|instance", error["message"].replace(param or "", "")), "no words of Python"
    if any(len(each) > 1024 for each in wrong["body"].get("stop_sequences", ())):
        assert "1024 characters" in error["message"]
