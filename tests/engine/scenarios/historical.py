"""The engine with one thing as it was in another engine, when that had the bug."""

from outrider.device import Fence
from outrider_proof.decode_program import Arrival, HostProgram
from outrider_proof.explorations import DecodeExplorer
from outrider_sanitizer import RaceError
from outrider_sim.exploration import run_once
from outrider_sim.strategies import make_strategy


def request(length, max_tokens, *, step=0, abort=None, moves=(), start=0):
    """One request of a host program."""
    return Arrival(start, length, max_tokens, step, abort, moves)


def program(*arrivals, max_requests=2, page_size=4, spare_pages=40, prefill_chunk=64, draft_tokens=3):
    """A host program: these requests, on an engine of these sizes."""
    return HostProgram(tuple(arrivals), max_requests, page_size, spare_pages, prefill_chunk, draft_tokens)


TWO = program(request(6, 12), request(3, 9, step=1, start=40))
"""Two requests that decode side by side, the second of which comes later."""
MANY = program(*(request(4 + i, 5 + i, step=i, start=9 * i) for i in range(5)), max_requests=4)
"""Batches of one to four, up and down."""


class Historical(DecodeExplorer):
    """Runs host programs on engines that ``change(engine)`` has made historical; fences by ``wrapping(fence)``."""

    def __init__(self, backend, *, change=None, wrapping=None, speculate="eagle", **options):
        super().__init__(backend, speculate=speculate, **options)
        self.change, self.wrapping = change, wrapping

    def _engine(self, program):
        engine = super()._engine(program)
        if self.change is not None:
            self.change(engine)
        return engine

    def wrap(self, fence):
        fence = super().wrap(fence)
        return fence if self.wrapping is None else self.wrapping(fence)

    def once(self, program, strategy="program"):
        """One watched run; what it raised, or None."""
        return run_once(self.backend, lambda device: self.run_program(program, device), make_strategy(strategy, 0, {}))

    def fails(self, program, *strategies):
        """What the first of the schedules that shows something raises."""
        found = next(filter(None, (self.once(program, strategy) for strategy in strategies or ("program",))), None)
        assert found is not None, "nothing was found"
        return found

    def races(self, program, *kinds):
        """The findings of one run in program order, all of these kinds where some are given."""
        error = self.fails(program)
        assert isinstance(error, RaceError), error
        findings = list(error.report)
        assert not kinds or {finding.kind for finding in findings} <= set(kinds), str(error)
        return findings

    def passes(self, program, *strategies):
        """Watched runs, found to be right."""
        for strategy in strategies or ("program",):
            assert self.once(program, strategy) is None


class Passing(Fence):
    """A fence that does what the one inside does; the base of those that do something else."""

    def __init__(self, inner):
        super().__init__(inner.name)
        self.inner = inner

    @property
    def mechanism(self):
        return self.inner.mechanism

    def signal(self, stream):
        self.inner.signal(stream)

    def wait(self, stream):
        self.inner.wait(stream)

    def wait_host(self):
        self.inner.wait_host()

    def wait_host_within(self, seconds):
        return self.inner.wait_host_within(seconds)

    def done(self):
        return self.inner.done()


class Skipping(Passing):
    """Skips the waits of one stream while ``when()`` holds."""

    def __init__(self, inner, stream, when=lambda: True):
        super().__init__(inner)
        self.stream, self.when = stream, when

    def wait(self, stream):
        if stream.name != self.stream or not self.when():
            self.inner.wait(stream)


class Elsewhere(Passing):
    """Recorded where a test says, by ``record``, and not where the engine does (but for the start)."""

    def __init__(self, inner):
        super().__init__(inner)
        self.started = False

    def signal(self, stream):
        if not self.started:
            self.started = True
            self.inner.signal(stream)

    def record(self, stream):
        self.inner.signal(stream)


def before(owner, name, action):
    """Call ``action(*arguments)`` before each call of ``owner.name``."""
    honest = getattr(owner, name)

    def changed(*arguments, **named):
        action(*arguments, **named)
        return honest(*arguments, **named)

    setattr(owner, name, changed)


def after(owner, name, action):
    """Call ``action(*arguments)`` after each call of ``owner.name``."""
    honest = getattr(owner, name)

    def changed(*arguments, **named):
        result = honest(*arguments, **named)
        action(*arguments, **named)
        return result

    setattr(owner, name, changed)
