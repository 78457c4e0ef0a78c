"""Run a host program on `opencl` without one fence, and say how the fault was noticed."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import Fence
from outrider.engine.fences import FENCES
from outrider_proof.decode_program import DecodeExplorer, WrongTokens
from outrider_proof.fence_log import FenceLog, WrappedFence
from outrider_sanitizer import RaceError

PRODUCER_DELAY = 4_000_000
"""Cycles (nanoseconds on a CPU) that the producer of the dropped fence is late."""


@dataclass(frozen=True)
class Noticed:
    """How the missing fence was noticed: the fences that the sanitizer's findings imply, and the effect on the tokens."""

    races: int
    implied: tuple[str, ...]
    effect: str


class _SlowProducer(WrappedFence):
    """A fence around which the streams of one name are late, so that a missing wait shows."""

    def __init__(self, inner: Fence, backend, producer: str) -> None:
        super().__init__(inner)
        self._backend, self._producer = backend, producer

    def _delay(self, stream) -> None:
        if stream.name.split(".")[0] == self._producer:
            self._backend.delay(stream, PRODUCER_DELAY)

    def signal(self, stream) -> None:
        self._delay(stream)
        super().signal(stream)

    def wait(self, stream) -> None:
        super().wait(stream)
        self._delay(stream)

    def wait_host(self) -> None:
        self._inner.wait_host()

    def wait_host_within(self, seconds: float) -> bool:
        return self._inner.wait_host_within(seconds)


class UnwatchedExplorer(DecodeExplorer):
    """An explorer whose runs nobody watches, and whose producers are late."""

    def run_unwatched(self, producer: str) -> None:
        self.log = FenceLog(lambda stream: 0, drop=self._drop, half=self._half)
        wrapped = self.log.wrap
        self.wrap = lambda fence: _SlowProducer(wrapped(fence), self.backend, producer)
        program = self.exercising_program
        self._serve(program, [self.expected(arrival) for arrival in program.arrivals])
        self.backend.synchronize()


def without(create, fence: str | None, *, effect: bool = True) -> Noticed:
    """Leave out the waits of `fence`: once watched in attached mode and, with `effect`, once unwatched on late producers."""
    explorer = DecodeExplorer(create(), speculate="eagle", drop=fence)
    races, implied = 0, ()
    try:
        explorer.run_program(explorer.exercising_program, explorer.backend)
    except RaceError:
        races, implied = len(explorer.findings.findings), explorer.implied()
    return Noticed(races, implied, _effect(create, fence) if effect else "not tried")


def _effect(create, fence: str | None) -> str:
    explorer = UnwatchedExplorer(create(), speculate="eagle", drop=fence)
    producer = next((spec.producer for spec in FENCES if spec.name == fence), "forward")
    try:
        explorer.run_unwatched(producer)
    except WrongTokens:
        return "wrong tokens"
    except Exception as error:
        return f"{type(error).__name__}"
    return "same tokens"
