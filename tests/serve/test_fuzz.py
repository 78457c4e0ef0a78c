"""Drawn requests over the description of the API: no answer is a 500, and each has a form that the description knows."""

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from serve.conftest import TEMPLATE
from serve.health_watch import HealthWatch
from serve.test_api import everything_is_back
from serve.test_load import gauges, process

schemathesis = pytest.importorskip("schemathesis", reason="not run: schemathesis isn't installed")

SOME, MANY, NUM_POSTS = 1, 2000, 6
"""Requests for each route, requests for all routes together, and the number of routes that take fields."""
WHOLE_STREAMS = schemathesis.Config.from_dict({"max-stream-events": 1 << 20})
"""By default the client hangs up after 20 events of a stream."""
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
KNOWN = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics"}
KNOWN |= {"/v1/responses", "/v1/responses/{response_id}", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"}


def served(case):
    """Mostly of the model that is there, and short: what is wrong otherwise is looked at, too."""
    body = case.body
    if isinstance(body, dict):
        if len(str(body)) % 8:
            body["model"] = "m"
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and body[name] > 8:
                body[name] = 1 + body[name] % 8
        if isinstance(body.get("n"), int) and body["n"] > 3:
            body["n"] = 1 + body["n"] % 3
        if case.path == "/v1/chat/completions" and not {"max_tokens", "max_completion_tokens"} & body.keys():
            body["max_tokens"] = 4
        if case.path == "/v1/responses":
            body.setdefault("max_output_tokens", 4)
        if isinstance(body.get("min_tokens"), int):
            body["min_tokens"] = 0
    return case


def check(answer, path, described):
    assert answer.status_code < 500, answer.text
    assert str(answer.status_code) in described or answer.status_code in (404, 405), (answer.status_code, sorted(described))
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) - {"details"} == {"message", "type", "param", "code"}
        assert error["message"]
    elif path.startswith("/v1"):
        if "text/event-stream" in str(answer.headers["content-type"]):
            events = answer.text.strip().split("\n\n")
            if "completions" in path:
                assert events.pop() == "data: [DONE]"
            assert all(isinstance(json.loads(event.rpartition("data: ")[2]), dict) for event in events)
        else:
            assert isinstance(answer.json(), dict)


def try_operation(operation, mode, examples, statuses):
    described = operation.definition.raw["responses"]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode).map(served))
    def run(case):
        answer = case.call(timeout=60)
        statuses[answer.status_code] += 1
        check(answer, operation.path, described)

    run()


def try_routes(server, mode, examples):
    """Requests to every route; those that take fields get nearly all of them. Returns the answers by status."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=WHOLE_STREAMS)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= KNOWN
    statuses = Counter()
    for operation in operations:
        if mode is not schemathesis.GenerationMode.NEGATIVE or has_wrong_form(operation):
            try_operation(operation, mode, examples if operation.method == "post" else 3, statuses)
    return statuses


def has_wrong_form(operation):
    """Return True for a request with fields: any text is a right segment of a path."""
    described = operation.definition.raw
    return "requestBody" in described or any(each["in"] != "path" for each in described.get("parameters", ()))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_no_request_is_an_internal_error(server, mode):
    assert sum(try_routes(server, mode, SOME).values()) >= SOME * NUM_POSTS
    assert everything_is_back(server)


@pytest.mark.slow
def test_many_requests_to_all_routes(tmp_path):
    """The longest time until /health answers is printed: a busy machine may need longer."""
    statuses = Counter()
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    with process("--max-context", "256", "--chat-template", str(template)) as server:
        with HealthWatch(server.url) as watch:
            while sum(statuses.values()) < MANY:
                for mode in MODES:
                    statuses += try_routes(server, mode, MANY // (2 * NUM_POSTS))
        found = gauges(server.url)
    print(f"{sum(statuses.values())} requests: {dict(statuses)}; /health took {watch.longest():.3f} s at most")
    assert not watch.failed
    names = ("outrider_requests_running", "outrider_requests_waiting", "outrider_kv_cache_usage")
    assert [found[name] for name in names] == [0, 0, 0]
