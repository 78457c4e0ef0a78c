"""What is proved: a proposer, how the step is run, and which device is imitated. Tiny models in float64."""

from __future__ import annotations

import atexit
import functools
import importlib
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider import Engine, SamplingParams
from outrider.device.errors import ConfigError
from outrider.model import MediaProcessor, load_decoder, load_vision
from outrider.speculative.ngram import NgramProposer
from outrider.speculative.proposer import PlainProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof import quantised, tiny
from outrider_proof.checkpoints import IMAGE, picture, write_vision_checkpoint
from outrider_proof.decode_program import Arrival, HostProgram, Serving, draft_length_of, limited_prefill_graphs
from outrider_proof.guides import guide
from outrider_proof.proposers import EXTREMES, MAKERS, decoder
from outrider_proof.quantised import QUANTISED
from outrider_proof.tiny import plain_config
from outrider_sim.plugin import create_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from outrider.device import Backend, Fence
    from outrider.engine.ranks.ranks import Ranks
    from outrider.engine.requests.request import Request
    from outrider.model import Media, VisionTower
    from outrider.speculative.proposer import Proposer

CONTEXT, TEXT, LONGEST = 96, 400, 14
VISION = "ngram, images"
MIXTURE = ", experts"
"""Behind the name of a proposer: its target is a mixture of experts."""
PROPOSERS = ("none", *(name for name in MAKERS if name != "none"), VISION)
MODES = ("staged", "graphs", "fused")
PERSONALITIES = ("cuda", "rocm", "npu")
PLUGINS = {"outrider_npu": "emulation", "outrider_rocm": "emulation_hip"}
"""A vendor's plugin instead of a personality: its code on the emulation of its package, alone in its process.

The value is the module of the emulation, in the directory that :attr:`Setup.emulations` names. It has ``make()``, which
returns the plugin's backend, and that of ``outrider_npu`` has ``lift_limits()``, which lets CANN's operators take float64.
"""


@dataclass(frozen=True)
class Setup:
    """A row of the tables. ``mode``: staged, staged with graphs, or fused; ``like``: a personality, or a plugin.

    ``emulations``: the directory with the emulations of vendors' packages; a plugin needs it.
    """

    proposer: str
    mode: str
    like: str = "cuda"
    emulations: Path | None = None

    @property
    def family(self) -> str:
        """The device that is imitated, whoever does it."""
        return self.like.removeprefix("outrider_")

    @property
    def name(self) -> str:
        """As records and tables name it."""
        return f"{self.proposer}, {self.mode}, {self.like}"


def runs(setup: Setup) -> bool:
    """Whether the imitated device runs this: where parameters are rebound there is no fused mode; nor does the plugin for
    ROCm declare it.
    """
    if setup.like == "outrider_rocm" and setup.mode == "fused":
        return False
    return setup.family != "npu" or setup.mode != "fused"


def all_setups(likes: Iterable[str] = PERSONALITIES, emulations: Path | None = None) -> list[Setup]:
    """Every setup that a device runs."""
    each = (Setup(proposer, mode, like, emulations) for proposer in PROPOSERS for mode in MODES for like in likes)
    return [setup for setup in each if runs(setup)]


@functools.cache
def text() -> tuple[int, ...]:
    """The tokens that prompts are slices of: repetitive enough for n-grams."""
    rng = random.Random(0)
    words = [[rng.randrange(tiny.VOCABULARY) for _ in range(rng.randint(2, 5))] for _ in range(12)]
    tokens: list[int] = []
    while len(tokens) < TEXT:
        tokens += rng.choice(words)
    return tuple(tokens[:TEXT])


def draw(seed: int) -> HostProgram:
    """The host program numbered ``seed``: an odd one is any, an even one is crowded, with prefixes to share and few pages."""
    program = HostProgram.draw(seed, TEXT)
    if seed % 2:
        return program
    rng, guiding = random.Random(f"crowded {seed}"), random.Random(f"crowd, guides {seed}")
    guides = 0.6 if guiding.random() < 0.4 else 0.0
    arrivals = []
    for _ in range(rng.randint(3, 6)):
        start, length = rng.choice((0, 0, 16)), rng.randint(6, 36)
        abort = rng.randint(1, 6) if rng.random() < 0.15 else None
        guided = guiding.random() < guides
        arrivals.append(Arrival(start, length, rng.randint(4, LONGEST), rng.randint(0, 6), abort, guided=guided))
    return replace(
        program,
        arrivals=tuple(arrivals),
        max_requests=rng.randint(2, 4),
        page_size=rng.choice((2, 4)),
        spare_pages=rng.randint(0, 8),
    )


@functools.cache
def simulated(like: str, emulations: Path | None) -> Any:
    """The device of a setup, one a process; it has a ``control``. An emulation's directory is put on ``sys.path``.

    Raises :class:`ConfigError` for a plugin without the directory of its emulation.
    """
    if like not in PLUGINS:
        return create_backend(0, {"like": like})
    if emulations is None or not (emulations / f"{PLUGINS[like]}.py").is_file():
        raise ConfigError(
            f"{like} runs on the emulation of its vendor's package, and there is no {PLUGINS[like]}.py in {emulations}; "
            "name its directory with --emulations DIR"
        )
    if str(emulations) not in sys.path:
        sys.path.insert(0, str(emulations))
    emulation = importlib.import_module(PLUGINS[like])
    if like == "outrider_npu":
        emulation.lift_limits()
    return emulation.make()


class Models:
    """The models of a proposer on one backend, loaded once; of one of several ranks, its part of them."""

    def __init__(self, proposer: str, backend: Backend, ranks: Ranks | None = None) -> None:
        self.proposer, self.backend, self.ranks = proposer, backend, ranks
        part = None if ranks is None else ranks.model
        self.vision: VisionTower | None = None
        stream = backend.create_stream("load")
        with backend.on(stream):
            if proposer == VISION:
                directory = vision_checkpoint()
                self.target = load_decoder(directory, backend=backend, dtype=torch.float64, ranks=part)
                self.vision = load_vision(directory, backend=backend, dtype=torch.float64)
            elif proposer == QUANTISED:
                self.target = quantised.target(backend)
            else:
                whole = tiny.mixture() if proposer.endswith(MIXTURE) else tiny.target()
                self.target = decoder(whole, backend, part)
        stream.synchronize()
        backend.synchronize()

    def make(self) -> Proposer:
        """A proposer, with caches that no engine has yet."""
        if self.proposer == VISION:
            return NgramProposer(vocab_size=self.target.config.vocab_size, draft_tokens=3)
        stream = self.backend.create_stream("load")
        with self.backend.on(stream):
            if self.proposer == QUANTISED:
                made: Proposer | None = quantised.proposer(self.target)
            else:
                made = {**MAKERS, **EXTREMES}[self.proposer.removesuffix(MIXTURE)](self.target, self.backend)
        stream.synchronize()
        return made or PlainProposer()

    def engine(
        self,
        program: HostProgram,
        *,
        mode: str = "staged",
        overlap: bool = True,
        wrap: Callable[[Fence], Fence] | None = None,
    ) -> Engine:
        """An engine of the program's sizes. ``wrap``: the engine's ``wrap_fence``."""
        # Room for the longest request, its image and its draft's slots, and little more: others wait, or are preempted.
        longest = max(arrival.length + arrival.max_tokens for arrival in program.arrivals)
        proposer = self.make()
        longest += max(12, proposer.nodes + 2) + (16 if self.vision is not None else 0)
        config = plain_config(
            max_requests=program.max_requests,
            page_size=program.page_size,
            num_pages=1 + -(-longest // program.page_size) + program.spare_pages,
            prefill_chunk=program.prefill_chunk,
            max_context=CONTEXT,
            dtype="float64",
            overlap=overlap,
            mode="fused" if mode == "fused" else "staged",
            graphs=mode == "graphs",
            token_budget=program.token_budget,
        )
        with limited_prefill_graphs(program):
            return Engine(
                self.target,
                self.backend,
                proposer=proposer,
                config=config,
                wrap_fence=wrap,
                vision=self.vision,
                draft_length=draft_length_of(program, proposer),
                ranks=self.ranks,
            )


@functools.cache
def models(proposer: str, like: str | None, emulations: Path | None = None) -> Models:
    """On a simulated device, or on the host where ``like`` is None."""
    return Models(proposer, CpuBackend() if like is None else simulated(like, emulations))


@functools.cache
def vision_checkpoint() -> Path:
    """The directory of a tiny vision-language checkpoint, written once a process."""
    directory = Path(tempfile.mkdtemp(prefix="outrider-proof-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_vision_checkpoint(directory, "qwen2_vl")
    return directory


@functools.cache
def pictures() -> tuple[Media, Media]:
    """Two preprocessed images of different sizes."""
    processor = MediaProcessor.from_checkpoint(vision_checkpoint())
    return processor.image(picture(20, 28)), processor.image(picture(16, 16, seed=1))


def prompt_and_media(proposer: str, arrival: Arrival) -> tuple[tuple[int, ...], tuple[Media, ...]]:
    """The tokens of an arrival, and its images: two of three requests of a multimodal program have one."""
    tokens = text()[arrival.start : arrival.start + arrival.length]
    if proposer != VISION:
        return tokens, ()
    tokens = tuple(5 + token for token in tokens)
    which = (arrival.start + arrival.length) % 3
    if which == 2:
        return (1, *tokens), ()
    return (1, *IMAGE, *tokens), (pictures()[which],)


class Served(Serving):
    """Keeps the engine's records of the requests."""

    def __init__(self, engines: Sequence[Engine], program: HostProgram, proposer: str) -> None:
        super().__init__(engines, program, lambda arrival: prompt_and_media(proposer, arrival))
        self.records: dict[int, Request] = {}

    def _place(self, index: int, side: int, request: int) -> None:
        super()._place(index, side, request)
        self.records[index] = self._engines[side]._requests[request]

    def acceptance(self) -> dict[int, tuple[int, int]]:
        """(iterations, verified tokens) of each request that ran undisturbed to its end."""
        return {
            index: (record.iterations, record.verified_tokens)
            for index, record in self.records.items()
            if self.ended.get(index) in ("stop", "length") and not record.preemptions
        }


@functools.cache
def plain(proposer: str, arrival: Arrival) -> tuple[int, ...]:
    """Plain greedy tokens of a request, alone in an engine on the host, for the longest that any may write."""
    tokens, media = prompt_and_media(proposer, arrival)
    host = models(proposer, None)
    config = plain_config(max_requests=1, max_context=CONTEXT, dtype="float64")
    engine = Engine(host.target, host.backend, config=config, vision=host.vision)
    request = engine.add_request(tokens, SamplingParams(max_tokens=arrival.max_tokens), media=media)
    if arrival.guided:
        guide(engine, request)
    found: list[int] = []
    while engine.has_unfinished:
        found += [token for output in engine.step() for token in output.tokens]
    return tuple(found)


def alone(arrival: Arrival) -> Arrival:
    """The same request, whatever else a program says of it."""
    return Arrival(arrival.start, arrival.length, arrival.max_tokens, 0, None, guided=arrival.guided)


def engines_for(setup: Setup, program: HostProgram, wrap: Callable[[Fence], Fence] | None = None) -> list[Engine]:
    """The engine of a program, or two where requests move. ``wrap``: their ``wrap_fence``."""
    moves = any(arrival.moves for arrival in program.arrivals)
    loaded = models(setup.proposer, setup.like, setup.emulations)
    return [loaded.engine(program, mode=setup.mode, wrap=wrap) for _ in range(2 if moves else 1)]


@functools.cache
def synchronous(proposer: str, program: HostProgram) -> dict[int, tuple[int, int]]:
    """The acceptance of each request in engines on the host that wait for every iteration."""
    moves = any(arrival.moves for arrival in program.arrivals)
    loaded = models(proposer, None)
    served = Served([loaded.engine(program, overlap=False) for _ in range(2 if moves else 1)], program, proposer)
    served.run()
    return served.acceptance()
