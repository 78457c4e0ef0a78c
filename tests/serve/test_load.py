"""The server under load; the whole of it, and the real process, behind the marker slow."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from outrider.serve.http.server import _signals
from serve.load import cases, drive
from serve.test_api import everything_is_back


@pytest.mark.slow
def test_a_small_load(server, reference):
    outcome = asyncio.run(drive(server.url, cases(reference, count=6, most=8), requests=60, at_once=20))
    assert outcome.wrong == []
    assert min(outcome.kinds.values()) > 0
    assert everything_is_back(server)


class Process:
    """``outrider serve`` as people start it."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "outrider.cli.main", "serve", "--port", "0", "--served-model-name", "m", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log = []
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr))
        self.reader.start()
        said = self.process.stdout.readline()
        self.url = re.search(r"http://\S+", said)[0]

    def end(self, number=signal.SIGTERM):
        """The exit code behind a signal."""
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def children(self):
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(path, encoding="ascii") as file:
            found = [int(each) for each in file.read().split()]
        return [pid for pid in found if "resource_tracker" not in command_of(pid)]

    def memory(self):
        """MiB of both processes."""
        total = 0
        for pid in (self.process.pid, *self.children):
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total / 2**20


def command_of(pid):
    with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
        return file.read()


@contextlib.contextmanager
def process(*options):
    started = Process("--dtype", "float32", "--backend", "cpu", *options)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        started.reader.join()
        started.process.stdout.close()
        started.process.stderr.close()


def gauges(url):
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize("count", [pytest.param(2000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)])
def test_many_requests(reference, count):
    made = cases(reference, count=60)
    with process("--max-context", "256", "--max-requests", "32") as server:
        before = asyncio.run(drive(server.url, made, requests=count // 5, at_once=200, seed=1))
        warm = server.memory()
        after = asyncio.run(drive(server.url, made, requests=count - count // 5, at_once=200, seed=2))
        time.sleep(1)
        grown = server.memory() - warm
        found = gauges(server.url)
        print(before.kinds + after.kinds, f"memory {warm:.0f} MiB, {grown:+.1f} MiB", found["outrider_aborted_total"])
        assert before.wrong == after.wrong == []
        assert grown < 40
        assert found["outrider_requests_running"] == found["outrider_requests_waiting"] == 0
        assert found["outrider_kv_cache_usage"] == 0
        assert server.end() == 0


@pytest.mark.slow
def test_a_signal_lets_requests_end_and_the_exit_code_is_zero():
    with process() as server:
        told = {}

        def ask():
            body = {"model": "m", "prompt": "x", "max_tokens": 300, "ignore_eos": True}
            told["answer"] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        while gauges(server.url).get("outrider_requests_running", 0) == 0:
            time.sleep(0.02)
        assert server.end() == 0
        asking.join()
        assert told["answer"].json()["usage"]["completion_tokens"] == 300


def test_a_server_leaves_an_ignored_signal_ignored():
    """A Ctrl-C is for the foreground job; a server in the background ends with SIGTERM."""
    came = []

    async def two_signals():
        with _signals(asyncio.get_running_loop(), came.append):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            while not came:
                await asyncio.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(two_signals())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGTERM]


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    with process() as server:
        body = {"model": "m", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            began = time.monotonic()
            server.end(signal.SIGINT)
            assert time.monotonic() - began < 15


@pytest.mark.slow
def test_an_engine_process_that_dies_ends_the_server():
    with process() as server:
        body = {"model": "m", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            (engine,) = server.children
            os.kill(engine, signal.SIGKILL)
            events = [line for line in lines if line]
        assert "engine_lost" in events[-2]
        assert server.process.wait(30) == 1
        server.reader.join()
        assert any("signal 9" in line for line in server.log)


@pytest.mark.slow
def test_an_engine_ends_with_a_server_that_is_killed():
    with process() as server:
        (engine,) = server.children
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{engine}/cmdline") and command_of(engine):
            assert time.monotonic() < deadline
            time.sleep(0.05)
