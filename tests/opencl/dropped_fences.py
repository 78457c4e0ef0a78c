"""Run a host program on `opencl` without one fence, watched by the sanitizer or with late producers."""

from __future__ import annotations

from outrider.device import Fence
from outrider.engine.fences import FENCES
from outrider_proof.decode_program import WrongTokens
from outrider_proof.explorations import DecodeExplorer
from outrider_proof.fence_log import FenceLog
from outrider_sanitizer import RaceError

PRODUCER_DELAYS = (4_000_000, 40_000_000, 200_000_000)
"""Cycles (nanoseconds on a CPU) that the producer of the dropped fence is late, the shortest first.

A host that does other work pauses a consumer for longer than the shortest.
"""


def _slow_producer(fence: Fence, backend, producer: str, cycles: int) -> Fence:
    """Let the streams of the name ``producer`` be late around the fence, so that a missing wait shows; return the fence."""
    signal, wait = fence.signal, fence.wait

    def delay(stream) -> None:
        if stream.name.split(".")[0] == producer:
            backend.delay(stream, cycles)

    def signal_late(stream) -> None:
        delay(stream)
        signal(stream)

    def wait_longer(stream) -> None:
        wait(stream)
        delay(stream)

    fence.signal, fence.wait = signal_late, wait_longer
    return fence


class UnwatchedExplorer(DecodeExplorer):
    """An explorer whose runs nobody watches, and whose producers are late."""

    def run_unwatched(self, producer: str, cycles: int) -> None:
        self.log = FenceLog(lambda stream: 0, drop=self._drop, half=self._half)
        wrapped = self.log.wrap
        self.wrap = lambda fence: _slow_producer(wrapped(fence), self.backend, producer, cycles)
        program = self.exercising_program
        self._serve(program, [self.expected(arrival) for arrival in program.arrivals])
        self.backend.synchronize()


def race_without(create, fence: str | None) -> tuple[int, tuple[str, ...]]:
    """Leave out the waits of `fence` in a watched run; return the number of findings and the fences that they imply."""
    explorer = DecodeExplorer(create(), speculate="eagle", drop=fence)
    try:
        explorer.run_program(explorer.exercising_program, explorer.backend)
    except RaceError:
        return len(explorer.findings.findings), explorer.implied()
    return 0, ()


def tokens_without(create, fence: str | None) -> str:
    """Leave out the waits of `fence` in unwatched runs with ever later producers; return the first effect on the tokens.

    Without a fence to leave out, one run is made.
    """
    producer = next((spec.producer for spec in FENCES if spec.name == fence), "forward")
    for cycles in PRODUCER_DELAYS if fence else PRODUCER_DELAYS[:1]:
        explorer = UnwatchedExplorer(create(), speculate="eagle", drop=fence)
        try:
            explorer.run_unwatched(producer, cycles)
        except WrongTokens:
            return "wrong tokens"
        except Exception as error:
            return type(error).__name__
    return "same tokens"
