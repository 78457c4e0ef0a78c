"""A fault on any stream of the engine, in any iteration: it's raised, and no token is wrong."""

import pytest
from tests.engine.conftest import Tiny
from tests.engine.test_faults_in_flight import LONGEST, MODES, PROMPTS, Run, engine_on, start

from outrider.device import DeviceFault
from outrider.registry import get_backend


@pytest.fixture(scope="module")
def device():
    made = Tiny(get_backend("sim"))
    return made.backend, made.target, made.head


@pytest.fixture(scope="module")
def expected(tiny64):
    return [tiny64.plain(prompt, LONGEST).token_ids for prompt in PROMPTS]


class Faulty(Run):
    """Provokes a fault on one of the engine's streams before some of its steps."""

    def __init__(self, engine, backend, place, when):
        super().__init__(engine)
        self.backend, self.place, self.when = backend, place, when
        self.provoked = 0

    def step(self):
        if self.steps in self.when:
            streams = self.backend.streams
            self.backend.provoke_fault(streams[self.place % len(streams)])
            self.provoked += 1
        super().step()


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["program", "lazy"])
@pytest.mark.parametrize("place", range(4))
def test_a_fault_on_a_stream_yields_no_wrong_token(device, expected, strategy, place):
    backend = start(device, strategy)
    mode = sorted(MODES)[place % len(MODES)]
    run = Faulty(engine_on(device, "eagle", mode=mode), backend, place, {2 + place, 6}).to_the_end()
    run.check(expected)
    assert len(run.ended) == len(PROMPTS)
    assert run.provoked
    assert run.raised, "the engine never heard of the fault"
    assert all(isinstance(error, DeviceFault) for error in run.raised)
    assert len(run.raised) <= run.provoked
