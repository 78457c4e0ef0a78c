"""Lost batching, lost overlap and early frees are told, though every token is right."""

import pytest

from outrider.engine.loop import Loop
from outrider.engine.requests.scheduler import Scheduler
from outrider.engine.state.results import Results
from outrider.engine.step import Step
from outrider_proof.engine_setups import random_host_program
from proof.program_checks import run_once_checked
from proof.setups import EngineSetup

STAGED, CROWDED = EngineSetup("none", "staged"), 2


def test_nothing_is_told_of_the_engine_as_it_is():
    outcome = run_once_checked(STAGED, random_host_program(CROWDED))
    assert outcome.error == ""
    assert 0 < outcome.counts["ran_ahead"] < outcome.counts["launches"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [16, 32])
def test_results_taken_in_to_preempt_are_no_lapse(number):
    outcome = run_once_checked(STAGED, random_host_program(number))
    assert outcome.error == "", outcome.text
    assert outcome.counts["preempted"] > 0


@pytest.fixture
def changed(monkeypatch):
    """What the program shows with one attribute changed."""

    def run(owner, name, make, *, watched=True):
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))
        return run_once_checked(STAGED, random_host_program(CROWDED), watched=watched)

    return run


def test_a_request_left_out_while_it_is_in_flight(changed):
    outcome = changed(Scheduler, "_can_decode", lambda right: staticmethod(lambda r: right(r) and r.in_flight == 0))
    assert outcome.error == "LostBatching", outcome.text


def test_results_that_are_awaited_before_the_next_launch(changed):
    def waits(right):
        def iterate(self):
            right(self)
            while self._in_flight:
                self._handle_oldest()

        return iterate

    assert changed(Loop, "iterate", waits).error == "LostOverlap"


@pytest.mark.sample(2)
@pytest.mark.parametrize("blocks", ["stream", "event", "device", "fence"])
def test_a_launch_that_blocks_the_host(changed, blocks):
    def waits(right):
        def launch(self, batch):
            ticket = right(self, batch)
            match blocks:
                case "stream":
                    self._streams.forward.synchronize()
                case "event":
                    event = self._backend.create_event("blocking")
                    self._streams.forward.record(event)
                    event.synchronize()
                case "device":
                    self._backend.synchronize()
                case "fence":
                    self._fences.results_ready.wait_host()
            return ticket

        return launch

    outcome = changed(Step, "launch", waits)
    assert outcome.error == "LostOverlap", outcome.text
    assert ("results_ready" in outcome.text) == (blocks == "fence")


def test_a_launch_that_reads_a_value_of_the_device(changed):
    def reads(right):
        def copy_out(self, batch, entry, stream):
            with self._ring._backend.on(stream):
                self._device.sum().item()
            return right(self, batch, entry, stream)

        return copy_out

    assert changed(Results, "copy_out", reads).error == "LostOverlap"


def test_a_row_freed_in_flight(changed):
    def retires(right):
        def retire(self):
            for request in [r for r in self._running if r.finished]:
                self._release(request)

        return retire

    assert changed(Scheduler, "retire", retires, watched=False).error == "FreedInFlight"


def test_a_row_taken_from_a_request_in_flight(changed):
    def preempts(right):
        def preempt(self):
            self._requeue(next(request for request in reversed(self._running) if not request.finished))

        return preempt

    outcome = changed(Scheduler, "_preempt", preempts, watched=False)
    assert outcome.error == "FreedInFlight", outcome.counts
