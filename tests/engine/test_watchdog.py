"""A device that is stuck is noticed: the error says for which fence the host waits, and the engine goes no further."""

import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider import Engine, EngineConfig, SamplingParams
from outrider.device import ConfigError, DeadlockError, DeviceLost, DeviceStuck, EngineStopped, Fence, stream
from outrider.device.stream import poll
from outrider.engine.recovery import Watchdog
from outrider.model import load_decoder, load_eagle, open_head
from outrider.speculative.eagle import EagleProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from outrider_sim.plugin import create_backend

EXAMPLE = Path(__file__).parents[2] / "examples" / "threads_backend"
PROMPTS = ((5, 9, 20, 33, 41, 7), (8, 8, 3))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def engine_on(backend, directory, **fields):
    target = load_decoder(directory / "target", backend=backend, dtype=torch.float32)
    head = load_eagle(open_head(directory / "eagle", target=target, backend=backend, dtype=torch.float32))
    backend.synchronize()
    config = plain_config(max_context=48, max_requests=2, page_size=4, overlap=True, **fields)
    return Engine(target, backend, proposer=EagleProposer(head, draft_tokens=3), config=config)


@pytest.fixture(scope="module")
def expected(bundled_dir):
    engine = engine_on(CpuBackend(), bundled_dir)
    return [done.token_ids for done in engine.generate(PROMPTS, PARAMS)]


def inject_in_draft(engine, kind, number):
    """The first operation of the ``number``-th draft from here is hit."""
    honest, calls = engine.proposer.draft, 0

    def draft(inputs):
        nonlocal calls
        calls += 1
        if calls == number:
            engine.backend.control.inject(kind, 1)
        return honest(inputs)

    engine.proposer.draft = draft


def run(engine):
    while engine.has_unfinished:
        engine.step()


def steps_until(engine, error):
    with pytest.raises(error) as caught:
        run(engine)
    return caught.value


def refuses(engine):
    """Every call says that the engine stopped, and what it leaves; returns the error."""
    request = next(iter(engine.open_requests))
    calls = (
        engine.step,
        engine.drain,
        lambda: engine.add_request((1, 2)),
        lambda: engine.abort(request),
        lambda: engine.hand_over(request),
        lambda: engine.generate([(1, 2)]),
        lambda: next(engine.stream((1, 2))),
    )
    for call in calls:
        with pytest.raises(EngineStopped, match="this engine stopped, with 2 requests open") as caught:
            call()
    assert caught.value.open_requests == engine.open_requests
    return caught.value


@pytest.mark.parametrize("strategy", ["program", "lazy", "random"])
def test_the_error_names_the_fence_and_where_each_stream_stands(bundled_dir, expected, strategy):
    backend = create_backend(0, {"strategy": strategy})
    engine = engine_on(backend, bundled_dir)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    inject_in_draft(engine, "stuck", 1)
    error = steps_until(engine, DeviceStuck)
    assert error.device_lost
    text = str(error)
    assert "the host waits for fence 'results_copied[1]', generation 2, which was enqueued on stream 'copy'" in text
    assert "stream 'forward' is held at operation" in text  # what the machine itself knows
    # The iteration that is stuck is the fourth, the third that decodes; the fifth was launched ahead.
    assert "it waits for its own end, which never comes" in text
    assert re.search(r"stream 'forward': .*hasn't reached shared_reads_done", text)
    assert "enqueued last results_ready (generation 5)" in text
    assert "stream 'plan': hasn't reached plan_ready (generation 4); enqueued last extend_plan_ready (generation 4)" in text
    assert "the host: came past results_copied[0] (generation 2)" in text

    stopped = refuses(engine)
    assert "the device is stuck" in str(stopped)
    # Another engine goes on with what is known.
    other = engine_on(CpuBackend(), bundled_dir)
    for request, prompt, tokens in zip(ids, PROMPTS, expected, strict=True):
        output = stopped.open_requests[request]
        assert output == tokens[: len(output)]
        rest = SamplingParams(max_tokens=12 - len(output), ignore_eos=True)
        (done,) = other.generate([(*prompt, *output)], rest)
        assert output + done.token_ids == tokens


def test_a_lost_device_stops_the_engine(bundled_dir, expected):
    backend = create_backend(0, {})
    engine = engine_on(backend, bundled_dir)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    inject_in_draft(engine, "lost", 1)
    steps_until(engine, DeviceLost)
    stopped = refuses(engine)
    assert "failed on request" in str(stopped)
    for request, tokens in zip(ids, expected, strict=True):
        assert stopped.open_requests[request] == tokens[: len(stopped.open_requests[request])]


def test_a_stream_iterator_that_meets_it_ends_with_the_first_error(bundled_dir):
    backend = create_backend(0, {})
    engine = engine_on(backend, bundled_dir)
    inject_in_draft(engine, "stuck", 2)
    with pytest.raises(DeviceStuck):
        list(engine.stream(PROMPTS[0], PARAMS))


def test_a_deadlock_outside_a_fence_stops_it_too(bundled_dir, monkeypatch):
    backend = create_backend(0, {})
    engine = engine_on(backend, bundled_dir)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)

    def launch(batch):
        raise DeadlockError("nothing that is queued can run")

    monkeypatch.setattr(engine._step, "launch", launch)
    steps_until(engine, DeviceStuck)
    refuses(engine)


@pytest.fixture
def threads(monkeypatch):
    """A device whose streams are real threads, on which time passes."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from outrider_threads.backend import ThreadsBackend

    yield ThreadsBackend()
    for name in [name for name in sys.modules if name.startswith("outrider_threads")]:
        del sys.modules[name]


def test_on_a_device_with_a_clock_the_limit_counts(threads, bundled_dir, expected):
    engine = engine_on(threads, bundled_dir, device_timeout_s=60)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    for _ in range(3):
        engine.step()
    # From now on: a busy machine may take longer for an iteration that doesn't hang.
    engine._parts.fences.results_copied[0]._watchdog.limit_s = 0.5
    let_go = threading.Event()
    engine._parts.streams.plan.put(let_go.wait)  # a task that hangs
    start = time.monotonic()
    try:
        error = steps_until(engine, DeviceStuck)
        spent = time.monotonic() - start
    finally:
        let_go.set()
    assert 0.5 <= spent < 30
    text = str(error)
    assert "it hasn't come within 0.5 s" in text
    assert "stream 'plan': hasn't reached plan_ready" in text
    refuses(engine)
    threads.synchronize()


def test_a_device_that_is_merely_slow_is_waited_for(threads, bundled_dir, expected):
    engine = engine_on(threads, bundled_dir, device_timeout_s=30)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    got = {request: [] for request in ids}
    while engine.has_unfinished:
        threads.delay(engine._parts.streams.forward, 60_000_000)  # 60 ms: beyond eager polling
        for output in engine.step():
            got[output.request_id].extend(output.tokens)
    assert [tuple(got[request]) for request in ids] == expected


@pytest.mark.parametrize("seconds", [0, -1.0, True, "5", float("inf"), float("nan")])
def test_a_limit_is_a_positive_number_of_seconds(seconds):
    with pytest.raises(ConfigError, match=r"device_timeout_s is .*; expected a positive number of seconds, or None"):
        EngineConfig(device_timeout_s=seconds)


def test_without_a_limit_the_device_itself_is_asked_to_wait(bundled_dir, expected):
    backend = create_backend(0, {})
    engine = engine_on(backend, bundled_dir, device_timeout_s=None)
    assert [done.token_ids for done in engine.generate(PROMPTS, PARAMS)] == expected


class Asked(Fence):
    """Notes for how long the host waits at it; None: for ever."""

    mechanism = "none"

    def __init__(self):
        super().__init__("asked")
        self.limits = []

    signal = wait = done = None  # nobody asks

    def wait_host(self):
        self.limits.append(None)

    def wait_host_within(self, seconds):
        self.limits.append(seconds)
        return True


@pytest.mark.parametrize("limit", [None, 2.5])
def test_the_host_waits_as_long_as_the_limit_says(limit):
    fence, watchdog = Asked(), Watchdog(limit)
    watched = watchdog.wrapping(lambda inner: inner)(fence)
    assert "the host: came past no fence yet" in str(watchdog.stuck_error(watched, "it waits"))
    watched.wait_host()
    assert fence.limits == [limit]
    assert "the host: came past asked (generation 0)" in str(watchdog.stuck_error(watched, "it waits"))


@pytest.mark.parametrize("takes", [0.03, 0.1, 0.5, 2.0])
def test_polling_finds_an_answer_soon_and_asks_seldom(takes, monkeypatch):
    """A prompt of some thousand tokens takes a tenth of a second; pauses that double would add up to 10 ms to that."""
    now, asked = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda pause: now.__setitem__(0, now[0] + max(pause, 5e-5)))
    monkeypatch.setattr(stream, "time", clock)
    assert poll(lambda: asked.append(1) or now[0] >= takes, 60.0)
    assert now[0] - takes <= max(takes / 400, 1e-4)
    assert len(asked) < 6000


def test_polling_ends_with_the_answer_or_with_the_time():
    answers = iter([False] * 5 + [True])
    assert poll(lambda: next(answers), 60.0)
    start = time.monotonic()
    assert not poll(lambda: False, 0.1)
    assert 0.1 <= time.monotonic() - start < 30
    asked = []
    assert poll(lambda: asked.append(1) or len(asked) > 1, 0.0)  # asked once more at the end
