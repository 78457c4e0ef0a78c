"""Who goes next: adversarial orders show what is missing, right programs pass, schedules replay and shrink."""

import pytest
import torch

from outrider.device import ConfigError, ControllableDevice
from outrider_sanitizer.races import RACES
from outrider_sim.exploration import explore, run_once
from outrider_sim.strategies import ReplaySchedule, Schedule, make_strategy, parse_strategy


def relay(backend, *, waits=True, rounds=3):
    """A producer fills one buffer again and again, a copy stream carries each value out: needs a wait both ways."""
    forward, copy = backend.create_stream("forward"), backend.create_stream("copy")
    ready, taken = backend.create_event("ready"), backend.create_event("taken")
    with backend.on(forward):
        buffer = torch.zeros(8, device=backend.device)
    results = [backend.empty_pinned(f"result {i}", (8,), torch.float32) for i in range(rounds)]
    for i, result in enumerate(results):
        if waits and i:
            forward.wait(taken)
        with backend.on(forward):
            buffer.fill_(float(i + 1))
        forward.record(ready)
        copy.wait(ready)
        backend.copy_async(result.tensor, buffer, stream=copy)
        copy.record(taken)
    copy.synchronize()
    assert [result.tensor.tolist()[0] for result in results] == [i + 1.0 for i in range(rounds)]


def wrong_relay(backend):
    relay(backend, waits=False)


def polls(backend):
    """The host asks until the answer is yes; what it asks for comes behind work of two streams."""
    one, two = backend.create_stream("one"), backend.create_stream("two")
    event = backend.create_event("e")
    with backend.on(one):
        x = torch.zeros(8, device=backend.device)
        for _ in range(3):
            x.add_(1.0)
    result = backend.empty_pinned("result", (8,), torch.float32)
    one.record(event)
    two.wait(event)
    backend.copy_async(result.tensor, x, stream=two)
    while not two.query():
        pass
    assert result.tensor.tolist() == [3.0] * 8


no_wait = RACES["read-after-write"].wrong  # stream `plan` doesn't wait for stream `forward`, the writer


SHALLOW = ["slowest:stream=forward", "fastest:stream=plan", "random", "pct:d=2", "exhaustive", "mixed"]


@pytest.mark.parametrize("spec", ["program", "fastest:stream=forward"])
def test_the_order_of_the_program_hides_a_missing_wait(sim, spec):
    assert explore(sim(), no_wait, strategy=spec, iterations=3).failure is None


@pytest.mark.parametrize("spec", SHALLOW)
def test_adversarial_orders_find_a_missing_wait(sim, spec):
    found = explore(sim(), no_wait, strategy=spec, iterations=50).failure
    assert found is not None
    assert isinstance(found.error, AssertionError)


@pytest.mark.parametrize(
    "spec", ["program", "lazy", "slowest:stream=copy", "fastest:stream=forward", "random", "pct:d=3", "mixed"]
)
def test_a_right_program_passes_every_order(sim, spec):
    result = explore(sim(), relay, strategy=spec, iterations=60)
    assert result.failure is None
    assert result.runs in (1, 60)


def test_exhaustive_ends_and_covers(sim):
    result = explore(sim(), relay, strategy="exhaustive", iterations=2000)
    assert result.exhausted
    assert result.failure is None
    found = explore(sim(), lambda b: wrong_relay(b), strategy="exhaustive", iterations=2000, shrinking=False)
    assert found.failure is not None


def test_exhaustive_tries_each_order_of_dependent_steps_once(sim):
    """Three writers of one buffer have 3! orders; independent ones have one."""
    seen = []

    def program(backend, shared):
        streams = [backend.create_stream(f"w{i}") for i in range(3)]
        x = torch.zeros(3, device=backend.device)
        backend.synchronize()
        for i, stream in enumerate(streams):
            with backend.on(stream):
                target = x if shared else x[i : i + 1]
                target.mul_(2).add_(i)
        backend.synchronize()
        seen.append(tuple(x.tolist()))

    result = explore(sim(), lambda b: program(b, True), strategy="exhaustive", iterations=5000)
    assert result.exhausted
    # Interleavings of three pairs on one location: 6!/(2!)^3.
    assert result.runs == 90
    assert len(set(seen)) > 6
    seen.clear()
    result = explore(sim(), lambda b: program(b, False), strategy="exhaustive", iterations=5000)
    assert result.exhausted
    assert result.runs == 1


@pytest.mark.parametrize("spec", ["random", "pct:d=3", "lazy", "slowest:stream=copy", "fastest:stream=copy", "mixed"])
@pytest.mark.parametrize("program", [wrong_relay, polls])
def test_schedules_replay_exactly(sim, spec, program):
    """The string of a run gives the same steps in the same order, and prints itself again."""
    backend = sim()
    name, options = parse_strategy(spec)
    for seed in range(12):
        logs = []
        texts = []
        for strategy in (make_strategy(name, seed, options), None):
            order = {}
            backend.sim.machine.scheduler.names = order
            chosen = strategy or ReplaySchedule(Schedule.parse(texts[0]))
            run_once(backend, program, chosen)
            texts.append(backend.control.schedule())
            logs.append([step for step in order if not step.startswith("host")])
        backend.sim.machine.scheduler.names = None
        assert logs[0] == logs[1]
        assert texts[0] == texts[1]


def test_one_seed_gives_one_run(sim):
    backend = sim()
    strings = []
    for seed in (1, 1, 2):
        run_once(backend, wrong_relay, make_strategy("random", seed))
        strings.append(backend.control.schedule())
    assert strings[0] == strings[1] != strings[2]


def test_shrinking_names_the_missing_edge(sim):
    backend = sim()
    for seed in range(5):
        found = explore(backend, wrong_relay, strategy="random", seed=seed, iterations=20).failure
        assert found is not None
        assert len(found.shrunk) == 1
        # What is left: a copy out runs only after the producer's next fill.
        (sentence,) = found.orderings
        copied, filled = sentence.split(" runs only after ")
        assert "copy to host" in copied
        assert "fill_" in filled or "host" in filled
        backend.control.reset()
        assert isinstance(run_once(backend, wrong_relay, ReplaySchedule(found.shrunk)), AssertionError)


def test_the_handle_is_a_controllable_device(sim):
    backend = sim()
    assert isinstance(backend.control, ControllableDevice)
    found = explore(backend, no_wait, strategy="slowest:stream=forward").failure
    backend.control.reset()
    backend.control.set_schedule(str(found.schedule))
    with pytest.raises(AssertionError):
        no_wait(backend)


@pytest.mark.parametrize("text", ["forward", "a@b", "a.1@b", "a.x@b.1", "a.1@b.2/"])
def test_what_isnt_a_schedule_is_refused(text):
    with pytest.raises(ConfigError, match="schedule"):
        Schedule.parse(text)


def test_long_runs_can_go_unrecorded(sim):
    backend = sim(strategy="random", record="off")
    relay(backend)
    assert backend.control.schedule() == "-"


def test_exhaustive_sees_host_accesses_of_pinned_memory(sim):
    found = explore(sim(), RACES["pinned-overwritten"].wrong, strategy="exhaustive", iterations=100).failure
    assert found is not None
    assert len(found.shrunk) == 1
    assert "touches pinned memory" in found.orderings[0]


def test_schedules_print_and_parse():
    text = "forward.5@plan.3/s.2.0@host0.7"
    assert str(Schedule.parse(text)) == text
    assert Schedule.parse("-") == Schedule()
    assert str(Schedule()) == "-"


@pytest.mark.parametrize("spec", ["nothing", "pct:d=0", "pct:depth=2", "slowest", "pct:d"])
def test_unknown_strategies_and_options_are_refused(sim, spec):
    with pytest.raises(ConfigError):
        explore(sim(), relay, strategy=spec)


def test_pct_finds_a_deep_bug_that_extremes_miss(sim):
    """The flag is seen up, then down again: two orderings at once."""

    def program(backend):
        one, two = backend.create_stream("one"), backend.create_stream("two")
        x, y = torch.zeros(1, device=backend.device), torch.zeros(2, device=backend.device)
        backend.synchronize()
        with backend.on(one):
            x.fill_(1)
            x.fill_(0)
        with backend.on(two):
            y[:1].copy_(x)
            y[1:].copy_(x)
        backend.synchronize()
        assert y.tolist() != [1.0, 0.0]

    for spec in ("program", "lazy", "slowest:stream=one", "slowest:stream=two", "fastest:stream=two"):
        assert explore(sim(), program, strategy=spec).failure is None
    assert explore(sim(), program, strategy="pct:d=3,k=20", iterations=400).failure is not None


EVERY = ["program", "lazy", "slowest:stream=one", "slowest:stream=two", "fastest:stream=one", "fastest:stream=two"]


@pytest.mark.parametrize("options", [{}, {"late": "copies"}])
@pytest.mark.parametrize("spec", [*EVERY, "random", "pct:d=3", "mixed"])
def test_a_host_that_asks_until_it_is_yes_ends(sim, spec, options):
    assert explore(sim(**options), polls, strategy=spec, iterations=12).failure is None


def test_a_thread_that_asks_lets_another_one_go_on(sim):
    """The one that asks comes first; what it waits for is enqueued by the other."""

    def program(backend):
        taker, giver = backend.create_stream("taker"), backend.create_stream("giver")
        flag = backend.create_flag("given")

        def asks():
            flag.wait(taker)
            while not taker.query():
                pass

        backend.control.run_threads(asks, lambda: flag.set(giver))

    assert explore(sim(like="npu"), program, strategy="lazy", iterations=3).failure is None
