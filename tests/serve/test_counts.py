"""Usage and metrics equal what happened: tokens and choices, in every sampling mode and for every end of a request."""

import asyncio
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.serve.connection.engine_messages import SampleOutput
from serve.test_api import ASKED, everything_is_back

NAMES = ("prompt_tokens", "output_tokens", "aborted")
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": 0}}}}
ENDS = ("whole", "stream", "leaves", "refused by the engine", "fails")


def counted(server):
    """The counters, and the number of choices that have ended with a finish reason."""

    def read(service):
        registry = service.metrics.registry
        label = {"model_name": "m"}
        found = {name: registry.get_sample_value(f"outrider_{name}_total", label) for name in NAMES}
        reasons = [
            (sample.labels["finish_reason"], sample.value)
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "outrider_samples_total"
        ]
        failed = sum(value for reason, value in reasons if reason == "error")
        requests = registry.get_sample_value("outrider_request_seconds_count", label)
        return found | {"ended": sum(value for _, value in reasons), "failed": failed, "requests": requests}

    return server.call(read)


class Happened:
    """Tokens of the outputs that the engine has sent for open requests, and choices that were submitted."""

    def __init__(self, client, monkeypatch):
        self.tokens = self.choices = 0
        deliver, submit = client._deliver, client.submit

        def delivered(event):
            self.tokens += len(event.output.tokens) if event.key in client._open else 0
            deliver(event)

        def submitted(inbox, tokens, params, **options):
            self.choices += params.n
            self.key = submit(inbox, tokens, params, **options)
            return self.key

        monkeypatch.setattr(client, "_deliver", delivered)
        monkeypatch.setattr(client, "submit", submitted)


def failure_of(key):
    return SampleOutput(key, 0, StepOutput(key, (5,), FinishReason.ERROR, error="broken"))


def send(server, http, happened, body, end):
    """Send a request that ends in a way; returns its usage, or None where a client gets none."""
    if end in ("whole", "refused by the engine"):
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == (400 if end == "refused by the engine" else 200), answer.text
        return answer.json().get("usage")
    usage = None
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for number, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
            usage = json.loads(line[6:]).get("usage")
            if number == 0 and end == "leaves":
                return None
            if number == 0 and end == "fails":
                server.call(lambda service: service.engine._handle([failure_of(happened.key)]))
    return usage


def check(server, http, reference, monkeypatch, *, end, prompts, n, fields):
    with monkeypatch.context() as patch:
        before, happened = counted(server), Happened(server.client, patch)
        body = {**ASKED, "prompt": prompts, "n": n, **fields}
        if end == "refused by the engine":
            zeros = [token for token in range(2048) if reference.tokenizer.decode([token]).startswith("0")]
            body |= SCHEMA | {"logit_bias": {str(token): -100 for token in zeros}}
        if end in ("leaves", "fails"):
            body |= {"ignore_eos": True, "max_tokens": 60, "stop": None}
            step = server.engine.step
            patch.setattr(server.engine, "step", lambda: time.sleep(0.01) or step())
        usage = send(server, http, happened, body, end)
        assert everything_is_back(server)
        deadline = time.monotonic() + 20
        while server.call(lambda service: len(service._open)):
            assert time.monotonic() < deadline
        more = {name: value - before[name] for name, value in counted(server).items()}
    length = sum(len(reference.tokenizer.encode(prompt)) for prompt in prompts)
    assert happened.choices == len(prompts) * n == more["ended"] + more["aborted"]
    assert more["output_tokens"] == happened.tokens
    assert more["prompt_tokens"] == length
    assert (more["failed"] > 0) == (end in ("fails", "refused by the engine"))
    if end in ("whole", "stream"):
        assert usage["prompt_tokens"] == length
        assert usage["completion_tokens"] == happened.tokens
        assert usage["total_tokens"] == length + happened.tokens
        assert (more["aborted"], more["requests"]) == (0, 1)


CASES = st.fixed_dictionaries(
    {
        "end": st.sampled_from(ENDS),
        "prompts": st.lists(st.sampled_from(["def f():", "class Tree:\n", "x"]), min_size=1, max_size=2),
        "n": st.integers(1, 3),
        "fields": st.fixed_dictionaries(
            {"max_tokens": st.integers(1, 12)},
            optional={
                "temperature": st.sampled_from([0.0, 0.7, 1.5]),
                "seed": st.integers(0, 9),
                "top_k": st.sampled_from([0, 5]),
                "stop": st.sampled_from(["(", ["e", "\n"]]),
                "logprobs": st.integers(0, 2),
                "presence_penalty": st.just(0.5),
                "echo": st.booleans(),
            },
        ).filter(lambda fields: not (fields.get("echo") and "logprobs" in fields)),
    }
)


@pytest.mark.parametrize("examples", [4, pytest.param(300, marks=pytest.mark.slow)])
def test_counters_equal_events(server, http, reference, monkeypatch, examples):
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=CASES)
    def run(case):
        check(server, http, reference, monkeypatch, **case)

    run()


@pytest.mark.parametrize("end", ENDS)
def test_every_end_is_counted(server, http, reference, monkeypatch, end):
    check(server, http, reference, monkeypatch, end=end, prompts=["def f():"], n=2, fields={"max_tokens": 6})


def test_greedy_choices_share_the_tokens_of_their_prompt(http, reference):
    usage = http.post("/v1/completions", json={**ASKED, "prompt": "def", "n": 3, "max_tokens": 4}).json()["usage"]
    assert usage["prompt_tokens"] == len(reference.tokenizer.encode("def"))
    assert usage["completion_tokens"] == 12


def test_a_request_that_the_engine_does_not_take_has_no_prompt(server, http):
    before = counted(server)
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    body = {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert http.post("/v1/completions", json=body).status_code == 400
    assert counted(server) == before


def test_outputs_that_no_reader_has_taken_are_counted(server):
    before = counted(server)

    async def leave(service):
        prompts = service.prompter.completion_prompts("def f():")
        generation = await service.generate(prompts, [SamplingParams(max_tokens=5, ignore_eos=True)])
        while service.engine.num_open_samples:
            await asyncio.sleep(0.01)
        generation.close()

    server.call(leave)
    after = counted(server)
    assert {name: after[name] - before[name] for name in ("output_tokens", "ended", "aborted", "requests")} == {
        "output_tokens": 5,
        "ended": 1,
        "aborted": 0,
        "requests": 1,
    }
