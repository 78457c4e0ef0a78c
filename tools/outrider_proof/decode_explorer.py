"""Run the engine on random host programs, watched by the sanitizer: ``outrider explore decode``.

Each run has one schedule. The tokens are compared with non-speculative greedy decoding on the reference backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

from outrider.device.errors import ConfigError
from outrider_proof.decode_program import (
    MOVING,
    Arrival,
    HostProgram,
    Serving,
    WrongTokens,
    check_tokens,
)
from outrider_proof.fence_log import FenceLog, Half
from outrider_proof.monitors import OverlapMonitor

if TYPE_CHECKING:
    from outrider.device import Backend, Fence
    from outrider.engine.engine import Engine
    from outrider_sanitizer import Finding
    from outrider_sanitizer import Report as Findings

_FENCES_OF_MOVES = frozenset({"handed_over", "pages_ready", "pages_read", "pages_free", "pages_written"})
_FENCES_OF_GUIDES = frozenset({"draft_on_host", "masks_ready"})
PARAMETER_FENCES = frozenset({"lengths_on_host", "params_free", "params_bound"})
"""Names of fences that only a device with host lengths in its graphs has."""


class DecodeExplorer:
    """A runner of host programs with one model on one backend. It compares their tokens with the reference.

    The explorer loads the weights once, outside the schedule; each run builds a new engine. ``images`` selects the tiny
    vision-language model instead of the bundled model.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        speculate: str,
        draft_topk: int = 1,
        mode: str = "staged",
        graphs: bool = False,
        drop: str | None = None,
        half: str = "wait",
        consumer: str | None = None,
        images: bool = False,
    ) -> None:
        from outrider.engine.fences import FENCES
        from outrider_proof import engine_setups as setups

        if speculate not in ("eagle", "ngram", "none"):
            raise ConfigError(f"--speculate is {speculate!r}; decode explores eagle, ngram and none")
        if drop is not None and drop not in {fence.name for fence in FENCES}:
            raise ConfigError(f"there is no fence {drop!r}; `outrider fences` lists them")
        if half not in get_args(Half):
            raise ConfigError(f"--drop is {half!r}; expected wait or record")
        self.backend = backend
        self._topk, self._drop, self._half, self._consumer = draft_topk, drop, cast("Half", half), consumer
        self._mode = "graphs" if graphs and mode == "staged" else mode
        self._models = setups.Models(f"{speculate}{setups.IMAGES if images else setups.BUNDLED}", backend)
        self.findings: Findings | None = None
        self.log: FenceLog | None = None
        self.monitor = OverlapMonitor()
        self.checks_overlap = True
        """True if lost overlap, lost batching or a row freed too early fails a run."""

    def program(self, seed: int) -> HostProgram:
        """Return host program number ``seed``."""
        from outrider_proof import engine_setups as setups

        return HostProgram.draw(seed, setups.TEXT if self._models.vision is not None else len(setups.bundled_text()))

    @property
    def exercising_program(self) -> HostProgram:
        """A host program that exercises the dropped fence, if the device and the mode have the fence."""
        if self._drop in _FENCES_OF_MOVES:
            return MOVING
        return self.program(3 if self._drop in _FENCES_OF_GUIDES else 1)

    def expected(self, arrival: Arrival) -> tuple[int, ...]:
        """Return the non-speculative greedy tokens of a request on the host."""
        from outrider_proof.engine_setups import reference_tokens

        return reference_tokens(self._models.proposer, arrival)

    def run_program(self, program: HostProgram, backend: Backend) -> None:
        """Run a host program once on the engine, watched by the sanitizer and the overlap monitor.

        Raises :class:`RaceError` of the sanitizer, :class:`WrongTokens`, the faults of :class:`OverlapMonitor`, or the
        engine's error.
        """
        from outrider_sanitizer import watching

        expected = [self.expected(arrival) for arrival in program.arrivals]
        # The engine orders accesses to whole tensors of rows, not to single rows.
        with watching(backend, rows_apart=False) as sanitizer:
            self.findings = sanitizer.report
            self.log = FenceLog(sanitizer.position, drop=self._drop, half=self._half, consumer=self._consumer)
            self.monitor = OverlapMonitor()
            stop = self.monitor.observe(backend)
            problem: Exception | None = None
            try:
                self._serve(program, expected)
                backend.synchronize()
            except Exception as error:
                problem = error
            finally:
                stop()
        # A race explains wrong tokens, so the race is the error.
        self.findings.raise_if_any()
        if self.checks_overlap:
            self.monitor.raise_if_any(problem)
        if problem is not None:
            raise problem

    def implied(self) -> tuple[str, ...]:
        """Return the fences that the findings of the last run imply."""
        if self.findings is None or self.log is None:
            return ()
        return implied_by(self.findings.findings, self.log)

    def _engine(self, program: HostProgram) -> Engine:
        engine = self._models.engine(program, mode=self._mode, wrap=self.wrap, topk=self._topk)
        self.monitor.watch(engine, overlap=True)
        return engine

    def wrap(self, fence: Fence) -> Fence:
        """Wrap a fence for the log and the overlap monitor; the engine's ``wrap_fence``."""
        assert self.log is not None
        return self.monitor.wrap(self.log.wrap(fence))

    def _serve(self, program: HostProgram, expected: list[tuple[int, ...]]) -> None:
        """Serve all requests of the program and compare their tokens. Raises :class:`WrongTokens`."""
        from outrider_proof.engine_setups import prompt_and_media

        moves = any(arrival.moves for arrival in program.arrivals)
        engines = [self._engine(program) for _ in range(2 if moves else 1)]
        free = [(engine.free_pages, engine.free_rows) for engine in engines]
        serving = Serving(engines, program, partial(prompt_and_media, self._models.proposer))
        serving.step_until_idle()
        check_tokens(serving.tokens, serving.ended, expected)
        for engine, (pages, rows) in zip(engines, free, strict=True):
            if (engine.free_pages, engine.free_rows) != (pages, rows):
                raise WrongTokens(
                    f"{pages - engine.free_pages} pages and {rows - engine.free_rows} rows weren't given back at the end"
                )


def implied_by(findings: Iterable[Finding], log: FenceLog) -> tuple[str, ...]:
    """Return the fences that ``findings`` imply, by the positions of the fences in ``log``."""
    names: dict[str, None] = {}
    for finding in findings:
        if finding.first is not None:
            first, second = ("host" if site.host else site.actor for site in (finding.first, finding.second))
            names.update(dict.fromkeys(log.implied((first, finding.first.last), (second, finding.second.position))))
    return tuple(names)
