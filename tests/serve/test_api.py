"""What the server says to requests that can't be served, to clients that go away, and about itself."""

import asyncio
import json
import re
import threading
import time

import httpx
import pytest

from outrider.engine.guides import grammars
from outrider.serve.api.responses import ApiError
from outrider.serve.config import ServeConfig
from outrider.serve.http.metrics import ALIASES

ASKED = {"model": "m", "prompt": "def f():", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def refused(answer, status, *, param=None, code=None, kind="invalid_request_error"):
    """Check that an answer is an error in OpenAI's form; returns its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == (kind, param)
    if code is not None:
        assert error["code"] == code
    assert answer.headers["x-request-id"]
    return error["message"]


def test_a_completion_without_a_prompt_starts_a_document(http):
    asked = {"model": "m", "temperature": 0, "max_tokens": 4}
    answers = [http.post("/v1/completions", json=asked | prompt) for prompt in ({"prompt": ""}, {"prompt": None}, {})]
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [texts[0]] * 3


JSON = {"content-type": "application/json"}


BROKEN = [b"", b"{", b"[]", b"null", b'"x"', b'{"model": "m", "prompt": NaN}', b"[" * 100_000, b"\xff", b"1" * 5000]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_a_body_that_is_no_request(http, body):
    assert http.post("/v1/completions", content=body, headers=JSON).status_code == 400


def test_what_is_not_there(http):
    answer = http.post("/v1/completions", json={**ASKED, "model": "n"})
    message = refused(answer, 404, param="model", code="model_not_found")
    assert "m" in message
    refused(http.get("/v1/models/other"), 404, param="model")
    refused(http.get("/v2"), 404, code="not_found")
    refused(http.get("/health/"), 404, code="not_found")  # no redirect, which would name http:// behind TLS
    refused(http.post("/v1/completions/", json=ASKED), 404, code="not_found")
    refused(http.get("/v1/completions"), 405, code="method_not_allowed")


def test_a_schema_that_no_grammar_can_keep_is_refused_by_the_engine(http):
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    body = {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert http.post("/v1/completions", json=body).status_code == 400


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_too_many_guides_at_a_time_are_a_reason_to_come_later(http, monkeypatch, path):
    """The client's retry succeeds, so the status isn't that of a wrong request."""
    schema = {"type": "object", "properties": {path: {"type": "boolean"}}, "required": [path], "additionalProperties": False}
    body = {
        "completions": {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "chat/completions": {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "responses": {"model": "m", "input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        "messages": {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }[path]
    with monkeypatch.context() as patched:
        patched.setattr(grammars, "_MAX_COMPILE_THREADS", 0)
        for stream in (False, True):
            answer = http.post(f"/v1/{path}", json={**body, "stream": stream})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["type"] == "rate_limit_error"
    assert http.post(f"/v1/{path}", json=body).status_code == 200


def test_request_ids(http):
    assert http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = http.get("/version", headers={"x-request-id": 'forged" {'}).headers["x-request-id"]
    assert made.startswith("req-")


def test_states(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert set(http.get("/version").json()) == {"version"}


def metrics(http):
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_health_routes_have_head(http):
    for path in ("/health", "/ready", "/metrics", "/version", "/v1/models", "/"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["x-request-id"]
    assert http.head("/v1/completions").status_code == 405


def test_every_alias_of_vllm_is_exported(server, http):
    http.post("/v1/completions", json=ASKED).raise_for_status()
    assert everything_is_back(server)
    exported = {re.split(r"[{ ]", line)[0] for line in http.get("/metrics").text.splitlines()}
    for alias in ALIASES:
        assert {alias.name, f"{alias.name}_total", f"{alias.name}_count"} & exported, alias.name


def test_metrics_count_what_happened(server, http):
    assert everything_is_back(server)
    before = metrics(http)
    http.post("/v1/completions", json={**ASKED, "max_tokens": 8}).raise_for_status()
    assert everything_is_back(server)
    after = metrics(http)
    model = '{model_name="m"}'

    def more(name):
        return after[name] - before.get(name, 0)

    assert more(f"outrider_output_tokens_total{model}") == 8
    assert more('outrider_samples_total{finish_reason="length",model_name="m"}') == 1
    assert more('outrider_http_requests_total{model_name="m",route="/v1/completions",status="200"}') == 1
    assert more(f"outrider_time_to_first_token_seconds_count{model}") == 1
    assert more(f"outrider_request_seconds_count{model}") == 1
    assert more('vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"}') == 1
    drafted = [more(f'outrider_drafted_tokens_total{{model_name="m",position="{place}"}}') for place in range(1, 5)]
    accepted = [more(f'outrider_accepted_tokens_total{{model_name="m",position="{place}"}}') for place in range(1, 5)]
    assert drafted[0] >= accepted[0] > 0
    assert accepted == sorted(accepted, reverse=True)
    assert more(f"outrider_iterations_total{model}") > 0
    assert more(f"outrider_step_seconds_total{model}") > 0
    vllm = '{engine="0",model_name="m"}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"vllm:{name}{vllm}"] == 0
    assert more(f"vllm:spec_decode_num_accepted_tokens_total{vllm}") == sum(accepted)
    assert more(f"vllm:spec_decode_num_draft_tokens_total{vllm}") == sum(drafted)
    assert more(f"vllm:spec_decode_num_drafts_total{vllm}") == drafted[0]
    per_position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"}'
    assert more(per_position) == accepted[0]
    assert more('vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}') == 1
    assert any(name.startswith("vllm:cache_config_info{") for name in after)
    assert after[f"outrider_up{model}"] == 1


def everything_is_back(server):
    """Nothing is open, no page is held, and the engine's last snapshot has come."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        snapshot = server.client.snapshot
        idle = server.client.num_open_samples == 0 and snapshot.load.running == snapshot.load.waiting == 0
        if idle and snapshot.stats == server.engine.stats:
            break
        time.sleep(0.02)
    load = server.client.snapshot.load
    return (server.client.num_open_samples, load.running, load.waiting, load.pages - load.free_pages) == (0, 0, 0, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_goes_away_ends_its_request(server, http, stream):
    before = metrics(http)['outrider_aborted_total{model_name="m"}']
    body = {**ASKED, "max_tokens": 200, "n": 2, "temperature": 1, "ignore_eos": True, "stream": stream}

    async def leave():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while server.client.num_open_samples < 2:
                await asyncio.sleep(0.01)
            asking.cancel()

    if stream:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        asyncio.run(leave())
    assert everything_is_back(server)
    assert metrics(http)['outrider_aborted_total{model_name="m"}'] - before == 2


def test_a_full_queue(server, monkeypatch):
    room, refusal, step = server.service.config.max_queued + 4, threading.Event(), server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: refusal.wait(60) and step())

    async def flood():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as many:
            body = {**ASKED, "n": 32, "temperature": 1, "max_tokens": 6}
            asked = [asyncio.create_task(many.post("/v1/completions", json=body)) for _ in range(4)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            refusal.set()
            return await asyncio.gather(*asked)

    answers = asyncio.run(flood())
    done = [answer for answer in answers if answer.status_code == 200]
    assert len(done) >= room // 32
    assert len(done) < 4
    for answer in answers:
        if answer.status_code != 200:
            refused(answer, 429, code="queue_full", kind="rate_limit_error")
            assert int(answer.headers["retry-after"]) > 0
    assert everything_is_back(server)


@pytest.mark.usefixtures("slow_steps")
def test_limits_of_bodies_and_time(server, http, monkeypatch):
    def limits(**changed):
        config = ServeConfig(names=("m",), **changed)
        monkeypatch.setattr(server.service, "config", config)

    limits(max_body_bytes=2000)
    refused(http.post("/v1/completions", json={**ASKED, "prompt": "x" * 3000}), 413, code="request_too_large")

    def pieces(pause):
        yield b'{"model": "m", '
        time.sleep(pause)
        yield b'"prompt": "' + b"x" * 3000 + b'"}'

    refused(http.post("/v1/completions", content=pieces(0), headers=JSON), 413, code="request_too_large")
    limits(body_timeout_s=0.2)
    refused(http.post("/v1/completions", content=pieces(1), headers=JSON), 408, code="body_timeout")
    limits(request_timeout_s=0.1)
    body = {**ASKED, "max_tokens": 240, "n": 4, "temperature": 1, "ignore_eos": True}
    refused(http.post("/v1/completions", json=body), 504, code="timeout", kind="server_error")
    assert everything_is_back(server)


@pytest.mark.usefixtures("slow_steps")
def test_an_error_in_the_middle_of_a_stream_is_an_event(server, http):
    body = {**ASKED, "max_tokens": 240, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        late = ApiError(504, "late", kind="server_error", code="timeout")
        server.call(lambda service: [each.fail(late) for each in service._open])
        events = [line for line in lines if line]
    assert json.loads(events[-2][6:])["error"]["code"] == "timeout"
    assert events[-1] == "data: [DONE]"
    assert everything_is_back(server)


def test_keys(server, http, monkeypatch):
    monkeypatch.setattr(server.service, "config", ServeConfig(names=("m",), api_keys=("right", "also")))
    refused(http.get("/v1/models"), 401, code="invalid_api_key")
    for wrong in ("Bearer wrong", "Bearer", "Basic right", "right", "Bearer right2"):
        refused(http.get("/v1/models", headers={"authorization": wrong}), 401, code="invalid_api_key")
    for key in ("right", "also"):
        assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert http.get("/health").status_code == 200


def test_every_answer_to_a_completion_is_described(http):
    described = http.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        answers = described["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "408", "413", "429", "503", "504"} <= set(answers)
        assert "422" not in answers


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slow_steps")
def test_a_draining_server_ends_what_runs_and_takes_nothing_new(server, http, monkeypatch):
    monkeypatch.setattr(server.service, "_draining", False)  # put back behind the test
    body = {**ASKED, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        ended = asyncio.run_coroutine_threadsafe(server.service.drain(30), server.loop)
        with httpx.Client(base_url=server.url) as other:
            while other.get("/ready").status_code == 200:
                time.sleep(0.005)
            refused(other.post("/v1/completions", json=ASKED), 503, code="draining", kind="server_error")
            assert all(other.get(path).status_code == 200 for path in ("/health", "/metrics", "/version", "/v1/models"))
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert ended.result(30) is True


@pytest.mark.usefixtures("slow_steps")
def test_a_drain_that_takes_too_long_cuts_requests_off(server, http, monkeypatch):
    monkeypatch.setattr(server.service, "_draining", False)
    body = {**ASKED, "max_tokens": 200, "n": 4, "temperature": 1, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.call(lambda service: service.drain(0.01)) is False
        events = [line for line in lines if line]
    assert json.loads(events[-2][6:])["error"]["code"] == "draining"
    assert everything_is_back(server)
