"""Requests that are wrong: the error of each names the field of its API, in words of its own."""

import json
import re
from pathlib import Path

import pytest

from serve.test_api import refused

LONG = {"model": "m", "messages": [{"role": "user", "content": "x " * 9000}], "max_tokens": 4}
WRONG = [
    *json.loads((Path(__file__).resolve().parents[1] / "data/wrong_requests.json").read_text()),
    {"route": "completions", "param": "prompt", "body": {"model": "m", "prompt": "x " * 4000, "max_tokens": 4}},
    {"route": "responses", "param": "input", "body": {"model": "m", "input": "x y " * 5000}},
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
