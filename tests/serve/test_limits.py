"""Refusals are cheap: bodies and prompts that can't be served take little time and memory, and hold nobody up."""

import asyncio
import time
import tracemalloc

import httpx
import pytest
from pydantic import ValidationError

from outrider.serve.prompt_builder import PromptBuilder
from outrider.serve.request_fields import ChatRequest, CompletionRequest
from serve.test_api import ASKED, CHAT, JSON, refused

MIB = 1 << 20
MANY = 20_000
COSTLY = {
    "a list of tokens with a text": ("completions", {"prompt": [5] * MANY + ["a"]}),
    "texts with a token": ("completions", {"prompt": ["a"] * MANY + [5]}),
    "lists with a text": ("completions", {"prompt": [[5]] * MANY + ["a"]}),
    "objects": ("completions", {"prompt": [{}] * MANY}),
    "a list in a list": ("completions", {"prompt": [[[]] * MANY]}),
    "unknown fields": ("completions", {"prompt": "x", **{f"field{index}": 1 for index in range(MANY)}}),
    "biases": ("completions", {"prompt": "x", "logit_bias": {str(index): "x" for index in range(MANY)}}),
    "stop strings": ("completions", {"prompt": "x", "stop": [5] * MANY}),
    "stop tokens": ("completions", {"prompt": "x", "stop_token_ids": ["x"] * MANY}),
    "messages": ("chat/completions", {"messages": [{"role": "user", "contents": ""}] * MANY}),
    "parts": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "x"}] * MANY}]}),
    "calls": ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"id": 5}] * MANY}]}),
    "tools": ("chat/completions", {"messages": CHAT["messages"], "tools": [{"type": "x"}] * MANY}),
    "modalities": ("chat/completions", {"messages": CHAT["messages"], "modalities": [5] * MANY}),
    "functions": ("chat/completions", {"messages": CHAT["messages"], "functions": [5] * MANY}),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_body_with_many_errors_gives_few(name):
    """The memory of a refusal doesn't grow with the body: one error for each list."""
    route, fields = COSTLY[name]
    model = CompletionRequest if route == "completions" else ChatRequest
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError) as wrong:
            model.model_validate({"model": "m", **fields})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert wrong.value.error_count() <= 4
    assert peak < 2 * MIB


def test_the_refusal_names_the_field(http):
    answer = http.post("/v1/completions", json={"model": "m", **COSTLY["a list of tokens with a text"][1]})
    refused(answer, 400, param="prompt")


def test_the_number_of_values_of_a_body_is_limited(http):
    body = b'{"model": "m", "prompt": [' + b"[]," * MIB + b"[]]}"
    assert "characters" in refused(http.post("/v1/completions", content=body, headers=JSON), 413, code="request_too_large")


@pytest.mark.parametrize("prompt", [["a"] * 3000, [[5]] * 3000], ids=["texts", "tokens"])
def test_too_many_prompts_are_refused_before_they_are_tokenised(server, http, monkeypatch, prompt):
    monkeypatch.setattr(server.service.prompter, "_tokens", None)
    refused(http.post("/v1/completions", json={**ASKED, "prompt": prompt}), 400, param="n")


@pytest.fixture
def tokenised(server, monkeypatch):
    """Lengths of the texts that the server tokenises."""
    lengths, encode = [], server.service.prompter.tokenizer.encode

    def recorded(text, **options):
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(server.service.prompter.tokenizer, "encode", recorded)
    return lengths


@pytest.mark.parametrize("text", ["a" * MIB, "def f(x): return x + 1\n" * 40_000, " " * MIB], ids=["a", "code", "spaces"])
def test_a_megabyte_that_can_not_fit_is_refused_by_its_beginning(http, tokenised, text):
    for path, body in (
        ("completions", {**ASKED, "prompt": text}),
        ("completions", {**ASKED, "prompt": ["x", text]}),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}),
    ):
        answer = http.post(f"/v1/{path}", json=body)
        refused(answer, 400, param="prompt", code="context_length_exceeded")
    assert max(tokenised) <= 1 << 16


def test_a_long_prompt_that_fits_is_served(server, http, monkeypatch):
    """Spaces have few tokens: the first part doesn't decide, and the whole text is tokenised."""
    prompt = " " * 3000
    assert http.post("/v1/completions", json={**ASKED, "prompt": prompt}).status_code == 200


def test_health_answers_while_a_long_text_is_tokenised(server, monkeypatch):
    """The event loop waits for no more than a fraction of the time that the tokeniser takes."""
    monkeypatch.setattr(PromptBuilder, "_check_text_length", lambda self, text: None)

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await client.get("/health")
            began = time.monotonic()
            large = asyncio.create_task(client.post("/v1/completions", json={**ASKED, "prompt": "a b" * 100_000}))
            longest = 0.0
            while not large.done():
                asked = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                longest = max(longest, time.monotonic() - asked)
                await asyncio.sleep(0.005)
            return await large, longest, time.monotonic() - began

    answer, longest, whole = asyncio.run(run())
    refused(answer, 400, param="prompt", code="context_length_exceeded")
    assert longest < whole / 2, (longest, whole)
