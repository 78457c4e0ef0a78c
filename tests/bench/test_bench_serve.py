"""bench serve: what is read from a server's streams, and the same load without one."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from outrider import Engine
from outrider.serve.connection.engine_client import EngineGone
from outrider_bench import servers
from outrider_bench.child import BenchFailed
from outrider_bench.http_load import HttpLoad, run_load
from outrider_bench.load import StreamedAnswer, summarize
from outrider_bench.random_checkpoint import make_tokenizer
from outrider_proof import tiny
from outrider_proof.tiny import plain_config

LOAD = HttpLoad(url="", model="m", clients=3, rounds=2, prompt_tokens=5, new_tokens=7)


def events(counts, ending=b"data: [DONE]\n\n"):
    said = [{"choices": [{"index": 0, "text": "x", "token_ids": list(range(count))}]} for count in counts]
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in said) + ending


async def answered_by(answer, load=LOAD):
    """The load on a server that answers each request with these chunks."""
    asked = []

    async def serve(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
            asked.append(json.loads(await reader.readexactly(length)))
            writer.write(answer)
            await writer.drain()

    def quiet(loop, context):
        assert isinstance(context.get("exception"), asyncio.IncompleteReadError | ConnectionError), context

    asyncio.get_running_loop().set_exception_handler(quiet)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await run_load(replace(load, url=f"http://127.0.0.1:{port}")), asked
    finally:
        server.close()


def chunked(body, size):
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    said = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + said + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [7, 100, 10_000])
def test_tokens_are_counted_wherever_chunks_end(size):
    answers, asked = asyncio.run(answered_by(chunked(events([1, 3, 3]), size)))
    assert len(answers) == len(asked) == 6
    assert all(sum(each.tokens) == 7 for each in answers)
    assert all(body["stream"] and body["ignore_eos"] and body["max_tokens"] == 7 for body in asked)
    assert len({tuple(body["prompt"]) for body in asked}) == 6


def test_a_server_that_fails():
    refused = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\nno"
    broken = chunked(events([1], b'data: {"error": {"message": "gone"}}\n\n'), 50)
    for answer, said in ((refused, "429"), (broken, "gone"), (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "chunks")):
        with pytest.raises(BenchFailed, match=said):
            asyncio.run(answered_by(answer, replace(LOAD, clients=1, rounds=1)))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "something else than completions"),
        (b"HTTP/1.1\r\n\r\n", "something else than completions"),
        (chunked(b"", 10).replace(b"\r\n0\r\n", b"\r\nx\r\n"), "something else than completions"),
        (chunked(b"data: {]\n\n", 100), "something else than completions"),
        (chunked(b'data: {"text": "x"}\n\n', 100), "something else than completions"),
        (chunked(b'data: {"choices": [{"text": "x"}]}\n\n', 100), "return_token_ids"),
        (chunked(events([1, 3]), 100), "asked for 7 new tokens, an answer had 4: that isn't the same work"),
    ],
)
def test_what_isnt_the_same_work_has_no_figures(answer, said):
    with pytest.raises(BenchFailed, match=re.escape(said)):
        asyncio.run(asyncio.wait_for(answered_by(answer, replace(LOAD, clients=1, rounds=1)), 20))


def test_a_server_that_isnt_there():
    with pytest.raises(BenchFailed, match="can't be reached"):
        asyncio.run(run_load(replace(LOAD, url="http://127.0.0.1:1")))


def test_no_prompt_is_known_from_another_request_or_an_earlier_run():
    """A server that keeps prefixes would have read the prompt already."""
    loads = [each for number in (1, 2) for each in [LOAD.with_clients(128, number=number)]]
    loads += [each.warm_up for each in loads] + [replace(LOAD, clients=128, seed=5)]
    heads = [tuple(each.prompt(client, round_)) for each in loads for client in range(128) for round_ in range(each.rounds)]
    assert len(set(heads)) == len(heads)
    assert loads[0].prompt(3, 1) == replace(loads[0], first=3).prompt(0, 1)  # whichever process asks


def test_what_was_measured_before_a_failure_is_shown(outrider, monkeypatch):
    def measured(load):
        if load.clients == 4:
            raise BenchFailed("too many")
        assert load.url == "http://host:1/base"
        return [StreamedAnswer(began=1.0, times=[2.0, 3.0], tokens=[1, 6])]

    monkeypatch.setattr("outrider_bench.commands.serve.run_clients", measured)
    given = ("--url", "http://host:1/base/v1/", "--model", "m", "--concurrency", "2,4,8", "--json")
    result = outrider("bench", "serve", *given)
    assert result.code == 1
    assert (result.json["model"], result.json["concurrency"]) == ("m", [2, 4, 8])
    (engine,) = result.json["engines"]
    assert engine["failed"] == "too many"
    assert [row["concurrency"] for row in engine["results"]] == [2]


def test_figures_of_a_load():
    answers = [
        StreamedAnswer(began=10.0, times=[10.5, 11.0, 11.2], tokens=[1, 3, 2]),
        StreamedAnswer(began=10.0, times=[11.0, 12.0], tokens=[1, 4]),
    ]
    found = summarize(answers)
    assert (found["requests"], found["tokens"], found["seconds"]) == (2, 11, 2.0)
    assert found["tokens_per_s"] == 5.5
    assert found["first_token_ms"]["max"] == pytest.approx(1000)
    assert found["between_outputs_ms"]["p50"] == pytest.approx(500)
    assert found["a_token_ms"]["max"] == pytest.approx(250)
    assert found["tokens_an_output"] == 2.2


def test_the_engine_alone_gets_the_same_load():
    engine = Engine(tiny.target(), tiny.BACKEND, config=plain_config(dtype="float64", max_requests=3, max_context=32))
    answers = servers.run_on_engine(engine, LOAD)
    assert [sum(each.tokens) for each in answers] == [7] * 6
    assert not engine.has_unfinished


def test_every_token_has_a_text():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(make_tokenizer(5000))
    assert tokenizer.get_vocab_size() == 5000
    assert len({tokenizer.decode([token]) for token in range(256, 5000)}) == 5000 - 256


def test_a_server_whose_engine_cant_be_made_says_why_alone(monkeypatch, tmp_path):
    """What it says last is shown, and a traceback is no answer."""
    model = {"shape": "tiny", "speculate": "none", "draft_tokens": 1, "accept_length": None}
    setup = {"model": model, "dtype": "sim", "backend": None, "max_requests": 1, "max_context": 8}
    given = {"setup": setup, "model": str(tmp_path), "port": 1}

    def fails(work):
        work.close()
        raise EngineGone("ConfigError: dtype is 'sim'")

    monkeypatch.setattr("outrider.serve.http.request_middleware.log_to_stderr", lambda form: None)
    monkeypatch.setattr("outrider.serve.command.run_loop", fails)
    with pytest.raises(SystemExit, match="^ConfigError: dtype is 'sim'$"):
        servers.serve_random_weights(given)
