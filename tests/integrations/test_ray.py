"""Ray Serve: the ingress's promise, scaling by load, and a replica's messages; then all of it on Ray itself."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="not run: the extra ray isn't installed")
pytest.importorskip("fastapi", reason="not run: the extra serve isn't installed")

from ray.exceptions import ActorDiedError
from starlette.requests import Request

from outrider.device import ConfigError
from outrider.integrations.ray import Ingress, RaySettings, Replica, app, scale
from proof.disaggregation import free_port

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain"), (b"x-request-id", b"r")]}


def piece(text, more=True):
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Stream:
    """An answer of a replica: messages, and perhaps its death."""

    def __init__(self, *messages):
        self.messages, self.cancelled = list(messages), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.messages:
            raise StopAsyncIteration
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self):
        self.cancelled = True


class Replicas:
    """A handle: each call gets the next of ``streams``."""

    def __init__(self, *streams):
        self.streams, self.asked = list(streams), []
        self.answer = SimpleNamespace(remote=self._call)

    def options(self, **options):
        assert options == {"stream": True}
        return self

    def _call(self, scope, body):
        self.asked.append((scope, body))
        return self.streams.pop(0) if len(self.streams) > 1 else self.streams[0]


def ask(replicas, resend_s=60.0, headers=()):
    """Status, headers and body that a client gets."""

    async def main():
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"x-request-id", b"r1"), *headers],
            "app": "can't travel",
        }
        body = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive():
            return body.pop() if body else await asyncio.Event().wait()

        answer = await Ingress(replicas, resend_s)(Request(scope, receive))
        if hasattr(answer, "body_iterator"):
            text = b"".join([part async for part in answer.body_iterator]).decode()
        else:
            text = answer.body.decode()
        return answer.status_code, dict(answer.raw_headers), text

    return asyncio.run(main())


def told(code):
    return json.dumps({"error": {"message": "m", "type": "server_error", "param": None, "code": code}})


class Bare(Replica):
    """A replica without an engine. Serve awaits a destructor; Python doesn't."""

    def __init__(self):
        pass

    def __del__(self):
        pass


LOST = (START | {"status": 503}, piece(told("engine_lost"), more=False))


@pytest.mark.parametrize(
    "deaths",
    [(ActorDiedError(),), (START, ActorDiedError()), LOST, (START | {"status": 503}, piece(told("draining"), more=False))],
    ids=["before the status", "before the first piece", "engine lost", "draining"],
)
def test_a_request_whose_answer_had_not_begun_is_sent_again(deaths):
    replicas = Replicas(Stream(*deaths), Stream(*deaths), Stream(START, piece("good"), piece("", more=False)))
    status, headers, text = ask(replicas)
    assert (status, text) == (200, "good")
    assert headers[b"content-type"] == b"text/plain"
    assert b"x-request-id" not in headers, "Serve adds it"
    assert len(replicas.asked) == 3
    assert all(asked == replicas.asked[0] for asked in replicas.asked), "the same request, under the same id"
    scope, body = replicas.asked[0]
    assert body == b"{}"
    assert (b"x-request-id", b"r1") in scope["headers"]
    assert "app" not in scope


def test_what_has_begun_is_not_sent_again_but_ends_with_an_error():
    stream = Stream(START, piece("data: 1\n\n"), ActorDiedError())
    replicas = Replicas(stream)
    status, _, text = ask(replicas)
    assert status == 200
    first, last = text.removesuffix("\n\n").split("\n\n")
    assert first == "data: 1"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_lost"
    assert len(replicas.asked) == 1
    assert stream.cancelled


@pytest.mark.parametrize("answer", [(400, "no"), (503, told("queue_full")), (503, "not JSON"), (500, told("engine_lost"))])
def test_other_errors_are_the_clients(answer):
    status, text = answer
    replicas = Replicas(Stream(START | {"status": status}, piece(text, more=False)))
    assert ask(replicas)[::2] == answer
    assert len(replicas.asked) == 1


def test_no_replica_for_too_long_is_an_error_in_form():
    status, _, text = ask(Replicas(Stream(*[ActorDiedError()] * 100)), resend_s=0.3)
    assert status == 503
    assert json.loads(text)["error"]["code"] == "no_replica"


def test_a_replica_hands_on_messages_and_hears_of_clients_that_leave():
    heard = []

    async def application(scope, receive, send):
        heard.append((await receive())["body"])
        await send(START)
        await send(piece("one"))
        heard.append((await receive())["type"])

    async def main():
        replica = Bare()
        replica._app = application
        messages = replica.answer({"type": "http"}, b"body")
        assert await anext(messages) == START
        assert await anext(messages) == piece("one")
        await messages.aclose()

    asyncio.run(main())
    assert heard[0] == b"body"


def test_a_replica_whose_engine_is_gone_fails_its_health_check():
    replica = Bare()
    replica._engine = SimpleNamespace(error=None)
    replica.check_health()
    replica._engine.error = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        replica.check_health()


def test_load_is_what_is_short_requests_or_pages():
    replica = Bare()
    replica._settings, replica._rows = RaySettings(target_load=0.5), 8
    for running, waiting, free, load in ((0, 0, 100, 0.0), (8, 8, 100, 2.0), (1, 0, 10, 0.9)):
        held = SimpleNamespace(running=running, waiting=waiting, free_pages=free, pages=100)
        replica._engine = SimpleNamespace(snapshot=SimpleNamespace(load=held))
        assert replica.record_autoscaling_stats() == {"outrider_load": pytest.approx(load / 0.5)}
    replica._engine = SimpleNamespace(snapshot=None)
    assert replica.record_autoscaling_stats() == {"outrider_load": 0.0}


@pytest.mark.parametrize(
    ("loads", "wanted"), [({}, 4), ({"a": 0.0}, 1), ({"a": 1.0}, 1), ({"a": 1.2}, 2), ({"a": 2.5, "b": 2.5}, 5)]
)
def test_scaling_aims_at_the_load(loads, wanted):
    context = SimpleNamespace(aggregated_metrics={"outrider_load": loads}, target_num_replicas=4)
    assert scale(context) == (wanted, {})


def test_settings_are_checked_and_words_of_a_command_line_are_numbers():
    settings = RaySettings(replicas="2", max_replicas="3", gpus="0.5")
    assert (settings.replicas, settings.max_replicas, settings.gpus) == (2, 3, 0.5)
    for wrong, named in (
        ({"replica": 2}, "replica: "),
        ({"replicas": 0}, "replicas: "),
        ({"replicas": 3, "max_replicas": 2}, "less"),
    ):
        with pytest.raises(ConfigError, match=named):
            app(wrong)
    assert app({"replicas": 2, "max_replicas": 4})._bound_deployment.name == "OutriderIngress"


# -- Ray itself ------------------------------------------------------------------------------------------------------

RUN = "from ray.serve.scripts import cli; cli()"


def post(port, **body):
    sent = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": "outrider-bundled", "temperature": 0} | body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(sent, timeout=180) as answer:
        return answer.read().decode()


class Load:
    """Requests from some threads; half of them stream."""

    def __init__(self, port, requests, threads=6):
        self.port, self.results, self._lock, self._left = port, [], threading.Lock(), list(range(requests))
        self.threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def _run(self):
        while True:
            with self._lock:
                if not self._left:
                    return
                index = self._left.pop()
            asked = {"prompt": f"def f{index % 5}(", "max_tokens": 20, "stream": index % 2 == 0}
            try:
                text = post(self.port, **asked)
            except Exception as error:
                text = f"failed: {error!r}"
            with self._lock:
                self.results.append((asked, text))

    def until(self, count):
        deadline = time.monotonic() + 420
        while len(self.results) < count:
            assert time.monotonic() < deadline, f"{len(self.results)} of {count} answers came"
            time.sleep(0.05)


def text_of(asked, answer):
    """The text of an answer; None where it was cut off in the middle."""
    if not asked["stream"]:
        return json.loads(answer)["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    parts = [json.loads(event) for event in events if event != "[DONE]"]
    if any("error" in part for part in parts):
        assert any("choices" in part for part in parts), "it was lost though nothing had been streamed"
        return None
    assert events[-1] == "[DONE]"
    return "".join(part["choices"][0]["text"] for part in parts)


def ready(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def replicas_of():
    from ray.util.state import list_actors

    return {actor.pid for actor in list_actors() if actor.state == "ALIVE" and "OutriderReplica" in (actor.name or "")}


def children(pid):
    """Processes that ``pid`` started."""
    return [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]


@pytest.mark.slow
def test_a_killed_replica_costs_no_request_that_had_not_begun(tmp_path):
    import ray

    port = free_port()
    config = tmp_path / "serve.yaml"
    arguments = {"replicas": 2, "backend": "cpu", "dtype": "float32", "cpus": 0.5}
    application = {"name": "default", "import_path": "outrider.integrations.ray:app", "args": arguments}
    config.write_text(json.dumps({"http_options": {"port": port}, "applications": [application]}))
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-c", RUN, "run", str(config)], stdout=log, stderr=log, env=environment, cwd=tmp_path
        )
    try:
        deadline = time.monotonic() + 420
        while not ready(port):
            assert running.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        reference = {
            index: json.loads(post(port, prompt=f"def f{index}(", max_tokens=20))["choices"][0]["text"] for index in range(5)
        }
        for kill_engine in (False, True):
            while len(before := replicas_of()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.5)
            load = Load(port, 60)
            load.until(15)
            victim = min(before)
            # The replica itself, or the process of its engine, as a lost device would end it.
            os.kill(max(children(victim)) if kill_engine else victim, signal.SIGKILL)
            load.until(60)
            cut = 0
            for asked, answer in load.results:
                assert not answer.startswith("failed"), answer
                text = text_of(asked, answer)
                cut += text is None
                assert text in (None, reference[int(asked["prompt"][5])])
            assert cut <= 6, "at most what had begun to stream on one replica"
            deadline = time.monotonic() + 300
            while len(alive := replicas_of()) < 2 or victim in alive:
                assert time.monotonic() < deadline, "the service isn't back"
                time.sleep(0.5)
            deadline = time.monotonic() + 300
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        running.send_signal(signal.SIGINT)
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
