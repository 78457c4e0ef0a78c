"""Run the engine on random host programs, watched by the sanitizer: ``outrider explore decode``.

Each run has one schedule. The tokens are compared with non-speculative greedy decoding on the reference backend.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from outrider.bundled import bundled
from outrider.device.errors import ConfigError
from outrider.registry import Registry
from outrider_proof.decode_program import (
    CONTEXT,
    MAX_OUTPUT_TOKENS,
    MOVING,
    Arrival,
    HostProgram,
    Serving,
    WrongTokens,
    check_tokens,
)
from outrider_proof.fence_log import FenceLog, Half
from outrider_proof.guides import Residues
from outrider_proof.monitors import OverlapMonitor

if TYPE_CHECKING:
    from outrider.device import Backend, Fence
    from outrider.engine.engine import Engine
    from outrider.model import Decoder, Media, VisionTower
    from outrider_sanitizer import Finding
    from outrider_sanitizer import Report as Findings

_FENCES_OF_MOVES = frozenset({"handed_over", "pages_ready", "pages_read", "pages_free", "pages_written"})
_FENCES_OF_GUIDES = frozenset({"draft_on_host", "masks_ready"})
PARAMETER_FENCES = frozenset({"lengths_on_host", "params_free", "params_bound"})
"""Names of fences that only a device with host lengths in its graphs has."""


@dataclass(frozen=True)
class Subject:
    """A model under test: its checkpoint, and the text from which prompts are taken."""

    directory: Path
    eagle: Path
    """Directory of the EAGLE head's checkpoint."""
    dtype: str
    text: tuple[int, ...]
    """Token ids of a text; prompts are slices of it."""
    images: bool = False
    """True if two of three requests have an image; positions are then on three axes."""
    extra: int = 0
    """Maximum number of tokens that an image adds to a prompt."""

    def load(self, backend: Backend) -> tuple[Decoder, VisionTower | None]:
        """Load the decoder, and the vision tower if requests have images, on a backend."""
        import torch

        from outrider.model import load_decoder, load_vision

        dtype = getattr(torch, self.dtype)
        model = load_decoder(self.directory, backend=backend, dtype=dtype)
        vision = load_vision(self.directory, backend=backend, dtype=dtype) if self.images else None
        backend.synchronize()
        return model, vision

    def prompt(self, arrival: Arrival) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """Return the tokens and the images of a request."""
        if self.images:
            from outrider_proof.engine_setups import VISION, prompt_and_media

            return prompt_and_media(VISION, arrival)
        return self.text[arrival.start : arrival.start + arrival.length], ()

    @functools.cached_property
    def reference(self) -> tuple[Decoder, VisionTower | None]:
        """The decoder and the vision tower on the host, loaded once."""
        return self.load(Registry().create("cpu"))

    @functools.cached_property
    def plain(self) -> dict[Arrival, tuple[int, ...]]:
        """A cache from request to non-speculative greedy tokens, filled on demand and shared by all explorers."""
        return {}


@functools.cache
def bundled_text() -> Subject:
    """Return the bundled model, with prompts from the engine's source code."""
    from outrider.engine.engine import Engine
    from outrider.model import Tokenizer

    tokens = Tokenizer.from_checkpoint(bundled("target")).encode(inspect.getsource(Engine))
    return Subject(bundled("target"), bundled("eagle"), "float32", tuple(tokens))


@functools.cache
def tiny_images() -> Subject:
    """Return the tiny random vision-language model with its random EAGLE head."""
    from outrider_proof.checkpoints import IMAGE
    from outrider_proof.engine_setups import text, vision_checkpoint, vision_eagle

    return Subject(vision_checkpoint(), vision_eagle(), "float64", text(), images=True, extra=len(IMAGE) + 1)


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

        if speculate not in ("eagle", "ngram", "none"):
            raise ConfigError(f"--speculate is {speculate!r}; decode explores eagle, ngram and none")
        if drop is not None and drop not in {fence.name for fence in FENCES}:
            raise ConfigError(f"there is no fence {drop!r}; `outrider fences` lists them")
        if half not in get_args(Half):
            raise ConfigError(f"--drop is {half!r}; expected wait or record")
        self.backend = backend
        self._speculate, self._topk, self._drop, self._half = speculate, draft_topk, drop, cast("Half", half)
        self._mode, self._graphs, self._consumer = mode, graphs, consumer
        self._subject = tiny_images() if images else bundled_text()
        self._model, self._vision = self._subject.load(backend)
        self.findings: Findings | None = None
        self.log: FenceLog | None = None
        self.monitor = OverlapMonitor()
        self.checks_overlap = True
        """True if lost overlap, lost batching or a row freed too early fails a run."""

    def program(self, seed: int) -> HostProgram:
        """Return host program number ``seed``."""
        program = HostProgram.draw(seed, len(self._subject.text))
        if not self._subject.images:
            return program
        # The reference loop for guided tokens does not support images.
        return replace(program, arrivals=tuple(replace(arrival, guided=False) for arrival in program.arrivals))

    @property
    def exercising_program(self) -> HostProgram:
        """A host program that exercises the dropped fence, if the device and the mode have the fence."""
        if self._drop in _FENCES_OF_MOVES:
            return MOVING
        return self.program(3 if self._drop in _FENCES_OF_GUIDES else 1)

    def expected(self, arrival: Arrival) -> tuple[int, ...]:
        """Return the non-speculative greedy tokens of a request, from the cache of the subject."""
        alike = Arrival(arrival.start, arrival.length, MAX_OUTPUT_TOKENS, 0, None, guided=arrival.guided)
        known = self._subject.plain
        if alike not in known:
            known[alike] = _plain(self._subject, alike)
        return known[alike][: arrival.max_tokens]

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
        from outrider.speculative.build import DraftOptions, build_proposer

        config = program.config(
            CONTEXT + 16 + self._subject.extra,
            dtype=self._subject.dtype,
            draft_tokens=program.draft_tokens,
            mode=self._mode,
            graphs=self._graphs,
        )
        options = DraftOptions(
            target=self._model,
            backend=self.backend,
            dtype=config.torch_dtype,
            directory=self._subject.eagle if self._speculate == "eagle" else None,
            draft_tokens=config.draft_tokens,
            topk=self._topk,
        )
        proposer = build_proposer(self._speculate, options)
        engine = program.engine(self._model, self.backend, proposer, config, wrap_fence=self.wrap, vision=self._vision)
        self.monitor.watch(engine, overlap=True)
        return engine

    def wrap(self, fence: Fence) -> Fence:
        """Wrap a fence for the log and the overlap monitor; the engine's ``wrap_fence``."""
        assert self.log is not None
        return self.monitor.wrap(self.log.wrap(fence))

    def _serve(self, program: HostProgram, expected: list[tuple[int, ...]]) -> None:
        """Serve all requests of the program and compare their tokens. Raises :class:`WrongTokens`."""
        moves = any(arrival.moves for arrival in program.arrivals)
        engines = [self._engine(program) for _ in range(2 if moves else 1)]
        free = [(engine.free_pages, engine.free_rows) for engine in engines]
        serving = Serving(engines, program, self._subject.prompt)
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


def _plain(subject: Subject, arrival: Arrival) -> tuple[int, ...]:
    """Return a request's greedy tokens without speculation. For a guided request, a loop that shares no engine code computes
    them.
    """
    model, vision = subject.reference
    tokens, media = subject.prompt(arrival)
    if arrival.guided:
        return Residues.greedy(model, tokens, arrival.max_tokens)
    from outrider.engine.engine import Engine
    from outrider.engine.requests.sampling import SamplingParams
    from outrider_proof.tiny import plain_config

    config = plain_config(max_requests=1, max_context=CONTEXT, dtype=subject.dtype)
    engine = Engine(model, Registry().create("cpu"), config=config, vision=vision)
    (completion,) = engine.generate([tokens], SamplingParams(max_tokens=arrival.max_tokens), media=[media])
    return completion.token_ids
