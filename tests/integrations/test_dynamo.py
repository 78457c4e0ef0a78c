"""The adapter of Dynamo's unified backend, against the wheel's own base class and its own contexts."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("dynamo.common.backend", reason="not run: the extra dynamo isn't installed")

from dynamo._core import Context
from dynamo.common.backend.engine import LLMEngine
from dynamo.common.backend.publisher import ZmqSource
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from outrider.device import DeviceLost
from outrider.engine.guides.guides import ChoiceGuide
from outrider.integrations import dynamo as adapter
from outrider.integrations.dynamo import OutriderEngine, sampling_params
from outrider.speculative.eagle import EagleProposer
from outrider_proof import tiny
from proof.disaggregation import free_port

PROMPT = [0, 1, 4, 1, 6]
GREEDY = {"temperature": 0.0}


def make():
    return tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), max_requests=2, page_size=4)


def make_slow():
    """Iterations that take so long that nothing ends before it's aborted."""
    engine = make()
    step = engine.step
    engine.step = lambda: time.sleep(0.01) or step()
    return engine


LONG = {"max_tokens": 50, "ignore_eos": True}


def worker(main, source=make):
    """``main(engine)`` between a start and a cleanup."""

    async def run():
        engine = OutriderEngine(source, model=Path("tiny"), name="tiny")
        assert isinstance(engine, LLMEngine)
        registered = await engine.start(worker_id=7)
        try:
            return await asyncio.wait_for(main(engine, registered), 60)
        finally:
            await engine.cleanup()
            await engine.cleanup()

    return asyncio.run(run())


async def chunks(engine, request, context=None):
    return [chunk async for chunk in engine.generate(request, context or Context())]


def request(**parts):
    return {"token_ids": list(PROMPT), "sampling_options": GREEDY, "stop_conditions": {"max_tokens": 10}} | parts


def tokens_of(found):
    return tuple(token for chunk in found for token in chunk["token_ids"])


def test_tokens_are_the_engines_and_the_end_says_how_many():
    async def main(engine, registered):
        many = await asyncio.gather(*(chunks(engine, request()) for _ in range(5)))
        assert registered.llm.kv_cache_block_size == 4
        assert registered.llm.max_num_seqs == 2
        assert registered.llm.total_kv_blocks == engine._engine.engine.config.num_pages - 1
        return many

    for found in worker(main):
        assert tokens_of(found) == tiny.plain(tuple(PROMPT), 10)
        assert all(chunk["index"] == 0 for chunk in found)
        assert [chunk.get("finish_reason") for chunk in found] == [None] * (len(found) - 1) + ["length"]
        assert found[-1]["completion_usage"] == {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}


def test_packed_tokens_are_taken():
    packed = b"".join(token.to_bytes(4, "little") for token in PROMPT)
    found = worker(lambda engine, _: chunks(engine, request(token_ids=packed)))
    assert tokens_of(found) == tiny.plain(tuple(PROMPT), 10)


def test_logprobs_are_in_dynamos_form():
    found = worker(lambda engine, _: chunks(engine, request(output_options={"logprobs": 2})))
    for chunk in found:
        assert len(chunk["log_probs"]) == len(chunk["top_logprobs"]) == len(chunk["token_ids"])
        for token, logprob, top in zip(chunk["token_ids"], chunk["log_probs"], chunk["top_logprobs"], strict=True):
            assert [each["rank"] for each in top] == [1, 2]
            assert top[0]["token_id"] == token, "greedy takes the likeliest"
            assert top[0]["logprob"] == logprob


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"sampling_options": {"n": 2}}, "ask n times"),
        ({"sampling_options": {"temperature": -1.0}}, "temperature"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {"a": 1}}}}, "structural_tag"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["b"]}}}, "takes one of"),
        ({"sampling_options": {"guided_decoding": {"json": "no JSON"}}}, "JSON"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"multi_modal_data": {"image_url": []}}, "multi_modal_data"),
        ({"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        ({"stop_conditions": {"max_tokens": 10**6}}, "context"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [10**6]}, "token"),
    ],
)
def test_what_cannot_be_done_is_an_invalid_argument_and_harms_nobody(parts, named):
    async def main(engine, _):
        with pytest.raises(InvalidArgument, match=named):
            await chunks(engine, request(**parts))
        assert engine._open_requests == {}
        return await chunks(engine, request())

    assert tokens_of(worker(main)) == tiny.plain(tuple(PROMPT), 10)


def test_sampling_options_arrive():
    params = sampling_params(
        {
            "token_ids": [1, 2],
            "sampling_options": {
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": -1,
                "min_p": 0.1,
                "seed": 5,
                "frequency_penalty": 1,
                "logit_bias": {"7": -5},
                "n": None,
            },
            "stop_conditions": {"stop": ["x"], "stop_token_ids_hidden": [3], "min_tokens": 2, "ignore_eos": True},
        },
        max_context=100,
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 0, 0.1, 5)
    assert (params.frequency_penalty, params.biases) == (1.0, ((7, -5.0),))
    assert (params.stop, params.stop_token_ids, params.min_tokens, params.ignore_eos) == (("x",), (3,), 2, True)
    assert params.max_tokens == 98, "as much as the context holds"
    guided = sampling_params(
        {"token_ids": [1], "sampling_options": {"guided_decoding": {"choice": ["a", "b"]}}}, max_context=9
    )
    assert guided.guide == ChoiceGuide(("a", "b"))
    unseeded = [sampling_params({"token_ids": [1]}, max_context=9) for _ in range(2)]
    assert unseeded[0].temperature == 1.0
    assert unseeded[0].seed != unseeded[1].seed


def test_an_abort_frees_a_running_and_a_waiting_request():
    async def main(engine, _):
        long = request(stop_conditions=LONG)
        contexts = [Context(f"r{index}") for index in range(4)]  # two run, two wait
        running = [asyncio.create_task(chunks(engine, dict(long), context)) for context in contexts]
        while len(engine._engine.engine.open_requests) < 4:
            await asyncio.sleep(0.005)
        for context in reversed(contexts):
            await engine.abort(context)
        await engine.abort(Context("never seen"))
        for found in await asyncio.gather(*running):
            assert found[-1]["finish_reason"] == "cancelled"
            assert len(tokens_of(found)) < 50
        inner = engine._engine.engine
        assert await engine._engine.call(lambda each: (each.free_rows, each.open_requests)) == (2, {})
        assert inner.free_pages == inner.config.num_pages - 1
        assert engine._open_requests == {}

    worker(main, make_slow)


def test_a_stream_that_is_dropped_frees_its_request():
    async def main(engine, _):
        stream = engine.generate(request(stop_conditions=LONG), Context())
        await anext(stream)
        await stream.aclose()
        while await engine._engine.call(lambda inner: inner.open_requests):
            await asyncio.sleep(0.005)

    worker(main, make_slow)


def test_the_prefix_cache_is_heard_where_the_worker_is_told_to_listen():
    zmq = pytest.importorskip("zmq", reason="not run: the extra kv-events isn't installed")
    msgspec = pytest.importorskip("msgspec", reason="not run: the extra kv-events isn't installed")

    async def main(engine, _):
        (source,) = await engine.kv_event_sources()
        assert source == ZmqSource(endpoint=source.endpoint, topic="", dp_rank=0)
        context = zmq.Context()
        try:
            listens = context.socket(zmq.SUB)
            listens.connect(source.endpoint)
            listens.subscribe(b"")
            for first in range(20):  # until the subscription has arrived
                await chunks(engine, request(token_ids=[first, *PROMPT], stop_conditions={"max_tokens": 1}))
                if await asyncio.to_thread(listens.poll, 100):
                    _, events, _ = msgspec.msgpack.decode(listens.recv_multipart()[2])
                    return first, events[-1]
        finally:
            context.destroy(linger=0)
        pytest.fail("no event was heard")

    first, event = worker(main)
    assert event["type"] == "BlockStored"
    assert event["token_ids"] == [first, *PROMPT[:3]]


def test_pages_in_use_are_reported():
    class Publisher:
        def __init__(self):
            self.heard = []

        def publish(self, rank, snapshot):
            self.heard.append((rank, snapshot))

    async def main(engine, registered):
        assert engine.component_metrics_dp_ranks() == [0]
        publisher = Publisher()
        await asyncio.to_thread(engine.attach_snapshot_publisher, publisher)
        while not publisher.heard:
            await asyncio.sleep(0.01)
        rank, snapshot = publisher.heard[0]
        assert (rank, snapshot.kv_used_blocks, snapshot.kv_total_blocks) == (0, 0, registered.llm.total_kv_blocks)

    worker(main)


def test_a_lost_device_ends_the_worker(monkeypatch):
    sent = []
    monkeypatch.setattr(adapter.os, "kill", lambda process, number: sent.append((process, number)))

    async def main(engine, _):
        def lose():
            raise DeviceLost("gone")

        await engine._engine.call(lambda inner: setattr(inner, "step", lose))
        for _ in range(2):
            with pytest.raises(EngineShutdown, match="gone"):
                await chunks(engine, request())
        assert isinstance(engine.lost, DeviceLost)

    worker(main)
    assert sent == [(os.getpid(), signal.SIGTERM)], "told once"


def test_a_start_that_fails_can_be_cleaned_up():
    def fail():
        raise DeviceLost("no device")

    async def run():
        engine = OutriderEngine(fail, model=Path("tiny"), name="tiny")
        with pytest.raises(DeviceLost):
            await engine.start(worker_id=1)
        await engine.cleanup()
        with pytest.raises(EngineShutdown):
            await chunks(engine, request())

    asyncio.run(run())


def test_options_become_a_worker(monkeypatch):
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    arguments = ["--discovery-backend", "file", "--namespace", "here", "--served-model-name", "small"]
    engine, config = asyncio.run(OutriderEngine.from_args(arguments))
    assert isinstance(engine, OutriderEngine)
    assert (config.namespace, config.component, config.endpoint) == ("here", "backend", "generate")
    assert config.served_model_name == "small"
    assert (Path(config.model_name) / "tokenizer.json").exists()
    with pytest.raises(SystemExit):
        asyncio.run(OutriderEngine.from_args(["--no-such-option"]))


def test_the_adapter_stays_small():
    assert len(Path(adapter.__file__).read_text().splitlines()) <= 310


# -- Dynamo itself ---------------------------------------------------------------------------------------------------


def ask(port, **body):
    sent = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": "bundled", "temperature": 0} | body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(sent, timeout=60) as answer:
        return json.load(answer)


SERVED = ("--served-model-name", "bundled", "--endpoint-types", "completions")


@pytest.mark.slow
def test_dynamos_own_frontend_routes_to_a_worker(tmp_path):
    """Frontend, KV router and worker as processes, found by files; the second prompt hits the pages of the first."""
    environment = os.environ | {"DYN_FILE_KV": str(tmp_path / "found"), "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}
    port = free_port()
    found = ["--discovery-backend", "file"]
    logs = [(tmp_path / f"{index}.log").open("wb") for index in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *command, *found],
            env=environment,
            cwd=tmp_path,
            stdout=logs[index],
            stderr=subprocess.STDOUT,
        )
        for index, command in enumerate(
            (
                ["dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"],
                ["outrider.integrations.dynamo", "--backend", "cpu", "--dtype", "float32", *SERVED],
            )
        )
    ]
    try:
        until = time.monotonic() + 120
        while True:
            try:
                first = ask(port, prompt="def add(a, b):\n" * 20, max_tokens=16)
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < until, (tmp_path / "1.log").read_text()[-2000:]
                assert all(each.poll() is None for each in started)
                time.sleep(0.5)
        time.sleep(1)
        assert ask(port, prompt="def add(a, b):\n" * 20, max_tokens=16)["choices"] == first["choices"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        applied = [line for line in metrics.splitlines() if 'event_type="stored",status="ok"' in line]
        assert applied, "the router has no count of KV events"
        assert float(applied[0].split()[-1]) > 0
        log = (tmp_path / "0.log").read_text()
        assert re.search(r"overlap_blocks=[1-9]", re.sub("\x1b\\[[0-9;]*m", "", log)), "the second prompt hit nothing"
        started[1].send_signal(signal.SIGTERM)
        assert started[1].wait(60) == 0
    finally:
        for each, log in zip(started, logs, strict=True):
            each.kill()
            each.wait()
            log.close()
