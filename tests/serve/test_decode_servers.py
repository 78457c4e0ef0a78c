"""HTTP in front of decode servers: the tokens of an engine in this server, and what happens when a server goes away."""

import asyncio
import threading
import time

import httpx
import pytest

from outrider.cli.main import main
from outrider.disaggregation.connections import PeerAddress
from outrider.disaggregation.server import DecodeServer, PrefillServer
from outrider.engine.guides import grammars
from outrider.serve.command import describe_engine
from outrider.serve.connection.engine_client import DecodeServers, EngineGone
from outrider.transports.link import LocalTransport
from serve.conftest import BUNDLED, bundled_engine
from serve.reading import chunks_of
from serve.running import running
from serve.test_api import refused

ANY = PeerAddress("127.0.0.1", 0)
SECRET = b"0123456789abcdef"
ASKED = {"model": "m", "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0}


class DecodeThread:
    """A prefill server and a decode server in one thread, as two processes run them."""

    def __init__(self):
        self._ended, started = False, threading.Event()

        def run():
            transport = LocalTransport()
            prefill = PrefillServer(bundled_engine(), transport, listen=ANY, secret=SECRET)
            decode = DecodeServer(
                bundled_engine(), transport, listen=ANY, prefill=[prefill.address], secret=SECRET, describe=describe_engine
            )
            self.address, self.decode, self.prefill = decode.address, decode, prefill
            while not decode.worker.num_peers:
                prefill.run_once(0.0)
                decode.run_once(0.0)
            started.set()
            while not self._ended:
                prefill.run_once(0.0)
                decode.run_once(0.002)
            decode.close()
            prefill.close()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert started.wait(60)

    def close(self):
        self._ended = True
        self._thread.join(60)


@pytest.fixture(scope="module")
def split():
    thread = DecodeThread()
    with running(DecodeServers([thread.address], secret=SECRET, patience_s=20), BUNDLED / "target") as server:
        yield server, thread
    thread.close()


def streamed_text(answer):
    """The text of a streamed completion, and what stopped it."""
    choices = [chunk["choices"][0] for chunk in chunks_of(answer)]
    return "".join(choice["text"] for choice in choices), choices[-1]["stop_reason"]


def test_answers_are_those_of_one_engine(split, http):
    server, thread = split
    whole = httpx.post(f"{server.url}/v1/completions", json={**ASKED, "n": 2, "return_token_ids": True}, timeout=60).json()
    one = http.post("/v1/completions", json={**ASKED, "n": 2, "return_token_ids": True}).json()
    assert [choice["token_ids"] for choice in whole["choices"]] == [choice["token_ids"] for choice in one["choices"]]
    assert whole["usage"]["completion_tokens_details"]["accepted_draft_tokens"] > 0
    stopped = {**ASKED, "stop": ["assert", "("], "stream": True}
    here = streamed_text(httpx.post(f"{server.url}/v1/completions", json=stopped, timeout=60))
    assert here == streamed_text(http.post("/v1/completions", json=stopped))
    assert here[1] in ("assert", "(")
    assert thread.prefill.counts["writes"] == thread.decode.counts["arrived"] > 0
    found = httpx.get(f"{server.url}/metrics").text
    assert 'outrider_prefix_cache_queries_total{model_name="m"}' in found


def test_a_client_that_goes_away_frees_the_request(split):
    server, thread = split
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**ASKED, "max_tokens": 200, "stream": True}) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 20
    while thread.decode.worker.num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_guide_that_can_not_be_compiled_now_or_ever_is_no_fault_of_the_server(split, monkeypatch):
    server, _ = split
    schema = {"type": "integer", "minimum": 5, "maximum": 2}
    body = {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    refused(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60), 400, code="failed")
    monkeypatch.setattr(grammars, "_MAX_COMPILE_THREADS", 0)
    body["response_format"]["json_schema"]["schema"] = {"const": "busy"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    refused(answer, 429, code="queue_full", kind="rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1


def test_a_start_without_a_server_fails_and_names_it():
    async def start():
        client = DecodeServers([PeerAddress("127.0.0.1", 1)], patience_s=0.1)
        try:
            with pytest.raises(EngineGone, match="127.0.0.1:1 within 0.1 s"):
                await client.start()
        finally:
            await client.close()

    asyncio.run(start())


def test_options_of_an_engine_are_refused_next_to_a_decode_server(capsys):
    for more in (["--backend", "cpu"], ["--max-requests", "4"], ["--tensor-parallel", "2"]):
        assert main(["serve", "--decode-server", "127.0.0.1:9600", *more]) != 0
        assert "has no effect with --decode-server" in capsys.readouterr().err
    assert main(["serve", "--role", "decode", "--decode-server", "127.0.0.1:9600"]) != 0
    assert "has no effect with --role decode" in capsys.readouterr().err
