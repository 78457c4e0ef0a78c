"""Every proposer on the simulated accelerator: clean under the sanitizer, plain tokens under adversarial schedules, and a
tree's waits are needed, each of them.
"""

import inspect
import textwrap

import pytest

from outrider.engine import step
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS, NEW_TOKENS, PROMPTS, program
from outrider_sanitizer import watch
from outrider_sim.backend import SimBackend
from outrider_sim.exploration import run_once
from outrider_sim.options import parse_options
from outrider_sim.strategies import Strategy, make_strategy


@pytest.fixture(scope="module", autouse=True)
def _plain_first():
    """Plain decoding runs outside the simulator's schedules."""
    for prompt in PROMPTS:
        tiny.plain(prompt, NEW_TOKENS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MAKERS)
def test_the_sanitizer_finds_nothing(name):
    backend = SimBackend(parse_options({}))
    with watch(backend) as report:
        error = run_once(backend, program(name), Strategy())
    assert error is None
    assert report.clean, str(report)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seeds", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MAKERS)
def test_any_schedule_gives_plain_greedy_tokens(name, seeds):
    for seed in range(1, 1 + seeds):  # lazy, pct, random, pct and so on; the order of the program is watched above
        backend = SimBackend(parse_options({}))
        error = run_once(backend, program(name), make_strategy("mixed", seed, {}))
        if error is not None:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "wait",
    [
        "fences.shared_reads_done.wait(streams.plan)",
        "fences.draft_outputs_ready.wait(streams.plan)",
        "fences.plan_ready.wait(streams.forward)",
        "fences.accept_ready.wait(streams.plan)",
        "fences.extend_plan_ready.wait(streams.forward)",
    ],
)
def test_a_missing_wait_of_a_tree_is_found_in_one_run(wait, monkeypatch):
    source = textwrap.dedent(inspect.getsource(step.Step._decode))
    assert wait in source
    namespace = dict(vars(step))
    exec(source.replace(wait, "pass"), namespace)
    monkeypatch.setattr(step.Step, "_decode", namespace["_decode"])
    backend = SimBackend(parse_options({}))
    with watch(backend) as report:
        run_once(backend, program("eagle-tree"), Strategy())
    assert not report.clean
