"""What is proved: a proposer, how the step is run, and which device is imitated. Tiny models in float64."""

import atexit
import functools
import importlib
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider import Engine, EngineConfig, SamplingParams
from outrider.model import MediaProcessor, load_decoder, load_vision
from outrider.speculative.ngram import NgramProposer
from outrider.speculative.proposer import PlainProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.checkpoints import IMAGE, picture, write_vision_checkpoint
from outrider_proof.decode_program import Arrival, HostProgram, Serving
from outrider_proof.proposers import MAKERS, decoder
from outrider_sim.plugin import create_backend

CONTEXT, TEXT, LONGEST = 96, 400, 14
VISION = "ngram, images"
PROPOSERS = ("none", *(name for name in MAKERS if name != "none"), VISION)
MODES = ("staged", "graphs", "fused")
PERSONALITIES = ("cuda", "rocm", "npu")
PLUGINS = {"outrider_npu": "emulation", "outrider_rocm": "emulation_hip"}
"""A vendor's plugin instead of a personality: its code on the emulation of its package, alone in its process."""


@dataclass(frozen=True)
class Setup:
    """A row of the tables. ``mode``: staged, staged with graphs, or fused; ``like``: a personality, or a plugin."""

    proposer: str
    mode: str
    like: str = "cuda"

    @property
    def family(self):
        """The device that is imitated, whoever does it."""
        return self.like.removeprefix("outrider_")

    @property
    def name(self):
        return f"{self.proposer}, {self.mode}, {self.like}"


def runs(setup):
    """Whether the imitated device runs this: lengths as host integers need a proposer whose lengths the host can know, and
    where parameters are rebound there is no fused mode; nor does the plugin for ROCm declare it.
    """
    if setup.like == "outrider_rocm" and setup.mode == "fused":
        return False
    return setup.family != "npu" or (setup.mode != "fused" and not setup.proposer.startswith("mtp"))


def all_setups(likes=PERSONALITIES):
    """Every setup that a device runs."""
    each = (Setup(proposer, mode, like) for proposer in PROPOSERS for mode in MODES for like in likes)
    return [setup for setup in each if runs(setup)]


@functools.cache
def text():
    """What prompts are slices of: repetitive enough for n-grams."""
    rng = random.Random(0)
    words = [[rng.randrange(tiny.VOCABULARY) for _ in range(rng.randint(2, 5))] for _ in range(12)]
    tokens = []
    while len(tokens) < TEXT:
        tokens += rng.choice(words)
    return tuple(tokens[:TEXT])


def draw(seed):
    """The host program numbered ``seed``: an odd one is any, an even one is crowded, with prefixes to share and few pages."""
    program = HostProgram.draw(seed, TEXT)
    if seed % 2:
        return program
    rng = random.Random(f"crowded {seed}")
    arrivals = []
    for _ in range(rng.randint(3, 6)):
        start, length = rng.choice((0, 0, 16)), rng.randint(6, 36)
        abort = rng.randint(1, 6) if rng.random() < 0.15 else None
        arrivals.append(Arrival(start, length, rng.randint(4, LONGEST), rng.randint(0, 6), abort))
    return replace(
        program,
        arrivals=tuple(arrivals),
        max_requests=rng.randint(2, 4),
        page_size=rng.choice((2, 4)),
        spare_pages=rng.randint(0, 8),
    )


@functools.cache
def simulated(like):
    if like not in PLUGINS:
        return create_backend(0, {"like": like})
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vendors" / "emulated"))
    emulation = importlib.import_module(PLUGINS[like])
    if like == "outrider_npu":
        emulation.lift_limits()
    return emulation.make()


class Models:
    """The models of a proposer on one backend, loaded once."""

    def __init__(self, proposer, backend):
        self.proposer, self.backend = proposer, backend
        self.vision = None
        stream = backend.create_stream("load")
        with backend.on(stream):
            if proposer == VISION:
                directory = vision_checkpoint()
                self.target = load_decoder(directory, backend=backend, dtype=torch.float64)
                self.vision = load_vision(directory, backend=backend, dtype=torch.float64)
            else:
                self.target = decoder(tiny.target(), backend)
        stream.synchronize()
        backend.synchronize()

    def make(self):
        """A proposer, with caches that no engine has yet."""
        if self.proposer == "none":
            return PlainProposer()
        if self.proposer == VISION:
            return NgramProposer(vocab_size=self.target.config.vocab_size, draft_tokens=3)
        stream = self.backend.create_stream("load")
        with self.backend.on(stream):
            made = MAKERS[self.proposer](self.target, self.backend)
        stream.synchronize()
        return made

    def engine(self, program, *, mode="staged", overlap=True, wrap=None):
        # Room for the longest request, its image and its draft's slots, and little more: others wait, or are preempted.
        longest = max(arrival.length + arrival.max_tokens for arrival in program.arrivals)
        proposer = self.make()
        longest += max(12, proposer.nodes + 2) + (16 if self.vision is not None else 0)
        config = EngineConfig(
            max_requests=program.max_requests,
            page_size=program.page_size,
            num_pages=1 + -(-longest // program.page_size) + program.spare_pages,
            prefill_chunk=program.prefill_chunk,
            max_context=CONTEXT,
            dtype="float64",
            overlap=overlap,
            mode="fused" if mode == "fused" else "staged",
            graphs=mode == "graphs",
            penalties=False,
            max_logprobs=0,
        )
        return Engine(self.target, self.backend, proposer=proposer, config=config, wrap_fence=wrap, vision=self.vision)


@functools.cache
def models(proposer, like):
    """On a simulated device, or on the host where ``like`` is None."""
    return Models(proposer, CpuBackend() if like is None else simulated(like))


@functools.cache
def vision_checkpoint():
    directory = Path(tempfile.mkdtemp(prefix="outrider-proof-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_vision_checkpoint(directory, "qwen2_vl")
    return directory


@functools.cache
def pictures():
    processor = MediaProcessor.from_checkpoint(vision_checkpoint())
    return processor.image(picture(20, 28)), processor.image(picture(16, 16, seed=1))


def prompt_and_media(proposer, arrival):
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
    """With images, and keeping the engine's records of the requests."""

    def __init__(self, engines, program, proposer):
        super().__init__(engines, program, lambda arrival: prompt_and_media(proposer, arrival)[0])
        self._proposer = proposer
        self.records = {}

    def _arrive(self, step):
        while self._waiting and self._arrivals[self._waiting[0]].step <= step:
            index = self._waiting.pop(0)
            arrival = self._arrivals[index]
            tokens, media = prompt_and_media(self._proposer, arrival)
            params = SamplingParams(max_tokens=arrival.max_tokens)
            self._place(index, 0, self._engines[0].add_request(tokens, params, media=media))
            self._since[index] = step

    def _place(self, index, side, request):
        super()._place(index, side, request)
        self.records[index] = self._engines[side]._requests[request]

    def acceptance(self):
        """(iterations, verified tokens) of each request that ran undisturbed to its end."""
        return {
            index: (record.iterations, record.verified_tokens)
            for index, record in self.records.items()
            if self.ended.get(index) in ("stop", "length") and not record.preemptions
        }


@functools.cache
def plain(proposer, arrival):
    """Plain greedy tokens of a request, alone in an engine on the host, for the longest that any may write."""
    tokens, media = prompt_and_media(proposer, arrival)
    host = models(proposer, None)
    config = EngineConfig(max_requests=1, max_context=CONTEXT, dtype="float64", penalties=False)
    engine = Engine(host.target, host.backend, config=config, vision=host.vision)
    (done,) = engine.generate([tokens], SamplingParams(max_tokens=arrival.max_tokens), media=[media])
    return done.token_ids


def alone(arrival):
    """The same request, whatever else a program says of it."""
    return Arrival(arrival.start, arrival.length, arrival.max_tokens, 0, None)


def engines_for(setup, program, wrap=None):
    moves = any(arrival.moves for arrival in program.arrivals)
    loaded = models(setup.proposer, setup.like)
    return [loaded.engine(program, mode=setup.mode, wrap=wrap) for _ in range(2 if moves else 1)]


@functools.cache
def synchronous(proposer, program):
    """The acceptance of each request in engines on the host that wait for every iteration."""
    moves = any(arrival.moves for arrival in program.arrivals)
    loaded = models(proposer, None)
    served = Served([loaded.engine(program, overlap=False) for _ in range(2 if moves else 1)], program, proposer)
    served.run()
    return served.acceptance()
