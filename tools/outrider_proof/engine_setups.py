"""Tiny models in float64 for each proposer, the bundled model, their engines, and random host programs for them."""

from __future__ import annotations

import atexit
import functools
import inspect
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider import Engine
from outrider.bundled import bundled
from outrider.device import KernelSet, WrappedKernels
from outrider.engine.ranks.ranks import part_of_model
from outrider.model import MediaProcessor, Tokenizer, load_decoder, load_vision
from outrider.speculative.build import DraftOptions, build_proposer
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.checkpoints import IMAGE, picture, write_eagle, write_vision_checkpoint
from outrider_proof.decode_program import CONTEXT, MAX_OUTPUT_TOKENS, Arrival, HostProgram, ResidueGrammars, check_residues
from outrider_proof.proposers import CHAINED, EXTREMES, MAKERS, OTHERS, decoder
from outrider_proof.tiny import plain_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.device import Backend, Fence
    from outrider.engine.ranks.ranks import Ranks
    from outrider.model import Decoder, Media, ModelRanks, VisionTower
    from outrider.speculative.proposer import Proposer

TEXT, LONGEST = 400, 14
IMAGES = ", images"
"""Suffix of the name of a proposer whose target is the tiny vision-language model."""
VISION = f"ngram{IMAGES}"
BUNDLED = ", bundled"
"""Suffix of the name of a proposer whose target is the bundled model, in float32."""
MIXTURE = ", experts"
"""Suffix of the name of a proposer whose target is a mixture of experts."""
HYBRID = ", hybrid"
"""Suffix of the name of a proposer whose target has recurrent layers."""
WIDE_HYBRID = ", wide hybrid"
"""Suffix of the name of a proposer whose target has recurrent layers with heads for four ranks."""
MODES = ("staged", "graphs", "fused")


@functools.cache
def text() -> tuple[int, ...]:
    """Return the token sequence that prompts are slices of, with enough repetition for n-grams."""
    rng = random.Random(0)
    words = [[rng.randrange(tiny.VOCABULARY) for _ in range(rng.randint(2, 5))] for _ in range(12)]
    tokens: list[int] = []
    while len(tokens) < TEXT:
        tokens += rng.choice(words)
    return tuple(tokens[:TEXT])


@functools.cache
def bundled_text() -> tuple[int, ...]:
    """Return the source code of the engine as tokens of the bundled model, of which prompts are slices."""
    return tuple(Tokenizer.from_checkpoint(bundled("target")).encode(inspect.getsource(Engine)))


def random_host_program(seed: int) -> HostProgram:
    """Return host program ``seed``: odd numbers are arbitrary; even numbers share prefixes and have few pages."""
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


class Models:
    """The target and the draft weights of a proposer on one backend, loaded once; with ``ranks``, only this rank's shards."""

    def __init__(self, proposer: str, backend: Backend, ranks: Ranks | None = None) -> None:
        self.proposer, self.backend, self.ranks = proposer, backend, ranks
        part = part_of_model(ranks)
        self.vision: VisionTower | None = None
        stream = backend.create_stream("load")
        with backend.on(stream):
            if proposer.endswith(IMAGES):
                directory = vision_checkpoint()
                self.target = load_decoder(directory, backend=backend, dtype=torch.float64, ranks=part)
                self.vision = load_vision(directory, backend=backend, dtype=torch.float64)
            elif proposer.endswith(BUNDLED):
                self.target = load_decoder(bundled("target"), backend=backend, dtype=torch.float32, ranks=part)
            elif proposer in OTHERS:
                self.target = OTHERS[proposer][0](backend)
            else:
                self.target = text_target(proposer, backend, part)
        stream.synchronize()
        backend.synchronize()

    def make(self, *, draft_tokens: int = 3, topk: int = 1) -> Proposer:
        """Return a new proposer with its own KV caches. ``draft_tokens`` and ``topk`` concern proposers for targets with a
        checkpoint; the tiny proposers over text have their own.
        """
        stream = self.backend.create_stream("load")
        with self.backend.on(stream):
            if self.proposer.endswith((IMAGES, BUNDLED)):
                made: Proposer | None = self._built(draft_tokens, topk)
            elif self.proposer in OTHERS:
                made = OTHERS[self.proposer][1](self.target)
            else:
                made = text_proposer(self.proposer, self.target, self.backend)
        stream.synchronize()
        return made or NonSpeculativeProposer()

    def _built(self, draft_tokens: int, topk: int) -> Proposer:
        name, _, _ = self.proposer.partition(",")
        head = bundled("eagle") if self.proposer.endswith(BUNDLED) else vision_eagle()
        options = DraftOptions(
            target=self.target,
            backend=self.backend,
            dtype=self.target.dtype,
            directory=head if name == "eagle" else None,
            draft_tokens=draft_tokens,
            topk=topk,
        )
        return build_proposer(name, options)

    def engine(
        self,
        program: HostProgram,
        *,
        mode: str = "staged",
        overlap: bool = True,
        wrap: Callable[[Fence], Fence] | None = None,
        topk: int = 1,
    ) -> Engine:
        """Return an engine with the sizes of the program. ``mode`` is staged, graphs (staged, with graphs) or fused.
        ``overlap``: the host launches an iteration ahead. ``wrap`` becomes the engine's ``wrap_fence``. ``topk`` is as in
        :meth:`make`.
        """
        # Pages for the longest request with its image and draft slots, and few more: other requests wait or are preempted.
        proposer = self.make(draft_tokens=program.draft_tokens, topk=topk)
        config = program.config(
            program.longest(proposer, images=self.vision is not None),
            dtype=str(self.target.dtype).removeprefix("torch."),
            overlap=overlap,
            mode="fused" if mode == "fused" else "staged",
            graphs=mode == "graphs",
        )
        return program.engine(
            self.target, self.backend, proposer, config, wrap_fence=wrap, vision=self.vision, ranks=self.ranks
        )


class _ShortIntervals(WrappedKernels):
    """A kernel set that keeps recurrent states at multiples of four tokens, because the programs have short prompts.

    Its chunked delta rule counts as native, so that engines replay short prefills from graphs.
    """

    state_interval = 4

    def is_native(self, name: str, block: object = None) -> bool:
        """Return True for the chunked delta rule, so that engines replay prefill from graphs; else the wrapped kernels'
        answer.
        """
        return name == "chunk_gated_delta_rule" or super().is_native(name, block)


def with_short_intervals(backend: Backend) -> KernelSet:
    """Return the kernels of ``backend``, with recurrent states kept at multiples of four tokens."""
    return _ShortIntervals(backend.kernels_in_use)


def text_target(proposer: str, backend: Backend, part: ModelRanks | None) -> Decoder:
    """Return the target of a text proposer on ``backend``; with ranks, this rank's part."""
    kernels = with_short_intervals(backend) if "hybrid" in proposer else None
    if proposer.endswith((HYBRID, WIDE_HYBRID)):
        target = tiny.hybrid() if proposer.endswith(HYBRID) else tiny.hybrid(recurrent=tiny.WIDE_RECURRENT)
    else:
        target = tiny.mixture() if proposer.endswith(MIXTURE) else tiny.target()
    return decoder(target, backend, part, kernels=kernels)


def text_proposer(name: str, target: Decoder, backend: Backend) -> Proposer | None:
    """Return the text proposer ``name``, which may have the suffix of a target; None for non-speculative decoding."""
    for suffix in (MIXTURE, HYBRID, WIDE_HYBRID):
        name = name.removesuffix(suffix)
    return {**MAKERS, **EXTREMES, **CHAINED}[name](target, backend)


@functools.cache
def host_models(proposer: str) -> Models:
    """Return the models of a proposer on the host."""
    return Models(proposer, CpuBackend())


@functools.cache
def vision_checkpoint() -> Path:
    """Return the directory of a tiny vision-language checkpoint, written once per process."""
    directory = Path(tempfile.mkdtemp(prefix="outrider-proof-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}
    write_vision_checkpoint(
        directory,
        "qwen3_vl",
        text={"head_dim": 8, "rope_parameters": rope},
        vision={
            "depth": 2,
            "hidden_size": 24,
            "out_hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 40,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    )
    return directory


@functools.cache
def vision_eagle() -> Path:
    """Return the directory of a random EAGLE head for :func:`vision_checkpoint`, written once per process."""
    directory = vision_checkpoint() / "eagle"
    write_eagle(directory)
    return directory


@functools.cache
def pictures() -> tuple[Media, Media]:
    """Return two preprocessed images of different sizes."""
    processor = MediaProcessor.from_checkpoint(vision_checkpoint())
    return processor.image(picture(20, 28)), processor.image(picture(16, 16, seed=1))


def prompt_and_media(proposer: str, arrival: Arrival) -> tuple[tuple[int, ...], tuple[Media, ...]]:
    """Return the tokens and images of an arrival; two of three requests of a vision setup have one image."""
    source = bundled_text() if proposer.endswith(BUNDLED) else text()
    tokens = source[arrival.start : arrival.start + arrival.length]
    if not proposer.endswith(IMAGES):
        return tokens, ()
    tokens = tuple(5 + token for token in tokens)
    which = (arrival.start + arrival.length) % 3
    if which == 2:
        return (1, *tokens), ()
    return (1, *IMAGE, *tokens), (pictures()[which],)


def reference_tokens(proposer: str, arrival: Arrival) -> tuple[int, ...]:
    """Return the non-speculative greedy tokens of a request, alone in an engine on the host."""
    shared = VISION if proposer.endswith(IMAGES) else f"none{BUNDLED}" if proposer.endswith(BUNDLED) else proposer
    longest = max(MAX_OUTPUT_TOKENS, arrival.max_tokens)
    return _longest_output(shared, replace(without_schedule(arrival), max_tokens=longest))[: arrival.max_tokens]


@functools.cache
def _longest_output(proposer: str, arrival: Arrival) -> tuple[int, ...]:
    tokens, media = prompt_and_media(proposer, arrival)
    host = host_models(proposer)
    dtype = str(host.target.dtype).removeprefix("torch.")
    config = plain_config(max_requests=1, max_context=CONTEXT, dtype=dtype)
    engine = Engine(host.target, host.backend, config=config, vision=host.vision)
    ResidueGrammars.into(engine)
    (completion,) = engine.generate([tokens], arrival.params, media=[media])
    if arrival.guided:
        check_residues(completion.token_ids)
    return completion.token_ids


def without_schedule(arrival: Arrival) -> Arrival:
    """Return the request without its arrival step, abort and moves, so that caches share it between programs."""
    return Arrival(arrival.start, arrival.length, arrival.max_tokens, 0, None, guided=arrival.guided)
