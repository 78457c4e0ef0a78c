"""Refusals are cheap: bodies and prompts that can't be served take little time and memory, and hold nobody up."""

import asyncio
import os
import random
import time
import tracemalloc

import httpx
import pytest
from pydantic import ValidationError

from outrider.serve.api.messages_api import MessagesRequest
from outrider.serve.api.prompt_builder import PromptBuilder
from outrider.serve.api.request_fields import MAX_MESSAGES, ChatRequest, CompletionRequest
from outrider.serve.api.responses_api import ResponsesRequest
from outrider.serve.http.app import DetokenizeRequest
from serve.bodies import random_body
from serve.conftest import TEMPLATE
from serve.health_watch import HealthWatch
from serve.test_api import ASKED, CHAT, JSON, everything_is_back, refused
from serve.test_load import process

MIB = 1 << 20
MANY = 20_000
MODELS = {
    "completions": CompletionRequest,
    "chat/completions": ChatRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
    "detokenize": DetokenizeRequest,
}
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
    "blocks": ("messages", {"max_tokens": 1, "messages": [5] * MANY}),
    "stop sequences": ("messages", {"max_tokens": 1, "messages": CHAT["messages"], "stop_sequences": [5] * MANY}),
    "unknown fields of a message": ("messages", {"max_tokens": 1, **{f"field{index}": 1 for index in range(MANY)}}),
    "items": ("responses", {"input": [5] * MANY}),
    "tools of a response": ("responses", {"input": "x", "tools": [5] * MANY}),
    "unknown fields of a response": ("responses", {f"field{index}": 1 for index in range(MANY)}),
    "tokens": ("detokenize", {"tokens": ["x"] * MANY}),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_body_with_many_errors_gives_few(name):
    """The memory of a refusal doesn't grow with the body: one error for each list."""
    route, fields = COSTLY[name]
    model = MODELS[route]
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
    refused(answer, 400, param=f"prompt[{MANY}]")


def test_the_number_of_values_of_a_body_is_limited(http):
    body = b'{"model": "m", "prompt": [' + b"[]," * MIB + b"[]]}"
    assert "characters" in refused(http.post("/v1/completions", content=body, headers=JSON), 413, code="request_too_large")


@pytest.mark.parametrize("stop", ["a" * 1025, ["x", "a" * 1025]], ids=["one", "list"])
def test_a_long_stop_string_is_refused(http, stop):
    param = "stop" if isinstance(stop, str) else "stop[1]"
    refused(http.post("/v1/completions", json={**ASKED, "stop": stop}), 400, param=param)


def test_a_list_that_is_too_long_is_named_and_no_other_type_of_the_field(http):
    answer = http.post("/v1/completions", json={**ASKED, "stop": ["a"] * 65})
    assert "at most 64 items" in refused(answer, 400, param="stop")


@pytest.mark.parametrize("prompt", [["a"] * 3000, [[5]] * 3000], ids=["texts", "tokens"])
def test_too_many_prompts_are_refused_before_they_are_tokenised(server, http, monkeypatch, prompt):
    monkeypatch.setattr(server.service.prompter, "_tokens", None)
    refused(http.post("/v1/completions", json={**ASKED, "prompt": prompt}), 400, param="prompt")
    refused(http.post("/v1/completions", json={**ASKED, "prompt": prompt[:100], "n": 2}), 400, param="n")


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
        refused(answer, 400, param="messages" if "chat" in path else "prompt", code="context_length_exceeded")
    assert max(tokenised) <= 1 << 16


def test_a_long_prompt_that_fits_is_served(server, http, monkeypatch):
    """Spaces have few tokens: the first part doesn't decide, and the whole text is tokenised."""
    prompt = " " * 3000
    assert http.post("/v1/completions", json={**ASKED, "prompt": prompt}).status_code == 200


def test_health_answers_while_a_long_text_is_tokenised(server, monkeypatch):
    """The tokeniser's thread lets the event loop run: a request to /health begins and ends while it works."""
    monkeypatch.setattr(PromptBuilder, "_check_text_length", lambda self, text: None)
    tokenizer, spans = server.service.prompter.tokenizer, []
    encode = tokenizer.encode

    def timed(text, **options):
        began = time.monotonic()
        tokens = encode(text, **options)
        spans.append((began, time.monotonic()))
        return tokens

    monkeypatch.setattr(tokenizer, "encode", timed)

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            large = asyncio.create_task(client.post("/v1/completions", json={**ASKED, "prompt": "a b" * 100_000}))
            times = []
            while not large.done():
                asked = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                times.append((asked, time.monotonic()))
            return await large, times

    answer, times = asyncio.run(run())
    refused(answer, 400, param="prompt", code="context_length_exceeded")
    ((began, ended),) = spans
    assert any(began < asked and answered < ended for asked, answered in times), (spans, times)


# -- random bodies -----------------------------------------------------------------------------------------------------


def check_answer(answer, body):
    assert answer.status_code in (200, 400, 404, 413, 429), (answer.status_code, answer.text[:300], body[:200])
    if answer.status_code != 200:
        assert set(answer.json()["error"]) >= {"message", "type"}
        assert len(answer.content) < 2000, "a refusal quotes little of the body"


def test_random_bodies_are_answered(server, http):
    drawn = random.Random(1)
    for _ in range(24):
        path, body = random_body(drawn, MIB // 8)
        check_answer(http.post(path, content=body, headers=JSON), body)
    assert everything_is_back(server)


class Usage:
    """CPU time and peak memory of a process, from Linux."""

    def __init__(self, pid):
        self.pid = pid

    def cpu_s(self):
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def reset_peak(self):
        with open(f"/proc/{self.pid}/clear_refs", "w", encoding="ascii") as file:
            file.write("5")

    def peak_mib(self):
        with open(f"/proc/{self.pid}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


@pytest.mark.parametrize(
    ("fields", "field"), [(ChatRequest, "messages"), (MessagesRequest, "messages"), (ResponsesRequest, "input")]
)
def test_a_conversation_has_a_bounded_number_of_messages(fields, field):
    """Each message is checked on the event loop, so their number bounds the time that /health waits."""
    body = {"model": "m", field: [{"role": "user", "content": "x"}] * MAX_MESSAGES}
    body |= {"max_tokens": 1} if fields is MessagesRequest else {}
    assert len(getattr(fields.model_validate(body), field)) == MAX_MESSAGES
    with pytest.raises(ValidationError, match=f"at most {MAX_MESSAGES} items"):
        fields.model_validate({**body, field: body[field] * 2})


@pytest.mark.slow
@pytest.mark.parametrize("count", [2000])
def test_the_cost_of_random_bodies_is_bounded(count, tmp_path):
    """Bodies of up to 32 MiB: CPU time and memory of the server's process. The stall of /health is printed only."""
    drawn, costs, times, statuses = random.Random(0), [], [], {}
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    options = ("--max-context", "256", "--chat-template", str(template))
    with process(*options) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        usage = Usage(server.process.pid)
        client.post("/v1/completions", json=ASKED)
        base = usage.peak_mib()
        with HealthWatch(server.url) as watch:
            for _ in range(count):
                path, body = random_body(drawn, 32 * MIB - 1024)
                usage.reset_peak()
                before, began = usage.cpu_s(), time.monotonic()
                answer = client.post(path, content=body, headers=JSON)
                costs.append((usage.cpu_s() - before, usage.peak_mib() - base, len(body), path, body[:80]))
                times.append((began, time.monotonic()))
                check_answer(answer, body)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert server.end() == 0
    costs = [(*cost[:2], watch.longest(*span), *cost[2:]) for cost, span in zip(costs, times, strict=True)]
    for index, unit in enumerate(("s of CPU", "MiB", "s until /health")):
        ordered = sorted(costs, key=lambda cost, index=index: cost[index])
        values = [round(ordered[count * part // 100 - 1][index], 3) for part in (50, 99, 100)]
        print(f"{unit}: median, 99 %, most: {values}; most at {ordered[-1][3:]}")
    print("statuses:", statuses)
    assert not watch.failed
    assert max(cost[0] for cost in costs) < 3
    assert max(cost[1] for cost in costs) < 512
