"""OpenAI's own client against the server: the same tokens as the engine without one, whole and as streams."""

import json

import pytest

from outrider import SamplingParams
from outrider.engine import JsonSchema

PROMPT = "def add(a, b):"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bb"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def direct(reference, prompt, **params):
    """What the engine gives without a server."""
    return reference.generate([reference.tokenizer.encode(prompt)], SamplingParams(**params))


def test_a_completion_has_the_tokens_and_logprobs_of_the_engine(client, reference):
    answer = client.completions.create(
        model="m", prompt=PROMPT, max_tokens=16, temperature=0, logprobs=2, extra_body={"return_token_ids": True}
    )
    (one,) = direct(reference, PROMPT, max_tokens=16, logprobs=2)
    choice = answer.choices[0]
    assert choice.token_ids == list(one.token_ids)
    assert choice.text == reference.tokenizer.decode(one.token_ids)
    assert choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs == pytest.approx([each.logprob for each in one.logprobs], abs=1e-5)
    assert "".join(choice.logprobs.tokens) == choice.text
    placed = zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    assert all(choice.text[start : start + len(token)] == token for start, token in placed)
    assert [2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs] == [True] * 16
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens == len(reference.tokenizer.encode(PROMPT))


def test_streams_add_up_to_whole_answers(client):
    asked = {"model": "m", "prompt": [PROMPT, "class Tree:"], "max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2}
    asked["stop"] = ["\n\n", "):"]
    whole = client.completions.create(**asked, logprobs=1)
    texts, reasons, logprobs = [""] * 4, [None] * 4, [[] for _ in range(4)]
    usage = None
    for chunk in client.completions.create(**asked, logprobs=1, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "nothing comes behind the end"
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    for streamed, choice in zip(logprobs, whole.choices, strict=True):
        assert streamed == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
    assert usage.model_dump() == whole.usage.model_dump()
    assert whole.usage.completion_tokens == sum(map(len, logprobs))


def test_each_chunk_has_the_usage_so_far_where_a_load_generator_asks_for_it(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "m", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    written = [chunk.usage.completion_tokens for chunk in chunks]
    assert written == sorted(written)
    assert 0 < written[0] < written[-1] == 12
    alone = client.completions.create(**asked, stream=True, stream_options={"continuous_usage_stats": True})
    assert all(chunk.usage is None for chunk in alone)


def test_a_chat_by_its_template(client, reference):
    messages = [{"role": "user", "content": "write a loop"}]
    asked = {"model": "m", "messages": messages, "max_completion_tokens": 10, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (one,) = direct(reference, "user: write a loop\nassistant:", max_tokens=10, logprobs=2)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", reference.tokenizer.decode(one.token_ids))
    content = whole.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([each.logprob for each in one.logprobs], abs=1e-5)
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content


def test_control_tokens_in_a_message_are_text(client, reference):
    def read(content):
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model="m", messages=messages, max_tokens=1).usage.prompt_tokens

    assert reference.tokenizer.encode("<|endoftext|>") == [0]
    assert read("<|endoftext|>") > read("x") + 2


def test_sampling_is_by_the_seed(client, reference):
    def text(seed):
        return client.completions.create(model="m", prompt=PROMPT, max_tokens=12, seed=seed, n=2).choices

    first, again, other = text(3), text(3), text(4)
    assert [each.text for each in first] == [each.text for each in again] != [each.text for each in other]
    drawn = direct(reference, PROMPT, max_tokens=12, seed=3, temperature=1.0, n=2)
    assert [each.text for each in first] == [reference.tokenizer.decode(each.token_ids) for each in drawn]


def test_samples_of_a_greedy_request_are_the_same(client):
    answer = client.completions.create(model="m", prompt=PROMPT, max_tokens=4, temperature=0, n=3)
    assert len({choice.text for choice in answer.choices}) == 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_stop_bias_and_echo(client, reference):
    free = client.completions.create(model="m", prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text
    stopped = client.completions.create(model="m", prompt=PROMPT, max_tokens=16, temperature=0, stop=["assert", "("]).choices[
        0
    ]
    assert stopped.text == free[: min(free.index("assert"), free.index("("))]
    assert stopped.finish_reason == "stop"
    dot = reference.tokenizer.encode(".")[0]
    asked = {"model": "m", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "extra_body": {"return_token_ids": True}}
    assert dot in client.completions.create(**asked).choices[0].token_ids
    banned = client.completions.create(**asked, logit_bias={str(dot): -100}, presence_penalty=0.5)
    assert dot not in banned.choices[0].token_ids
    echoed = client.completions.create(model="m", prompt=PROMPT, max_tokens=4, temperature=0, echo=True).choices[0].text
    assert echoed == PROMPT + free[: len(echoed) - len(PROMPT)]


def test_token_ids_are_a_prompt_too(client, reference):
    tokens = reference.tokenizer.encode(PROMPT)
    by_text = client.completions.create(model="m", prompt=PROMPT, max_tokens=6, temperature=0)
    by_ids = client.completions.create(model="m", prompt=tokens, max_tokens=6, temperature=0)
    several = client.completions.create(model="m", prompt=[tokens, tokens], max_tokens=6, temperature=0)
    assert {choice.text for answer in (by_text, by_ids, several) for choice in answer.choices} == {by_text.choices[0].text}


def test_a_schema_is_kept(client, reference):
    asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    whole = client.completions.create(
        model="m", prompt=PROMPT, max_tokens=60, temperature=0, extra_body={"response_format": asked}
    )
    found = json.loads(whole.choices[0].text)
    assert found["name"] in ("a", "bb")
    assert 0 <= found["count"] <= 99
    (one,) = direct(reference, PROMPT, max_tokens=60, guide=JsonSchema(SCHEMA))
    assert whole.choices[0].text == reference.tokenizer.decode(one.token_ids)


def test_a_tool_that_must_be_called_is_called(client):
    tool = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool],
        "max_tokens": 120,
        "temperature": 0,
    }
    named = {"type": "function", "function": {"name": "pick"}}
    (call,) = client.chat.completions.create(**asked, tool_choice=named).choices[0].message.tool_calls
    assert (call.function.name, sorted(json.loads(call.function.arguments))) == ("pick", ["count", "name"])
    told = ""
    for chunk in client.chat.completions.create(**asked, tool_choice=named, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            told += piece.function.arguments
    assert told == call.function.arguments
    required = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert required.finish_reason == "tool_calls"
    assert {call.function.name for call in required.message.tool_calls} == {"pick"}
    assert required.message.content is None
    chunks = client.chat.completions.create(**{**asked, "max_tokens": 16}, tool_choice="required", stream=True)
    assert all(choice.delta.to_dict() or choice.finish_reason for chunk in chunks for choice in chunk.choices)


def test_a_stream_says_what_was_drafted(client):
    answers = client.completions.create(
        model="m", prompt=PROMPT, max_tokens=16, temperature=0, stream=True, stream_options={"include_drafted": True}
    )
    told = [(chunk.choices[0].text, chunk.outrider) for chunk in answers if chunk.choices]
    assert all(text == "".join(piece for piece, _ in said["tokens"]) for text, said in told)
    assert sum(drafted for _, said in told for _, drafted in said["tokens"]) == sum(said["accepted"] for _, said in told) > 0


def test_models(client):
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").object == "model"
