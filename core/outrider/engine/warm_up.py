"""Warm-up: compiles kernels before the first request, by using them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.device import Backend
from outrider.engine.config import MAX_LOGPROBS, DecidedConfig
from outrider.engine.loop import Loop
from outrider.engine.requests.guidance import Anything, Guidance
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import LanguageModel
from outrider.speculative.proposer import Proposer

_CHUNKS = 2
"""Of a prompt, unless its pages are shared."""
_ITERATIONS = 3
"""Behind a prompt, at least: the first, one behind that, and one whose inputs come from another one in flight."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up took. ``compiled``: variants of each kernel that were compiled, or loaded from a cache of compiled
    ones; empty where the kernels don't say. ``chosen``: what was chosen by measurement, by what it's for.
    """

    seconds: float
    compiled: Mapping[str, int]
    chosen: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        named = ", ".join(f"{name} {count}" for name, count in sorted(self.compiled.items()))
        said = f"{sum(self.compiled.values())} kernels compiled or loaded in {self.seconds:.1f} s"
        return said + (f" ({named})" if named else "") + "".join(f"; {what}: {which}" for what, which in self.chosen.items())


def warm_up(
    loop: Loop, backend: Backend, model: LanguageModel, proposer: Proposer, config: DecidedConfig, *, room: int, lengths: int
) -> WarmUp:
    """Serve requests of its own that need everything which a request may ask for; a prompt that takes two chunks, and then
    iterations that draft, verify and extend. ``loop`` is made for this and dropped afterwards. ``room``: tokens that a
    request may have. ``lengths``: how many lengths of a draft there are, one after the other.
    """
    kernels = model.kernels
    before, began = kernels.compiled(), time.perf_counter()
    most = max(1, min(2 * proposer.depth + 3, room - 1))
    length = max(1, min(config.prefill_chunk + 2, room - most))
    vision = model.config.vision
    pictures = () if vision is None else (vision.image_token, vision.video_token)
    word = next(token for token in range(model.config.vocab_size) if token not in pictures)
    greedy = SamplingParams(max_tokens=most, ignore_eos=True)
    everything = replace(
        greedy,
        temperature=1.0,
        top_k=2,
        top_p=0.9,
        min_p=0.1,
        logit_bias={word: 1.0},
        presence_penalty=1.0,
        logprobs=min(MAX_LOGPROBS, model.config.vocab_size),
    )
    rope_key = model.config.rope.sharing_key(length)
    rounds = _CHUNKS + max(_ITERATIONS, lengths + 1)
    for number, params in enumerate((greedy, replace(greedy, temperature=1.0), everything)):
        request = Request(number, (word,) * length, params.sample(0), frozenset(), rope_key=rope_key)
        if params is everything:
            request.guidance = Guidance(Anything(), vocabulary=model.config.vocab_size)
        loop.add(request)
        for _ in range(rounds):
            if not request.finished:
                loop.iterate()
        loop.forget([request])
        loop.drain()
    backend.synchronize()
    after = kernels.compiled()
    new = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    return WarmUp(time.perf_counter() - began, new, kernels.chosen())
