"""Every proposer on the simulated accelerator is clean under the sanitizer. Schedules and missing waits: ``tests/proof``."""

import pytest

from outrider_proof import tiny
from outrider_proof.proposers import MAKERS
from outrider_sanitizer import watch
from outrider_sim.backend import SimBackend
from outrider_sim.exploration import run_once
from outrider_sim.options import parse_options
from outrider_sim.strategies import Strategy
from tiny_programs import NEW_TOKENS, PROMPTS, program


@pytest.fixture(scope="module", autouse=True)
def _plain_first():
    """Plain decoding runs outside the simulator's schedules."""
    for prompt in PROMPTS:
        tiny.plain(prompt, NEW_TOKENS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MAKERS)
def test_the_sanitizer_finds_nothing(name):
    backend = SimBackend(parse_options({}))
    with watch(backend) as report:
        error = run_once(backend, program(name), Strategy())
    assert error is None
    assert report.clean, str(report)
