"""What clients do that no list names: stop strings over tokens, letters in pieces, choices at once, rude readers."""

import asyncio
import json

import httpx

from outrider import SamplingParams
from serve.reading import chunks_of
from serve.test_api import everything_is_back

PROMPT = "def add(a, b):"
CHAIN = {
    "type": "object",
    "properties": {"v": {"enum": [0, 1]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


def completion(**fields):
    return {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 16} | fields


def schema_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def text_of(found, index=0):
    return "".join(choice["text"] for each in found for choice in each["choices"] if choice["index"] == index)


def test_stop_strings_over_the_borders_of_tokens_in_two_streams_at_once(http, server, reference):
    (whole,) = reference.generate([reference.tokenizer.encode(PROMPT)], SamplingParams(max_tokens=16))
    text = reference.tokenizer.decode(whole.token_ids)
    pieces = [reference.tokenizer.decode([token]) for token in whole.token_ids]
    border = len("".join(pieces[:5]))
    stops = [text[border - 1 : border + 2], text[border - 2 : border + 1]]

    async def both():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = [completion(stop=stop, stream=True) for stop in stops]
            return await asyncio.gather(*(client.post("/v1/completions", json=each) for each in asked))

    for stop, answer in zip(stops, asyncio.run(both()), strict=True):
        found = chunks_of(answer)
        assert text_of(found) == text[: text.index(stop)]
        assert found[-1]["choices"][0]["finish_reason"] == "stop"


def test_letters_that_are_split_over_tokens_come_whole(http):
    word = "größe 😀 字"
    asked = completion(max_tokens=60) | schema_of({"const": word})
    whole = http.post("/v1/completions", json=asked).json()["choices"][0]
    assert json.loads(whole["text"]) == word
    found = chunks_of(http.post("/v1/completions", json=asked | {"stream": True}))
    assert text_of(found) == whole["text"]
    assert "\ufffd" not in text_of(found)


def test_a_schema_that_refers_to_itself(http):
    choice = http.post("/v1/completions", json=completion(max_tokens=200, temperature=1, seed=3) | schema_of(CHAIN)).json()
    found = choice["choices"][0]
    if found["finish_reason"] == "stop":
        value = json.loads(found["text"])
        while value is not None:
            assert value["v"] in (0, 1)
            value = value["next"]
    else:
        assert found["text"].startswith("{")


def test_biases_that_ban_what_the_schema_needs_are_the_requests_fault(http, reference):
    zeros = [token for token in range(2048) if reference.tokenizer.decode([token]).startswith("0")]
    asked = completion(logit_bias={str(token): -100 for token in zeros}) | schema_of({"const": 0})
    answer = http.post("/v1/completions", json=asked)
    assert answer.status_code == 400, answer.text
    assert "isn't allowed by the guide" in answer.json()["error"]["message"]
    streamed = http.post("/v1/completions", json=asked | {"stream": True})
    assert "isn't allowed by the guide" in streamed.text


def test_a_guided_stream_that_is_left_frees_everything(server, http):
    asked = completion(max_tokens=200, stream=True, ignore_eos=True) | schema_of(
        {"type": "array", "items": {"type": "string"}}
    )
    with http.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_lines())
    assert everything_is_back(server)
    assert http.post("/v1/completions", json=completion()).status_code == 200


def test_a_megabyte_of_prompt_is_refused_and_holds_nobody_up(server):
    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            large = asyncio.create_task(client.post("/v1/completions", json=completion(prompt="a" * 1_000_000)))
            while not large.done():
                assert (await client.get("/health")).status_code == 200
                await asyncio.sleep(0.05)
            return await large

    answer = asyncio.run(run())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_logprobs_of_several_choices_with_echo_free_fields(http):
    choices = http.post("/v1/completions", json=completion(n=3, temperature=1, seed=1, logprobs=3)).json()["choices"]
    for choice in choices:
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        sizes = {len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert len(sizes) == 1


def test_a_completion_without_a_limit_ends_at_the_context(http):
    longest = http.get("/v1/models/m").json()["max_model_len"]
    answer = http.post("/v1/completions", json={"model": "m", "prompt": [5] * (longest - 3), "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3, answer.text
    answer = http.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": None, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 16, answer.text


def test_tools_beside_a_response_format(http):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "tools": [tool]}
    both = asked | {"tool_choice": "required"} | schema_of(CHAIN)
    answer = http.post(
        "/v1/chat/completions", json=both | {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 120}
    )
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f", answer.text
    nameless = asked | {"tool_choice": {"type": "function", "function": {"name": "g"}}}
    assert http.post("/v1/chat/completions", json=nameless).status_code == 400
    none = http.post("/v1/chat/completions", json=asked | {"tool_choice": "none"}).json()
    assert "tool_calls" not in none["choices"][0]["message"]
