"""Streams, events, flags, host threads, time and faults."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from outrider.device import (
    BackendLoadError,
    CapabilityError,
    ConfigError,
    DeadlockError,
    DeviceFault,
    DeviceLost,
    StreamOrderError,
)
from outrider_conformance.lab import THREADS, call_at_once
from outrider_sim.backend import register_device
from outrider_sim.exploration import explore
from outrider_sim.plugin import backend_info, create_backend


def test_recycled_events_break_generations(sim):
    """The injected fault: a re-record satisfies an old wait, or an old record a new wait."""

    def program(backend):
        one, two = backend.create_stream("one"), backend.create_stream("two")
        event = backend.create_event("e")
        x = torch.zeros(1, device=backend.device)
        one.record(event)
        backend.synchronize()
        with backend.on(one):
            x.fill_(1)
        one.record(event)
        two.wait(event)
        with backend.on(two):
            y = x.clone()
        backend.synchronize()
        assert y.item() == 1

    assert explore(sim(), program, strategy="random", iterations=30).failure is None
    assert explore(sim(events="recycled"), program, strategy="random", iterations=30).failure is not None


def test_a_second_set_is_lost_and_the_deadlock_says_who_waits(sim):
    backend = sim(like="npu")
    one, two = backend.create_stream("one"), backend.create_stream("two")
    flag = backend.create_flag("go")
    flag.set(one)
    flag.set(one)
    for _ in range(2):
        flag.wait(two)
        flag.reset(two)
    with pytest.raises(DeadlockError, match=r"'two' is held at operation 2.*go, which is down \(1 sets were lost\)"):
        two.synchronize()
    backend.control.reset()
    with pytest.raises(CapabilityError):
        sim(like="cuda").create_flag("f")


def test_the_explorer_finds_a_lost_wake_up(sim):
    """Set, wait, reset, twice: right only if the second set comes after the first reset."""

    def program(backend):
        one, two = backend.create_stream("one"), backend.create_stream("two")
        flag = backend.create_flag("go")
        for _ in range(2):
            flag.set(one)
            flag.wait(two)
            flag.reset(two)
        backend.synchronize()

    backend = sim(like="npu")
    assert explore(backend, program, strategy="program").failure is None
    found = explore(backend, program, strategy="exhaustive", iterations=50).failure
    assert isinstance(found.error, DeadlockError)
    assert len(found.shrunk) == 1


def test_a_synchronise_drains_what_it_needs_and_no_more(sim):
    backend = sim(strategy="lazy")
    one, two = backend.create_stream("one"), backend.create_stream("two")
    event = backend.create_event("e")
    with backend.on(one):
        torch.zeros(1, device=backend.device)
    one.record(event)
    with backend.on(one):
        torch.zeros(1, device=backend.device)
    event.synchronize()
    assert event.query()
    assert not one.query()
    assert two.query()


def test_queries_branch_on_the_schedule(sim):
    answers = set()

    def program(backend):
        stream = backend.create_stream("s")
        event = backend.create_event("e")
        with backend.on(stream):
            torch.zeros(1, device=backend.device)
        stream.record(event)
        answers.add(event.query())

    assert explore(sim(), program, strategy="exhaustive", iterations=100).exhausted
    assert answers == {True, False}


def test_host_threads_interleave_by_the_strategy_alone(sim):
    """Two threads read, yield, and write a Python counter: the lost update is found, and replays."""

    def program(backend):
        counter = [0]

        def body():
            value = counter[0]
            backend.control.yield_()
            counter[0] = value + 1

        backend.control.run_threads(body, body)
        assert counter == [2]

    backend = sim()
    found = explore(backend, program, strategy="random", iterations=100).failure
    assert isinstance(found.error, AssertionError)
    for _ in range(3):
        backend.control.reset()
        backend.control.set_schedule(str(found.shrunk))
        with pytest.raises(AssertionError):
            program(backend)
    assert explore(backend, program, strategy="exhaustive", iterations=200).failure is not None


def test_host_threads_have_streams_of_their_own(sim):
    backend = sim(strategy="random", seed="3")
    streams = [backend.create_stream("a"), backend.create_stream("b")]
    seen = {}

    def body(stream):
        def run():
            with backend.on(stream):
                backend.control.yield_()
                seen[stream.name] = torch.full((2,), 1.0, device=backend.device)._alloc.stream.label

        return run

    backend.control.run_threads(*map(body, streams))
    assert seen == {"a": "a", "b": "b"}


def test_a_new_thread_begins_on_the_default_stream(sim):
    backend, seen = sim(), []
    with backend.on(backend.create_stream("side")):
        thread = threading.Thread(target=lambda: seen.append(backend.sim.machine.stream.label))
        thread.start()
        thread.join()
    assert seen == ["default"]


@pytest.mark.parametrize("options", [{}, {"strategy": "random"}])
def test_threads_that_replay_graphs_at_once_read_their_own_results(sim, options):
    """Threads that the scheduler did not start share one actor, but each waits for its own stream."""
    backend = sim(**options)
    graphs = []
    for number in range(THREADS):
        stream = backend.create_stream(f"s{number}")
        with backend.on(stream):
            x, y = torch.zeros(1, device=backend.device), torch.zeros(1, device=backend.device)

        def triple(context):
            context.outputs["y"].copy_(context.inputs["x"] * 3)

        graphs.append((stream, backend.capture("triple", triple, stream=stream, inputs={"x": x}, outputs={"y": y})))

    def body(number):
        stream, graph = graphs[number]
        for turn in range(20):
            with backend.on(stream):
                graph.inputs["x"].fill_(turn)
            graph.replay(stream)
            read = backend.empty_pinned("read", (1,), torch.float32).tensor
            with backend.on(stream):
                read.copy_(graph.outputs["y"], non_blocking=True)
            stream.synchronize()
            assert read.item() == 3 * turn

    call_at_once(body)


def test_a_thread_that_fails_reports_and_the_next_run_is_clean(sim):
    backend = sim()

    def boom():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        backend.control.run_threads(boom, lambda: None)
    event, stream = backend.create_event("never"), backend.create_stream("s")

    def stuck():
        stream.wait(event)

    with pytest.raises(StreamOrderError):
        backend.control.run_threads(stuck, lambda: None)
    backend.control.reset()
    backend.control.run_threads(lambda: None, lambda: None)


def test_threads_that_wait_for_each_other_deadlock(sim):
    backend = sim(like="npu")
    stream = backend.create_stream("s")
    flag = backend.create_flag("f")

    def one():
        flag.wait(stream)
        stream.synchronize()

    with pytest.raises(DeadlockError, match="host thread"):
        backend.control.run_threads(one, lambda: None)
    backend.control.reset()
    assert torch.ones(1, device=backend.device).item() == 1


@pytest.mark.parametrize("strategy", ["program", "lazy"])
def test_a_recoverable_error_surfaces_at_the_next_synchronise(sim, strategy):
    backend = sim(fault="error@2", strategy=strategy)
    x = torch.ones(1, device=backend.device)
    x.add_(1)
    with pytest.raises(DeviceFault, match=r"default\.1 .*error@2"):
        backend.synchronize()
    assert x.item() == 1


def test_a_lost_device_stays_lost_until_reset(sim):
    backend = sim(fault="lost@2")
    x = torch.ones(1, device=backend.device)
    x.add_(1)
    for _ in range(2):
        with pytest.raises(DeviceLost):
            backend.synchronize()
    with pytest.raises(DeviceLost):
        x.add_(1)


def test_late_copies_run_last(sim):
    def program(backend):
        one, two = backend.create_stream("one"), backend.create_stream("two")
        with backend.on(one):
            x = torch.ones(4, device=backend.device)
        backend.synchronize()
        host = backend.empty_pinned("h", (4,), torch.float32).tensor
        backend.copy_async(host, x, stream=two)
        with backend.on(one):
            x.fill_(2)
        backend.synchronize()
        assert host.tolist() == [1.0] * 4

    assert explore(sim(), program, strategy="program").failure is None
    assert explore(sim(late="copies"), program, strategy="program").failure is not None


def test_virtual_time_doesnt_depend_on_the_schedule(sim):
    times = []
    for strategy in ("program", "lazy", "random", "pct"):
        backend = sim(strategy=strategy, seed="4")
        one, two = backend.create_stream("one"), backend.create_stream("two")
        event, start, end = (backend.create_event(n, timing=n != "e") for n in ("e", "start", "end"))
        one.record(start)
        backend.delay(one, 5000)
        one.record(event)
        two.wait(event)
        backend.delay(two, 3000)
        two.record(end)
        backend.synchronize()
        times.append((start.elapsed_ms(end), backend.control.virtual_time()))
    assert times == [times[0]] * 4
    assert 0.008 <= times[0][0] < 0.03


def test_streams_that_nobody_holds_go_at_reset(sim):
    backend = sim()
    for _ in range(5):
        stream = backend.create_stream("s")
        assert stream.name == "s"
        assert stream.queue_state.label == "s"
        del stream
        backend.control.reset()
    assert len(backend.sim.machine.streams) == 1


def test_personalities_declare_what_they_imitate(sim):
    cuda, rocm, npu = (sim(like=name) for name in ("cuda", "rocm", "npu"))
    assert cuda.capabilities.forks_in_capture
    assert not npu.capabilities.forks_in_capture
    assert npu.capabilities.flags
    assert npu.capabilities.updates_graph_params
    assert npu.speculative_sync.exact_host_lengths
    assert npu.speculative_sync.rebind_params
    assert rocm.speculative_sync.published_waiter == "host"
    assert cuda.versions()["device"] == "simulated, like cuda"


@pytest.mark.parametrize(
    "options",
    [
        {"sead": "1"},
        {"like": "tpu"},
        {"seed": "x"},
        {"strategy": "luck"},
        {"memory": "0"},
        {"memory": "1TB"},
        {"fault": "oom"},
        {"fault": "fire@1"},
        {"poison": "maybe"},
        {"strategy": "slowest"},
    ],
)
def test_options_that_dont_exist_are_refused(options):
    with pytest.raises(ConfigError):
        create_backend(0, options)


def test_the_plugin_describes_itself():
    info = backend_info()
    assert info.name == "sim"
    assert info.priority < 0
    assert "strategy" in info.options
    with pytest.raises(BackendLoadError, match="device 64"):
        create_backend(64, {})


def test_one_name_a_process(sim):
    sim()
    with pytest.raises(BackendLoadError, match="'sim' in this process"):
        register_device("other")


def test_imports_and_wrong_options_register_nothing_and_a_taken_slot_is_a_clear_error():
    code = (
        "import outrider_sim.backend, torch\n"
        "from outrider.device import BackendLoadError, ConfigError\n"
        "from outrider_sim.plugin import create_backend, backend_info\n"
        "backend_info()\n"
        "try: create_backend(0, {'strategy': 'slowest'})\n"
        "except ConfigError: pass\n"
        "print(torch._C._get_privateuse1_backend_name())\n"
        "torch.utils.rename_privateuse1_backend('npu')\n"
        "try: create_backend(0, {})\n"
        "except BackendLoadError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    name, error = done.stdout.split("\n", 1)
    assert name == "privateuseone"
    assert "taken by 'npu'" in error


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_torch_module(sim):
    sim(strategy="lazy")
    stream = torch.sim.Stream()
    with torch.sim.stream(stream):
        assert torch.sim.current_stream() == stream
        x = torch.ones(3, device="sim")
    event = stream.record_event()
    torch.sim.current_stream().wait_event(event)
    assert (x + 1).tolist() == [2.0] * 3
    assert stream.query()
    assert torch.sim.memory_allocated() > 0
    state = torch.sim.get_rng_state()
    a = torch.rand(2, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.rand(2, device="sim").tolist() == a.tolist()
    torch.sim.synchronize()


def test_a_random_state_is_numbers_alone(sim):
    seeds = sim(strategy="lazy").sim.seeds
    for before in (lambda: None, lambda: seeds.gauss(0, 1)):  # the second number of a pair is kept
        before()
        state, kept = torch.sim.get_rng_state(), seeds.getstate()
        seeds.random()
        torch.sim.set_rng_state(state)
        assert seeds.getstate() == kept
    for broken in (state[:-1], state[:0], torch.zeros_like(state), torch.full_like(state, 255)):
        with pytest.raises(ConfigError, match=r"random state .*expected what get_rng_state gave"):
            torch.sim.set_rng_state(broken)
    pickled = torch.frombuffer(bytearray(b"cos\nsystem\n(S'false'\ntR."), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="expected what get_rng_state gave"):
        torch.sim.set_rng_state(pickled)
